"""Finding the model to load, and what is refused before anything is timed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.errors import BadInput, NotFound
from deploykit.core.tensors import TensorSpec
from deploykit.loadtest.check import error_text
from deploykit.loadtest.load import load_test
from deploykit.loadtest.server import Server, find_server
from deploykit.loadtest.target import (
    RemoteModel,
    Requests,
    find_model,
    make_feeds,
    make_requests,
    model_options,
)
from tests.support.measure.loads import at_least, load
from tests.support.stand_in import StandIn, reply

QUICK = {"concurrency": 1, "warmup_s": 0.0, "duration_s": 0.3}


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BadInput, match="Connection refused") as caught:
            load_test(url, **QUICK)
    assert url in caught.value.message
    assert "deploykit serve" in str(caught.value.hint)


def whole_server(answer: bytes) -> StandIn:
    return StandIn(other=lambda _path: answer)


NO_OIP = "not an Open Inference Protocol server"
REFUSED: dict[str, tuple[StandIn, dict[str, object], type[dk.DeploykitError], str]] = {
    "not found": (whole_server(reply(404, b"<html>")), {}, BadInput, NO_OIP),
    "a page": (whole_server(reply(200, b"<html>")), {}, BadInput, NO_OIP),
    "SSH": (whole_server(b"SSH-2.0\r\n\r\n"), {}, BadInput, NO_OIP),
    "another host": (whole_server(reply(421, {"error": "not me"})), {}, BadInput, "421: not me"),
    "an unknown model": (StandIn(), {"model": "resnet"}, NotFound, "no model 'resnet'"),
    "several models": (StandIn(models=("a", "b")), {}, BadInput, "serves 2 models: a, b"),
    "axes": (StandIn(), {"axes": {"T": 5}}, BadInput, "besides the batch, are: none"),
    "a wrong request": (
        StandIn(lambda _server, _n: reply(400, {"error": "batch 64 is above 8"})),
        {"batch": 64},
        BadInput,
        "400: batch 64 is above 8",
    ),
}


@pytest.mark.parametrize(("server", "options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_a_run_that_cannot_be_is_refused_before_it_begins(
    server: StandIn, options: dict[str, object], error: type[Exception], words: str
) -> None:
    with server.running() as url, pytest.raises(error, match=words) as caught:
        load_test(url, **{**QUICK, **options})  # type: ignore[arg-type]
    assert len(server.bodies) == 2 * ("400" in words)  # in bytes, and in JSON
    assert error is BadInput or caught.value.hint == "the models are: m"  # type: ignore[attr-defined]


def test_of_several_models_the_one_that_is_named_is_loaded() -> None:
    with StandIn(models=("cnn", "bert")).running() as url:
        assert load(url, model="cnn", **QUICK).ok > 0
    index = "/v2/repository/index"  # MLServer lists no model that was not loaded from its folder
    other = StandIn(other=lambda path: reply(200, []) if path == index else None)
    with other.running() as url:
        assert load(url, model="m", **QUICK).ok > 0
        with pytest.raises(BadInput, match="does not list its models"):
            load_test(url, **QUICK)


def test_a_server_without_an_index_needs_the_model_s_name() -> None:
    def other(path: str) -> bytes | None:
        if path == "/v2":
            return reply(200, {"name": "other", "version": "1", "extensions": []})
        return reply(501, {"error": "no"}) if path == "/v2/repository/index" else None

    with StandIn(other=other).running() as url:
        with pytest.raises(BadInput, match="does not list its models"):
            load_test(url, **QUICK)
        assert load(url, model="m", **QUICK).ok > 0
        with pytest.raises(NotFound, match="no model 'other'"):
            load_test(url, model="other", **QUICK)


def test_a_server_that_refuses_the_first_request_is_loaded_all_the_same() -> None:
    with StandIn(lambda _server, _n: reply(429, {"error": "slow down"})).running() as url:
        result = load(url, **QUICK)
    assert result.refused == result.sent > 0
    assert result.first_error == "429: slow down"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"name": "ids", "datatype": "INT64", "shape": [-1, -1]}, "axis1 has no size"),
        ({"name": "text", "datatype": "TEXT", "shape": [-1]}, "text, TEXT"),
        ({"name": "x", "datatype": "FP32", "shape": [1, 4]}, "no batch axis"),
        ({"name": "x", "datatype": "FP32", "shape": ["N"]}, "not an Open Inference"),
        ({"datatype": "FP32", "shape": [1]}, "not an Open Inference"),
    ],
)
def test_inputs_that_no_request_can_be_made_for_are_named(
    tensor: dict[str, object], message: str
) -> None:
    with StandIn(inputs=[tensor]).running() as url, pytest.raises(BadInput, match=message):
        load_test(url, batch=2, **QUICK)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "https://",
        "http://",
        "http://h:99999",
        "http://me:secret@localhost",
        "ftp://me:secret@h",
        "grpc://h/models",
        "http://localhost/?token=secret",
        "http://a b",
        "http://[::1",
        "http://127.0.0.1\n",
        "unix:",
        "ftp://unix:/tmp/s",
        "unix:/tmp/a\0b",
        "unix:/tmp/a\nb",
        "",
    ],
)
def test_what_is_no_url_of_a_host_is_refused(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_test(url)
    assert str(caught.value.hint).startswith("write it as http://HOST:PORT[/PATH], grpc://HOST")
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "options",
    [
        {"rate": 10.0, "concurrency": 2},
        {"concurrency": 0},
        {"concurrency": 10**6},
        {"rate": 0.0},
        {"rate": -1.0},
        {"rate": 1e9},
        {"rate": float("nan")},
        {"duration_s": 0.0},
        {"duration_s": float("inf")},
        {"duration_s": float("nan")},
        {"warmup_s": -1.0},
        {"rate": 1e-5},
        {"slo_ms": float("inf")},
        {"batch": 0},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_before_anything_is_sent(
    options: dict[str, float],
) -> None:
    server = StandIn()
    with server.running() as url, pytest.raises(BadInput) as caught:
        load_test(url, **options)  # type: ignore[arg-type]
    assert server.connections == 0
    named = [name for name in options if f"`{name}`" in caught.value.message]
    assert named  # and no other parameter
    assert named == [part for part in caught.value.message.split("`")[1::2] if part in options]
    assert "e-" not in caught.value.message


@pytest.mark.parametrize("prefix", ["", "inputs/"])
def test_a_model_of_several_inputs_of_any_length_is_loaded_with_its_golden_samples(
    tmp_path: Path, prefix: str
) -> None:
    """Golden samples name their arrays inputs/NAME, and outputs/NAME, which are not sent."""
    ids = np.arange(12, dtype=np.int64).reshape(4, 3)
    arrays = {f"{prefix}ids": ids, f"{prefix}mask": np.ones((4, 3), np.int64)}
    np.savez(tmp_path / "m.golden.npz", **arrays, **({"outputs/y": ids} if prefix else {}))
    inputs = [{"name": n, "datatype": "INT64", "shape": [-1, -1]} for n in ("ids", "mask")]
    server = StandIn(inputs=inputs)
    with server.running() as url:
        with pytest.raises(BadInput, match="axis1 has no size") as caught:
            load_test(url, **QUICK)
        assert "`data`" in str(caught.value.hint)
        data = tmp_path / "m.golden.npz"
        assert load(url, enough=at_least(8), batch=3, data=data, **QUICK).ok > 0
    sent = {raw[: ids[:3].nbytes] for _, raw in server.bodies}
    rows = [ids.take(range(3 * n, 3 * n + 3), axis=0, mode="wrap") for n in range(8)]
    assert sent <= {each.tobytes() for each in rows}
    assert len(sent) > 1


def requests_for(url: str, **options: Any) -> Requests:
    return make_requests(find_model(find_server(url), None), **options)


def test_several_requests_share_a_bound_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploykit.loadtest.target.MOST_BYTES", 1000)
    server = Server("u", "h", "127.0.0.1", 80)
    small = RemoteModel(server, "m", (TensorSpec("x", "float32", ("N", 4)),))
    large = RemoteModel(server, "m", (TensorSpec("x", "uint8", ("N", 16)),))
    assert len(make_feeds(small, 1, 0)[1]) == 8
    assert len(make_feeds(large, 40, 0)[1]) == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": "two\\nlines\\u001b[31m"}', "two lines [31m"),
        (b"<html>\r\noops", "<html> oops"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", "no message"),
        (b'{"error": 3}', '{"error": 3}'),
    ],
)
def test_an_error_s_text_is_one_clean_line(body: bytes, text: str) -> None:
    assert error_text(body) == text


IDS = [{"name": n, "datatype": "INT64", "shape": [-1, -1]} for n in ("ids", "mask")]


@pytest.mark.parametrize("axes", [{"T": 5}, {"axis1": 5}], ids=str)
def test_axes_of_any_length_get_the_size_that_is_asked_for(axes: dict[str, int]) -> None:
    with StandIn(inputs=IDS).running() as url:
        result = requests_for(url, batch=2, axes=axes)
    assert result.shapes == {"ids": (2, 5), "mask": (2, 5)}


STATE = [
    {"name": "x", "datatype": "FP32", "shape": [-1, -1, 4]},
    {"name": "h", "datatype": "FP32", "shape": [2, -1, 8]},
]


@pytest.mark.parametrize(
    ("axes", "state"),
    [({"T": 5}, 3), ({"axis1": 5}, 3), ({"x_1": 5}, 3), ({"x_1": 5, "h_1": 7}, 7)],
    ids=str,
)
def test_the_batch_is_the_dynamic_axis_of_a_state(axes: dict[str, int], state: int) -> None:
    with StandIn(inputs=STATE).running() as url:
        result = requests_for(url, batch=3, axes=axes)
    assert result.shapes == {"x": (3, 5, 4), "h": (2, state, 8)}


@pytest.mark.parametrize(
    ("shape", "options", "rows"),
    [
        ([-1, 3], {"batch": 5}, 5),
        ([4, 3], {}, 4),
        ([4, 3], {"batch": 4}, 4),
        ([2, -1, 3], {"batch": 5}, 5),
        ([2, -1, 3], {"axes": {"x_1": 5}}, 1),
        ([1, -1, 3], {"axes": {"T": 5}}, 1),
        ([3], {}, 1),
        ([], {}, 1),
    ],
    ids=str,
)
def test_a_request_has_the_rows_of_its_batch_wherever_that_is(
    shape: list[int], options: dict[str, Any], rows: int
) -> None:
    with StandIn(inputs=[{"name": "x", "datatype": "FP32", "shape": shape}]).running() as url:
        assert requests_for(url, **options).batch == rows


@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_answers_are_compared_along_the_batch_wherever_an_output_has_it(
    tmp_path: Path, wrong: float
) -> None:
    x, h = np.ones((4, 5, 4), np.float32), np.zeros((2, 4, 8), np.float32)
    h += np.arange(4, dtype=np.float32)[:, None]
    named = {"inputs/x": x, "inputs/h": h, "outputs/h2": h + wrong}
    np.savez(tmp_path / "m.golden.npz", **named)

    def infer(server: StandIn, _n: int) -> bytes:
        head, raw = server.bodies[-1]
        state = raw[-2 * 3 * 8 * 4 :]
        assert [each["shape"] for each in head["inputs"]] == [[3, 5, 4], [2, 3, 8]]  # type: ignore[attr-defined]
        data = np.frombuffer(state, "<f4").tolist()
        item = {"name": "h2", "datatype": "FP32", "shape": [2, 3, 8], "data": data}
        return reply(200, {"outputs": [item]})

    with StandIn(infer, inputs=STATE).running() as url:
        result = load(url, batch=3, expect=tmp_path / "m.golden.npz", **QUICK)
    assert (result.ok == result.sent) is (wrong == 0), result.errors
    assert result.batch == 3


@pytest.mark.parametrize("axes", [{"T": 0}, {"T": 5, "axis1": 5}, {"axis2": 3, "x": 1}], ids=str)
def test_axes_that_fit_none_are_named(axes: dict[str, int]) -> None:
    with (
        StandIn(inputs=IDS).running() as url,
        pytest.raises(BadInput, match="besides the batch, are: axis1; each size is 1 or more"),
    ):
        load_test(url, axes=axes, **QUICK)


@pytest.mark.parametrize("wrong", [0.0, 0.01])
def test_answers_are_compared_with_golden_samples(tmp_path: Path, wrong: float) -> None:
    """The stand-in answers with the input's first two values, row by row."""
    image = np.random.default_rng(0).random((3, 2, 3), np.float32)
    y = image.reshape(3, 6)[:, :2]
    y = y + np.array([[0], [0], [wrong]], np.float32)
    np.savez(tmp_path / "m.golden.npz", **{"inputs/image": image, "outputs/y": y})

    def infer(server: StandIn, _n: int) -> bytes:
        rows = np.frombuffer(server.bodies[-1][1], "<f4").reshape(-1, 6)[:, :2]
        item = {"name": "y", "datatype": "FP32", "shape": list(rows.shape)}
        return reply(200, {"outputs": [{**item, "data": rows.ravel().tolist()}]})

    with StandIn(infer).running() as url:
        golden = tmp_path / "m.golden.npz"
        result = load(url, enough=at_least(3), batch=2, expect=golden, **QUICK)
        with pytest.raises(BadInput, match="exclude each other"):
            load_test(url, expect=tmp_path / "m", data=tmp_path / "m", **QUICK)
        np.savez(tmp_path / "inputs.npz", image=image)
        with pytest.raises(BadInput, match="has no outputs to expect"):
            load_test(url, expect=tmp_path / "inputs.npz", **QUICK)
    assert result.ok > 0
    assert (result.failed > 0) is (wrong > 0)
    if wrong:  # rows 2 and 0, then 1 and 2: two of the first three requests have the wrong row
        assert result.failed == pytest.approx(result.sent * 2 / 3, abs=result.sent / 10 + 2)
        assert result.first_error == "a wrong answer: y differs by more than 0.001"


@pytest.fixture
def running(affine_onnx: Path) -> Iterator[dk.RunningServer]:
    with dk.serve(affine_onnx) as server:
        yield server


@pytest.mark.parametrize("grpc", [False, True], ids=["http", "grpc"])
def test_a_server_s_options_and_the_model_s_hash_are_in_the_result(
    running: dk.RunningServer, grpc: bool
) -> None:
    result = load(f"grpc://{running.grpc_url}" if grpc else running.url, **QUICK)
    assert result.ok > 0
    assert {"server", "version", "platform", "file", "sha256"} <= result.server.keys()
    assert (result.server["server"], result.server["file"]) == ("deploykit", "affine.onnx")
    assert len(result.server["sha256"]) == 64
    assert result.options["backend"] == "onnxruntime"
    assert int(result.options["max_batch_size"]) > 1
    assert result.options["instance_group[0].kind"] == "KIND_CPU"
    assert result.options["dynamic_batching.max_queue_delay_microseconds"].isdecimal()


def test_the_load_of_other_processes_is_watched(
    running: dk.RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_PROC", "/proc")
    found = load(running.url, **QUICK).outside
    assert found is not None
    for window in (found.before, found.during, found.after):
        assert window.seconds > 0  # by the kernel's ticks: of any length where they come late
        assert window.others_cores is not None
    assert f"(process {os.getpid()})" not in found.during.busiest  # it serves


def test_a_server_without_options_is_loaded_all_the_same() -> None:
    with StandIn().running() as url:
        result = load(url, **QUICK)
    assert result.ok > 0
    assert (result.options, result.notes) == ({}, ())


def test_options_are_flat_short_and_no_more_than_64() -> None:
    config = {
        "name": "m",
        "input": [{"name": "x"}],
        "backend": "ort\nx",
        "max_batch_size": 8,
        "instance_group": [{"kind": "KIND_GPU", "gpus": [0, 1]}],
        "optimization": {"cuda": {"graphs": True}},
        "parameters": {"sha256": {"string_value": "c0ffee"}},
        "deep": {"a": {"b": {"c": {"d": {"e": 1}}}}},
    }
    assert model_options(config) == {
        "backend": "ort x",
        "max_batch_size": "8",
        "instance_group[0].kind": "KIND_GPU",
        "instance_group[0].gpus": "0 1",
        "optimization.cuda.graphs": "True",
        "deep.a.b.c": "{'d': {'e': 1}}",
    }
    many = model_options({f"k{n}": "v" * 1000 for n in range(1000)})
    assert len(many) == 64
    assert max(map(len, many.values())) == 300


def test_the_process_that_listens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_PROC", "/proc")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = Server("", "", "127.0.0.1", listener.getsockname()[1])
        assert here.processes() == (os.getpid(),)
        assert replace(here, address="192.0.2.1").processes() == ()
    assert here.processes() == ()


def test_a_machine_without_proc_has_no_such_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_PROC", str(tmp_path))
    assert Server("", "", "127.0.0.1", 80).processes() == ()
