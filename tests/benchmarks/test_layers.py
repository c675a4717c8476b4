"""The nodes of a call by ONNX Runtime's profiler: what counts, and what it is called."""

from __future__ import annotations

from pathlib import Path

import layers
import pytest

from deploykit.runtimes.data.samples import random_feeds
from deploykit.runtimes.onnxruntime.engine import open_engine


def event(name: str, begin_us: int, taken_us: int, op: str = "Conv") -> dict[str, object]:
    return {"name": name, "ts": begin_us, "dur": taken_us, "args": {"op_name": op}}


def test_what_is_in_the_body_of_a_loop_counts_once() -> None:
    events = [
        event("model_run", 0, 100),
        event("loop_kernel_time", 10, 50, "Loop"),
        event("body_kernel_time", 12, 20),
        event("body_kernel_time", 40, 20),
        event("last_kernel_time", 60, 30),
        event("last_fence_after", 90, 5),
    ]
    found = list(layers.kernels(events))
    assert found == [("Loop", "loop", 50.0), ("Conv", "last", 30.0)]


def test_every_node_of_a_real_model_has_its_time_and_the_model_its_whole(
    affine_onnx: Path,
) -> None:
    with open_engine(affine_onnx, "cpu", 1) as engine:
        feeds = random_feeds(engine.inputs, {"N": 4})
    found = layers.profile_calls(affine_onnx, 1, False, feeds)
    assert {each.op for each in found.layers} == {"Mul", "Add"}
    assert all(each.ms >= 0 for each in found.layers)
    assert found.whole_ms > 0
    assert found.added_up == pytest.approx(sum(e.ms for e in found.layers) / found.whole_ms)
