"""What a request held is freed with its answer, not at the next garbage collection.

An error's traceback refers to the frames that it passed, and those to the body, to what became of
it and to the error. No memory budget counts such a circle: requests of 100 KB that expand to 64 MiB
before they are refused held 960 MiB.
"""

from __future__ import annotations

import gc
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from deploykit.engines.engine import Arrays
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import INFER, STREAM, frames, infer_bytes, serving
from tests.support.serving.running import Running, infer_json, request, running

WIDTH = 100_000
HTTP = "/v2/models/{}/infer"
GOOD = infer_json([0.5] * WIDTH, [1, WIDTH])
LARGEST = 4 << 20  # of a body, expanded too
BOMB = bytes(LARGEST + 1)
FEW_BYTES = 64 << 10
TIMES = 3


class Failing(FakeEngine):
    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if feeds["x"].max() > 4:  # not in the warm-up
            return {"y": feeds["x"].astype(np.float64)}
        if feeds["x"].max() > 2:
            raise RuntimeError("broken")
        return super().__call__(feeds)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if a garbage collection finds something that holds many bytes, of what began here."""
    gc.collect()
    gc.disable()
    gc.freeze()  # the server of a test before may be gone only now
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        leaves = {id(leaf): leaf for leaf in gc.get_referents(*gc.garbage)}
        large = [leaf for leaf in leaves.values() if bytes_of(leaf) > FEW_BYTES]
        assert [(type(leaf).__name__, bytes_of(leaf)) for leaf in large] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def bytes_of(leaf: object) -> int:
    if isinstance(leaf, (np.ndarray, memoryview)):
        return leaf.nbytes
    return sys.getsizeof(leaf) if isinstance(leaf, (bytes, bytearray, io.BytesIO)) else 0


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    models = {"large": FakeEngine(width=WIDTH), "fails": Failing(width=WIDTH)}
    with running(models, max_body_bytes=LARGEST) as server:
        assert server.ask("POST", HTTP.format("large"), GOOD).status == 200  # starts its threads
        yield server


PACKED = gzip.compress(GOOD, 1)
OVER_HTTP: dict[str, tuple[str, bytes, str, int]] = {
    "a good one in gzip": ("large", PACKED, "gzip", 200),
    "gzip above the limit": ("large", gzip.compress(BOMB, 1), "gzip", 413),
    "gzip that ends too early": ("large", PACKED[:-100], "gzip", 400),
    "no JSON when expanded": ("large", gzip.compress(BOMB[: LARGEST // 2], 1), "gzip", 400),
    "cut JSON": ("large", GOOD[:-5], "identity", 400),
    "a wrong shape": ("large", GOOD.replace(b"[1, ", b"[2, "), "identity", 400),
    "half of it, then nothing": ("large", GOOD, "identity", 0),
    "an unknown model": ("nothing", GOOD, "identity", 404),
    "an engine that fails": ("fails", GOOD.replace(b"0.5", b"3.5"), "identity", 500),
    "an engine that answers wrongly": ("fails", GOOD.replace(b"0.5", b"5.5"), "identity", 500),
}


@pytest.mark.parametrize(("name", "body", "encoding", "status"), OVER_HTTP.values(), ids=OVER_HTTP)
def test_an_http_request_leaves_no_garbage(
    server: Running, name: str, body: bytes, encoding: str, status: int
) -> None:
    data = request("POST", HTTP.format(name), body, Content_Encoding=encoding)
    with nothing_left():
        for _ in range(TIMES):
            raw = server.connect()
            raw.send(data if status else data[: len(data) // 2])
            assert not status or raw.status() == status
            raw.close()
        assert server.ask("GET", "/v2/health/live").status == 200  # the loop is done with them


ROWS = infer_bytes(value=3, width=WIDTH)
OVER_GRPC: dict[str, tuple[bytes, str, int]] = {
    "above the limit": (zlib.compress(BOMB, 1), "deflate", 8),
    "no deflate": (ROWS, "deflate", 3),
    "no message when expanded": (zlib.compress(BOMB[: LARGEST // 2], 1), "deflate", 3),
    "cut": (ROWS[:-9], "identity", 3),
    "a wrong shape": (infer_bytes(value=3, width=WIDTH + 1), "identity", 3),
    "an engine that fails": (ROWS, "identity", 13),
    "an engine that answers wrongly": (infer_bytes(value=5, width=WIDTH), "identity", 13),
}


@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize(("message", "encoding", "status"), OVER_GRPC.values(), ids=OVER_GRPC)
def test_a_grpc_message_leaves_no_garbage(
    path: str, message: bytes, encoding: str, status: int
) -> None:
    with (
        serving({"m": Failing(width=WIDTH)}, max_body_bytes=LARGEST) as server,
        frames(server.port) as client,
        nothing_left(),
    ):
        for stream in range(1, 2 * TIMES, 2):
            client.start(
                stream,
                message,
                path,
                compressed=int(encoding != "identity"),
                grpc_encoding=encoding,
            )
            assert client.answer(stream).status in ((status,) if path == INFER else (status, 0))
        client.settle()
