"""A CUDA made of NumPy, as slow as CUDA may be: nothing on a stream runs until it is waited for.

So a buffer that is read too early or written too late shows as a wrong answer. It counts what is
held, keeps the order of the calls, and fails where a test tells it to.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from deploykit.core.errors import DeploykitError
from deploykit.engines.cuda.memory import Shape, cuda_error, out_of_memory

POISON = 0xA5
Op = Callable[[], None]


class CallLog:
    """The calls that a CUDA got, in their order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []  # (name, stream; 0 for none)
        self.count: Counter[str] = Counter()
        self.scratch_of: dict[int, int] = {}  # memory -> the stream whose calls work in it

    def log(self, name: str, stream: int) -> None:
        self.calls.append((name, stream))
        self.count[name] += 1

    def names(self, *wanted: str) -> list[str]:
        return [name for name, _ in self.calls if not wanted or name in wanted]

    def on(self, stream: int) -> list[str]:
        return [name for name, at in self.calls if at == stream]


class FakeCuda(CallLog):
    device = "cuda:0"

    def __init__(self, *, total_bytes: int = 1 << 30, integrated: bool = False) -> None:
        super().__init__()
        self.total_bytes, self.integrated = total_bytes, integrated
        self.fail: dict[str, str] = {}  # name of a call -> code that it answers, once
        self.lost = ""  # a code that every call answers
        self.device_blocks: dict[int, np.ndarray] = {}
        self.host_blocks: dict[int, np.ndarray] = {}
        self.streams: dict[int, list[Op | int]] = {}  # what is to run; a number is an event
        self.events: set[int] = set()
        self.graphs: dict[int, list[Op | int]] = {}
        self.capturing: dict[int, list[Op | int]] = {}
        self.used_bytes = self.peak_bytes = 0
        self.library_bytes = self.most_library_bytes = (
            0  # of them: a library's own, such as weights
        )
        self._running = threading.RLock()  # `free` runs what other threads enqueued
        self._next = 0x1000

    # what tests ask
    def held(self) -> dict[str, int]:
        """What was not given back; empty when all was."""
        kinds = {
            "device": self.device_blocks,
            "host": self.host_blocks,
            "streams": self.streams,
            "events": self.events,
            "graphs": self.graphs,
        }
        held = {name: len(kind) for name, kind in kinds.items() if kind}
        return {**held, "library": self.library_bytes} if self.library_bytes else held

    def take(self, nbytes: int) -> bool:
        """Device memory of a library; negative: given back. False: too little is free."""
        if self.used_bytes + nbytes > self.total_bytes:
            return False
        self.used_bytes += nbytes
        self.library_bytes += nbytes
        self.most_library_bytes = max(self.most_library_bytes, self.library_bytes)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def push(self, stream: int, name: str, op: Op) -> None:
        """Enqueue `op`, as a kernel."""
        self._called(name, stream)
        self._queue(stream).append(op)

    def at(self, address: int, nbytes: int) -> np.ndarray:
        """Device memory, device_address host memory included."""
        blocks = {**self.device_blocks, **(self.host_blocks if self.integrated else {})}
        for base, block in blocks.items():
            if base <= address and address + nbytes <= base + block.nbytes:
                return block[address - base : address - base + nbytes]
        raise AssertionError(f"illegal address {address:#x}, {nbytes} bytes")

    # Driver
    def memory(self) -> tuple[int, int]:
        return self.total_bytes - self.used_bytes, self.total_bytes

    def use(self) -> None:
        self._called("use")

    def check(self) -> None:
        with contextlib.suppress(DeploykitError):
            self._called("check")
        if self.lost:
            raise cuda_error(self.device, "check", f"cudaError{self.lost}", "as the test says")

    def allocate(self, nbytes: int) -> int:
        self._called("allocate")
        if self.used_bytes + nbytes > self.total_bytes:
            raise out_of_memory(self.device, nbytes, *self.memory())
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return self._new(self.device_blocks, nbytes)

    def free(self, address: int) -> None:
        self._called("free")
        for stream in list(self.streams):  # as cudaFree waits for the device
            self._run(stream)
        block = self.device_blocks.pop(address)
        self.scratch_of.pop(address, None)
        block[:] = POISON
        self.used_bytes -= block.nbytes

    def pin(self, nbytes: int) -> int:
        self._called("pin")
        return self._new(self.host_blocks, nbytes)

    def unpin(self, address: int) -> None:
        self._called("unpin")
        self.host_blocks.pop(address)[:] = POISON

    def device_address(self, address: int) -> int:
        self._called("device_address")
        assert self.integrated
        return address

    def array(self, address: int, nbytes: int) -> np.ndarray:
        return self.host_blocks[address][:nbytes]

    def open_stream(self) -> int:
        self._called("open_stream")
        stream = self._handle()
        self.streams[stream] = []
        return stream

    def close_stream(self, stream: int) -> None:
        self._called("close_stream")
        del self.streams[stream]

    def wait_stream(self, stream: int) -> None:
        self._called("wait_stream", stream)
        self._run(stream)

    def open_event(self) -> int:
        self._called("open_event")
        event = self._handle()
        self.events.add(event)
        return event

    def close_event(self, event: int) -> None:
        self._called("close_event")
        self.events.remove(event)

    def record(self, event: int, stream: int) -> None:
        self._called("record", stream)
        self._queue(stream).append(event)

    def wait(self, event: int) -> None:
        self._called("wait")
        for stream, queue in list(self.streams.items()):
            if event in queue:
                self._run(stream, event)

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self._called("copy_in", stream)
        self._copy(self._host(host, nbytes), self.at(device, nbytes), stream)

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._called("copy_out", stream)
        self._copy(self.at(device, nbytes), self._host(host, nbytes), stream)

    def begin_capture(self, stream: int) -> None:
        self._called("begin_capture", stream)
        assert stream not in self.capturing
        self.capturing[stream] = []

    def end_capture(self, stream: int) -> int:
        ops = self.capturing.pop(stream)
        self._called("end_capture", stream)
        graph = self._handle()
        self.graphs[graph] = ops
        return graph

    def launch(self, graph: int, stream: int) -> None:
        self._called("launch", stream)
        self._queue(stream).extend(self.graphs[graph])

    def drop_graph(self, graph: int) -> None:
        self._called("drop_graph")
        del self.graphs[graph]

    def _called(self, name: str, stream: int = 0) -> None:
        self.log(name, stream)
        code = self.lost or self.fail.pop(name, "")
        if code:
            raise cuda_error(self.device, name, f"cudaError{code}", "as the test says")

    def _queue(self, stream: int) -> list[Op | int]:
        return self.capturing.get(stream, self.streams[stream])

    def _copy(self, source: np.ndarray, target: np.ndarray, stream: int) -> None:
        self._queue(stream).append(lambda: np.copyto(target, source))

    def _host(self, address: int, nbytes: int) -> np.ndarray:
        return self.host_blocks[address][:nbytes]

    def _run(self, stream: int, until: int = 0) -> None:
        with self._running:
            queue = self.streams[stream]
            while queue:
                item = queue.pop(0)
                if isinstance(item, int):
                    if item == until:
                        return
                else:
                    item()

    def _new(self, blocks: dict[int, np.ndarray], nbytes: int) -> int:
        address = self._next
        self._next += -(-nbytes // 512) * 512 + 512
        blocks[address] = np.full(nbytes, POISON, np.uint8)
        return address

    def _handle(self) -> int:
        self._next += 512
        return self._next


class Affine:
    """Work: y = 2x + 1 on float32, whatever the shapes; a graph of it holds until it is changed."""

    def __init__(self, cuda: FakeCuda, stream: int, scratch: int) -> None:
        self.cuda, self.stream, self.scratch = cuda, stream, scratch
        self.inputs: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.changes = 0
        self.closed = False
        self.refuse: Exception | None = None

    def shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape | None]:
        self.inputs = dict(inputs)
        self.changes += 1
        return {"y": self.inputs["x"]}

    def bind(self, addresses: Mapping[str, int]) -> None:
        self.addresses = dict(addresses)
        self.changes += 1

    def enqueue(self, stream: int) -> None:
        assert stream == self.stream
        if self.refuse is not None:
            raise self.refuse
        shape, changes = self.inputs["x"], self.changes
        nbytes = 4 * int(np.prod(shape))
        x = self.cuda.at(self.addresses["x"], nbytes).view(np.float32)
        y = self.cuda.at(self.addresses["y"], nbytes).view(np.float32)
        captured = stream in self.cuda.capturing

        def run() -> None:
            assert not captured or changes == self.changes, "a graph of a context since changed"
            y[:] = 2 * x + 1

        self.cuda.push(stream, "enqueue", run)

    def late(self, name: str) -> tuple[int, Shape]:
        raise AssertionError(f"{name} is not late")

    def close(self) -> None:
        assert not self.closed
        self.closed = True
