"""Where the time of a call goes, node by node, by ONNX Runtime's profiler, and what that costs.

    python benchmarks/layers.py MODEL.onnx [--batch 1] [--threads 1]

Calls with and without the profiler take turns, for a second or 200 calls. Printed as Markdown: the
median of each node of the graph as ONNX Runtime runs it (fused nodes are one, those in the body of
a loop are in the loop's), what they add up to as a share of a call without the profiler, and how
much longer the profiler makes a call. It counts whole microseconds: nodes that take a few do not
add up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from child import header

from deploykit.runtimes.data.samples import random_feeds
from deploykit.runtimes.engine import Arrays
from deploykit.runtimes.onnxruntime import engine
from deploykit.runtimes.onnxruntime.file import small_floats

LENGTH_S, FEWEST, MOST, WARM = 1.0, 5, 200, 3  # of the calls with the profiler
KERNEL = "_kernel_time"


class Layer(NamedTuple):
    name: str
    op: str
    ms: float


class Profiled(NamedTuple):
    """Median ms of a call without and with the profiler, and of each node with it."""

    whole_ms: float
    profiled_ms: float
    layers: list[Layer]

    @property
    def added_up(self) -> float:
        """What the nodes take, as a share of a call without the profiler."""
        return sum(each.ms for each in self.layers) / self.whole_ms


def profile_calls(path: Path, threads: int | None, spinning: bool, feeds: Arrays) -> Profiled:
    """Calls with and without the profiler in turns, on the same inputs."""
    with TemporaryDirectory() as folder:
        plain = _open(path, threads, spinning, None)
        profiled = _open(path, threads, spinning, str(Path(folder) / "calls"))
        inputs = dict(feeds)
        for _ in range(WARM):
            _time(profiled, inputs)
            once_s = _time(plain, inputs)
        wanted = min(MOST, LENGTH_S / once_s)
        pairs = [
            (_time(plain, inputs), _time(profiled, inputs))
            for _ in range(max(FEWEST, round(wanted)))
        ]
        events = json.loads(Path(profiled.end_profiling()).read_text(encoding="utf-8"))
    without_s, with_s = (median(side) for side in zip(*pairs, strict=True))
    ops: dict[str, str] = {}
    spent: dict[str, list[float]] = defaultdict(list)
    for op, node, taken_us in kernels(events):
        ops[node] = op
        spent[node].append(taken_us / 1e3)
    layers = [Layer(node, ops[node], median(ms[WARM:])) for node, ms in spent.items()]
    return Profiled(without_s * 1e3, with_s * 1e3, layers)


def _time(session: Any, inputs: dict[str, Any]) -> float:
    begun = time.perf_counter()
    session.run(None, inputs)
    return time.perf_counter() - begun


def kernels(events: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """Operator, name and us of each run of a node; a loop's body is in the loop's."""
    chosen = [each for each in events if each.get("name", "").endswith(KERNEL)]
    end = float("-inf")
    for each in sorted(chosen, key=lambda event: (event["ts"], -event["dur"])):
        if each["ts"] < end and each["ts"] + each["dur"] <= end:
            continue
        end = each["ts"] + each["dur"]
        yield each["args"]["op_name"], each["name"].removesuffix(KERNEL), float(each["dur"])


def _open(path: Path, threads: int | None, spinning: bool, prefix: str | None) -> Any:
    """A session with the options of an engine; `prefix`: of the profiler's file."""
    half = "float16" in small_floats(path)
    options = engine.session_options(threads, half=half, spinning=spinning)
    weights = engine.read_weights(path, options)
    if prefix is not None:
        options.enable_profiling, options.profile_file_prefix = True, prefix
    with engine.onnxruntime_errors(path):
        session = engine.ort.InferenceSession(
            str(path),
            sess_options=options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=engine.SLOWER_ON_CPU,
        )
    del weights
    return session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    with engine.open_engine(given.model, "cpu", given.threads) as opened:
        sizes = {str(axis): given.batch for spec in opened.inputs for axis in spec.shape}
        feeds = random_feeds(opened.inputs, sizes)
    found = profile_calls(given.model, given.threads, False, feeds)
    print(header(f"Layers of {given.model.name}, batch {given.batch}, {given.threads} threads"))
    print("| node | operator | ms | % of a call |\n| --- | --- | --: | --: |")
    for name, op, ms in found.layers:
        print(f"| {name} | {op} | {ms:.3f} | {100 * ms / found.whole_ms:.1f} |")
    longer = found.profiled_ms / found.whole_ms - 1
    print(
        f"\nThe nodes add up to {found.added_up:.1%} of a call, which takes {found.whole_ms:.3f} "
        f"ms; the profiler makes it {longer:.1%} longer."
    )


if __name__ == "__main__":
    main()
