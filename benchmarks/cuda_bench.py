"""What cuda_path.py measures on the GPU: models as torch's work on our pipeline, and their runs."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.evidence import Interval
from deploykit.core.tensors import TensorSpec
from deploykit.engines.cuda.execution import Pipeline
from deploykit.evaluation.statistics import ratio

Shape = tuple[int, ...]
WARM_UP = 2000  # calls after which everything has its memory


@dataclass(frozen=True)
class Model:
    """`layers` times h = relu(h @ w), or where `width` is large h = tanh(h); all in float32."""

    name: str
    width: int
    layers: int
    matmul: bool
    batches: tuple[int, ...]


MODELS = (
    Model("copies weigh most", 1 << 18, 8, False, (1, 8, 32)),
    Model("arithmetic weighs most", 4096, 8, True, (1, 8, 64)),
    Model("many small kernels", 256, 100, True, (1, 8, 32)),
)


class TorchWork:
    """The model as `Work`: every tensor is there before it is captured, so nothing is allocated."""

    def __init__(self, torch: Any, model: Model, device: str, stream: int) -> None:
        self.torch, self.model, self.device = torch, model, device
        self.stream = torch.cuda.ExternalStream(stream, device=device)
        generator = torch.Generator().manual_seed(0)
        width = model.width
        weights = torch.randn(width, width, generator=generator) if model.matmul else None
        self.weights = None if weights is None else (weights / width**0.5).to(device)
        torch.cuda.synchronize()  # they were copied on another stream
        self.inputs: Mapping[str, Shape] = {}

    def shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape | None]:
        self.inputs = dict(inputs)
        return {"y": self.inputs["x"]}

    def bind(self, addresses: Mapping[str, int]) -> None:
        shape = self.inputs["x"]
        self.x, self.y = (self._tensor(addresses[name], shape) for name in "xy")
        self.spare = self.torch.empty(shape, device=self.device)

    def enqueue(self, _stream: int) -> None:
        with self.torch.cuda.stream(self.stream):
            self.run(self.x, self.y, self.spare)

    def run(self, x: Any, y: Any, spare: Any) -> None:
        """Put the model of x into y; `spare` takes every second layer."""
        torch, source = self.torch, x
        layers = self.model.layers
        for layer in range(layers):
            target = y if (layers - layer) % 2 else spare
            if self.weights is None:
                torch.tanh(source, out=target)
            else:
                torch.mm(source, self.weights, out=target)
                target.relu_()
            source = target

    def late(self, name: str) -> tuple[int, Shape]:
        raise AssertionError(name)

    def close(self) -> None:
        self.x = self.y = self.spare = self.weights = None

    def _tensor(self, address: int, shape: Shape) -> Any:
        return self.torch.as_tensor(Pointer(address, shape), device=self.device)


class Pointer:
    """Float32 numbers on the GPU that someone else owns, as torch can be given them."""

    def __init__(self, address: int, shape: Shape) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


class Bench:
    """What the measurements share: the driver, torch, and how often to run."""

    def __init__(self, cuda: Any, torch: Any, calls: int, rounds: int) -> None:
        self.cuda, self.torch, self.calls, self.rounds = cuda, torch, calls, rounds

    def pipeline(self, model: Model, **options: Any) -> Pipeline:
        spec = [TensorSpec(name, "float32", ("N", model.width)) for name in "xy"]
        return Pipeline(
            self.cuda, lambda stream, _: self.work(model, stream), spec[:1], spec[1:], **options
        )

    def work(self, model: Model, stream: int) -> TorchWork:
        return TorchWork(self.torch, model, self.cuda.device, stream)

    def correctness(self) -> list[dict[str, Any]]:
        """Answers of overlapped, captured calls against the same layers run one by one."""
        rows = []
        for model in MODELS:
            stream = self.cuda.open_stream()
            work = self.work(model, stream)
            feeds = [feed(model, batch, n) for n, batch in enumerate(model.batches * 3)]
            wanted = [self.alone(work, each["x"]) for each in feeds]
            self.cuda.close_stream(stream)
            for slots, graphs in ((1, ()), (3, ()), (2, model.batches), (3, model.batches)):
                wrong = done = 0
                worst = 0.0
                with self.pipeline(model, slots=slots, graphs=graphs) as run:
                    order = [n % len(feeds) for n in range(60 * len(feeds))]
                    for n, answer in zip(order, run.map(feeds[n] for n in order), strict=True):
                        error = float(np.abs(answer["y"] - wanted[n]).max())
                        worst, done = max(worst, error), done + 1
                        wrong += not error <= 1e-4 * max(1.0, float(np.abs(wanted[n]).max()))
                    notes = run.notes
                rows.append(
                    {
                        "model": model.name,
                        "slots": slots,
                        "graphs": bool(graphs),
                        "calls": done,
                        "wrong": wrong,
                        "largest error": worst,
                        "notes": list(notes),
                    }
                )
        return rows

    def alone(self, work: TorchWork, x: np.ndarray) -> np.ndarray:
        source = self.torch.from_numpy(x).to(self.cuda.device)
        y, spare = self.torch.empty_like(source), self.torch.empty_like(source)
        work.run(source, y, spare)
        return y.cpu().numpy()

    def leak(self) -> dict[str, Any]:
        """Memory of host and GPU after `calls` calls of changing sizes, some never asked for."""
        model = Model("leak", 64, 4, True, (1, 2, 4))
        feeds = [feed(model, 1 + n % 9, n) for n in range(9)]
        free = self.cuda.memory()[0]
        with self.pipeline(model, slots=3, graphs=model.batches) as run:
            for n in range(WARM_UP):
                run.submit(feeds[n % 9])
            gc.collect()
            before = resident_bytes(), self.cuda.memory()[0]
            started = time.perf_counter()
            for n in range(self.calls):
                ticket = run.submit(feeds[n % 9])
                if n % 5 == 0:
                    ticket.result()
            ticket.result()
            seconds = time.perf_counter() - started
            gc.collect()
            after = resident_bytes(), self.cuda.memory()[0]
        return {
            "calls": self.calls,
            "seconds": seconds,
            "host bytes grown": after[0] - before[0],
            "GPU bytes grown": before[1] - after[1],
            "GPU bytes kept after closing": free - self.cuda.memory()[0],
        }

    def compare(
        self, one: Callable[[], None], other: Callable[[], None], calls: int
    ) -> tuple[Interval, float, float]:
        """How many times faster `one` is than `other`, and the seconds of one call of either."""
        times: tuple[list[float], list[float]] = ([], [])
        one(), other()  # buffers, graphs and caches are made in the first calls
        for number in range(self.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                started = time.perf_counter()
                (one, other)[which]()
                times[which].append((time.perf_counter() - started) / calls)
        return ratio(times[1], times[0]), *(float(np.median(side)) for side in times)

    def gains(self) -> list[dict[str, Any]]:
        """Two slots against one, graphs against none, both at once; by model and batch."""
        rows = []
        for model in MODELS:
            for batch in model.batches:
                x = feed(model, batch, 0)
                calls = self.repeats(model, x)
                for name, faster, slower in (
                    ("overlap", {"slots": 2}, {"slots": 1}),
                    ("graphs", {"slots": 1, "graphs": (batch,)}, {"slots": 1}),
                    ("both", {"slots": 2, "graphs": (batch,)}, {"slots": 1}),
                ):
                    with (
                        self.pipeline(model, **faster) as a,
                        self.pipeline(model, **slower) as b,
                    ):
                        found, fast_s, slow_s = self.compare(
                            lambda a=a, x=x, n=calls: drain(a.map([x] * n)),
                            lambda b=b, x=x, n=calls: drain(b.map([x] * n)),
                            calls,
                        )
                        row = {"gain of": name, "model": model.name, "batch": batch}
                        rows.append({**row, **faster_than(found, fast_s, slow_s)})
                        rows[-1]["notes"] = list(a.notes)
        return rows

    def overhead(self) -> list[dict[str, Any]]:
        """Our call against a loop of nothing but CUDA's calls, on buffers of the same kind."""
        rows = []
        for model in MODELS:
            for batch in model.batches[:2]:
                x = feed(model, batch, 0)
                calls = self.repeats(model, x)
                with self.pipeline(model, slots=1) as run, self.bare(model, x["x"]) as loop:
                    found, ours_s, bare_s = self.compare(
                        lambda run=run, x=x, n=calls: [run(x) for _ in range(n)] and None,
                        lambda loop=loop, n=calls: [loop() for _ in range(n)] and None,
                        calls,
                    )
                rows.append(
                    {
                        "model": model.name,
                        "batch": batch,
                        "ours µs": ours_s * 1e6,
                        "bare µs": bare_s * 1e6,
                        "over µs": (ours_s - bare_s) * 1e6,
                        "ours / bare": 1 / found.value,
                        "95 %": [1 / found.high, 1 / found.low],
                    }
                )
        return rows

    @contextmanager
    def bare(self, model: Model, x: np.ndarray) -> Iterator[Callable[[], np.ndarray]]:
        cuda, nbytes = self.cuda, x.nbytes
        stream, event = cuda.open_stream(), cuda.open_event()
        host = [cuda.pin(nbytes) for _ in "xy"]
        device = [cuda.allocate(nbytes) for _ in "xy"]
        views = [cuda.array(a, nbytes).view(np.float32).reshape(x.shape) for a in host]
        work = self.work(model, stream)
        work.shapes({"x": x.shape})
        work.bind(dict(zip("xy", device, strict=True)))

        def call() -> np.ndarray:
            np.copyto(views[0], x)
            cuda.copy_in(device[0], host[0], nbytes, stream)
            work.enqueue(stream)
            cuda.copy_out(host[1], device[1], nbytes, stream)
            cuda.record(event, stream)
            cuda.wait(event)
            return views[1].copy()

        try:
            call()
            yield call
        finally:
            work.close()
            for address in device:
                cuda.free(address)
            for address in host:
                cuda.unpin(address)
            cuda.close_event(event)
            cuda.close_stream(stream)

    def repeats(self, model: Model, x: dict[str, np.ndarray], seconds: float = 0.1) -> int:
        """How many calls take about `seconds`."""
        with self.pipeline(model, slots=1) as run:
            for _ in range(5):
                run(x)
            started = time.perf_counter()
            for _ in range(10):
                run(x)
            return max(10, int(seconds / ((time.perf_counter() - started) / 10)))


def feed(model: Model, batch: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"x": random.standard_normal((batch, model.width), dtype=np.float32)}


def drain(answers: Iterator[object]) -> None:
    for _ in answers:
        pass


def faster_than(found: Interval, fast_s: float, slow_s: float) -> dict[str, Any]:
    return {
        "times as fast": found.value,
        "95 %": [found.low, found.high],
        "µs with": fast_s * 1e6,
        "µs without": slow_s * 1e6,
    }


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
