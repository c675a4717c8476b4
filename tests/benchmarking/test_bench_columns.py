"""Which columns a benchmark has, and in which settings each artefact runs on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import deploykit as dk
from deploykit.benchmarking.columns import (
    Columns,
    Entry,
    choose_columns,
    open_entries,
    open_entry,
    open_on_cpu,
)
from deploykit.core.artefact import Artefact
from deploykit.core.machine import this_machine
from deploykit.engines.onnxruntime.engine import OnnxRuntimeEngine
from deploykit.reporting.points import CpuSearch, CpuSettings, CpuTrial

ONE, SPINNING = CpuSettings(1, 2), CpuSettings(1, 2, spinning=True)
TWO, APART = CpuSettings(2, 1), CpuSettings(2, 1, processes=True)
ROW = tuple[str, str, int, "int | None", tuple[int, ...]]


def columns(
    *paths: Path, found: Mapping[tuple[str, int], tuple[CpuSettings, ...]], batches: tuple[int, ...]
) -> Columns:
    entries = open_entries(paths, None, False, print)

    def search(item: Entry, batch: int) -> CpuSearch | None:
        tried = found.get((item.artefact.name, batch))
        trials = tuple(CpuTrial(each, 10.0 - number) for number, each in enumerate(tried or ()))
        return CpuSearch(item.artefact.name, batch, trials) if tried else None

    return choose_columns(entries[0], entries, this_machine(), "cpu", batches, search)


def rows(found: Columns) -> list[ROW]:
    return [(s.label, s.settings, s.sessions, s.threads, s.batches) for s in found.setups]


def copy_of(path: Path) -> Path:
    other = path.with_name("copy.onnx")
    other.write_bytes(path.read_bytes())
    return other


def test_the_baseline_has_its_fastest_session_and_its_fastest_settings(affine_onnx: Path) -> None:
    found = columns(
        affine_onnx,
        found={("affine.onnx", 1): (SPINNING, TWO, ONE), ("affine.onnx", 8): (APART, TWO, ONE)},
        batches=(1, 8),
    )
    assert rows(found) == [
        ("fp32 CPU", "1 session of 2 threads, spinning on", 1, 2, (1,)),
        ("fp32 CPU", "1 session of 2 threads, spinning off", 1, 2, (8,)),
        ("fp32 CPU, 2 sessions", "2 processes of 1 thread", 2, 1, (8,)),
    ]
    assert [(each.batch, each.fastest) for each in found.searches] == [(1, SPINNING), (8, APART)]


def test_other_artefacts_run_as_the_baseline_does_and_in_settings_of_their_own(
    affine_onnx: Path,
) -> None:
    """A copy of the baseline has its like next to it, whatever its own search says."""
    other = copy_of(affine_onnx)
    found = columns(
        affine_onnx,
        other,
        found={
            ("affine.onnx", 1): (ONE, TWO),
            ("affine.onnx", 8): (TWO, ONE),
            ("copy.onnx", 1): (APART, ONE),
            ("copy.onnx", 8): (TWO, ONE),
        },
        batches=(1, 8),
    )
    one, two = str(ONE), str(TWO)
    assert rows(found) == [
        ("fp32 CPU", one, 1, 2, (1, 8)),
        ("fp32 CPU, 2 sessions", two, 2, 1, (8,)),
        ("copy", one, 1, 2, (1, 8)),
        ("copy, 2 sessions", two, 2, 1, (8,)),
        ("copy, own settings", str(APART), 2, 1, (1,)),
    ]


def test_an_artefact_that_is_not_searched_runs_as_the_baseline_does(affine_onnx: Path) -> None:
    found = columns(
        affine_onnx, copy_of(affine_onnx), found={("affine.onnx", 1): (TWO, ONE)}, batches=(1,)
    )
    assert [(label, settings) for label, settings, *_ in rows(found)][2:] == [
        ("copy", str(ONE)),
        ("copy, 2 sessions", str(TWO)),
    ]


def test_columns_of_different_counts_of_sessions_have_one_name(affine_onnx: Path) -> None:
    """Crossovers are found by name."""
    four = CpuSettings(4, 1)
    tried = {("affine.onnx", 1): (TWO, ONE), ("affine.onnx", 8): (four, ONE)}
    found = columns(affine_onnx, found=tried, batches=(1, 8))
    assert [label for label, *_ in rows(found)][1:] == ["fp32 CPU, several sessions"] * 2


def test_each_file_is_timed_once_and_the_baseline_comes_first(affine_onnx: Path) -> None:
    other = copy_of(affine_onnx)

    def names(*sources: Path, baseline: Path | None = None) -> list[str]:
        return [each.artefact.name for each in open_entries(sources, baseline, False, print)]

    assert names(affine_onnx, affine_onnx) == ["affine.onnx"]
    assert names(other, affine_onnx, baseline=affine_onnx) == ["affine.onnx", "copy.onnx"]
    assert names(affine_onnx, other) == ["affine.onnx", "copy.onnx"]


def test_each_engine_has_a_label_of_its_own(affine_onnx: Path) -> None:
    """Two builds of one name are common; columns of one label ended the run after the search."""
    names = ("a/affine.onnx", "b/affine.onnx", "fp32 CPU.onnx", "fp32 CPU, 2 sessions.onnx")
    others = [affine_onnx.parent / name for name in names]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(affine_onnx.read_bytes())
    found = columns(affine_onnx, *others, found={}, batches=(1,))
    last = f"{affine_onnx.parent.name}/fp32 CPU, 2 sessions.onnx"
    assert [setup.label for setup in found.setups] == [
        *("fp32 CPU", "a/affine.onnx", "b/affine.onnx", "fp32 CPU.onnx", last)
    ]


def test_settings_reach_the_session(affine_onnx: Path) -> None:
    item = open_entry(Artefact.open(affine_onnx), False, print)
    for settings in (ONE, SPINNING):
        with open_on_cpu(item, settings) as engine:
            assert isinstance(engine, OnnxRuntimeEngine)
            options = engine.session.get_session_options()
            spinning = options.get_session_config_entry("session.intra_op.allow_spinning")
            assert (options.intra_op_num_threads, spinning) == (2, str(int(settings.spinning)))
    with open_on_cpu(item, APART) as engine:
        assert engine.runtime.startswith("onnxruntime")
        assert not isinstance(engine, OnnxRuntimeEngine)


def test_a_bench_searches_times_and_reports_the_settings(affine_onnx: Path) -> None:
    report = dk.bench(
        [copy_of(affine_onnx)],
        baseline=affine_onnx,
        batches=(1, 8),
        warmup_s=0,
        seconds=0.05,
        device="cpu",
        out=affine_onnx.parent / "report",
    )
    own = [each for each in report.cpu_search if each.runtime == "onnxruntime"]
    assert [(each.file, each.batch) for each in own] == [
        (name, batch) for name in ("affine.onnx", "copy.onnx") for batch in (1, 8)
    ]
    for batch in (1, 8):
        rates = {p.label: p.throughput_per_s.value for p in report.points if p.batch == batch}
        (best,) = [each for each in report.best_cpu if each.batch == batch]
        assert best.label == max(rates, key=lambda label: rates[label])
    ways = {point.label: point.settings for point in report.points if point.batch == 8}
    assert ways["copy"] == ways["fp32 CPU"]
    for point in report.points:
        tried = {
            str(t.settings) for s in report.cpu_search for t in s.trials if s.batch == point.batch
        }
        assert point.settings in tried
