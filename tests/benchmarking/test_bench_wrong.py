"""`bench` of an engine that computes something else: it is no faster, it is wrong."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.benchmarking.bench import bench
from deploykit.cli.main import main
from deploykit.core.errors import BadInput
from deploykit.reporting.report import Report
from deploykit.reporting.tables import summary

pytestmark = pytest.mark.usefixtures("onnxruntime_alone")


def write(path: Path, weights: np.ndarray) -> Path:
    """Y = x W on float32[N,16]."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 16])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(weights.astype(np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path)
    return path


@pytest.fixture
def right(tmp_path: Path) -> Path:
    return write(tmp_path / "right.onnx", np.random.default_rng(1).standard_normal((16, 4)))


@pytest.fixture
def zeros(tmp_path: Path) -> Path:
    return write(tmp_path / "zeros.onnx", np.zeros((16, 4)))


def timed(*engines: Path, data: Path | None = None) -> Report:
    out = engines[0].parent / "report"
    return bench(engines, out=out, seconds=0.05, batches=(1, 8), data=data)


def test_a_wrong_engine_is_timed_and_compared_with_nothing(right: Path, zeros: Path) -> None:
    report = timed(right, zeros)
    assert "zeros" in {point.label for point in report.points}
    assert set(report.wrong) == {each.label for each in report.points if "zeros" in each.label}
    document = report.to_dict()
    for rows in (document["speedups"], document["crossovers"]):
        assert not any("zeros" in row["label"] for row in rows)
    gate, *sentences = report.verdict
    assert "1 of 1 gates NOT met: outputs of zeros.onnx" in gate
    assert "SQNR 0.0 dB" in gate
    assert gate.endswith("Wrong outputs have no speed-up.")
    assert not any("zeros" in each for each in sentences)


def test_each_engine_has_its_own_accuracy(right: Path, zeros: Path) -> None:
    """A wrong engine's took the place of the baseline's: both are float32."""
    x = np.random.default_rng(2).standard_normal((64, 16)).astype(np.float32)
    labels = (x @ np.random.default_rng(1).standard_normal((16, 4))).argmax(axis=1)
    np.savez(right.parent / "data.npz", x=x, labels=labels)
    report = timed(right, zeros, data=right.parent / "data.npz")
    scores = {row.label: row.value.value for row in report.accuracy}
    assert scores["fp32 CPU"] == 1.0
    assert scores["zeros"] < 0.5
    (shown,) = [row for row in summary(report.to_dict()).rows if row[0] == "fp32 CPU"]
    assert shown[2].startswith("100.0")


def test_without_another_engine_no_ratio_is_stated(right: Path, zeros: Path) -> None:
    (only, *_) = [each for each in timed(zeros, right).gates if not each.passed]
    assert "right.onnx" in only.name  # the first engine is the baseline


def test_an_engine_that_is_a_little_off_passes(right: Path, tmp_path: Path) -> None:
    weights = np.random.default_rng(1).standard_normal((16, 4))
    near = write(tmp_path / "near.onnx", weights + 0.02 * np.sign(weights))
    report = timed(right, near)
    (gate,) = report.gates
    assert gate.passed
    assert re.fullmatch(r"against right.onnx: SQNR \d\d.\d dB, 25 or more is asked", gate.detail)
    assert report.wrong == ()


def test_a_float32_engine_of_other_weights_is_wrong(right: Path, tmp_path: Path) -> None:
    """The bound of INT8 let a model that is a tenth off pass, with a headline."""
    weights = np.random.default_rng(1).standard_normal((16, 4))
    other = write(tmp_path / "other.onnx", weights + 0.05 * np.sign(weights))
    report = timed(right, other)
    assert [gate.passed for gate in report.gates] == [False]
    assert "other" in report.wrong


def test_outputs_that_are_no_numbers_are_named_without_a_ratio(right: Path, zeros: Path) -> None:
    """ "SQNR inf dB, 15 or more is asked" read as if it had been met."""
    nan = write(zeros, np.full((16, 4), np.nan))
    (gate,) = timed(right, nan).gates
    assert not gate.passed
    assert "NaN or infinity" in gate.detail
    assert "SQNR" not in gate.detail


def test_the_command_ends_with_1_and_writes_the_report(
    right: Path, zeros: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    short = ("--seconds", "0.05", "--batches", "1")
    words = ["deploykit", "bench", zeros, "--against", right, "-o", tmp_path / "out", *short]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())
    assert ended.value.code == 1
    printed = capfd.readouterr()
    assert "error: outputs of zeros.onnx: against right.onnx" in printed.err
    table, _, _ = printed.out.partition("\n\n")
    assert re.findall(r"^(.*?)  ", table, re.MULTILINE)[-1].startswith("✗ zeros")
    assert "✗: no verdict" in table
    document = json.loads((tmp_path / "out" / "report.json").read_text())
    assert document["wrong"]
    assert [gate["passed"] for gate in document["gates"]] == [False]


def test_the_report_is_about_the_engines_that_were_given(right: Path, zeros: Path) -> None:
    report = timed(right, zeros)
    assert report.asked
    assert all(label.startswith("zeros") for label in report.asked)
    assert report.provenance["affinity"]
    options = [point.options for point in report.points if point.processes == 1]
    assert {each["graph_optimization_level"] for each in options if each} == {"ORT_ENABLE_ALL"}
    assert {each["file"]: each["bytes"] for each in report.artefacts} == {
        path.name: path.stat().st_size for path in (right, zeros)
    }


@pytest.mark.parametrize("slo_ms", [0.0, -1.0, float("nan"), float("inf")], ids=str)
def test_a_wanted_latency_that_makes_no_sense_is_refused(right: Path, slo_ms: float) -> None:
    with pytest.raises(BadInput, match="`slo_ms` must be a number above 0"):
        bench([right], out=right.parent / "report", slo_ms=slo_ms)
    assert not (right.parent / "report").exists()
