"""The benchmarks of a rented GPU, on any machine: what they plan, refuse and write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploykit.core.machine import this_machine
from scripts.gpu.steps import PYTHON, ROOT, Result, Step

sys.path[:0] = [str(ROOT / "benchmarks" / "serve"), str(ROOT / "benchmarks")]

import gpu_serve  # noqa: E402
import gpu_zoo  # noqa: E402

SCRIPTS = ("gpu_zoo", "gpu_serve")


def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, str(ROOT / "benchmarks" / f"{script}.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_a_gpu_nothing_is_run_and_an_out_that_is_a_file_is_named(
    script: str, tmp_path: Path
) -> None:
    if not this_machine().gpus:
        done = run(script, "--out", tmp_path / "out")
        assert done.returncode == 3
        assert done.stderr.startswith("error: no NVIDIA GPU here: nothing was run")
        assert not list(tmp_path.iterdir())
    (tmp_path / "out").write_text("mine")
    done = run(script, "--rehearse", "--out", tmp_path / "out")
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
