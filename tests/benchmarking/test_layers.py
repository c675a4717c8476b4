"""`bench --layers`: calls with a profiler after the timed ones, whose failure fails nothing."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.benchmarking import limits
from deploykit.benchmarking.columns import Entry, open_entry
from deploykit.benchmarking.limits import measure_layers, read_profile, time_layers
from deploykit.benchmarking.timing import Setup, Timing, sweep
from deploykit.cli.main import main
from deploykit.core.errors import DeploykitError
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays
from deploykit.engines.onnxruntime.engine import OnnxRuntimeEngine, open_engine
from deploykit.reporting.report import LayerKey, Point, read
from tests.support.fake_engine import FakeEngine
from tests.support.onnx_zoo import mnist_like, save

pytestmark = pytest.mark.usefixtures("onnxruntime_alone")


def feeds_of(path: Path, batch: int) -> Arrays:
    with open_engine(path, "cpu", 1) as engine:
        return random_feeds(engine.inputs, {"N": batch})


def timed(path: Path, *setups: Setup) -> tuple[Entry, list[Point], Callable[[int], Arrays]]:
    entry = open_entry(path)
    feeds = partial(feeds_of, path)
    return entry, sweep(setups, [1, 4], Timing(0.0, 0.02, 2), feeds), feeds


def named(path: Path, label: str = "m", **more: Any) -> Setup:
    opener = partial(open_engine, path, "cpu", 1)
    return Setup(label, opener, threads=1, file=path.name, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "m.onnx")


def test_the_command_shows_the_layers_and_writes_them(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(path.parent)
    words = ["deploykit", "bench", "m.onnx", "--batches", "1", "--seconds", "0.1", "-o", "r"]
    monkeypatch.setattr(sys, "argv", [*words, "--layers"])
    with pytest.raises(SystemExit, match="0"):
        main()
    shown = capsys.readouterr().out
    for text in ("layer ", "Conv", "add up to"):
        assert text in shown
    (found,) = read(path.parent / "r").layers
    assert (found.label, found.count) == ("fp32 CPU", len(found.layers))
    assert {"Conv", "MaxPool"} <= {each.op for each in found.layers}
    assert found.sum_ms == pytest.approx(sum(each.ms for each in found.layers))
    assert "Time by layer: fp32 CPU" in (path.parent / "r" / "report.html").read_text()


def event(name: bytes, ts: int, dur: int, about: bytes = b"", cat: bytes = b"Node") -> bytes:
    head = b'{"cat" : "%b","pid" :7,"tid" :7,"dur" :%d,"ts" :%d,"ph" : "X","name" :"'
    return head % (cat, dur, ts) + name + b'","args" : {' + about + b"}}"


def kernel(name: bytes, ts: int, dur: int, number: int = 0) -> bytes:
    operator = name.title() if name.isalpha() else b"Op"
    about = b'"op_name" : "%b","node_index" : "%d"' % (operator, number)
    return event(name + b"_kernel_time", ts, dur, about)


def call(ts: int, dur: int) -> bytes:
    return event(b"model_run", ts, dur, cat=b"Session")


def written(*events: bytes) -> bytes:
    return b"[\n" + b",\n".join(events) + b"\n]\n"


def test_each_call_has_its_nodes_and_what_is_in_a_loop_is_the_loop_s() -> None:
    found = read_profile(
        written(
            event(b"session_initialization", 0, 50, cat=b"Session"),
            kernel(b"folded", 10, 5),  # while it was opened
            call(100, 90),
            kernel(b"loop", 100, 60),
            kernel(b"inner", 110, 20),
            kernel(b"inner", 130, 30),
            kernel(b"add", 160, 20, 1),
            kernel(b"add", 180, 0, 2),  # another node of that name
            call(300, 9),
            kernel(b"add", 301, 3, 1),
            kernel(b"add", 400, 4, 1),  # of a call that is not in it as a whole
        )
    )
    assert found == [
        {("loop", "Loop", "0"): 0.06, ("add", "Add", "1"): 0.02, ("add", "Add", "2"): 0},
        {("add", "Add", "1"): 0.003},
    ]
    with pytest.raises(DeploykitError, match="is the disk of TMPDIR full"):
        read_profile(written(call(0, 9))[:-2])


NAMES = ('say "hi"', "C:\\new\nbreak", "süß 层\x1b", '","args" : {')


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_an_older_version_does_not_escape_is_an_error(name: str) -> None:
    escaped = json.dumps(name)[1:-1].encode()
    (run,) = read_profile(written(call(0, 9), kernel(escaped, 1, 3)))
    assert [key[0] for key in run] == [name]
    if '"' in name:
        with pytest.raises(DeploykitError, match="or onnxruntime old"):
            read_profile(written(call(0, 9), kernel(name.encode(), 1, 3)))


def full_disk(path: Path) -> OnnxRuntimeEngine:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    return OnnxRuntimeEngine(path, "cpu", 1)


def test_a_profile_that_is_not_written_leaves_the_reason_and_no_file(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    good = named(path)
    entry, points, feeds = timed(path, good)
    wanted = [entry, replace(entry, label="absent")]
    setup = replace(good, engines=partial(full_disk, path))
    found, (gap, none) = measure_layers(wanted, [setup], points, feeds)
    assert (found, gap.what) == ([], "layers of m")
    assert "is the disk of TMPDIR full" in gap.why
    assert none.what == "layers of m.onnx"
    assert "no column is one session" in none.why
    assert list((tmp_path / "tmp").iterdir()) == []
    for change in ({"device": "cuda:0"}, {"runtime": "openvino 2026.1"}):
        others = [replace(point, **change) for point in points]
        found, (gap,) = measure_layers([entry], [good], others, feeds)
        assert (found, gap.why) == ([], "only ONNX Runtime and PyTorch on CPUs report them")


NOW_S = [0.0]
SLOW = 4  # times as long is every fourth call, as next to other work


def slow(number: int) -> int:
    return SLOW if number % 4 == 3 else 1


class Plain(FakeEngine):
    """Calls of 2 ms on the clock of this file."""

    runtime = "onnxruntime 1.32.0"
    name, call_s = "plain", 0.002

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        NOW_S[0] += self.call_s * slow(len(self.batches))
        self.order.append(self.name)
        return super().__call__(feeds)


class Profiled(Plain):
    """Calls of 3 ms in which a convolution takes 1.5 and 250 others 2 us each."""

    name, call_s, empty = "profiled", 0.003, False

    def read(self) -> list[Counter[LayerKey]]:
        runs = []
        for number in range(len(self.batches)):
            run = Counter({(f"add {at}", "Add", ""): 2e-3 * slow(number) for at in range(250)})
            run["conv", "Conv", "7"] = 1.5 * slow(number)
            if slow(number) > 1:
                run[f"add {number % 250}", "Add", ""] = 40.0  # where other work stopped the call
            runs.append(Counter() if self.empty else run)
        return runs


def test_the_middle_half_of_calls_in_turns_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.time, "perf_counter", lambda: NOW_S[0])
    order: list[str] = []
    plain, profiled = Plain(order), Profiled(order)
    feeds = random_feeds(profiled.inputs, {"N": 4})
    found = time_layers(plain, profiled, feeds, profiled.read)
    times = (found.call_ms, found.profiled_ms, found.sum_ms, found.layers[0].ms)
    assert times == pytest.approx((2.0, 3.0, 2.0, 1.5))
    assert (found.layers[0].name, found.layers[0].op) == ("conv", "Conv")
    assert (found.count, len(found.layers), found.runtime) == (251, 251, "onnxruntime 1.32.0")
    assert order[:6] == ["plain", "profiled"] * 3
    quarter = found.calls // 4
    assert order[6:] == (["plain"] * quarter + ["profiled"] * quarter) * 4
    assert 8 <= found.calls <= 200
    profiled.empty = True
    with pytest.raises(DeploykitError, match="its profile holds no whole call"):
        time_layers(plain, profiled, feeds, profiled.read)
