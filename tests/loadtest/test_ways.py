"""Servers behind TLS, a token or a path, and servers without the protocol's binary extension."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.loadtest.load import load_test
from tests.support.fake_engine import FakeEngine
from tests.support.measure.loads import at_least, load
from tests.support.serving.running import Running, running
from tests.support.stand_in import ANSWER, StandIn, reply

pytest.importorskip("hpack")

QUICK: dict[str, Any] = {"concurrency": 2, "warmup_s": 0.0, "duration_s": 0.3}
TOKEN = "a-token-of-sixteen-or-more"


@pytest.fixture
def secured(pem: tuple[Path, Path]) -> Iterator[Running]:
    options = {"token": TOKEN, "tls_cert": pem[0], "tls_key": pem[1], "grpc_port": 0}
    with running({"m": FakeEngine()}, **options) as server:
        yield server


def urls(server: Running) -> tuple[str, str]:
    return f"https://localhost:{server.port}", f"grpcs://localhost:{server.server.grpc_port}"


@pytest.mark.parametrize("way", [0, 1], ids=["https", "grpcs"])
@pytest.mark.parametrize("options", [{"concurrency": 3}, {"rate": 60.0}], ids=str)
def test_a_server_with_tls_and_a_token_is_loaded(
    secured: Running,
    pem: tuple[Path, Path],
    way: int,
    options: dict[str, Any],
) -> None:
    result = load(
        urls(secured)[way],
        enough=at_least(3),
        token=TOKEN,
        ca_file=pem[0],
        **{**QUICK, "concurrency": None, **options},
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
    secured: Running,
    pem: tuple[Path, Path],
    way: int,
) -> None:
    url = urls(secured)[way]
    with pytest.raises(BadInput, match="certificate is not trusted: self") as caught:
        load_test(url, token=TOKEN, **QUICK)
    assert "`ca_file`" in str(caught.value.hint)
    with pytest.raises(BadInput) as caught:
        load_test(url, ca_file=pem[0], **QUICK)
    assert "`token`" in str(caught.value.hint)
    with pytest.raises(BadInput, match="holds no certificates"):
        load_test(url, ca_file=pem[1].parent / "none.pem", **QUICK)
    with pytest.raises(BadInput, match="IP address mismatch"):
        load_test(url.replace("localhost", "127.0.0.1"), ca_file=pem[0], **QUICK)


def test_tls_where_there_is_none_is_named() -> None:
    with running({"m": FakeEngine()}) as server, pytest.raises(BadInput, match="TLS: ") as caught:
        load_test(f"https://localhost:{server.port}", **QUICK)
    assert "without TLS" in str(caught.value.hint)


@pytest.mark.parametrize("path", ["/models/a b", "/models/a%20b/", "/models/a%20b/v2"])
def test_a_server_below_a_path_is_loaded(path: str) -> None:
    server = StandIn(prefix="/models/a%20b")
    with server.running() as url:
        assert load(f"{url}{path}", server.bodies, **QUICK).ok > 0
        with pytest.raises(BadInput, match="not an Open Inference Protocol server"):
            load_test(f"{url}/other", **QUICK)


def test_a_server_that_declares_no_binary_tensors_gets_json() -> None:
    server = StandIn(extensions=())
    with server.running() as url:
        result = load(url, server.bodies, batch=2, seed=3, **QUICK)
    assert result.ok == result.sent > 0
    assert result.notes[-1].startswith("tensors are sent as JSON, as the server declares no")
    head, raw = server.bodies[0]
    assert (raw, head.keys()) == (b"", {"id", "inputs"})
    (item,) = head["inputs"]  # type: ignore[misc]
    assert {key: item[key] for key in ("name", "shape", "datatype")} == {
        "name": "image",
        "shape": [2, 2, 3],
        "datatype": "FP32",
    }
    values = np.array(item["data"], np.float32)
    assert values.shape == (12,)
    assert np.abs(values).max() > 0


@pytest.mark.parametrize("extensions", [(), ("binary_tensor_data",)], ids=["JSON", "bytes"])
@pytest.mark.parametrize("datatype", ["BYTES", "BOOL", "BF16", "FP16", "INT64"])
def test_every_datatype_is_sent(datatype: str, extensions: tuple[str, ...]) -> None:
    tensors = [{"name": "x", "datatype": datatype, "shape": [-1, 3]}]
    server = StandIn(inputs=tensors, extensions=extensions)
    with server.running() as url:
        assert load(url, server.bodies, batch=2, **QUICK).ok > 0
    head, raw = server.bodies[0]
    (item,) = head["inputs"]  # type: ignore[misc]
    assert (item["datatype"], item["shape"]) == (datatype, [2, 3])
    if extensions:
        assert len(raw) == 6 * {"BYTES": 4 + 1, "BOOL": 1, "INT64": 8}.get(datatype, 2)
    else:
        kinds = {"BYTES": str, "BOOL": bool, "INT64": int}
        assert {type(each) for each in item["data"]} == {kinds.get(datatype, float)}


def test_a_server_that_names_no_inputs_is_named() -> None:
    with StandIn(inputs=()).running() as url, pytest.raises(BadInput, match="names no inputs"):
        load_test(url, **QUICK)


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


def test_a_server_that_lists_its_models_as_kserve_does_needs_no_name() -> None:
    def other(path: str) -> bytes | None:
        if path == "/v2/repository/index":
            return reply(404, {"error": "Not Found"})
        return reply(200, {"models": ["m"]}) if path == "/v2/models" else None

    with StandIn(other=other, extensions=()).running() as url:
        assert load(url, **QUICK).ok > 0


def test_values_that_json_lacks_are_refused_before_the_run(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", image=np.full((2, 2, 3), np.nan, np.float32))
    with (
        StandIn(extensions=()).running() as url,
        pytest.raises(BadInput, match="NaN or infinity, which JSON cannot"),
    ):
        load_test(url, data=tmp_path / "d.npz", **QUICK)
