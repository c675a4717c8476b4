"""The whole main job end to end: the demo at a small size, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.artefact import Artefact
from tests.support.installed import needs

pytestmark = [pytest.mark.torch, pytest.mark.slow]
needs("torch", "onnxscript", "sklearn", "onnxruntime")


# the command, whose benchmark and load test take a tenth of their time
SHORT = """
from deploykit import demonstration as demo
from deploykit.cli.main import main

def tenth(call, name):
    return lambda *words, **named: call(*words, **named | {name: named[name] / 10})

demo.bench.bench = tenth(demo.bench.bench, "seconds")
demo.load_test.load_test = tenth(demo.load_test.load_test, "duration_s")
main()
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """`deploykit demo --quick` in a fresh folder: where it wrote, and what it said."""
    place = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-c", SHORT, "demo", "--quick", "-o", "out"]
    with contextlib.ExitStack() as others:
        for port in (8000, 8001):  # another server may have the usual ports
            with contextlib.suppress(OSError):
                others.enter_context(socket.create_server(("127.0.0.1", port)))
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place / "out", done


@pytest.fixture(scope="module")
def report(demo: tuple[Path, object]) -> dict:
    return json.loads((demo[0] / "report.json").read_text())


def test_every_artefact_has_a_manifest_and_the_lineage_leads_back_to_the_weights(
    demo: tuple[Path, object],
) -> None:
    names = ("pt", "onnx", "fp16.onnx", "int8.onnx", "int8.cpu.onnx")
    manifests = {name: Artefact(demo[0] / f"model.{name}").manifest for name in names}
    found = {name: manifest for name, manifest in manifests.items() if manifest is not None}
    assert [found[name].inputs[0].shape for name in names] == [("N", 1, 28, 28)] * len(names)
    for source, made in (("pt", "onnx"), ("onnx", "int8.onnx")):
        assert found[source].sha256 in found[made].made_from


def test_the_report_has_accuracy_with_intervals_latency_against_a_baseline_and_passed_gates(
    report: dict,
) -> None:
    rows = {row["precision"]: row for row in report["accuracy"]}
    assert set(rows) >= {"fp32", "fp16", "int8"}  # bf16 too, on some CPUs
    for row in rows.values():
        assert row["n"] == 540
        assert 0.9 < row["value"]["low"] < row["value"]["value"] < row["value"]["high"] <= 1
    assert rows["int8"]["drop"]["high"] <= 0.02
    labels = {point["label"] for point in report["points"]}
    assert report["baseline"] in labels
    assert any("int8" in label for label in labels)
    assert all(point["throughput_per_s"]["value"] > 0 for point in report["points"])
    assert {point["device"] for point in report["points"]} == {"cpu"}
    closed, opened = report["serving"]
    assert (closed["mode"], opened["mode"]) == ("closed", "open")
    assert closed["ok"] > 100
    assert closed["failed"] == opened["failed"] == 0
    assert len(report["gates"]) >= 6
    assert all(gate["passed"] for gate in report["gates"])


def test_it_ends_with_the_table_and_the_reports_path(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, done = demo
    lines = done.stdout.rstrip().splitlines()
    assert lines[-1] == "report: out/report.html"
    for row in ("fp32 CPU", "model.fp16", "model.int8.cpu", "best CPU", "served, 32 connections"):
        assert any(line.startswith(row) for line in lines), row
    assert (out / "report.html").stat().st_size < 1_000_000
    text = (out / "report.md").read_text()
    assert "✓ met" in text
    assert "NOT " not in text  # nothing was not met


def test_the_predictions_are_the_test_splits(demo: tuple[Path, object]) -> None:
    with (
        np.load(demo[0] / "predictions.npz") as answers,
        np.load(demo[0] / "data/test.npz") as test,
    ):
        agree = answers["logits"].argmax(1) == test["labels"]
    assert agree.shape == (540,)
    assert agree.mean() > 0.9


def test_it_leaves_no_process_behind(demo: tuple[Path, object]) -> None:
    here = demo[0].parent.resolve()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert (folder / "cwd").resolve() != here, (folder / "cmdline").read_bytes()
        except OSError:
            continue
