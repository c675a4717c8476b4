"""Figures of the benchmarks: what wrk and h2load print, tables, memory, and a rented GPU's."""

from __future__ import annotations

import ast
import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gpu_serve
import gpu_zoo
import numpy as np
import pytest
from bodies import ENCODINGS
from clients import Sample, h2load_sample, steady_per_s, wrk, wrk_sample
from memory import file_pages_kib, held_mib
from reasons import NotMeasuredError
from tables import Cell, Results, markdown, share_of_ceiling, times_of

from deploykit.core.machine import this_machine
from scripts.gpu.steps import PYTHON, ROOT, Result, Step
from tests.support.http_server import Handler, http_server

TRIES = 5  # of runs of 1 s, in which a machine may stand still
ROWS = np.array([[0.125, 0.3, 1.0]], np.float32)


def line(**changes: object) -> str:
    times = {"duration_us": 2_000_000, "p50_us": 250, "p99_us": 1500, "times_s": []}
    return json.dumps({"requests": 1000, "refused": 0, "errors": 0, **times, **changes})


def test_wrk_counts_answers_with_success_only() -> None:
    said = f"Running 2s test\n  Requests/sec: 500\n{line(refused=100, errors=3)}\n"
    sample = wrk_sample(said, 2.0)
    assert sample.per_s == pytest.approx(450)
    assert (sample.p50_ms, sample.p99_ms, sample.errors) == (0.25, 1.5, 103)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("unable to connect to 127.0.0.1:9 Connection refused\n", "Connection refused"),
        (line(requests=7, refused=7), "none of 7 requests"),
        ("", "it said nothing"),
    ],
)
def test_wrk_without_an_answer_is_not_a_figure(said: str, why: str) -> None:
    with pytest.raises(NotMeasuredError, match=why):
        wrk_sample(said, 2.0)


@pytest.mark.parametrize(("begin_s", "end_s"), [(0.0, 8.2), (0.3, 8.0), (0.7, 8.45)])
def test_a_steady_rate_does_not_depend_on_where_a_run_begins_and_ends(
    begin_s: float, end_s: float
) -> None:
    times = [0.55 * turn + 1e-4 * row for turn in range(1, 20) for row in range(32)]
    assert steady_per_s(times, begin_s, end_s) == pytest.approx(32 / 0.55, rel=1e-6)
    assert steady_per_s([1.0, 1.0, 1.0], 0.0, 2.0) is None  # too few


H2LOAD = """
finished in 2.00s, 1500.00 req/s, 300.00KB/s
requests: 3000 total, 3000 started, 3000 done, 3000 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 3000 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 600.00KB (614400) total, 100KB (102400) headers (space savings 90.00%), 146KB (150000) data
"""
LOG = "".join(f"{1_000_000 + i * 667}\t200\t{400 + i % 100}\n" for i in range(3000))


def test_h2load_reads_rate_and_percentiles_and_counts_refusals_of_grpc_by_missing_bytes() -> None:
    sample = h2load_sample(H2LOAD, LOG, 50)
    figures = (sample.per_s, sample.p50_ms, sample.p99_ms, sample.errors)
    assert figures == pytest.approx((1500, 0.45, 0.498, 0), abs=0.002)
    sample = h2load_sample(H2LOAD.replace("150000", "100000"), LOG, 50)  # they have status 200
    assert (sample.errors, sample.per_s) == (1000, pytest.approx(1000))
    nothing = H2LOAD.replace("3000 done, 3000 succeeded", "0 done, 0 succeeded")
    with pytest.raises(NotMeasuredError, match="none of 0"):
        h2load_sample(nothing.replace("(150000)", "(0)"), "", 50)


class Echo(Handler):
    """200 and the body; 503 for a body that is empty. Notes the headers it got."""

    protocol_version = "HTTP/1.1"
    seen: dict[str, str]

    def reply(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).seen = dict(self.headers)
        self.answer(200 if body else 503, body)


@pytest.fixture
def port() -> Iterator[int]:
    with http_server(Echo) as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
@pytest.mark.parametrize("slow", [False, True])
def test_wrk_sends_the_body_and_reports_the_answers(port: int, slow: bool) -> None:
    ask = ENCODINGS["v2 binary"](ROWS)
    for _ in range(TRIES):
        with contextlib.suppress(NotMeasuredError):
            sample = wrk(port, ask, 2, 1, slow=slow)
            if not sample.errors:
                break
    assert sample.errors == 0
    assert sample.per_s > 0
    assert 0 < sample.p50_ms <= sample.p99_ms
    assert ask.headers.items() <= Echo.seen.items()
    with pytest.raises(NotMeasuredError, match="answered with 200"):
        wrk(port, ENCODINGS["raw"](ROWS[:0]), 1, 1, slow=slow)


TITLES = {"deploykit": "deploykit 1", "slow": "Slow 2", "fast": "Fast 3", "gone": "Gone 4"}


def sample(per_s: float) -> Sample:
    return Sample(per_s, 1.0, 2.0, 0)


def results() -> Results:
    found = Results("tiny", TITLES, reasons={"gone": "not installed: no wheel"})
    rates = {"deploykit": (1000, 2000, 1100), "slow": (100, 200, 110), "fast": (500, 1000, 500)}
    for name, values in rates.items():
        found.samples[Cell(name, "HTTP", 32)] = [sample(value) for value in values]
        found.ready_s[name] = found.ready_mib[name] = found.loaded_mib[name] = [1.0]
    found.samples[Cell("fast", "HTTP", 32)][1] = None
    found.ceilings = [{1: 1500.0, 8: 2000.0}, {1: 1500.0, 8: 4000.0}, {1: 1500.0, 8: 2200.0}]
    return found


def test_ratios_are_paired_by_round_and_shares_are_of_the_best_batch_in_it() -> None:
    times = times_of(results(), "slow", "HTTP", 32)
    assert times is not None
    assert (times.low, times.value, times.high) == pytest.approx((10, 10, 10))
    times = times_of(results(), "fast", "HTTP", 32)  # a round without a figure is left out
    assert times is not None
    assert times.value == pytest.approx((2.0 * 2.2) ** 0.5)
    share = share_of_ceiling(results(), Cell("deploykit", "HTTP", 32))
    assert share is not None
    assert share.value == pytest.approx(0.5)


def test_the_table_marks_the_best_and_says_why_one_is_missing() -> None:
    text = markdown(results())
    assert "2,000 at 8" not in text.splitlines()[0]
    assert "2,200 at 8" in text  # the median round's
    assert "| Gone 4 | not measured |" in text
    assert "Gone 4: not installed: no wheel" in text
    assert "as many requests as the best of the others, Fast 3" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    head = next(line for line in rows if "p99" in line)
    widths = {line.count("|") for line in rows[rows.index(head) : rows.index(head) + 6]}
    assert widths == {head.count("|")}
    found = results()
    found.samples = {cell: samples[:1] for cell, samples in found.samples.items()}
    assert "| 10.00x |" in markdown(found)  # one round has no interval


SMAPS = """\
7f00-7f10 r-xp 00000000 08:01 42                 /usr/lib/libx.so
Size:                100 kB
Rss:                  80 kB
Anonymous:            10 kB
VmFlags: rd ex mr mw me
7f10-7f20 rw-p 00000000 00:00 0
Rss:                  50 kB
Anonymous:            50 kB
7f20-7f30 rw-s 00000000 00:01 7                  /dev/shm/tensor
Rss:                  30 kB
Anonymous:             0 kB
"""


def test_a_librarys_file_pages_count_whole_and_once(tmp_path: Path) -> None:
    assert file_pages_kib(SMAPS) == {("/usr/lib/libx.so", "00000000"): 70}
    own = "Rss: 160 kB\nPss_Anon: 60 kB\nPss_File: 35 kB\nPss_Shmem: 15 kB\n"
    for pid in ("7", "8"):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "smaps").write_text(SMAPS)
        (tmp_path / pid / "smaps_rollup").write_text(own)
    assert held_mib([7, 8, 9], tmp_path) * 1024 == pytest.approx(2 * (60 + 15) + 70)


@cache
def names(module: str) -> frozenset[str]:
    """What a module of the checkout defines or imports at its top, and its submodules."""
    path = ROOT.joinpath(*module.split("."))
    below = {each.stem for each in path.glob("*")} if path.is_dir() else set()
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return frozenset(below)
    found = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    stored = {node.id for node in found if isinstance(node, ast.Name)}
    defined = {node.name for node in found if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported = {node.asname or node.name for node in found if isinstance(node, ast.alias)}
    return frozenset(below | stored | defined | imported)


def test_benchmarks_import_what_is_there() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.split(".")[0] in ("deploykit", "tests", "scripts")
        for alias in node.names
        if alias.name not in names(node.module)
    ]
    assert missing == []


SCRIPTS = ("gpu_zoo", "gpu_serve")


def run_script(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, str(ROOT / "benchmarks" / f"{script}.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_a_gpu_nothing_is_run_and_an_out_that_is_a_file_is_named(
    script: str, tmp_path: Path
) -> None:
    if not this_machine().gpus:
        done = run_script(script, "--out", tmp_path / "out")
        assert done.returncode == 3
        assert done.stderr.startswith("error: no NVIDIA GPU here: nothing was run")
        assert not list(tmp_path.iterdir())
    (tmp_path / "out").write_text("mine")
    done = run_script(script, "--rehearse", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'out'}")
    assert (tmp_path / "out").read_text() == "mine"


def point(label: str, device: str) -> dict[str, Any]:
    figures = {"throughput_per_s": {"value": 2000.0}, "latency": {"p50_ms": {"value": 0.5}}}
    compute = None if device == "cpu" else {"p50_ms": {"value": 0.25}}
    where = {"label": label, "batch": 1, "device": device, "runtime": "r", "marks": ()}
    return {**where, **figures, "compute": compute}


def test_the_models_are_summed_up_with_energy_and_the_plans_error(tmp_path: Path) -> None:
    predicted = {"label": "m, GPU", "batch": 1, "predicted_ms": 0.4, "error": -0.2}
    report = {
        **{name: [] for name in ("crossovers", "not_measured", "throttled", "invalid")},
        "verdict": ["It is 2 times as fast."],
        "points": [point("fp32 CPU", "cpu"), point("m, GPU", "cuda:0")],
        "energy": [{"label": "m, GPU", "batch": 1, "joules": 0.05}],
        "predicted": [predicted, {**predicted, "label": "fp32 CPU", "error": 3.0}],
        "roofline": {},
        "gpu_roofline": {"ceilings": {"gflops fp32": 400.0}},
    }
    (tmp_path / "lstm").mkdir()
    (tmp_path / "lstm/report.json").write_text(json.dumps(report))
    steps = [Step("gpu_zoo", f"{name}: bench", [], 1) for name in ("lstm", "resnet50")]
    results = [Result(steps[0], "passed"), Result(steps[1], "failed")]
    gpu_zoo.collect(tmp_path, results, rehearse=False)
    found = json.loads((tmp_path / "gpu_zoo.json").read_text())
    assert found["plan_error"] == {"points": 1, "median": 0.2, "largest": 0.2}
    text = (tmp_path / "gpu_zoo.md").read_text()
    assert "| m, GPU | 1 | 2,000 | 0.5 | 0.25 | 50 | -20% |" in text
    assert "- ceilings of the CPU: not measured" in text
    assert "| gpu_zoo | resnet50: bench | failed |" in text


def test_a_load_that_failed_is_a_row_with_the_reason_and_no_figure() -> None:
    row = {"kind": "JPEG", "connections": 32}
    nothing = dict.fromkeys(("p99_ms", "gpu_busy", "joules"))
    figures = {"p50_ms": 1.0, "cpu_us": 80.0, "limits": [], "marks": [], "errors": {}, **nothing}
    good = {**row, "workers": 1, "achieved_per_s": {"value": 900.0}, **figures}
    *_, first, second = gpu_serve.served_table([good, {**row, "workers": 2, "error": "no answer"}])
    assert first == "| JPEG | 32 | 1 | 900 | 1.00 | 1 | – | 80 | – | – |  |"
    assert second.startswith("| JPEG | 32 | 2 | not measured: no answer |")
    assert second.count("|") == first.count("|")
