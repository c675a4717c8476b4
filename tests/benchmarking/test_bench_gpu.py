"""A benchmark on a GPU, with the CPU in its place: what is timed, proven and concluded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.benchmarking.columns import open_entries
from deploykit.core.errors import BadInput, OutOfMemory
from deploykit.core.profile import load_profile
from deploykit.planning import probe
from scripts.gpu.cpu_as_gpu import NOTE, cpu_as_gpu
from tests.support.calibrations import keep_round_calibration
from tests.support.onnx_zoo import mnist_like, save

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

GPU, H200 = "model, GPU", (load_profile("h200"), "the driver names the GPU NVIDIA H200")


@pytest.fixture(scope="module", name="bench")
def bench_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`dk.bench` of a short run, on a machine whose GPU is an H200."""
    folder = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch, cpu_as_gpu():
        patch.setattr("deploykit.benchmarking.columns.installed", lambda _: False)
        patch.setattr("deploykit.benchmarking.limits.PROBE_FROM_S", 0.0)
        patch.setattr("deploykit.benchmarking.limits.recognise", lambda _: H200)
        keep_round_calibration(folder / "cache", patch)
        short: dict[str, Any] = {"seconds": 0.05, "device": "cuda"}
        model = save(mnist_like(), folder / "model.onnx")
        yield partial(dk.bench, [model], out=folder / "report", force=True, **short)


@pytest.fixture(scope="module", name="report")
def report_fixture(bench: Any) -> dk.Report:
    found: dk.Report = bench(batches=(1, 4))
    return found


def test_a_column_on_the_gpu_has_compute_alone_too(report: dk.Report) -> None:
    on_gpu = [point for point in report.points if point.device == "cuda:0"]
    assert [(point.label, point.batch) for point in on_gpu] == [(GPU, 1), (GPU, 4)]
    assert all(point.compute is not None for point in on_gpu)
    assert all(point.compute is None for point in report.points if point.device == "cpu")
    assert NOTE in " ".join(report.notes)


def test_each_device_has_a_roofline_of_its_own(report: dk.Report) -> None:
    marks = {name: {p["label"] for p in found["points"]} for name, found in rooflines(report)}
    assert marks["gpu_roofline"] == {GPU}
    assert GPU not in marks["roofline"]
    ceilings = report.gpu_roofline["ceilings"]
    assert ceilings["gflops fp32"] > 0
    assert all(p["gflops"] <= ceilings["gflops"] for p in report.gpu_roofline["points"])


def rooflines(report: dk.Report) -> list[tuple[str, Any]]:
    return [(name, getattr(report, name)) for name in ("roofline", "gpu_roofline")]


def test_the_plan_of_the_gpu_is_compared_with_what_was_measured(
    bench: Any, report: dk.Report
) -> None:
    found = [each for each in report.predicted if each.label == GPU]
    (target,) = dk.plan(bench.args[0][0], profiles=["h200"], batches=(1, 4)).targets
    planned = {p.batch: p.latency_ms for p in target.predictions if p.precision == "fp32"}
    assert found  # a point of too few calls has no p50, and so no prediction
    for each in found:
        assert each.predicted_ms == pytest.approx(planned[each.batch])
    for each in found:
        assert each.basis.startswith("the vendor's figures")
        assert each.error == pytest.approx(each.predicted_ms / each.measured_ms - 1)


def test_energy_of_a_gpu_without_a_meter_has_the_reason(report: dk.Report) -> None:
    assert not [each for each in report.energy if each.label == GPU]
    (gap,) = [each for each in report.not_measured if each.what == "energy of cuda:0"]
    assert "NVML" in gap.why


def test_the_page_shows_the_roofline_of_the_gpu(bench: Any, report: dk.Report) -> None:
    folder = Path(bench.keywords["out"])
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Roofline: what limits the speed on the GPU" in page
    document = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert document["gpu_roofline"] == report.to_dict()["gpu_roofline"]


def test_a_gpu_that_computes_something_else_is_not_timed(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from deploykit.engines.onnxruntime.engine import Binding

    def zeros(self: Binding, feeds: Any) -> dict[str, np.ndarray]:
        found = right(self, feeds)
        return {name: np.zeros_like(value) for name, value in found.items()}

    right = Binding.__call__
    monkeypatch.setattr(Binding, "__call__", zeros)
    report = bench(batches=(1,), out=tmp_path / "report")
    assert {point.device for point in report.points} == {"cpu"}
    (gap,) = [each for each in report.not_measured if each.what == "model.onnx on the GPU"]
    assert "SQNR" in gap.why
    (failed,) = [gate for gate in report.gates if not gate.passed]
    assert failed.name == "outputs of model.onnx on cuda"


def test_a_gpu_whose_ceilings_cannot_be_measured_has_the_reason(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(_: str) -> None:
        raise OutOfMemory("cuda:0: out of memory")

    monkeypatch.setattr(probe, "measure_gpu", refuse)
    monkeypatch.setattr(
        "deploykit.benchmarking.limits.recognise", lambda _: (None, "no profile names NVIDIA X")
    )
    report = bench(batches=(1,), out=tmp_path / "report")
    why = {each.what: each.why for each in report.not_measured}
    assert why["ceilings of the GPU"] == "cuda:0: out of memory"
    assert why["plan of the GPU"] == "no profile names NVIDIA X"
    assert report.gpu_roofline == {}
    assert GPU not in {each.label for each in report.predicted}
    assert [point.batch for point in report.points if point.label == GPU] == [1]


@pytest.mark.torch
def test_weights_alone_are_an_engine_with_their_arch(affine_onnx: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arch = tmp_path / "net.py"
    arch.write_text(AFFINE)
    weights = tmp_path / "weights.pt"
    torch.save({"two": torch.tensor(2.0), "one": torch.tensor(1.0)}, weights)
    with pytest.raises(BadInput, match=r"an \.onnx or \.trt file is needed"):
        open_entries([weights], [affine_onnx])
    found = open_entries([weights], [affine_onnx], arch=f"{arch}:Net")
    assert [each.runtime for each in found] == ["onnxruntime", "torch"]
    with found[1].open("cpu") as engine:
        (found_y,) = engine({"x": np.full((2, 4), 3, np.float32)}).values()
    np.testing.assert_array_equal(found_y, np.full((2, 4), 7))
    with pytest.raises(BadInput, match=r"`arch` .* none of the engines is a file of weights only"):
        open_entries([affine_onnx], arch=f"{arch}:Net")


AFFINE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.two, self.one = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))
    def forward(self, x):
        return x * self.two + self.one
"""
