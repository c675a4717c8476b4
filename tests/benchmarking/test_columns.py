"""Which columns a benchmark has: what was given, other runtimes, and the fastest CPU settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from deploykit.benchmarking import columns
from deploykit.benchmarking.bench import Proofs
from deploykit.benchmarking.columns import (
    Entry,
    choices,
    find_rivals,
    make_columns,
    open_entries,
    open_entry,
    search_cpu,
)
from deploykit.benchmarking.timing import ProcessEngine, Setup
from deploykit.core.errors import BadInput, DeploykitError, OutOfMemory
from deploykit.core.machine import Machine, this_machine
from deploykit.engines.engine import Engine
from deploykit.engines.onnxruntime.engine import OnnxRuntimeEngine
from deploykit.reporting.report import CpuSearch, CpuSettings, CpuTrial, NotMeasured, Report
from tests.support.fake_engine import FakeEngine
from tests.support.measure.virtual_time import Timed, VirtualTime, feeds
from tests.support.onnx_zoo import mnist_like, save

ONE, SPINNING, FREE = CpuSettings(1, 2), CpuSettings(1, 2, spinning=True), CpuSettings(1, 2, None)
TWO, APART = CpuSettings(2, 1), CpuSettings(2, 1, processes=True)
Tried = Mapping[tuple[str, int], tuple[CpuSettings, ...]]  # by label and batch, the fastest first
needs_openvino = pytest.mark.skipif(
    not columns.installed("openvino"), reason="openvino is not installed"
)


def searches(tried: Tried) -> dict[tuple[str, int], CpuSearch]:
    return {
        (label, batch): CpuSearch(label, batch, tuple(CpuTrial(s, 10.0 - n) for n, s in found))
        for (label, batch), found in ((key, enumerate(each)) for key, each in tried.items())
    }


def setups(*paths: Path, tried: Tried, batches: tuple[int, ...]) -> list[Setup]:
    return make_columns(open_entries(paths), searches(tried), batches, "cpu")[0]


def rows(found: list[Setup]) -> list[tuple[str, str, int, int | None, tuple[int, ...]]]:
    return [(s.label, s.settings, s.sessions, s.threads, s.batches) for s in found]


def copy_of(path: Path, name: str = "copy.onnx") -> Path:
    other = path.with_name(name)
    other.write_bytes(path.read_bytes())
    return other


def test_the_baseline_has_its_fastest_session_and_its_fastest_settings(affine_onnx: Path) -> None:
    tried = {("fp32 CPU", 1): (SPINNING, TWO, ONE), ("fp32 CPU", 8): (APART, TWO, ONE)}
    assert rows(setups(affine_onnx, tried=tried, batches=(1, 8))) == [
        ("fp32 CPU", "1 session of 2 threads, spinning on", 1, 2, (1,)),
        ("fp32 CPU", "1 session of 2 threads, spinning off", 1, 2, (8,)),
        ("fp32 CPU, 2 sessions", "2 processes of 1 thread", 2, 1, (8,)),
    ]
    tried = {("fp32 CPU", 1): (TWO, ONE), ("fp32 CPU", 8): (CpuSettings(4, 1), ONE)}
    found = setups(affine_onnx, tried=tried, batches=(1, 8))
    assert [setup.label for setup in found][1:] == ["fp32 CPU, several sessions"] * 2


def test_other_artefacts_run_as_the_baseline_does_and_in_settings_of_their_own(
    affine_onnx: Path,
) -> None:
    """A copy of the baseline has its like next to it, whatever its own search says."""
    paths = affine_onnx, copy_of(affine_onnx)
    tried = {
        ("fp32 CPU", 1): (ONE, TWO),
        ("fp32 CPU", 8): (TWO, ONE),
        ("copy", 1): (APART, ONE),
        ("copy", 8): (TWO, ONE),
    }
    one, two = str(ONE), str(TWO)
    assert rows(setups(*paths, tried=tried, batches=(1, 8))) == [
        ("fp32 CPU", one, 1, 2, (1, 8)),
        ("fp32 CPU, 2 sessions", two, 2, 1, (8,)),
        ("copy", one, 1, 2, (1, 8)),
        ("copy, 2 sessions", two, 2, 1, (8,)),
        ("copy, own settings", str(APART), 2, 1, (1,)),
    ]
    unsearched = setups(*paths, tried={("fp32 CPU", 1): (TWO, ONE)}, batches=(1,))
    assert [row[:2] for row in rows(unsearched)][2:] == [("copy", one), ("copy, 2 sessions", two)]


def test_each_file_is_timed_once_and_the_baseline_comes_first(affine_onnx: Path) -> None:
    other = copy_of(affine_onnx)
    with pytest.raises(BadInput, match="`engines` names no file"):
        open_entries([], [affine_onnx])
    found = open_entries([other, affine_onnx, other], [affine_onnx])
    assert [each.artefact.name for each in found] == ["affine.onnx", "copy.onnx"]


def test_an_engine_to_compare_with_is_timed_next_to_the_baseline(affine_onnx: Path) -> None:
    half = dk.quantize(affine_onnx, "fp16").path
    old = copy_of(half, "old.onnx")
    found = open_entries([half], [old])
    assert [(e.label, e.against) for e in found] == [
        ("fp32 CPU", False),  # which the manifest of the engine names
        ("old", True),
        ("affine.fp16", False),
    ]
    with pytest.raises(BadInput, match="is fp16 in onnx, and the float32 model that") as caught:
        open_entries([old], [half])
    assert "`against`" in str(caught.value.hint)


def test_each_engine_has_a_label_of_its_own(affine_onnx: Path) -> None:
    names = ("a/affine.onnx", "b/affine.onnx", "fp32 CPU.onnx", "fp32 CPU, 2 sessions.onnx")
    others = [affine_onnx.parent / name for name in names]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(affine_onnx.read_bytes())
    last = f"{affine_onnx.parent.name}/fp32 CPU, 2 sessions.onnx"
    found = setups(affine_onnx, *others, tried={}, batches=(1,))
    assert [setup.label for setup in found] == [
        *("fp32 CPU", "a/affine.onnx", "b/affine.onnx", "fp32 CPU.onnx", last)
    ]


def test_settings_reach_the_session(affine_onnx: Path) -> None:
    entry = open_entry(affine_onnx)
    for settings in (ONE, SPINNING):
        with entry.open_on_cpu(settings) as engine:
            assert isinstance(engine, OnnxRuntimeEngine)
            options = engine.session.get_session_options()
            spinning = options.get_session_config_entry("session.intra_op.allow_spinning")
            assert (options.intra_op_num_threads, spinning) == (2, str(int(settings.spinning)))
    with entry.open_on_cpu(APART) as engine:
        assert isinstance(engine, ProcessEngine)
        assert engine.runtime.startswith("onnxruntime")


def machine(*features: str) -> Machine:
    return replace(this_machine(), cpu_features=features)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "model.onnx")


def timed(*engines: Path, batches: tuple[int, ...] = (1,), **options: tuple[Path, ...]) -> Report:
    out = engines[0].parent / "report"
    return dk.bench(engines, out=out, seconds=0.05, batches=batches, device="cpu", **options)


def test_a_bench_searches_times_and_reports_the_settings(
    affine_onnx: Path, onnxruntime_alone: None
) -> None:
    """A second one takes its settings from the report, and has an engine to compare with."""
    old, folder = copy_of(dk.quantize(affine_onnx, "fp16").path, "old.onnx"), affine_onnx.parent
    first = timed(old, against=(affine_onnx,), batches=(1, 8))
    assert [(each.file, each.batch) for each in first.cpu_search] == [
        (name, batch) for name in ("affine.onnx", "old.onnx") for batch in (1, 8)
    ]
    for batch in (1, 8):
        points = [point for point in first.points if point.batch == batch]
        (best,) = [each for each in first.best_cpu if each.batch == batch]
        assert best.label == max(points, key=lambda p: p.throughput_per_s.value).label
        trials = [t for s in first.cpu_search if s.batch == batch for t in s.trials]
        assert {p.settings for p in points} <= {str(trial.settings) for trial in trials}
        ways = {point.label: point.settings for point in points}
        assert ways["old"] == ways["fp32 CPU"]
    again = {"out": folder / "again", "seconds": 0.05, "batches": (1,), "device": "cpu"}
    against = [affine_onnx, old, folder / "report"]
    report = dk.bench([copy_of(affine_onnx)], against=against, **again)
    found = {(each.file, each.batch): each for each in report.cpu_search}
    assert [found[each.file, 1] for each in first.cpu_search[::2]] == list(first.cpu_search[::2])
    assert {label.partition(",")[0] for label in report.asked} == {"copy"}
    assert {label.partition(",")[0] for label in report.against} == {"old"}
    assert {"fp32 CPU", "old", "copy"} <= {point.label for point in report.points}


@needs_openvino
def test_each_precision_is_tried_in_openvino_and_bfloat16_where_the_cpu_has_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).standard_normal((64, 1, 28, 28)).astype(np.float32)
    np.savez(tmp_path / "x.npz", image=x)
    int8 = dk.quantize(model, to="int8", calib=tmp_path / "x.npz", runtime="onnxruntime").path
    every = open_entries([model, int8])
    found, gaps = find_rivals(every, machine("avx512_bf16"), tmp_path)
    assert [each.label for each in found] == ["OpenVINO fp32", "OpenVINO int8", "OpenVINO bf16"]
    assert [each.what for each in gaps] == ["PyTorch on the CPU"]
    other = tmp_path / "other.onnx"
    other.write_bytes(model.read_bytes() + b"\x32\x01x")  # doc_string
    found, _ = find_rivals(open_entries([model, copy_of(model), other]), machine(), tmp_path)
    assert [each.label for each in found] == ["OpenVINO fp32 of model", "OpenVINO fp32 of other"]
    found, gaps = find_rivals(every[:1], machine(), tmp_path)
    assert [each.label for each in found] == ["OpenVINO fp32"]
    reasons = {each.what: each.why for each in gaps}
    assert "no instructions" in reasons["OpenVINO bf16 on the CPU"]
    assert "deploykit quantize --to int8" in reasons["INT8 on the CPU"]
    assert "checkpoint" in reasons["PyTorch on the CPU"]
    monkeypatch.setattr(columns, "installed", lambda _: False)
    found, gaps = find_rivals(every[:1], machine(), tmp_path)
    assert found == []
    why = {each.what: each.why for each in gaps}["OpenVINO on the CPU"]
    assert why.startswith("not installed: pip install")
    assert "[openvino]" in why


@needs_openvino
def test_a_rival_that_is_wrong_or_cannot_run_the_model_is_a_gap_and_fails_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploykit.engines.openvino import OpenVinoEngine

    call = OpenVinoEngine.__call__

    def wrong(self: OpenVinoEngine, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: array * 0 for name, array in call(self, feeds).items()}

    def refuse(_self: Entry, _device: str) -> Engine:
        raise BadInput("model.onnx: OpenVINO has no operator Foo")

    (reference,) = open_entries([model])
    (rival,), gaps = find_rivals([reference], machine(), tmp_path)
    with reference.open() as base:
        proofs = Proofs(base, reference, None, "cpu", print)
        assert proofs.admit(rival, gaps)
        assert proofs.gates == {}  # nobody asked for it
        with monkeypatch.context() as patch:
            patch.setattr(OpenVinoEngine, "__call__", wrong)
            assert not proofs.admit(rival, gaps)
        monkeypatch.setattr(Entry, "open", refuse)
        assert not proofs.admit(rival, gaps)
    first, second = gaps[-2:]
    assert first.what == "OpenVINO fp32 on the CPU"
    assert "SQNR 0.0 dB" in first.why
    assert second == NotMeasured(first.what, "model.onnx: OpenVINO has no operator Foo")


@pytest.mark.parametrize(("rate", "batches"), [(80.0, (1, 8)), (60.0, (8,))])
def test_a_rival_has_a_column_only_where_the_search_found_it_near_the_fastest(
    affine_onnx: Path, rate: float, batches: tuple[int, ...]
) -> None:
    (reference,) = open_entries([affine_onnx])
    rival = replace(reference, runtime="openvino", rival=True, label="OpenVINO fp32")
    found = {
        (entry.label, batch): CpuSearch("", batch, (CpuTrial(settings, per_s),))
        for entry, settings, rates in ((reference, ONE, (100, 100)), (rival, FREE, (rate, 300)))
        for batch, per_s in zip((1, 8), rates, strict=True)
    }
    made, gaps = make_columns([reference, rival], found, (1, 8), "cpu")
    assert [(each.label, each.settings, each.batches) for each in made] == [
        ("fp32 CPU", str(ONE), (1, 8)),
        ("OpenVINO fp32", "1 session of 2 threads", batches),
    ]
    assert {each.entry for each in made} == {reference.label, rival.label}
    behind = [each.why for each in gaps if each.what == "OpenVINO fp32 on the CPU at batch 1"]
    assert behind == ["far slower than others in the search"] * (batches == (8,))


@needs_openvino
def test_a_bench_times_openvino_and_names_its_precision_in_the_report(model: Path) -> None:
    built = dk.build(model, "cpu-openvino").path
    report = timed(built, model, batches=(8,))
    assert {each.runtime for each in report.cpu_search} == {"onnxruntime", "openvino"}
    assert report.asked == ("model.cpu-openvino in OpenVINO",)
    (asked,) = [each for each in report.points if each.label in report.asked]
    assert "thread" in asked.settings
    names = {"fp32": "float32", "bf16": "bfloat16"}
    points = [point for point in report.points if point.label.startswith("OpenVINO")]
    left_out = [each.what for each in report.not_measured if each.what.startswith("OpenVINO")]
    assert points or left_out  # by the machine's load: the search was far slower with it
    for point in (asked, *points):
        assert point.runtime.startswith("openvino ")
        assert names[point.precision] in point.options["layers"]
    assert [each.name for each in report.gates] == ["outputs of model.cpu-openvino.onnx"]


@pytest.mark.torch
def test_a_checkpoint_is_timed_in_processes_of_its_own_in_both_precisions(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from deploykit.core.recipe import load_recipe
    from deploykit.engines.torch.open import save_checkpoint

    recipe = load_recipe("mnist-cnn")
    checkpoint = tmp_path / "mnist.pt"
    save_checkpoint(checkpoint, recipe.build(), "mnist-cnn", recipe)
    model = save(mnist_like(), tmp_path / "model.onnx")
    every = open_entries([model, checkpoint])
    assert (every[1].runtime, every[1].precision) == ("torch", "fp32")
    found, gaps = find_rivals(every, machine(), tmp_path)
    (half,) = [each for each in found if each.runtime == "torch"]
    assert (half.label, half.precision) == ("PyTorch bf16", "bf16")
    assert "PyTorch on the CPU" not in {each.what for each in gaps}
    inputs = {"image": np.random.default_rng(0).standard_normal((2, 1, 28, 28)).astype("f4")}
    with every[1].open("cpu") as exact, half.open("cpu") as rounded:
        expected, found_half = exact(inputs)["logits"], rounded(inputs)["logits"]
    error = np.abs(found_half - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < 5e-2  # 8 bits of mantissa
    with half.open_on_cpu(CpuSettings(1, 1, None, processes=True)) as engine:
        assert isinstance(engine, ProcessEngine)
        np.testing.assert_allclose(engine(inputs)["logits"], found_half, rtol=0.1, atol=0.05)
        assert engine.runtime.startswith("torch ")


def search(candidates: Sequence[CpuSettings], call_s: Callable[[CpuSettings], float]) -> CpuSearch:
    """Of engines whose calls take as long as `call_s` says for their settings."""
    clock = VirtualTime()

    def open_engine(settings: CpuSettings) -> FakeEngine:
        seconds = call_s(settings)
        return Timed(clock, lambda _: seconds, [], "")

    return CpuSearch("a", 4, search_cpu(candidates, open_engine, feeds(4), 4, 0.2, clock=clock))


def test_choices_use_all_cores_or_fewer_and_what_the_runtime_can_choose() -> None:
    """Torch keeps one pool of threads for a process; ONNX Runtime alone lets threads spin."""
    one, pair, two = "1 session of 1 thread", "1 session of 2 threads", "2 sessions of 1 thread"
    for runtime, expected in (
        ("onnxruntime", {one, two, f"{pair}, spinning off", f"{pair}, spinning on"}),
        ("openvino", {one, two, pair}),
        (
            "torch",
            {each.replace("session", "process") for each in (one, pair)}
            | {"2 processes of 1 thread"},
        ),
    ):
        assert {str(each) for each in choices([2], runtime)} == expected
    assert choices([1]) == [CpuSettings()]
    for each in choices([6]):
        assert each.sessions == 1 or each.sessions * each.threads == 6
    assert {each.sessions for each in choices([12, 6])} == {1, 2, 3, 4, 6, 12}


@pytest.mark.parametrize("winner", [*choices([4]), CpuSettings(4, 1, processes=True)], ids=str)
def test_the_fastest_settings_are_found(winner: CpuSettings) -> None:
    """Per row: with s sessions a call of s times the seconds gives the same rate."""

    def call_s(each: CpuSettings) -> float:
        slow = 0.01 if replace(each, processes=winner.processes) == winner else 0.012
        return (0.008 if each == winner else slow) * each.sessions

    assert search(choices([4]), call_s).fastest == winner


@pytest.mark.parametrize("error", [OutOfMemory("4 GiB needed"), BadInput("no such input")])
def test_settings_that_do_not_fit_into_memory_are_left_out(error: DeploykitError) -> None:
    def call_s(each: CpuSettings) -> float:
        if each.sessions > 1:
            raise OutOfMemory("a.onnx: 4 GiB needed")
        return 0.01

    assert search(choices([4]), call_s).fastest.sessions == 1

    def none(_each: CpuSettings) -> float:
        raise error

    with pytest.raises(type(error), match=error.message):
        search(choices([4]), none)
