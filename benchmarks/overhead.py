#!/usr/bin/env python3
"""What the instrument adds to a call: the loop of `bench`, and the Engine around the session.

    python benchmarks/overhead.py [--rounds 100] [--ms 20]

An ONNX graph that passes one number on is called through its Engine by the loop that `bench` times
with, and through the session's own `run` by a bare `for`; so is a function that does nothing. All
take turns in one thread, the garbage collector off. Prints Markdown: microseconds for a call by the
clock, and of processor time, which other work on the machine changes less. Takes ten seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from child import header

from deploykit.benchmarking.timing import closed_loop, no_garbage_collection
from deploykit.engines.onnxruntime.engine import OnnxRuntimeEngine

FEEDS = {"x": np.zeros((1, 1), np.float32)}
BAR_US = 2.0


def identity(path: Path) -> Path:
    """A graph that does nothing."""
    tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 1]) for n in "xy"]
    node = helper.make_node("Identity", ["x"], ["y"])
    graph = helper.make_graph([node], "identity", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


def looped(call: Any, length_ns: int) -> int:
    return len(closed_loop(call, FEEDS, length_ns, time.perf_counter_ns))


def bare(call: Callable[[Any], object], length_ns: int) -> int:
    """In a `for`, which looks at the clock after each thousand calls only."""
    calls, end = 0, time.perf_counter_ns() + length_ns
    while time.perf_counter_ns() < end:
        for _ in range(1000):
            call(FEEDS)
        calls += 1000
    return calls


def time_us(side: Callable[[], int]) -> tuple[float, float]:
    """Of a call: by the clock, and of processor time."""
    begun, computed = time.perf_counter(), time.thread_time()
    calls = side()
    taken, computed = time.perf_counter() - begun, time.thread_time() - computed
    return 1e6 * taken / calls, 1e6 * computed / calls


def nothing(_: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ms", type=float, default=20.0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        OnnxRuntimeEngine(identity(Path(folder, "m.onnx")), "cpu", 1) as engine,
    ):
        run: Any = engine.session.run  # type: ignore[union-attr]  # it is open
        length_ns = round(options.ms * 1e6)
        sides: dict[str, Callable[[], int]] = {
            "nothing, in a bare `for`": lambda: bare(nothing, length_ns),
            "nothing, in the loop": lambda: looped(nothing, length_ns),
            "the session's `run`, in a bare `for`": lambda: bare(partial(run, ["y"]), length_ns),
            "the Engine, in a bare `for`": lambda: bare(engine, length_ns),
            "the Engine, in the loop": lambda: looped(engine, length_ns),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        with no_garbage_collection():
            for _ in range(options.rounds):
                for name, side in sides.items():
                    found[name].append(time_us(side))
    print(header("What the instrument adds to a call"))
    print("| what is called | us a call | us of processor time |\n| --- | --: | --: |")
    medians = {}
    for name, every in found.items():
        medians[name] = [statistics.median(each) for each in zip(*every, strict=True)]
        print(f"| {name} | {medians[name][0]:.3f} | {medians[name][1]:.3f} |")
    names = list(sides)
    added = [
        [
            (each[at] - bare_us[at])
            for each, bare_us in zip(found[names[4]], found[names[2]], strict=True)
        ]
        for at in (0, 1)
    ]
    clock, processor = (statistics.median(each) for each in added)
    print(
        f"\nThe instrument adds {clock:.2f} us to a call by the clock and {processor:.2f} us of "
        f"processor time (medians of {options.rounds} rounds, the last row less the third; "
        f"the bar is {BAR_US:g} us)."
    )


if __name__ == "__main__":
    main()
