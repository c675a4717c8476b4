"""Three HTTP stacks under the same application: which one should carry the server?

The application is deploykit's own: read the body, decode the Open Inference Protocol, queue in the
batcher, answer. Only the bytes' way in and out differs: (a) uvicorn with httptools and uvloop and a
raw ASGI application, (b) granian's RSGI, (c) an asyncio protocol on httptools and uvloop, which is
deploykit.serving.server. The rounds of the stacks alternate in one run, by the same client process.

    pip install uvicorn granian
    python benchmarks/http_stacks.py [--model FILE|fake] [--seconds 3] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path

import numpy as np
from child import listening
from http_client import infer_request, load
from mnist_graph import write_mnist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/support

STACKS = ("uvicorn", "granian", "protocol")
MAX_BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="an .onnx file, or 'fake' for an engine that costs nothing")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", default="1,32")
    parser.add_argument("--serve", choices=STACKS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        SERVE[options.serve](options.model, options.port)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(write_mnist(Path(folder) / "mnist.onnx"))
        counts = [int(count) for count in options.connections.split(",")]
        compare(model, counts, options.seconds, options.rounds, Path(folder) / "request")


def compare(model: str, counts: list[int], seconds: float, rounds: int, request: Path) -> None:
    shape = (1, 784) if model == "fake" else (1, 1, 28, 28)
    rows = np.random.default_rng(0).random(shape, dtype=np.float32)
    request.write_bytes(infer_request("127.0.0.1", 80, "m", "x", rows))
    results: dict[tuple[str, int], list[dict]] = {}
    with contextlib.ExitStack() as stack:
        ports = {name: stack.enter_context(started(name, model)) for name in STACKS}
        for _ in range(rounds):
            for count in counts:
                for name, port in ports.items():
                    result = load("127.0.0.1", port, count, seconds, request)
                    results.setdefault((name, count), []).append(result)
    packages = ("uvicorn", "granian", "httptools", "uvloop", "onnxruntime")
    print(", ".join(f"{name} {version(name)}" for name in packages), end="; ")
    what = "an engine that costs nothing" if model == "fake" else Path(model).name
    print(f"{os.cpu_count()} cores, {what}, ")
    print(f"median of {rounds} alternating rounds of {seconds:g} s, batches up to {MAX_BATCH}.\n")
    print("| stack | connections | requests/s | lowest–highest | p50 ms | p99 ms | errors |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for count in counts:
        for name in STACKS:
            found = results[name, count]
            rates = [result["per_s"] for result in found]
            p50_ms, p99_ms = (
                statistics.median(result[key] for result in found) for key in ("p50_ms", "p99_ms")
            )
            errors = sum(result["errors"] for result in found)
            print(
                f"| {name} | {count} | {statistics.median(rates):,.0f} "
                f"| {min(rates):,.0f}–{max(rates):,.0f} | {p50_ms:.2f} | {p99_ms:.2f} | {errors} |"
            )


def started(name: str, model: str) -> AbstractContextManager[int]:
    """A server process of that stack, and its port."""
    return listening([sys.executable, __file__, "--serve", name, "--model", model])


def engine_for(model: str):
    from deploykit.engines.engine import load as open_engine
    from tests.support.fake_engine import FakeEngine

    return FakeEngine(width=784) if model == "fake" else open_engine(Path(model), "cpu")


def routes_for(model: str, loop: asyncio.AbstractEventLoop):
    """The application, with answers handed to `loop` once per batch: as in serving/http.py."""
    from deploykit.serving.batching.batcher import deliver_inline
    from deploykit.serving.http.routes import Routes
    from deploykit.serving.models.repository import ModelRepository
    from deploykit.serving.options import ServeOptions

    service = ModelRepository(
        {"m": engine_for(model)},
        ServeOptions(max_batch=MAX_BATCH),
        deliver=lambda batch: loop.call_soon_threadsafe(deliver_inline, batch),
    )
    service.warm_up()
    return Routes(service)


class Call:
    """What the routes need of a request, for stacks that want the answer from a coroutine."""

    def __init__(self, method: str, target: str, headers: dict, body: bytes) -> None:
        self.method, self.target, self.body = method, target, body
        self.json_bytes = headers.get(b"inference-header-content-length")
        self.encoding = headers.get(b"content-encoding")
        self.cancel = None
        self.answered = asyncio.get_running_loop().create_future()

    def reply(self, status: int, headers: bytes, parts: list[bytes]) -> None:
        body = b"".join(parts)
        pairs = [tuple(line.lower().split(b": ", 1)) for line in headers.split(b"\r\n")[:-1]]
        pairs.append((b"content-length", str(len(body)).encode()))
        self.answered.set_result((status, pairs, body))


def serve_uvicorn(model: str, port: int) -> None:
    import uvicorn

    routes = None

    async def app(scope, receive, send) -> None:
        nonlocal routes
        if routes is None:
            routes = routes_for(model, asyncio.get_running_loop())
        message = await receive()
        body = message["body"]
        while message["more_body"]:
            message = await receive()
            body += message["body"]
        call = Call(scope["method"], scope["path"], dict(scope["headers"]), body)
        routes.handle(call)
        status, headers, answer = await call.answered
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    uvicorn.run(
        app,
        port=port,
        http="httptools",
        loop="uvloop",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )


def serve_granian(model: str, port: int) -> None:
    from granian import Granian
    from granian.constants import Interfaces, Loops

    os.environ["BENCHMARK_MODEL"] = model  # granian imports the application in its worker
    Granian(
        "http_stacks:granian_app",
        port=port,
        interface=Interfaces.RSGI,
        loop=Loops.uvloop,
        working_dir=Path(__file__).parent,
        log_enabled=False,
    ).serve()


async def granian_app(scope, protocol) -> None:
    global granian_routes
    if granian_routes is None:
        granian_routes = routes_for(os.environ["BENCHMARK_MODEL"], asyncio.get_running_loop())
    names = ("inference-header-content-length", "content-encoding")
    headers = {n.encode(): v.encode() for n in names if (v := scope.headers.get(n))}
    call = Call(scope.method, scope.path, headers, await protocol())
    granian_routes.handle(call)
    status, pairs, answer = await call.answered
    texts = [(name.decode(), value.decode()) for name, value in pairs]
    protocol.response_bytes(status, texts, answer)


granian_routes = None


def serve_protocol(model: str, port: int) -> None:
    from deploykit.serving.options import ServeOptions
    from deploykit.serving.server import run

    options = ServeOptions(http_port=port, max_batch=MAX_BATCH)
    run({"m": engine_for(model)}, options, lambda *_: None)


SERVE = {"uvicorn": serve_uvicorn, "granian": serve_granian, "protocol": serve_protocol}

if __name__ == "__main__":
    main()
