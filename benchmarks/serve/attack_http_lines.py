"""Attacks that put large requests before small ones: does the line move for the small?

Each answer names the longest of the small requests meanwhile, over HTTP and gRPC.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.serve.attack_http_setup import (
    LARGE,
    SMALL,
    Attacked,
    answer,
    ask,
    counted,
    infer,
    reset,
)
from tests.support.serving.grpc_cases import Frames, infer_bytes

NUMBERS = json.dumps([random.random() for _ in range(200_000)])  # 4 MB
BIG_BODY = (
    b'{"inputs":[{"name":"x","datatype":"FP32","shape":[50000,4],"data":%s}]}' % NUMBERS.encode()
)
BIG = ask("POST", "/v2/models/m/infer", BIG_BODY)
PACKED = ask("POST", "/v2/models/m/infer", gzip.compress(BIG_BODY, 1), "Content-Encoding: gzip")
ZIPPED = SMALL.replace(b"Host:", b"Accept-Encoding: gzip\r\nHost:")


class Smalls:
    """Small requests each 20 ms on two connections, HTTP and gRPC, until the block ends."""

    def __init__(self, server: Attacked) -> None:
        self._server = server
        self._ended = threading.Event()
        self.most_ms = {"HTTP": 0.0, "gRPC": 0.0}
        self.others: Counter[str] = Counter()

    def __enter__(self) -> Smalls:
        self._threads = [
            threading.Thread(target=self._run, args=(kind, ask_one))
            for kind, ask_one in (("HTTP", self._http), ("gRPC", self._grpc))
        ]
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for each in self._threads:
            each.join()

    def _run(self, kind: str, asked: Callable[[], Iterator[int]]) -> None:
        while not self._ended.is_set():
            try:
                for status in asked():
                    if status:
                        self.others[f"{kind} {status}"] += 1
            except (OSError, AssertionError) as exc:
                self.others[f"{kind} {type(exc).__name__}"] += 1
                self._ended.wait(0.05)

    def _http(self) -> Iterator[int]:
        with self._server.connect(kept=False) as client:
            while not self._ended.wait(0.02):
                with self._timed("HTTP"):
                    status = answer(client, ZIPPED)
                yield 0 if status == 200 else status or -1

    def _grpc(self) -> Iterator[int]:
        port = int(self._server.server.grpc.rpartition(":")[2])
        client = Frames(port)
        try:
            for stream in range(1, 1 << 20, 2):
                if self._ended.wait(0.02):
                    return
                with self._timed("gRPC"):
                    status = client.call(stream, infer_bytes()).status
                yield status or 0
        finally:
            client.close()

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        begun_s = time.perf_counter()
        yield
        self.most_ms[kind] = max(self.most_ms[kind], 1e3 * (time.perf_counter() - begun_s))

    def __str__(self) -> str:
        most = ", ".join(f"{kind} {ms:,.0f} ms" for kind, ms in self.most_ms.items())
        wrong = f"; **small ones got {counted(self.others)}**" if self.others else ""
        return f"small: {most}{wrong}"


def worker(server: Attacked) -> int:
    """The process that reads large requests; starts it if need be."""
    pid = server.server.popen.pid
    for _ in range(100):
        server.once(BIG)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text("ascii").split():
                with contextlib.suppress(OSError):
                    if b"models.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return int(child)
    raise ProcessLookupError("no worker process")


@contextlib.contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work(ended)` in a thread until the block ends."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def large(server: Attacked, work: Callable[[int], object], clients: int = 8) -> str:
    with Smalls(server) as smalls:
        found = server.together(clients, work)
    return f"{counted(found)}; {smalls}"


def worker_stopped(server: Attacked) -> str:
    """8 clients send 4 MB of JSON, plain and in gzip, while SIGSTOP holds the process for it."""
    pid = worker(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        return large(server, lambda n: server.once(PACKED if n % 2 else BIG))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def worker_killed(server: Attacked) -> str:
    """8 clients send 4 MB of JSON, SIGKILL ends the process for it ten times."""

    def kill(ended: threading.Event) -> None:
        while not ended.wait(server.seconds / 10):
            with contextlib.suppress(OSError):
                os.kill(worker(server), signal.SIGKILL)

    with meanwhile(kill):
        return large(server, lambda _: server.once(BIG))


def worker_stops_and_goes(server: Attacked) -> str:
    """8 clients send 4 MB of JSON to a process that runs 20 ms of each 200."""
    pid = worker(server)

    def stop(ended: threading.Event) -> None:
        with contextlib.suppress(ProcessLookupError):
            while not ended.wait(0.02):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.18)
                os.kill(pid, signal.SIGCONT)

    with meanwhile(stop):
        return large(server, lambda _: server.once(BIG))


def no_descriptors(server: Attacked) -> str:
    """8 clients send 4 MB of JSON to a server without file descriptors for a process or them."""
    pid, server.accepts = server.server.popen.pid, False
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    clients = [server.connect(kept=False) for _ in range(8)]
    with Smalls(server) as smalls:
        time.sleep(1)
        held = server.server.holds()[0]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (held, before[1]))
        try:
            found = server.together(8, lambda number: answer(clients[number], BIG))
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    for each in clients:
        each.close()
    return f"{counted(found)}; {smalls}"


def large_by_trickle(server: Attacked) -> str:
    """200 clients send a body of 1.9 MB in pieces of 100 bytes and never end it."""
    clients = [server.connect() for _ in range(200)]
    for each in clients:
        each.sendall(BIG[: 1 << 16])

    def one(number: int) -> str:
        for client in clients[number::8]:
            client.send(b"1" * 100)
        time.sleep(0.01)
        return "pieces"

    return large(server, one)


def leave_while_encoded(server: Attacked) -> str:
    """8 clients ask for 8 MiB as JSON and leave while the other process writes it."""
    asked = infer("wide", [[1.0]])

    def one(number: int) -> str:
        with server.connect(kept=False) as client:
            client.sendall(asked)
            time.sleep(0.05 * (number + 1))
            if number % 2:
                reset(client)
        return "left"

    return large(server, one)


def large_compressed(server: Attacked) -> str:
    """12 clients ask for 8 MiB in gzip or deflate, in turn with 200 kB of JSON in gzip."""
    asked = [
        LARGE.replace(b"Host:", b"Accept-Encoding: gzip\r\nHost:"),
        LARGE.replace(b"Host:", b"Accept-Encoding: deflate\r\nHost:"),
        PACKED,
    ]
    return large(server, lambda n: server.once(asked[n % 3]), 12)


def costly_numbers(server: Attacked) -> str:
    """12 clients send JSON just below 256 kB: numbers of 300 digits, 30,000 keys, 80 levels."""
    start = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":%s}]%s}'
    digits = b"[%s]" % b",".join([b"0." + b"3" * 300] * 800)
    keys = b"," + b",".join(b'"k%d":%d' % (n, n) for n in range(15_000))
    deep = b"[" * 80 + b"1," * 60_000 + b"1" + b"]" * 80
    bodies = [start % (digits, b""), start % (b"[1,2,3,4]", keys), start % (deep, b"")]
    asked = [ask("POST", "/v2/models/m/infer", each) for each in bodies]
    return large(server, lambda n: server.once(asked[n % 3]), 12)


def classes_of_all(server: Attacked) -> str:
    """8 clients ask for all 2 million classes of an answer."""
    wanted = [{"name": "y", "parameters": {"classification": 1 << 21}}]
    item = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}
    body = json.dumps({"inputs": [item], "outputs": wanted}).encode()
    asked = ask("POST", "/v2/models/wide/infer", body)
    return large(server, lambda _: server.once(asked))


def chunked_large(server: Attacked) -> str:
    """8 clients send 4 MB of JSON in chunks of 900 bytes, in gzip of them too."""
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    packed = gzip.compress(BIG_BODY, 1)

    def chunks(body: bytes) -> bytes:
        pieces = (body[at : at + 900] for at in range(0, len(body), 900))
        return b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"

    asked = [
        head + b"\r\n" + chunks(BIG_BODY),
        head + b"Content-Encoding: gzip\r\n\r\n" + chunks(packed),
    ]
    return large(server, lambda n: server.once(asked[n % 2]))


def pipelined_large(server: Attacked) -> str:
    """8 clients pipeline 4 MB of JSON and 15 small requests, which wait for it in order."""

    def one(_: int) -> str:
        with server.connect(kept=False) as client:
            statuses = [answer(client, BIG + SMALL * 15), *(answer(client) for _ in range(15))]
        return f"{len(statuses)} answers {max(statuses)}"

    return large(server, one)


LINES = (
    worker_stopped,
    worker_killed,
    worker_stops_and_goes,
    no_descriptors,
    large_by_trickle,
    leave_while_encoded,
    large_compressed,
    costly_numbers,
    classes_of_all,
    chunked_large,
    pipelined_large,
)
