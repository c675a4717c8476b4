"""Servers behind TLS, a token, a path or a socket, and servers that answer in other ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.loadtest.load import load_test
from deploykit.loadtest.schedule import NO_ANSWER
from tests.support.fake_engine import FakeEngine
from tests.support.measure.loads import at_least, load, run_here
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
        for files in ({"cert_file": cert, "key_file": key}, {"cert_file": both}):
            result = load(url, ca_file=cert, **files, **QUICK)
            assert result.ok == result.sent > 0, result.errors
        unread = "no certificate and its key can be read"
        for files, words, hint in (
            ({}, "TLS: ", "`cert_file`"),
            ({"cert_file": cert}, unread, ""),
            ({"cert_file": cert, "key_file": cert}, unread, ""),
            ({"key_file": key}, "`key_file` needs `cert_file`", ""),
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
