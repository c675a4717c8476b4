"""`bench` from the command to the report: engines on stand-ins of a GPU, inputs, wrong outputs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.benchmarking.bench import BenchInputs
from deploykit.benchmarking.columns import open_entries
from deploykit.cli.main import main
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, OutOfMemory
from deploykit.core.files import manifest_path
from deploykit.core.machine import this_machine
from deploykit.core.profile import load_profile
from deploykit.core.tensors import parse_spec
from deploykit.deploying.bundle import complete_model
from deploykit.engines.devices import Devices, GpuState
from deploykit.engines.onnxruntime.engine import Binding
from deploykit.planning import probe
from deploykit.planning.probe import store_calibration
from deploykit.reporting.report import read
from deploykit.reporting.tables import details, summary
from scripts.gpu.cpu_as_gpu import NOTE, cpu_as_gpu
from tests.support.calibrations import keep_round_calibration
from tests.support.onnx_zoo import mnist_like, save
from tests.support.runtimes.cases import Case, onnx_model
from tests.support.runtimes.gpu_machine import LAYERS, gpu_machine, plan
from tests.support.runtimes.jetson_files import ORIN_NANO
from tests.support.runtimes.jetson_files import write as write_files

Machine = Callable[..., Any]


@pytest.fixture(name="machine")
def machine_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    folder = tmp_path / "machine"
    folder.mkdir()
    with ExitStack() as stack:
        yield lambda **more: stack.enter_context(gpu_machine(folder, monkeypatch, **more))


SHORT: dict[str, Any] = {"seconds": 0.05, "batches": (1, 8)}


def timed(*engines: Path, **options: Any) -> Any:
    out = engines[0].parent / "report"
    return dk.bench(engines, out=out, **{**SHORT, "force": True, **options})


def run_bench(patch: pytest.MonkeyPatch, *words: object) -> int:
    short = ("--seconds", "0.05", "--batches", "1")
    patch.setattr(sys, "argv", [str(word) for word in ("deploykit", "bench", *words, *short)])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())
    return int(ended.value.code or 0)


# TensorRT, on a machine made of Python below our runtime

alone = pytest.mark.usefixtures("onnxruntime_alone")


@alone
def test_an_engine_is_timed_against_the_model_it_was_built_from(
    machine: Machine, affine_onnx: Path
) -> None:
    """CUDA graphs and calls in flight have rows of their own; the weights are on the GPU once."""
    seen = machine(content=plan(layers=LAYERS.replace("Float", "Half"), weights=1000)).seen
    engine = dk.build(dk.quantize(affine_onnx, "fp16").path, "l4").path
    report = timed(engine, batches=(8,))
    cuda, name = seen["cuda"], "affine.fp16, TensorRT"
    assert cuda.held() == {}
    assert cuda.count["launch"] > 0
    assert cuda.most_library_bytes == 1000
    columns = {point.label: point for point in report.points}
    assert {label: p.scenario for label, p in columns.items() if "TensorRT" in label} == {
        name: "closed-loop",
        f"{name}, CUDA graphs": "closed-loop",
        f"{name}, overlap": "closed-loop, 2 calls in flight",
        f"{name}, CUDA graphs, overlap": "closed-loop, 2 calls in flight",
    }
    usable = {point.label for point in report.usable}  # all, but on a machine that is busy
    rivals = {name, f"{name}, CUDA graphs"} & usable if report.baseline in usable else set()
    compared = {found["label"] for found in report.to_dict()["speedups"]}
    assert compared & columns.keys() == rivals
    assert not any("overlap" in sentence for sentence in report.verdict[:1])
    assert (columns[name].device, columns[name].runtime) == ("cuda:0", "tensorrt 10.13.3.9")
    assert columns["fp32 CPU"].runtime.startswith("onnxruntime")
    assert [(each["file"], each["format"], each["precision"]) for each in report.artefacts] == [
        ("affine.onnx", "onnx", "fp32"),
        ("affine.fp16.trt", "tensorrt", "fp16"),
    ]
    assert report.artefacts[1]["built_on"]["gpu"] == "NVIDIA L4"
    parity = [(found["a"], found["b"]) for found in report.parity]
    assert parity == [("affine.onnx", "affine.fp16.trt")]


@alone
def test_without_the_float32_model_a_baseline_is_required(
    machine: Machine, affine_onnx: Path, tmp_path: Path
) -> None:
    machine(has_cuda=False)
    engine = dk.build(affine_onnx, "l4").path
    machine()
    with pytest.raises(dk.Unsupported, match="runs on a GPU only"):
        timed(engine, device="cpu")
    report = timed(affine_onnx, against=[engine])  # no baseline, but an engine to compare with
    assert report.baseline == "fp32 CPU"
    assert {label.partition(", ")[0] for label in report.asked} == {"fp32 CPU"}
    assert report.against[0] == "affine, TensorRT"
    assert Artefact(engine).manifest.evidence.verified is True  # before it was timed
    moved = affine_onnx.rename(tmp_path / "machine" / "model.onnx")
    with pytest.raises(dk.BadInput, match="is not next to it") as caught:
        timed(engine)
    assert "`against`" in (caught.value.hint or "")
    assert timed(engine, against=[moved]).artefacts[0]["file"] == "model.onnx"


@alone
def test_an_engine_without_a_manifest_is_timed_on_trust_and_the_report_says_so(
    machine: Machine, affine_onnx: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    machine()
    engine = dk.build(affine_onnx, "l4").path
    manifest_path(engine).unlink()
    with pytest.raises(dk.BadInput, match="has no manifest"):
        timed(engine, against=[affine_onnx])
    out = engine.parent / "report"
    against = ("--against", affine_onnx, "--trust", "-o", out)
    assert run_bench(monkeypatch, engine, *against) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    (warning,) = lines
    assert warning.startswith(f"warning: {engine}: loaded without a manifest: neither")
    report = read(out)
    assert warning.rpartition("/")[2] in report.notes
    assert report.artefacts[1]["precision"] == "unknown"


@alone
def test_batches_and_accuracy_stay_within_the_engines_sizes(
    machine: Machine, affine_onnx: Path, tmp_path: Path
) -> None:
    machine(content=plan((1, 4, 8), layers=LAYERS))
    engine = dk.build(affine_onnx, "l4", shapes=dk.Shapes(batch="1,4,8")).path
    data = tmp_path / "test.npz"
    np.savez(data, x=np.eye(4, dtype=np.float32).repeat(5, 0), labels=np.arange(4).repeat(5))
    report = timed(engine, batches=(4, 64), data=data)
    assert [point.batch for point in report.points if "TensorRT" in point.label] == [4] * 4
    assert [row.value.value for row in report.accuracy] == [1.0, 1.0]
    assert max(row["batch"] for row in report.parity[0]["rows"]) == 8


@alone
def test_a_throttled_gpu_is_a_warning(
    machine: Machine, affine_onnx: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    machine()
    engine = dk.build(affine_onnx, "l4").path
    hot = (GpuState("GPU-1", "NVIDIA L4", 0, "nvml", throttled=("hw_thermal",)),)
    monkeypatch.setattr(Devices, "read", lambda _self: hot)
    assert run_bench(monkeypatch, engine, "-o", engine.parent / "report") == 0
    said = capfd.readouterr()
    assert "the GPU lowered its clocks during the measurement: hw_thermal" in said.err
    assert "no speed-up is stated" in said.out
    report = read(engine.parent / "report")
    assert report.to_dict()["speedups"] == report.to_dict()["crossovers"] == []
    assert "×" not in " ".join(report.verdict)


@alone
def test_a_report_records_the_power_mode_and_the_heat_of_a_jetson(
    affine_onnx: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = write_files(tmp_path / "root", ORIN_NANO)
    made, here = Devices.__init__, replace(this_machine(), l4t="36.4.3", gpus=())
    monkeypatch.setattr(Devices, "__init__", lambda self, _: made(self, root))
    monkeypatch.setattr("deploykit.benchmarking.bench.this_machine", lambda: here)
    mode = {"var/lib/nvpmodel/status": "pmode:0000"}
    mode["etc/nvpmodel.conf"] = "< POWER_MODEL ID=0 NAME=15W >"
    write_files(root, mode)
    known = timed(affine_onnx, batches=(1,))
    assert not any("POWER MODE" in sentence for sentence in known.verdict)
    (held,) = known.conditions
    assert (held.power_mode, held.temperature_c) == ("15W", 48.0)
    assert held.power_mean_w == pytest.approx(5.52)  # of as many readings as there was time for
    assert held.clock_high_mhz == 624.75
    assert "| GPU: power mode | 15W |" in (tmp_path / "report" / "report.md").read_text("utf-8")
    assert "no NVIDIA GPU" not in " ".join(gap.why for gap in known.not_measured)


GPU, H200 = "model, GPU", (load_profile("h200"), "the driver names the GPU NVIDIA H200")


@pytest.fixture(scope="module", name="bench_gpu")
def bench_gpu_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`dk.bench` of a short run, on a machine whose GPU is an H200."""
    folder = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch, cpu_as_gpu():
        patch.setattr("deploykit.benchmarking.columns.installed", lambda _: False)
        patch.setattr("deploykit.benchmarking.limits.PROBE_FROM_S", 0.0)
        patch.setattr("deploykit.benchmarking.limits.recognise", lambda _: H200)
        found = keep_round_calibration(folder / "cache", patch)
        for threads in range(1, (os.cpu_count() or 1) + 1):  # the search may choose any
            assert store_calibration(replace(found, threads=threads)) == []
        model = save(mnist_like(), folder / "model.onnx")
        yield partial(timed, model, device="cuda")


def test_a_gpu_has_compute_alone_a_roofline_and_a_plan_of_its_own(bench_gpu: Any) -> None:
    (model,) = bench_gpu.args
    report = bench_gpu(batches=(1, 4), seconds=0.2)
    on_gpu = [point for point in report.points if point.device == "cuda:0"]
    assert [(point.label, point.batch) for point in on_gpu] == [(GPU, 1), (GPU, 4)]
    for point in report.points:
        assert (point.compute is not None) == (point in on_gpu)
    assert NOTE in " ".join(report.notes)
    for roofline, here in ((report.gpu_roofline, on_gpu), (report.roofline, None)):
        ceilings, marks = roofline["ceilings"], roofline["points"]
        assert {mark["label"] for mark in marks} == {
            p.label for p in report.points if (p in on_gpu) == (here is not None)
        }
        for mark in marks:
            assert mark["gflops"] <= ceilings["gflops"]
            assert mark["gflops"] / mark["intensity"] <= ceilings["gbytes_per_s"]
    (target,) = dk.plan(model, profiles=["h200"], batches=(1, 4)).targets
    planned = {p.batch: p.latency_ms for p in target.predictions if p.precision == "fp32"}
    medians = {(p.label, p.batch): p.latency.p50_ms for p in report.points}
    assert {each.label for each in report.predicted} >= {GPU}
    for each in report.predicted:
        assert each.measured_ms == medians[each.label, each.batch].value
        assert each.error == pytest.approx(each.predicted_ms / each.measured_ms - 1)
        if each.label == GPU:
            assert each.predicted_ms == pytest.approx(planned[each.batch])
            assert each.basis.startswith("the vendor's figures")
    assert not [each for each in report.energy if each.label == GPU]
    (gap,) = [each for each in report.not_measured if each.what == "energy of cuda:0"]
    assert "NVML" in gap.why
    page = (model.parent / "report" / "report.html").read_text(encoding="utf-8")
    assert "Roofline: what limits the speed on the GPU" in page
    document = json.loads((model.parent / "report" / "report.json").read_text(encoding="utf-8"))
    assert document["gpu_roofline"] == report.to_dict()["gpu_roofline"]
    document["energy"] = [{"label": "a", "batch": 1, "joules": 0.5, "above_idle": 0.25}]
    document["energy"][0] |= {"idle_w": 3.0, "source": "RAPL"}
    tables = {each.title: each for each in details(document)}
    assert len(tables["Predicted and measured"].rows) == len(report.predicted)
    assert tables["Energy"].rows == (("a", "1", "0.500", "0.250", "3.00", "RAPL"),)


def test_a_gpu_that_computes_something_else_is_not_timed(
    bench_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(self: Binding, feeds: Any) -> dict[str, np.ndarray]:
        return {name: np.zeros_like(value) for name, value in right(self, feeds).items()}

    right = Binding.__call__
    monkeypatch.setattr(Binding, "__call__", zeros)
    report = bench_gpu(batches=(1,))
    assert {point.device for point in report.points} == {"cpu"}
    (gap,) = [each for each in report.not_measured if each.what == "model.onnx on the GPU"]
    assert "SQNR" in gap.why
    (failed,) = [gate for gate in report.gates if not gate.passed]
    assert failed.name == "outputs of model.onnx on cuda"


def test_a_gpu_whose_ceilings_cannot_be_measured_has_the_reason(
    bench_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise OutOfMemory("cuda:0: out of memory")

    unknown = (None, "no profile names NVIDIA X")
    monkeypatch.setattr(probe, "measure_gpu", refuse)
    monkeypatch.setattr("deploykit.benchmarking.limits.recognise", lambda _: unknown)
    report = bench_gpu(batches=(1,))
    why = {each.what: each.why for each in report.not_measured}
    assert why["ceilings of the GPU"] == "cuda:0: out of memory"
    assert why["plan of the GPU"] == "no profile names NVIDIA X"
    assert report.gpu_roofline == {}
    assert GPU not in {each.label for each in report.predicted}
    assert [point.batch for point in report.points if point.label == GPU] == [1]


SEQUENCE = Case(
    "sequence",
    ("x:float32[batch_size,T,4]", "lengths:int64[batch_size]"),
    ("y:float32[batch_size,T,4]", "n:int64[batch_size]"),
    (("Mul", ["x", "two"], "y"), ("Identity", ["lengths"], "n")),
    "",
    lambda feeds: feeds,
    {"two": np.float32(2)},
)


def written(case: Case, folder: Path) -> Path:
    path = folder / f"{case.name}.onnx"
    path.write_bytes(onnx_model(case).SerializeToString())
    return path


@pytest.fixture
def sequence(tmp_path: Path, onnxruntime_alone: None) -> Path:
    return written(SEQUENCE, tmp_path)


def shapes(report: Any) -> dict[int, Any]:
    return {point.batch: point.shapes for point in report.points}


def test_a_batch_axis_of_any_name_is_swept_with_the_sizes_asked_for(sequence: Path) -> None:
    report = timed(sequence, axis={"T": 7})
    assert shapes(report) == {batch: {"x": (batch, 7, 4), "lengths": (batch,)} for batch in (1, 8)}
    assert "inputs: random numbers, T = 7" in report.notes


def test_random_numbers_that_a_model_refuses_are_named_before_the_search(tmp_path: Path) -> None:
    nodes, table = (("Gather", ["table", "i"], "y"),), {"table": np.zeros((1, 2), np.float32)}
    case = Case("table", ("i:int64[N]",), ("y:float32[N,2]",), nodes, "", dict, table)
    with pytest.raises(dk.BadInput, match="out of data bounds") as caught:
        timed(written(case, tmp_path))
    assert caught.value.hint == "`data`: inputs that the model takes; these were random numbers"


def test_the_data_given_or_golden_samples_are_what_is_timed(tmp_path: Path, sequence: Path) -> None:
    data, out = tmp_path / "data.npz", tmp_path / "recorded.onnx"
    x = np.arange(3 * 5 * 4, dtype=np.float32).reshape(3, 5, 4)
    np.savez(data, x=x, lengths=np.array([5, 4, 3]))
    report = timed(sequence, data=data)
    assert shapes(report)[8] == {"x": (8, 5, 4), "lengths": (8,)}
    assert "inputs: the data given, T = 5" in report.notes
    assert shapes(timed(sequence, data=data, axis={"T": 9}, batches=(1,)))[1]["x"] == (1, 9, 4)
    complete_model(Artefact.open(sequence), data, out, "onnxruntime")
    report = timed(out)
    assert shapes(report)[8]["x"] == (8, 5, 4)
    assert "inputs: golden samples, T = 5" in report.notes
    text = (tmp_path / "report" / "report.md").read_text("utf-8")
    assert "x 8×5×4; lengths 8" in text
    assert "inputs: golden samples, T = 5" in text


@pytest.mark.parametrize(
    ("axis", "problem", "hint"),
    [
        ({}, "how large is the axis T of its inputs", "`axis` T=SIZE"),
        ({"batch_size": 4}, "`axis` batch_size is the batch", ""),
        ({"H": 4}, "no input has a dynamic axis 'H'", ""),
        ({"T": 0}, "`axis` T must be 1 or more, got 0", ""),
    ],
)
def test_axes_that_make_no_sense_are_refused(
    sequence: Path, axis: dict[str, int], problem: str, hint: str
) -> None:
    with pytest.raises(dk.BadInput, match=problem) as caught:
        timed(sequence, axis=axis)
    assert hint in (caught.value.hint or "")


def test_rows_are_repeated_and_lengths_stay_within_their_rows() -> None:
    specs = (parse_spec("x:float32[T,N,2]"), parse_spec("lengths:int64[N]"))
    x = np.arange(4 * 3 * 2, dtype=np.float32).reshape(4, 3, 2)
    inputs = BenchInputs(specs, {"T": 2}, "data", {"x": x, "lengths": np.array([4, 1, 2])})
    feeds = inputs(5)
    assert (feeds["x"] == x[:2][:, [0, 1, 2, 0, 1]]).all()
    assert feeds["lengths"].tolist() == [2, 1, 2, 2, 1]
    assert feeds["lengths"].dtype == np.int64


@pytest.mark.torch
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_weights_alone_are_an_engine_with_their_arch(
    affine_onnx: Path, tmp_path: Path, ending: str
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arch, weights = tmp_path / "net.py", tmp_path / f"weights.{ending}"
    arch.write_text(AFFINE)
    state = {"two": torch.tensor(2.0), "one": torch.tensor(1.0)}
    if ending == "pt":
        torch.save(state, weights)
    else:
        pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_file(
            state, weights
        )
    with pytest.raises(
        BadInput, match=rf"weights\.{ending}: is a .* file, an \.onnx or \.trt file"
    ):
        timed(weights)
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


WEIGHTS = np.random.default_rng(1).standard_normal((16, 4))
MODELS = {  # the bound of INT8 let `other`, a tenth off, pass with a headline
    "right": WEIGHTS,
    "zeros": WEIGHTS * 0,
    "near": WEIGHTS + 0.02 * np.sign(WEIGHTS),
    "other": WEIGHTS + 0.05 * np.sign(WEIGHTS),
    "nan": WEIGHTS * np.nan,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Y = x W on float32[N,16], for all weights."""
    folder = tmp_path_factory.mktemp("wrong")
    nodes, x, y = (("MatMul", ["x", "w"], "y"),), ("x:float32[N,16]",), ("y:float32[N,4]",)
    return [
        written(Case(name, x, y, nodes, "", dict, {"w": weights.astype(np.float32)}), folder)
        for name, weights in MODELS.items()
    ]


@alone
def test_a_wrong_engine_is_timed_and_compared_with_nothing(paths: list[Path]) -> None:
    wrong = timed(*paths, scenarios=["offline"], device="cpu")
    assert {label.partition(",")[0] for label in wrong.wrong} == {"zeros", "other", "nan"}
    assert set(wrong.wrong) <= {point.label for point in wrong.points}
    document = wrong.to_dict()
    for rows in (document["speedups"], document["crossovers"], document["scenarios"]):
        assert rows
        assert not any(row["label"] in wrong.wrong for row in rows)
    first, *sentences = wrong.verdict
    assert first.startswith("3 of 4 gates NOT met: outputs of zeros.onnx: against right.onnx")
    assert first.endswith("Wrong outputs have no speed-up.")
    assert not any("zeros" in each for each in sentences)
    zeros, near, other, nan = wrong.gates
    assert [gate.passed for gate in wrong.gates] == [False, True, False, False]
    assert "SQNR 0.0 dB" in zeros.detail
    assert re.fullmatch(r"against right.onnx: SQNR \d\d.\d dB, 25 or more is asked", near.detail)
    assert "25 or more is asked" in other.detail
    assert "NaN or infinity" in nan.detail  # "SQNR inf dB, 15 or more is asked" read as if met
    assert "SQNR" not in nan.detail
    assert {label.partition(",")[0] for label in wrong.asked} == {*MODELS} - {"right"}
    assert wrong.provenance["affinity"]
    options = [point.options for point in wrong.points if point.processes == 1]
    assert {each["graph_optimization_level"] for each in options if each} == {"ORT_ENABLE_ALL"}
    assert {each["file"]: each["bytes"] for each in wrong.artefacts} == {
        path.name: path.stat().st_size for path in paths
    }


@alone
def test_the_command_ends_with_1_and_reports_the_accuracy_of_each_engine(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    right, zeros, *_ = paths
    x = np.random.default_rng(2).standard_normal((64, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, labels=(x @ WEIGHTS).argmax(axis=1))
    data = ("--data", tmp_path / "data.npz", "--device", "cpu", "-o", tmp_path / "out")
    assert run_bench(monkeypatch, zeros, "--baseline", right, *data) == 1
    printed = capfd.readouterr()
    assert "error: outputs of zeros.onnx: against right.onnx: output" in printed.err
    table, _, _ = printed.out.partition("\n\n")
    assert re.findall(r"^(.*?)  ", table, re.MULTILINE)[-1].startswith("✗ zeros")
    assert "✗: no verdict" in table
    report = read(tmp_path / "out")
    assert report.wrong
    assert not report.gates[0].passed
    scores = {row.label: row.value.value for row in report.accuracy}
    assert (scores["fp32 CPU"], scores["zeros"] < 0.5) == (1.0, True)
    (shown,) = [row for row in summary(report.to_dict()).rows if row[0] == "fp32 CPU"]
    assert shown[2].startswith("100.0")
