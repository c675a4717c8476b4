"""`bench` with TensorRT engines, on a machine made of Python below our runtime."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.benchmarking.bench import bench
from deploykit.cli.main import main
from deploykit.core.artefact import Artefact
from deploykit.core.files import manifest_path
from deploykit.core.machine import this_machine
from tests.support.runtimes.gpu_machine import LAYERS, gpu_machine, plan

pytestmark = pytest.mark.usefixtures("onnxruntime_alone")

Machine = Callable[..., Any]


@pytest.fixture(name="machine")
def machine_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    folder = tmp_path / "machine"
    folder.mkdir()
    with ExitStack() as stack:
        yield lambda **more: stack.enter_context(gpu_machine(folder, monkeypatch, **more))


def timed(*engines: Path, **options: Any) -> Any:
    short = {"seconds": 0.05, "batches": (1, 8), **options}
    return bench(engines, out=engines[0].parent / "report", **short)


def test_an_engine_is_timed_against_the_model_it_was_built_from(
    machine: Machine, affine_onnx: Path
) -> None:
    machine()
    engine = dk.build(affine_onnx, "l4").path
    report = timed(engine)
    columns = {point.label: point for point in report.points if point.batch == 8}
    assert columns["affine, TensorRT"].device == "cuda:0"
    assert columns["affine, TensorRT"].runtime == "tensorrt 10.13.3.9"
    assert columns["fp32 CPU"].runtime.startswith("onnxruntime")
    first, second = report.artefacts
    assert (first["file"], first["format"], first["precision"]) == ("affine.onnx", "onnx", "fp32")
    assert (second["file"], second["format"]) == ("affine.trt", "tensorrt")
    assert second["built_on"]["gpu"] == "NVIDIA L4"
    assert [(found["a"], found["b"]) for found in report.parity] == [("affine.onnx", "affine.trt")]
    assert (affine_onnx.parent / "report" / "report.json").exists()


def test_cuda_graphs_and_overlap_have_rows_of_their_own(
    machine: Machine, affine_onnx: Path
) -> None:
    """The weights are on the GPU once; calls in flight are compared with nothing else."""
    seen = machine(content=plan(layers=LAYERS, weights=1000)).seen
    engine = dk.build(affine_onnx, "l4").path
    report = timed(engine, batches=(8,))
    cuda = seen["cuda"]
    assert cuda.held() == {}
    assert cuda.count["launch"] > 0
    assert cuda.most_library_bytes == 1000
    scenarios = {p.label: p.scenario for p in report.points if "TensorRT" in p.label}
    assert scenarios == {
        "affine, TensorRT": "closed-loop",
        "affine, TensorRT, CUDA graphs": "closed-loop",
        "affine, TensorRT, overlap": "closed-loop, 2 calls in flight",
        "affine, TensorRT, CUDA graphs, overlap": "closed-loop, 2 calls in flight",
    }
    compared = {found["label"] for found in report.to_dict()["speedups"]}
    assert compared & set(scenarios) == {"affine, TensorRT", "affine, TensorRT, CUDA graphs"}
    assert not any("overlap" in sentence for sentence in report.verdict[:1])
    on_cpu = timed(affine_onnx, batches=(8,), force=True)
    assert not any("overlap" in p.label or "graphs" in p.label for p in on_cpu.points)


def test_the_report_names_the_engines_precision_and_its_float32_baseline(
    machine: Machine, affine_onnx: Path
) -> None:
    machine(content=plan(layers=LAYERS.replace("Float", "Half")))
    half = dk.quantize(affine_onnx, "fp16").path
    report = timed(dk.build(half, "l4").path)
    assert [(item["file"], item["precision"]) for item in report.artefacts] == [
        ("affine.onnx", "fp32"),
        ("affine.fp16.trt", "fp16"),
    ]


def test_without_the_float32_model_a_baseline_is_required(
    machine: Machine, affine_onnx: Path, tmp_path: Path
) -> None:
    machine()
    engine = dk.build(affine_onnx, "l4").path
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = affine_onnx.rename(elsewhere / "model.onnx")
    with pytest.raises(dk.BadInput, match="is not next to it") as caught:
        timed(engine)
    assert "`against`" in (caught.value.hint or "")
    assert timed(engine, against=[moved]).artefacts[0]["file"] == "model.onnx"


def test_an_engine_to_compare_with_is_no_baseline(machine: Machine, affine_onnx: Path) -> None:
    machine()
    report = timed(affine_onnx, against=[dk.build(affine_onnx, "l4").path])
    assert report.baseline == "fp32 CPU"
    assert {label.partition(", ")[0] for label in report.asked} == {"fp32 CPU"}
    assert report.against[0] == "affine, TensorRT"


def test_an_unverified_engine_is_verified_before_it_is_timed(
    machine: Machine, affine_onnx: Path
) -> None:
    machine(has_cuda=False)
    engine = dk.build(affine_onnx, "l4").path
    machine()
    timed(engine)
    manifest = Artefact(engine).manifest
    assert manifest is not None
    assert manifest.evidence.verified is True


def test_an_engine_without_a_manifest_is_timed_on_trust_and_the_report_says_so(
    machine: Machine, affine_onnx: Path
) -> None:
    machine()
    engine = dk.build(affine_onnx, "l4").path
    manifest_path(engine).unlink()
    with pytest.raises(dk.BadInput, match="has no manifest"):
        timed(engine, against=[affine_onnx])
    warnings: list[str] = []
    report = timed(engine, against=[affine_onnx], trust=True, on_note=warnings.append)
    assert len(warnings) == 1
    assert warnings[0] in report.notes
    assert report.artefacts[1]["precision"] == "unknown"


def test_batches_and_accuracy_stay_within_the_engines_sizes(
    machine: Machine, affine_onnx: Path, tmp_path: Path
) -> None:
    machine(content=plan((1, 4, 8), layers=LAYERS))
    from deploykit.building.builder import Shapes

    engine = dk.build(affine_onnx, "l4", shapes=Shapes(batch="1,4,8")).path
    data = tmp_path / "test.npz"
    np.savez(data, x=np.eye(4, dtype=np.float32).repeat(5, 0), labels=np.arange(4).repeat(5))
    report = timed(engine, batches=(4, 64), data=data)
    ours = [point.batch for point in report.points if "TensorRT" in point.label]
    assert ours == [4] * 4
    assert [row.value.value for row in report.accuracy] == [1.0, 1.0]
    assert max(row["batch"] for row in report.parity[0]["rows"]) == 8


def test_without_a_gpu_an_engine_is_refused(affine_onnx: Path, machine: Machine) -> None:
    machine()
    engine = dk.build(affine_onnx, "l4").path
    with pytest.raises(dk.Unsupported, match="runs on a GPU only"):
        timed(engine, device="cpu")


def test_no_engine_at_all_is_refused(affine_onnx: Path) -> None:
    for against in ([], [affine_onnx]):
        with pytest.raises(dk.BadInput, match="`engines` names no file"):
            dk.bench([], against=against)


def test_other_files_are_refused_with_their_format(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    import torch

    path = tmp_path / "m.pt"
    torch.save({"w": torch.zeros(1)}, path)
    with pytest.raises(dk.BadInput, match=r"m\.pt: is a PyTorch file, an \.onnx or \.trt file"):
        timed(path)


def test_the_command_warns_once_about_an_engine_taken_on_trust(
    machine: Machine,
    affine_onnx: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    machine()
    engine = dk.build(affine_onnx, "l4").path
    manifest_path(engine).unlink()
    short = ("--seconds", "0.05", "--batches", "1")
    out = ("-o", affine_onnx.parent / "report", "--against", affine_onnx)
    words = ["deploykit", "bench", engine, "--trust", *short, *out]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())
    assert not ended.value.code
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"warning: {engine}: loaded without a manifest: neither")


def test_a_report_records_the_power_mode_and_the_heat_of_a_jetson(
    affine_onnx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from deploykit.engines.devices import Devices
    from tests.support.runtimes.jetson_files import ORIN_NANO, write

    root = write(tmp_path / "root", ORIN_NANO)
    made, here = Devices.__init__, this_machine()
    monkeypatch.setattr(Devices, "__init__", lambda self: made(self, root))
    monkeypatch.setattr(
        "deploykit.benchmarking.bench.this_machine", lambda: replace(here, l4t="36.4.3", gpus=())
    )
    once = {"batches": (1,), "seconds": 0.05}
    unknown = dk.bench([affine_onnx], **once, out=tmp_path / "a")
    write(
        root,
        {
            "var/lib/nvpmodel/status": "pmode:0000",
            "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >",
        },
    )
    known = dk.bench([affine_onnx], **once, out=tmp_path / "b")
    assert any("POWER MODE IS NOT KNOWN" in sentence for sentence in unknown.verdict)
    assert not any("POWER MODE" in sentence for sentence in known.verdict)
    (held,) = known.conditions
    assert (held.power_mode, held.temperature_c) == ("15W", 48.0)
    assert held.power_mean_w == pytest.approx(5.52)  # of as many readings as there was time for
    assert held.clock_high_mhz == 624.75
    assert "| power mode | NOT KNOWN |" in (tmp_path / "a" / "report.md").read_text("utf-8")
    assert "| power mode | 15W |" in (tmp_path / "b" / "report.md").read_text("utf-8")
    assert "no NVIDIA GPU" not in " ".join(gap.why for gap in known.not_measured)


def test_a_throttled_gpu_is_a_warning(
    machine: Machine,
    affine_onnx: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from deploykit.engines import devices
    from deploykit.engines.devices import GpuState

    machine()
    engine = dk.build(affine_onnx, "l4").path
    hot = (GpuState("GPU-1", "NVIDIA L4", 0, "nvml", throttled=("hw_thermal",)),)
    monkeypatch.setattr(devices.Devices, "read", lambda _self: hot)
    out = affine_onnx.parent / "report"
    words = ["deploykit", "bench", engine, "--batches", "1", "--seconds", "0.05"]
    words += ["-o", out]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())
    assert not ended.value.code
    said = capfd.readouterr()
    assert "the GPU lowered its clocks during the measurement: hw_thermal" in said.err
    assert "no speed-up is stated" in said.out
    assert (out / "report.json").exists()
