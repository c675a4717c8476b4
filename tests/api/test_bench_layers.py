"""`bench --layers`: a run of its own after the timed one, whose failure fails nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from deploykit.api.bench_columns import Entry, open_entry
from deploykit.api.bench_layers import measure_layers, read_profile
from deploykit.cli.main import main
from deploykit.core.artefact import Artefact
from deploykit.measure.report.report import read
from deploykit.measure.timing.sweep import Point, Setup, Timing, sweep
from deploykit.runtimes.data.samples import random_feeds
from deploykit.runtimes.engine import Arrays
from deploykit.runtimes.onnxruntime.engine import OnnxRuntimeEngine, open_engine
from tests.support.onnx_zoo import mnist_like, save

pytestmark = pytest.mark.usefixtures("onnxruntime_alone")


class Dying(OnnxRuntimeEngine):
    """Ends its process when it is called in one of its own."""

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if os.getpid() != self.parent:
            os._exit(3)
        return super().__call__(feeds)

    parent = os.getpid()


def dying(path: Path, parent: int) -> OnnxRuntimeEngine:
    engine = Dying(path, "cpu", 1)
    engine.parent = parent
    return engine


def feeds_of(path: Path, batch: int) -> Arrays:
    with open_engine(path, "cpu", 1) as engine:
        return random_feeds(engine.inputs, {"N": batch})


def timed(path: Path, *setups: Setup) -> tuple[Entry, list[Point], Callable[[int], Arrays]]:
    entry = open_entry(Artefact(path), False, lambda _: None)
    feeds = partial(feeds_of, path)
    return entry, sweep(setups, [1, 4], Timing(0.0, 0.02, 2), feeds), feeds


def named(path: Path, label: str = "m", **more: Any) -> Setup:
    entry = open_entry(Artefact(path), False, lambda _: None)
    opener = partial(open_engine, path, "cpu", 1)
    return Setup(label, opener, threads=1, file=path.name, entry=entry.key, **more)


def test_the_layers_of_the_fastest_session_are_timed_with_what_they_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    several = named(path, "several", sessions=2)
    setups = [several, named(path)]
    entry, points, feeds = timed(path, *setups)
    steps: list[str] = []
    (found,), gaps = measure_layers(
        [entry.key], setups, points, feeds, lambda what, _: steps.append(what)
    )
    best = max((p for p in points if p.label == "m"), key=lambda p: p.throughput_per_s.value)
    assert (found.label, found.batch, gaps) == ("m", best.batch, [])
    assert steps == [f"m, batch {best.batch}: time of each layer"]
    by_op = {each.op: each for each in found.layers}
    assert {"Conv", "MaxPool"} <= by_op.keys()
    assert found.sum_ms == pytest.approx(sum(each.ms for each in found.layers))
    assert found.count == len(found.layers)


def test_a_process_that_dies_under_the_profiler_leaves_the_reason(tmp_path: Path) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    good = named(path, "good")
    bad = replace(good, label="bad", engines=partial(dying, path, os.getpid()), entry="bad")
    entry, points, feeds = timed(path, good, bad)
    found, (gap,) = measure_layers(["bad", entry.key, "absent"], [good, bad], points, feeds)
    assert [each.label for each in found] == ["good"]
    assert gap.what == "layers of bad"
    assert "ended with code 3" in gap.why


def test_the_command_shows_the_layers_and_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_main(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["deploykit", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    monkeypatch.chdir(tmp_path)
    path = save(mnist_like(), tmp_path / "m.onnx")
    short = ["--batches", "1", "--warmup", "0", "--seconds", "0.1", "-o", "r"]
    assert run_main("bench", str(path), *short, "--layers") == 0
    shown = capsys.readouterr().out
    assert "layer " in shown
    assert "Conv" in shown
    assert "add up to" in shown
    (found,) = read(tmp_path / "r").layers
    assert found.label == "fp32 CPU"
    assert "Where the time goes, by layer" in (tmp_path / "r" / "report.html").read_text()


def kernel(name: str, ts: int, dur: int, number: int = 0) -> dict[str, Any]:
    about = {"op_name": name.title(), "node_index": str(number)}
    return {"name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": about}


def test_each_call_has_its_nodes_and_what_is_in_a_loop_is_the_loop_s() -> None:
    events = [
        {"name": "session_initialization", "ts": 0, "dur": 50},
        kernel("folded", 10, 5),  # while it was opened
        {"name": "model_run", "ts": 100, "dur": 90},
        kernel("loop", 100, 60),
        kernel("inner", 110, 20),
        kernel("inner", 130, 30),
        kernel("add", 160, 20, 1),
        kernel("add", 180, 0, 2),  # another node of that name
        {"name": "model_run", "ts": 300, "dur": 9},
        kernel("add", 301, 3, 1),
        {"ph": "M"},
    ]
    assert read_profile(events) == [
        {("loop", "Loop", "0"): 0.06, ("add", "Add", "1"): 0.02, ("add", "Add", "2"): 0},
        {("add", "Add", "1"): 0.003},
    ]


def test_a_profiled_session_has_the_options_of_the_timed_one(tmp_path: Path) -> None:
    """A model with its weights in a file of its own, which each session reads anew."""
    path = tmp_path / "m.onnx"
    onnx.save(mnist_like(), path, save_as_external_data=True, location="w", size_threshold=0)
    place = str(tmp_path / "calls")
    plain = OnnxRuntimeEngine(path, "cpu", 1, spinning=True)
    with plain, OnnxRuntimeEngine(path, "cpu", 1, spinning=True, profile=place) as profiled:
        feeds = random_feeds(plain.inputs, {"N": 4})
        name = plain.outputs[0].name
        np.testing.assert_array_equal(plain(feeds)[name], profiled(feeds)[name])
        assert plain.options == profiled.options
        events = json.loads(Path(profiled.session.end_profiling()).read_text())
    (run,) = read_profile(events)
    assert {"Conv", "MaxPool"} <= {op for _, op, _ in run}
    assert not plain.session


def test_a_profile_that_was_not_written_whole_is_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk is full: ONNX Runtime reports nothing."""
    session = onnxruntime.InferenceSession
    monkeypatch.setattr(session, "end_profiling", session.end_profiling)  # back at the end
    path = save(mnist_like(), tmp_path / "m.onnx")
    setup = replace(named(path), engines=partial(cutting, path))
    entry, points, feeds = timed(path, setup)
    found, (gap,) = measure_layers([entry.key], [setup], points, feeds)
    assert found == []
    assert "its profile is damaged: is the disk of " in gap.why


def cutting(path: Path) -> OnnxRuntimeEngine:
    """Opened last in its process, it leaves sessions that write nothing whole."""

    def end(session: Any) -> str:
        written = whole(session)
        text = Path(written).read_bytes()
        Path(written).write_bytes(text[:-9])
        return written

    session = onnxruntime.InferenceSession
    whole, session.end_profiling = session.end_profiling, end
    return OnnxRuntimeEngine(path, "cpu", 1)


def test_what_onnx_runtime_cannot_tell_is_a_gap(tmp_path: Path) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    entry, points, feeds = timed(path, named(path))
    for change in ({"device": "cuda:0"}, {"runtime": "openvino 2026.1"}):
        others = [replace(point, **change) for point in points]
        found, (gap,) = measure_layers([entry.key], [named(path)], others, feeds)
        assert (found, gap.why) == ([], "they are known of ONNX Runtime on CPUs alone")
