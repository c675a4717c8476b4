"""Four gRPC stacks under the same application: which one should carry the server?

The application is deploykit's own: cut the message, decode the Open Inference Protocol, queue in
the batcher, answer. Only the bytes' way in and out differs: (a) grpcio's asyncio server, (b)
grpcio's server with a pool of threads that wait for their answers, (c) the `h2` package on uvloop,
(d) our own HTTP/2 on uvloop with `hpack`: deploykit.serving.grpc.server. The client is h2load,
native, on the same cores; the rounds of the stacks alternate. A row "http" is the HTTP/1.1 server
of the same package with the same tensor, by the same client, for scale.

    pip install grpcio h2          (and h2load: Debian's nghttp2-client)
    python benchmarks/grpc_stacks.py [--model FILE|fake] [--seconds 3] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from child import listening
from mnist_graph import write_mnist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/support

STACKS = ("grpcio.aio", "grpcio threads", "h2", "ours", "http")
PATH = "inference.GRPCInferenceService/ModelInfer"
LOADS = {
    "1 connection, 1 call": (1, 1),
    "1 connection, 32 calls": (1, 32),
    "32 connections": (32, 1),
}
MAX_BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="an .onnx file, or 'fake' for an engine that costs nothing")
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stacks", default=",".join(STACKS))
    parser.add_argument("--serve", choices=STACKS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        SERVE[options.serve](options.model, options.port)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(write_mnist(Path(folder) / "mnist.onnx"))
        compare(model, options.stacks.split(","), options.seconds, options.rounds, Path(folder))


def compare(model: str, stacks: list[str], seconds: int, rounds: int, folder: Path) -> None:
    shape = (1, 784) if model == "fake" else (1, 1, 28, 28)
    grpc_body, http_body, json_bytes = bodies(shape)
    (folder / "grpc").write_bytes(grpc_body)
    (folder / "http").write_bytes(http_body)
    results: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        ports = {name: stack.enter_context(started(name, model)) for name in stacks}
        for name, port in ports.items():
            if name != "http":
                check(port, shape)
        for _ in range(rounds):
            for load, (connections, calls) in LOADS.items():
                for name, port in ports.items():
                    if name == "http" and calls > 1:
                        continue
                    command = ["h2load", f"-c{connections}", f"-m{calls}", f"-D{seconds}"]
                    command += ["--warm-up-time=1"]
                    if name == "http":
                        command += ["--h1", f"-d{folder / 'http'}"]
                        command += [f"-HInference-Header-Content-Length: {json_bytes}"]
                        command += [f"http://127.0.0.1:{port}/v2/models/m/infer"]
                    else:
                        command += [f"-d{folder / 'grpc'}", "-Hcontent-type: application/grpc"]
                        command += ["-Hte: trailers", f"http://127.0.0.1:{port}/{PATH}"]
                    results.setdefault((load, name), []).append(rate(command))
    versions = ("grpcio", "h2", "hpack", "protobuf", "uvloop", "onnxruntime")
    print(", ".join(f"{name} {version(name)}" for name in versions), end="; ")
    what = "an engine that costs nothing" if model == "fake" else Path(model).name
    print(f"{os.cpu_count()} cores, {what}, median of {rounds} alternating rounds of {seconds} s, ")
    print(f"batches up to {MAX_BATCH}. Each stack's answers were compared with the engine's.\n")
    print("| load | stack | requests/s | lowest–highest |")
    print("|---|---|--:|--:|")
    for (load, name), rates in results.items():
        span = f"{min(rates):,.0f}–{max(rates):,.0f}"
        print(f"| {load} | {name} | {statistics.median(rates):,.0f} | {span} |")


def rate(command: list[str]) -> float:
    """Answers per second; all of them must have been 200."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    codes = re.search(r"status codes: (\d+) 2xx, 0 3xx, 0 4xx, 0 5xx", done.stdout)
    per_s = re.search(r"finished in .*, ([\d.]+) req/s", done.stdout)
    if not codes or not per_s or not int(codes[1]):
        raise SystemExit(f"{command}: {done.stdout[-600:]}")
    return float(per_s[1])


def bodies(shape: tuple[int, ...]) -> tuple[bytes, bytes, int]:
    """A gRPC message with its prefix; an HTTP body, and the length of its JSON part."""
    import orjson

    from deploykit.engines.oip.protobuf import MESSAGES

    rows = np.random.default_rng(0).random(shape, dtype=np.float32)
    request = MESSAGES["ModelInferRequest"](model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=shape)
    request.raw_input_contents.append(rows.tobytes())
    data = request.SerializeToString()
    item = {"name": "x", "datatype": "FP32", "shape": shape}
    item["parameters"] = {"binary_data_size": rows.nbytes}
    head = orjson.dumps({"inputs": [item], "parameters": {"binary_data_output": True}})
    return b"\0" + len(data).to_bytes(4, "big") + data, head + rows.tobytes(), len(head)


def check(port: int, shape: tuple[int, ...]) -> None:
    """h2load does not look into answers; tritonclient does."""
    import tritonclient.grpc as triton

    rows = np.random.default_rng(0).random(shape, dtype=np.float32)
    tensor = triton.InferInput("x", list(shape), "FP32")
    tensor.set_data_from_numpy(rows)
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        answer = client.infer("m", [tensor]).as_numpy("y")
    if shape == (1, 784):
        np.testing.assert_array_equal(answer, rows * 2 + 1)
    elif answer.shape != (1, 10) or not np.isfinite(answer).all():
        raise SystemExit("a wrong answer")


def started(name: str, model: str) -> AbstractContextManager[int]:
    """A server process of that stack, and its port."""
    return listening([sys.executable, __file__, "--serve", name, "--model", model])


def service_for(model: str, deliver: Callable) -> object:
    from deploykit.engines.engine import load as open_engine
    from deploykit.serving.models.repository import ModelRepository
    from deploykit.serving.options import ServeOptions
    from tests.support.fake_engine import FakeEngine

    engine = FakeEngine(width=784) if model == "fake" else open_engine(Path(model), "cpu")
    service = ModelRepository({"m": engine}, ServeOptions(max_batch=MAX_BATCH), deliver=deliver)
    service.warm_up()
    return service


def deliver_on(loop: asyncio.AbstractEventLoop) -> Callable:
    from deploykit.serving.batching.batcher import deliver_inline

    return lambda requests: loop.call_soon_threadsafe(deliver_inline, requests)


def infer(service, data: bytes, at: int, answer: Callable[[bytes], None]) -> None:
    """What deploykit.serving.grpc.methods does with a message, for the other stacks."""
    from deploykit.serving.oip import messages
    from deploykit.serving.oip.request import fill
    from deploykit.serving.oip.response import collect_results

    head, spans = messages.split_request(data, at)
    name, version = messages.model_of(head)
    model = service.find(name, version or "1")
    request = fill(messages.plan_request(head, spans, model.signature), data, at)

    def done(pending) -> None:
        found = collect_results(request, pending.outputs, model.signature)
        answer(b"".join(messages.encode("m", "1", request.id, found)))

    model.submit(request, done)


def handlers(handler):
    import grpc

    class Handlers(grpc.GenericRpcHandler):
        def service(self, details):  # noqa: ARG002 - grpcio's signature
            return handler

    return (Handlers(),)


def serve_aio(model: str, port: int) -> None:
    import grpc

    async def run() -> None:
        loop = asyncio.get_running_loop()
        service = service_for(model, deliver_on(loop))

        async def call(data: bytes, _context) -> bytes:
            answered = loop.create_future()
            infer(service, data, 0, lambda data: answered.done() or answered.set_result(data))
            return await answered

        server = grpc.aio.server()
        server.add_generic_rpc_handlers(handlers(grpc.unary_unary_rpc_method_handler(call)))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())  # uvloop was slower here: grpcio polls through a socket of its own


def serve_threads(model: str, port: int) -> None:
    import grpc

    from deploykit.serving.batching.batcher import deliver_inline

    service = service_for(model, deliver_inline)

    def call(data: bytes, _context) -> bytes:
        answered: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        infer(service, data, 0, answered.set_result)
        return answered.result()

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(MAX_BATCH))
    server.add_generic_rpc_handlers(handlers(grpc.unary_unary_rpc_method_handler(call)))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def serve_h2(model: str, port: int) -> None:
    import h2.config
    import h2.connection
    import h2.events
    import uvloop

    class Http2(asyncio.Protocol):
        def connection_made(self, transport) -> None:
            self.transport = transport
            config = h2.config.H2Configuration(client_side=False, header_encoding=None)
            self.http = h2.connection.H2Connection(config)
            self.http.initiate_connection()
            self.bodies: dict[int, list[bytes]] = {}
            self.flush()

        def flush(self) -> None:
            self.transport.write(self.http.data_to_send())

        def data_received(self, data: bytes) -> None:
            for event in self.http.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    self.bodies[event.stream_id] = []
                elif isinstance(event, h2.events.DataReceived):
                    self.bodies[event.stream_id].append(event.data)
                    size = event.flow_controlled_length
                    self.http.acknowledge_received_data(size, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    body = b"".join(self.bodies.pop(event.stream_id))
                    infer(service, body, 5, partial(self.answer, event.stream_id))
            self.flush()

        def answer(self, stream: int, data: bytes) -> None:
            if self.transport.is_closing():
                return
            head = [(b":status", b"200"), (b"content-type", b"application/grpc")]
            self.http.send_headers(stream, head)
            self.http.send_data(stream, b"\0" + len(data).to_bytes(4, "big") + data)
            self.http.send_headers(stream, [(b"grpc-status", b"0")], end_stream=True)
            self.flush()

    loop = uvloop.new_event_loop()
    service = service_for(model, deliver_on(loop))
    loop.run_until_complete(loop.create_server(Http2, "127.0.0.1", port))
    loop.run_forever()


def serve_ours(model: str, port: int) -> None:
    import uvloop

    from deploykit.serving.grpc.server import GrpcServer
    from deploykit.serving.models.offload import ThreadOffload
    from deploykit.serving.options import ServeOptions
    from deploykit.serving.transport.memory import MemoryBudget
    from deploykit.serving.transport.security import Guard

    loop = uvloop.new_event_loop()
    service = service_for(model, deliver_on(loop))
    options = ServeOptions(grpc_port=port)
    memory, offload = MemoryBudget(None, options.max_body_bytes), ThreadOffload(loop, 1)
    server = GrpcServer(service, options, Guard(None), memory, offload)
    loop.run_until_complete(server.start())
    loop.run_forever()


def serve_http(model: str, port: int) -> None:
    from deploykit.engines.engine import load as open_engine
    from deploykit.serving.options import ServeOptions
    from deploykit.serving.server import run
    from tests.support.fake_engine import FakeEngine

    engine = FakeEngine(width=784) if model == "fake" else open_engine(Path(model), "cpu")
    options = ServeOptions(http_port=port, max_batch=MAX_BATCH)
    run({"m": engine}, options, lambda *_: None)


SERVE = dict(zip(STACKS, (serve_aio, serve_threads, serve_h2, serve_ours, serve_http), strict=True))

if __name__ == "__main__":
    main()
