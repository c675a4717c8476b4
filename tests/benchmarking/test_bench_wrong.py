"""`bench` of an engine that computes something else: it is no faster, it is wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.benchmarking.bench import bench
from deploykit.cli.main import main
from deploykit.reporting.report import Report
from deploykit.reporting.tables import summary

WEIGHTS = np.random.default_rng(1).standard_normal((16, 4))
MODELS = {  # the bound of INT8 let `other`, a tenth off, pass with a headline
    "right": WEIGHTS,
    "zeros": WEIGHTS * 0,
    "near": WEIGHTS + 0.02 * np.sign(WEIGHTS),
    "other": WEIGHTS + 0.05 * np.sign(WEIGHTS),
    "nan": WEIGHTS * np.nan,
}


def write(folder: Path) -> list[Path]:
    """Y = x W on float32[N,16], for all weights."""
    for name, weights in MODELS.items():
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 16])],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 4])],
            [numpy_helper.from_array(weights.astype(np.float32), "w")],
        )
        opsets = [helper.make_opsetid("", 20)]
        onnx.save(
            helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / f"{name}.onnx"
        )
    return [folder / f"{name}.onnx" for name in MODELS]


@pytest.fixture(scope="module", name="paths")
def paths_fixture(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(tmp_path_factory.mktemp("wrong"))


def timed(*paths: Path, **options: Any) -> Report:
    out = paths[0].parent / "report"
    short: dict[str, Any] = {"seconds": 0.05, "batches": (1, 8), "device": "cpu", "force": True}
    return bench(paths, out=out, **short, **options)


@pytest.fixture(scope="module", name="report")
def report_fixture(paths: list[Path]) -> Iterator[Report]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploykit.benchmarking.columns.installed", lambda _: False)
        yield timed(*paths, scenarios=["offline"])


def test_a_wrong_engine_is_timed_and_compared_with_nothing(report: Report) -> None:
    assert {label.partition(",")[0] for label in report.wrong} == {"zeros", "other", "nan"}
    assert set(report.wrong) <= {point.label for point in report.points}
    document = report.to_dict()
    for rows in (document["speedups"], document["crossovers"], document["scenarios"]):
        assert rows
        assert not any(row["label"] in report.wrong for row in rows)
    first, *sentences = report.verdict
    assert first.startswith("3 of 4 gates NOT met: outputs of zeros.onnx: against right.onnx")
    assert first.endswith("Wrong outputs have no speed-up.")
    assert not any("zeros" in each for each in sentences)


def test_each_gate_has_its_reason(report: Report) -> None:
    zeros, near, other, nan = report.gates
    assert [gate.passed for gate in report.gates] == [False, True, False, False]
    assert "SQNR 0.0 dB" in zeros.detail
    assert re.fullmatch(r"against right.onnx: SQNR \d\d.\d dB, 25 or more is asked", near.detail)
    assert "25 or more is asked" in other.detail
    assert "NaN or infinity" in nan.detail  # "SQNR inf dB, 15 or more is asked" read as if met
    assert "SQNR" not in nan.detail


def test_each_engine_has_its_own_accuracy(paths: list[Path], onnxruntime_alone: None) -> None:
    """A wrong engine's took the place of the baseline's: both are float32."""
    data = paths[0].with_name("data.npz")
    x = np.random.default_rng(2).standard_normal((64, 16)).astype(np.float32)
    np.savez(data, x=x, labels=(x @ WEIGHTS).argmax(axis=1))
    report = timed(*paths[:2], data=data)
    scores = {row.label: row.value.value for row in report.accuracy}
    assert scores["fp32 CPU"] == 1.0
    assert scores["zeros"] < 0.5
    (shown,) = [row for row in summary(report.to_dict()).rows if row[0] == "fp32 CPU"]
    assert shown[2].startswith("100.0")


def test_the_report_is_about_the_engines_that_were_given(report: Report, paths: list[Path]) -> None:
    assert {label.partition(",")[0] for label in report.asked} == {*MODELS} - {"right"}
    assert report.provenance["affinity"]
    options = [point.options for point in report.points if point.processes == 1]
    assert {each["graph_optimization_level"] for each in options if each} == {"ORT_ENABLE_ALL"}
    assert {each["file"]: each["bytes"] for each in report.artefacts} == {
        path.name: path.stat().st_size for path in paths
    }


def test_the_command_ends_with_1_and_writes_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, onnxruntime_alone: None
) -> None:
    right, zeros, *_ = write(tmp_path)
    words = ["deploykit", "bench", zeros, "--baseline", right, "-o", tmp_path / "out"]
    words += ["--seconds", "0.05", "--batches", "1"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())
    assert ended.value.code == 1
    printed = capfd.readouterr()
    assert "error: outputs of zeros.onnx: against right.onnx: output" in printed.err
    table, _, _ = printed.out.partition("\n\n")
    assert re.findall(r"^(.*?)  ", table, re.MULTILINE)[-1].startswith("✗ zeros")
    assert "✗: no verdict" in table
    document = json.loads((tmp_path / "out" / "report.json").read_text())
    assert document["wrong"]
    assert [gate["passed"] for gate in document["gates"]] == [False]
