"""The servers to load: how they are reached, the model found, what is sent, what is refused."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.errors import BadInput, NotFound
from deploykit.loadtest.load import load_test
from deploykit.loadtest.server import Server, find_server
from deploykit.loadtest.target import (
    find_model,
    make_requests,
    model_options,
)
from deploykit.loadtest.wire import NO_ANSWER, error_text
from tests.support.fake_engine import FakeEngine
from tests.support.measure.loads import at_least, load, run_here
from tests.support.serving.running import Running, running
from tests.support.stand_in import ANSWER, StandIn, reply

pytest.importorskip("hpack")

QUICK: dict[str, Any] = {"concurrency": 1, "warmup_s": 0.0, "duration_s": 0.3}
INDEX = "/v2/repository/index"
IDS = [{"name": n, "datatype": "INT64", "shape": [-1, -1]} for n in ("ids", "mask")]
STATE = [
    {"name": "x", "datatype": "FP32", "shape": [-1, -1, 4]},
    {"name": "h", "datatype": "FP32", "shape": [2, -1, 8]},
]
NO_OIP = "not an Open Inference Protocol server"
NO_AXIS = "besides the batch are: ids_1 (axis1), mask_1 (axis1); each needs a size"


def tensor(shape: list[Any], name: str = "x", datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}


def always(status: int, body: object, extra: str = "") -> StandIn:
    return StandIn(other=lambda _path: reply(status, body, extra))


def answering(**paths: bytes) -> Callable[[str], bytes | None]:
    """Of a StandIn: another answer at /v2 (`about`), at `index` or at `models`."""
    named = {"about": "/v2", "slash": "/v2/", "index": INDEX, "models": "/v2/models"}
    return {named[key]: answer for key, answer in paths.items()}.get


ABOUT = reply(200, {"name": "other", "version": "1", "extensions": ["binary_tensor_data"]})


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BadInput, match="Connection refused") as caught:
            load_test(url, **QUICK)
    assert url in caught.value.message
    assert "deploykit serve" in str(caught.value.hint)


EMPTY = StandIn(other=answering(index=reply(200, [])))
UNLISTED = StandIn(other=answering(about=ABOUT, index=reply(501, {"error": "no"})))
NAMES = StandIn(other=answering(about=ABOUT, index=reply(200, ["m"])))
MOVED = always(301, {}, "Location: https://example.org/v2\r\n")
NO_TENSOR = "not an Open Inference"
REFUSED: dict[str, tuple[StandIn, dict[str, object], str, str]] = {
    "not found": (always(404, b"<html>"), {}, NO_OIP, ""),
    "SSH": (StandIn(other=lambda _path: b"SSH-2.0\r\n\r\n"), {}, NO_OIP, ""),
    "another host": (always(421, {"error": "not me"}), {}, "421: not me", ""),
    "too busy": (always(429, {"error": "why"}), {}, "about: 429: why", "try again later"),
    "down": (always(503, {"error": "why"}, "Retry-After: 2\r\n"), {}, "503: why", "try again"),
    "moved": (MOVED, {}, "301: redirects to https://example.org/v2", "load the URL"),
    "a proxy": (always(407, {"error": "why"}), {}, "407: why", "load the server itself"),
    "an unknown model": (StandIn(), {"model": "resnet"}, "no model 'resnet'", "models are: m"),
    "several models": (StandIn(models=("a", "b")), {}, "serves 2 models: a, b", ""),
    "an empty index": (EMPTY, {}, "does not list its models", ""),
    "no index": (UNLISTED, {}, "does not list its models", ""),
    "an index of names": (NAMES, {}, "does not list its models", ""),
    "no inputs": (StandIn(inputs=()), {}, "names no inputs", ""),
    "a fixed batch": (StandIn(inputs=[tensor([1, 4])]), {"batch": 2}, "no batch axis", ""),
    "a free axis": (StandIn(inputs=IDS), {}, NO_AXIS, "`data`"),
    "an unknown type": (StandIn(inputs=[tensor([-1], "t", "TEXT")]), {}, "t, TEXT", ""),
    "no name": (StandIn(inputs=[{"datatype": "FP32", "shape": [1]}]), {}, NO_TENSOR, ""),
    "no such axis": (StandIn(), {"axes": {"T": 5}}, "besides the batch are: none", ""),
    "an axis of 0": (StandIn(inputs=IDS), {"axes": {"T": 0}}, NO_AXIS, ""),
}


@pytest.mark.parametrize(("server", "options", "words", "hint"), REFUSED.values(), ids=REFUSED)
def test_a_run_that_cannot_be_is_refused_before_it_begins(
    server: StandIn, options: dict[str, Any], words: str, hint: str
) -> None:
    sent = len(server.bodies)  # other tests load some of these servers
    with server.running() as url, pytest.raises((BadInput, NotFound)) as caught:
        load_test(url, **{**QUICK, **options})
    assert words in caught.value.message
    assert hint in str(caught.value.hint)
    assert len(server.bodies) == sent


AS_KSERVE = answering(index=reply(404, {}), models=reply(200, {"models": ["m"]}))
SLASH = answering(about=reply(307, b"", "Location: /v2/\r\n"), slash=ABOUT)
UNUSUAL: dict[str, tuple[StandIn, dict[str, Any]]] = {
    "without options": (StandIn(), {}),
    "several models": (StandIn(models=("cnn", "bert")), {"model": "cnn"}),
    "an empty index": (EMPTY, {"model": "m"}),
    "no index": (UNLISTED, {"model": "m"}),
    "lists its models as KServe": (StandIn(other=AS_KSERVE), {}),
    "adds a slash": (StandIn(other=SLASH), {}),
}


@pytest.mark.parametrize(("server", "options"), UNUSUAL.values(), ids=UNUSUAL)
def test_a_server_that_answers_in_its_own_way_is_loaded(
    server: StandIn, options: dict[str, Any]
) -> None:
    with server.running() as url:
        result = load(url, **options, **QUICK)
    assert result.ok == result.sent > 0
    assert (result.options, result.notes) == ({}, ())  # and the tensors are bytes


def test_a_server_that_refuses_requests_is_loaded_unless_the_request_is_wrong() -> None:
    with StandIn(lambda _server, _n: reply(429, {"error": "slow down"})).running() as url:
        result = load(url, **QUICK)
    assert result.refused == result.sent > 0
    assert result.first_error == "429: slow down"
    server = StandIn(lambda _server, _n: reply(400, {"error": "batch 64 is above 8"}))
    with server.running() as url, pytest.raises(BadInput, match="400: batch 64 is above 8"):
        load_test(url, batch=64, **QUICK)
    assert len(server.bodies) == 2  # in bytes, and in JSON


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8000", "https://", "http://h:99999", "http://me:secret@localhost"),
        *("ftp://me:secret@h", "grpc://h/models", "http://localhost/?token=secret"),
        *("http://a b", "http://[::1", "http://127.0.0.1\n", "unix:", "unix:/tmp/a\0b", ""),
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
        {"concurrency": 10**6},
        {"rate": 1e9},
        {"rate": float("nan")},
        {"rate": 1e-5},
        {"duration_s": 0.0},
        {"warmup_s": -1.0},
        {"slo_ms": float("inf")},
        {"batch": 0},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_before_anything_is_sent(
    options: dict[str, Any],
) -> None:
    server = StandIn()
    with server.running() as url, pytest.raises(BadInput) as caught:
        load_test(url, **options)
    assert server.connections == 0
    named = [name for name in options if f"`{name}`" in caught.value.message]
    assert named  # and no other parameter
    assert named == [part for part in caught.value.message.split("`")[1::2] if part in options]
    assert "e-" not in caught.value.message


# -- What is sent, and compared with what is expected


@pytest.mark.parametrize(
    ("inputs", "options", "shapes"),
    [
        ([tensor([-1, 3])], {"batch": 5}, {"x": (5, 3)}),
        ([tensor([4, 3])], {}, {"x": (4, 3)}),
        ([tensor([2, -1, 3])], {"batch": 5}, {"x": (2, 5, 3)}),
        ([tensor([2, -1, 3])], {"axes": {"x_1": 5}}, {"x": (2, 5, 3)}),
        ([tensor([1, -1, 3])], {"axes": {"T": 5}}, {"x": (1, 5, 3)}),
        ([tensor([])], {}, {"x": ()}),
        (IDS, {"batch": 2, "axes": {"T": 5}}, {"ids": (2, 5), "mask": (2, 5)}),
        (STATE, {"batch": 3, "axes": {"x_1": 5}}, {"x": (3, 5, 4), "h": (2, 3, 8)}),
        (STATE, {"batch": 3, "axes": {"x_1": 5, "h_1": 7}}, {"x": (3, 5, 4), "h": (2, 7, 8)}),
    ],
    ids=str,
)
def test_a_request_has_the_batch_and_the_axes_that_are_asked_for(
    inputs: list[dict[str, object]], options: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    with StandIn(inputs=inputs).running() as url:
        found = make_requests(find_model(find_server(url), None), **options)
    assert found.shapes == shapes
    rows = options.get("batch", 4 if inputs[0]["shape"] == [4, 3] else 1)
    assert found.batch == rows


@pytest.mark.parametrize("prefix", ["", "inputs/"])
def test_a_model_of_several_inputs_of_any_length_is_loaded_with_its_golden_samples(
    tmp_path: Path, prefix: str
) -> None:
    """Golden samples name their arrays inputs/NAME, and outputs/NAME, which are not sent."""
    ids = np.arange(12, dtype=np.int64).reshape(4, 3)
    arrays = {f"{prefix}ids": ids, f"{prefix}mask": np.ones((4, 3), np.int64)}
    data = tmp_path / "m.golden.npz"
    np.savez(data, **arrays, **({"outputs/y": ids} if prefix else {}))
    server = StandIn(inputs=IDS)
    with server.running() as url:
        assert load(url, enough=at_least(8), batch=3, data=data, **QUICK).ok > 0
    sent = {raw[: ids[:3].nbytes] for _, raw in server.bodies}
    rows = [ids.take(range(3 * n, 3 * n + 3), axis=0, mode="wrap") for n in range(8)]
    assert sent <= {each.tobytes() for each in rows}
    assert len(sent) > 1


@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_answers_are_compared_along_the_batch_wherever_an_output_has_it(
    tmp_path: Path, wrong: float
) -> None:
    x, h = np.ones((4, 5, 4), np.float32), np.zeros((2, 4, 8), np.float32)
    h += np.arange(4, dtype=np.float32)[:, None]
    expect = tmp_path / "m.golden.npz"
    np.savez(expect, **{"inputs/x": x, "inputs/h": h, "outputs/h2": h + wrong})

    def infer(server: StandIn, _n: int) -> bytes:
        head, raw = server.bodies[-1]
        assert [each["shape"] for each in head["inputs"]] == [[3, 5, 4], [2, 3, 8]]  # type: ignore[attr-defined]
        data = np.frombuffer(raw[-2 * 3 * 8 * 4 :], "<f4").tolist()
        return reply(200, {"outputs": [{**tensor([2, 3, 8], "h2"), "data": data}]})

    with StandIn(infer, inputs=STATE).running() as url:
        result = load(url, batch=3, expect=expect, **QUICK)
    assert (result.ok == result.sent) is (wrong == 0), result.errors
    assert result.batch == 3


@pytest.mark.parametrize("wrong", [0.0, 0.01])
def test_answers_are_compared_with_golden_samples(tmp_path: Path, wrong: float) -> None:
    """The stand-in answers with the input's first two values, row by row."""
    image = np.random.default_rng(0).random((3, 2, 3), np.float32)
    y = image.reshape(3, 6)[:, :2] + np.array([[0], [0], [wrong]], np.float32)
    golden = tmp_path / "m.golden.npz"
    np.savez(golden, **{"inputs/image": image, "outputs/y": y})

    def infer(server: StandIn, _n: int) -> bytes:
        rows = np.frombuffer(server.bodies[-1][1], "<f4").reshape(-1, 6)[:, :2]
        item = {**tensor([*rows.shape], "y"), "data": rows.ravel().tolist()}
        return reply(200, {"outputs": [item]})

    with StandIn(infer).running() as url:
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


# -- What is known of the server


@pytest.fixture
def ours(affine_onnx: Path) -> Iterator[dk.RunningServer]:
    with dk.serve(affine_onnx) as server:
        yield server


@pytest.mark.parametrize("grpc", [False, True], ids=["http", "grpc"])
def test_a_server_s_options_and_load_and_the_model_s_hash_are_in_the_result(
    ours: dk.RunningServer, grpc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_PROC", "/proc")
    result = load(f"grpc://{ours.grpc_url}" if grpc else ours.url, **QUICK)
    assert result.ok > 0
    assert {"server", "version", "platform", "file", "sha256"} <= result.server.keys()
    assert (result.server["server"], result.server["file"]) == ("deploykit", "affine.onnx")
    assert len(result.server["sha256"]) == 64
    assert result.options["backend"] == "onnxruntime"
    assert int(result.options["max_batch_size"]) > 1
    assert '"kind": "KIND_CPU"' in result.options["instance_group"]
    assert "max_queue_delay_microseconds" in result.options["dynamic_batching"]
    assert result.outside is not None
    for window in (result.outside.before, result.outside.during, result.outside.after):
        assert window.seconds > 0  # by the kernel's ticks: of any length where they come late
        assert window.others_cores is not None
    assert f"(process {os.getpid()})" not in result.outside.during.busiest  # it serves


def test_options_are_short_and_no_more_than_64() -> None:
    config = {"name": "m", "input": [{"name": "x"}], "backend": "ort\nx", "max_batch_size": 8}
    config |= {"instance_group": [{"kind": "KIND_GPU", "gpus": [0, 1]}], "version_policy": {}}
    assert model_options(config) == {
        "backend": "ort x",
        "max_batch_size": "8",
        "instance_group": '[{"kind": "KIND_GPU", "gpus": [0, 1]}]',
    }
    many = model_options({f"k{n}": "v" * 1000 for n in range(1000)})
    assert len(many) == 64
    assert max(map(len, many.values())) == 300


def test_the_process_that_listens_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_PROC", "/proc")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = Server("", "", "127.0.0.1", listener.getsockname()[1])
        assert here.processes() == (os.getpid(),)
        assert replace(here, address="192.0.2.1").processes() == ()
        monkeypatch.setenv("HOST_PROC", str(tmp_path))  # a machine without /proc
        assert here.processes() == ()


# -- TLS, a token, a path, a socket, and servers that answer in other ways


TOKEN = "a-token-of-sixteen-or-more"


@pytest.fixture
def secured(pem: tuple[Path, Path]) -> Iterator[Running]:
    options = {"token": TOKEN, "tls_cert": pem[0], "tls_key": pem[1], "grpc_port": 0}
    with running({"m": FakeEngine()}, **options) as server:
        yield server


def urls(server: Running) -> tuple[str, str]:
    return f"https://localhost:{server.port}", f"grpcs://localhost:{server.server.grpc_port}"


@pytest.mark.parametrize(
    ("way", "options"), [(0, {"concurrency": 3}), (1, {"rate": 60.0})], ids=["https", "grpcs"]
)
def test_a_server_with_tls_and_a_token_is_loaded(
    secured: Running, pem: tuple[Path, Path], way: int, options: dict[str, Any]
) -> None:
    result = load(
        urls(secured)[way],
        enough=lambda found: found.sent >= 3 and bool(found.lag_p99_ms),
        token=TOKEN,
        ca_file=pem[0],
        **{**QUICK, "concurrency": None, "duration_s": 1.0, **options},
    )
    assert result.ok == result.sent >= 3, result.errors
    assert result.lag_p99_ms > 0  # by the kernel's clock, through TLS too
    assert TOKEN not in json.dumps(result.to_dict())


def test_large_requests_and_answers_pass_tls(pem: tuple[Path, Path]) -> None:
    wide = FakeEngine(width=200_000)
    with running({"m": wide}, tls_cert=pem[0], tls_key=pem[1], grpc_port=0) as server:
        for url in urls(server):
            result = load(url, batch=4, ca_file=pem[0], **QUICK)
            assert result.ok == result.sent > 0, result.errors


@pytest.mark.parametrize("way", [0, 1], ids=["https", "grpcs"])
def test_what_a_secured_server_lacks_is_named(
    secured: Running, pem: tuple[Path, Path], way: int
) -> None:
    url, ca_file = urls(secured)[way], pem[0]
    with running({"m": FakeEngine()}, grpc_port=0) as plain:
        for at, options, words, hint in (
            (url, {"token": TOKEN}, "certificate is not trusted: self", "`ca_file`"),
            (url, {"ca_file": ca_file}, "a token is needed", "`token`"),
            (url, {"ca_file": ca_file.parent / "none.pem"}, "holds no certificates", ""),
            (url.replace("localhost", "127.0.0.1"), {"ca_file": ca_file}, "address mismatch", ""),
            (urls(plain)[0], {}, "TLS: ", "without TLS"),
        ):
            with pytest.raises(BadInput, match=words) as caught:
                load_test(at, **options, **QUICK)  # type: ignore[arg-type]
            assert hint in str(caught.value.hint)


@pytest.mark.parametrize("way", [0, 1], ids=["https", "grpcs"])
def test_a_server_that_wants_certificates_of_its_clients_is_loaded(
    pem: tuple[Path, Path], tmp_path: Path, way: int
) -> None:
    cert, key = pem
    both = tmp_path / "both.pem"
    both.write_text(cert.read_text() + key.read_text())
    options = {"tls_cert": cert, "tls_key": key, "tls_client_ca": cert, "grpc_port": 0}
    with running({"m": FakeEngine()}, **options) as server:
        url = urls(server)[way]
        result = load(url, ca_file=cert, cert_file=both, **QUICK)
        assert result.ok == result.sent > 0, result.errors
        unread = "no certificate and its key can be read"
        for files, words, hint in (
            ({}, "TLS: ", "`cert_file`"),
            ({"cert_file": cert}, unread, ""),
        ):
            with pytest.raises(BadInput, match=words) as caught:
                load_test(url, ca_file=cert, **files, **QUICK)
            assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("unix:{}", {"concurrency": 20}),
        ("http://unix:{}", {"rate": 60.0}),
        ("unix:{}.grpc", {"rate": 60.0}),
        ("grpc://unix:{}.grpc", {"concurrency": 20}),
    ],
)
def test_a_server_at_a_unix_socket_is_loaded(
    tmp_path: Path, form: str, options: dict[str, Any]
) -> None:
    with pytest.raises(BadInput, match="no server answers there: No such file"):
        load_test(form.format(tmp_path / "none.sock"), **QUICK)
    with running({"m": FakeEngine()}, host=f"unix:{tmp_path}/s.sock", grpc_port=0):
        url = form.format(tmp_path / "s.sock")
        longer = {**QUICK, "concurrency": None, "duration_s": 1.0, **options}
        result = load(url, enough=at_least(3), **longer)
    assert result.ok == result.sent >= 3, result.errors
    assert result.protocol == ("grpc" if "grpc" in form else "http")
    assert result.same_machine
    assert result.lag_p99_ms is None  # no kernel's clock
    assert any("late reads were not measured" in note for note in result.notes)


def test_a_body_that_is_compressed_unasked_is_named() -> None:
    server = StandIn(lambda _server, _n: reply(200, ANSWER, "Content-Encoding: br\r\n"))
    with server.running() as url:
        record = run_here(url)
    assert set(record.statuses) == {NO_ANSWER}
    why = "it is encoded as b'br', which was not asked for"
    assert [*record.errors] == [f"not an answer of this protocol: {why}"]


def test_a_server_below_a_path_is_loaded() -> None:
    server = StandIn(prefix="/models/a%20b")
    with server.running() as url:
        for path in ("/models/a b", "/models/a%20b/", "/models/a%20b/v2"):
            assert load(f"{url}{path}", server.bodies, **QUICK).ok > 0
        with pytest.raises(BadInput, match="not an Open Inference Protocol server"):
            load_test(f"{url}/other", **QUICK)


def test_a_server_that_declares_no_binary_tensors_gets_json(tmp_path: Path) -> None:
    server, data = StandIn(extensions=()), tmp_path / "d.npz"
    with server.running() as url:
        result = load(url, server.bodies, batch=2, seed=3, **QUICK)
        np.savez(data, image=np.full((2, 2, 3), np.nan, np.float32))
        with pytest.raises(BadInput, match="NaN or infinity, which JSON cannot"):
            load_test(url, data=data, **QUICK)
    assert result.ok == result.sent > 0
    assert result.notes[-1].startswith("tensors are sent as JSON, as the server declares no")
    head, raw = server.bodies[0]
    assert (raw, head.keys()) == (b"", {"id", "inputs"})
    (item,) = head["inputs"]  # type: ignore[misc]
    values = np.array(item.pop("data"), np.float32)
    assert item == {"name": "image", "shape": [2, 2, 3], "datatype": "FP32"}
    assert values.shape == (12,)
    assert np.abs(values).max() > 0


@pytest.mark.parametrize("extensions", [(), ("binary_tensor_data",)], ids=["JSON", "bytes"])
def test_every_datatype_is_sent(extensions: tuple[str, ...]) -> None:
    bits = {"BYTES": 40, "BOOL": 8, "BF16": 16, "FP16": 16, "INT64": 64}
    tensors = [{"name": each, "datatype": each, "shape": [-1, 3]} for each in bits]
    server = StandIn(inputs=tensors, extensions=extensions)
    with server.running() as url:
        assert set(run_here(url, batch=2).statuses) == {200}
    head, raw = server.bodies[0]
    for item in head["inputs"]:  # type: ignore[attr-defined]
        assert (item["datatype"], item["shape"]) == (item["name"], [2, 3])
        kinds = {"BYTES": str, "BOOL": bool, "INT64": int}
        if not extensions:
            assert {type(each) for each in item["data"]} == {kinds.get(item["name"], float)}
    assert len(raw) == (6 * sum(bits.values()) // 8 if extensions else 0)


def test_a_server_that_fails_on_the_form_it_declares_gets_the_other() -> None:
    def infer(server: StandIn, number: int) -> bytes:
        head, _ = server.bodies[number]
        if "parameters" in head:
            return reply(500, {"error": "'utf-8' codec can't decode byte 0xff"})
        return reply(200, ANSWER)

    server = StandIn(infer)
    with server.running() as url:
        result = load(url, server.bodies, **QUICK)
    assert result.ok == result.sent > 0
    assert "does not take bytes (500: 'utf-8' codec" in result.notes[-1]
