"""Other runtimes on the CPU as columns that nobody asked for: found, gated, searched, named."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from deploykit.benchmarking import columns as bench_rivals
from deploykit.benchmarking.bench import Proofs
from deploykit.benchmarking.columns import (
    Columns,
    Entry,
    choose_columns,
    open_entries,
    open_entry,
    open_on_cpu,
)
from deploykit.benchmarking.processes import ProcessEngine
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.machine import Machine, this_machine
from deploykit.reporting.points import CpuSearch, CpuSettings, CpuTrial
from deploykit.reporting.report import NotMeasured, Report
from tests.support.onnx_zoo import mnist_like, save

needs_openvino = pytest.mark.skipif(
    not bench_rivals.installed("openvino"), reason="openvino is not installed"
)


def machine(*features: str) -> Machine:
    return replace(this_machine(), cpu_features=features)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "model.onnx")


def entry(path: Path) -> Entry:
    return open_entry(Artefact.open(path), False, print)


def int8_of(model: Path) -> Path:
    x = np.random.default_rng(0).standard_normal((64, 1, 28, 28)).astype(np.float32)
    np.savez(model.with_name("x.npz"), image=x)
    calib = model.with_name("x.npz")
    return dk.quantize(model, to="int8", calib=calib, runtime="onnxruntime").path


def timed(*engines: Path, batches: tuple[int, ...] = (1,), seconds: float = 0.05) -> Report:
    return dk.bench(
        engines,
        out=engines[0].parent / "report",
        warmup_s=0,
        seconds=seconds,
        batches=batches,
        device="cpu",
    )


@needs_openvino
def test_each_precision_is_tried_in_openvino_and_bfloat16_where_the_cpu_has_it(
    model: Path, tmp_path: Path
) -> None:
    every = [entry(model), entry(int8_of(model))]
    found, gaps = bench_rivals.find_rivals(every, machine("avx512_bf16"), tmp_path)
    assert [each.rival for each in found] == ["OpenVINO fp32", "OpenVINO int8", "OpenVINO bf16"]
    assert [each.what for each in gaps] == ["PyTorch on the CPU"]
    assert len({each.key for each in (*every, *found)}) == 5
    again = pickle.loads(pickle.dumps(found))  # as sessions in processes of their own open them
    assert [each.key for each in again] == [each.key for each in found]
    found, gaps = bench_rivals.find_rivals(every[:1], machine(), tmp_path)
    assert [each.rival for each in found] == ["OpenVINO fp32"]
    reasons = {each.what: each.why for each in gaps}
    assert "no instructions" in reasons["OpenVINO bf16 on the CPU"]
    assert "deploykit quantize --to int8" in reasons["INT8 on the CPU"]


@needs_openvino
def test_two_files_of_one_precision_have_labels_of_their_own_and_copies_none(
    model: Path, tmp_path: Path
) -> None:
    copy, other = tmp_path / "copy.onnx", tmp_path / "other.onnx"
    copy.write_bytes(model.read_bytes())
    other.write_bytes(model.read_bytes() + b"\x32\x01x")  # doc_string
    every = open_entries([model, copy, other], None, False, print)
    found, _ = bench_rivals.find_rivals(every, machine(), tmp_path)
    assert [each.rival for each in found] == ["OpenVINO fp32 of model", "OpenVINO fp32 of other"]


def test_what_is_not_installed_is_named_with_what_installs_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_rivals, "installed", lambda _: False)
    found, gaps = bench_rivals.find_rivals([entry(model)], machine("avx512_bf16"), tmp_path)
    assert found == []
    reasons = {each.what: each.why for each in gaps}
    assert reasons["OpenVINO on the CPU"].startswith("not installed: pip install")
    assert "[openvino]" in reasons["OpenVINO on the CPU"]
    assert "checkpoint" in reasons["PyTorch on the CPU"]


@needs_openvino
def test_a_rival_whose_outputs_are_wrong_is_a_gap_and_fails_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploykit.engines.openvino import OpenVinoEngine

    call = OpenVinoEngine.__call__

    def wrong(self: OpenVinoEngine, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: array * 0 for name, array in call(self, feeds).items()}

    reference = entry(model)
    (rival,), gaps = bench_rivals.find_rivals([reference], machine(), tmp_path)
    with reference.open("cpu") as base:
        proofs = Proofs(base, reference, None, "cpu", print)
        assert proofs.admit(rival, gaps)
        assert proofs.gates == {}  # nobody asked for it
        monkeypatch.setattr(OpenVinoEngine, "__call__", wrong)
        assert not proofs.admit(rival, gaps)
    assert gaps[-1].what == "OpenVINO fp32 on the CPU"
    assert "SQNR 0.0 dB" in gaps[-1].why


@needs_openvino
def test_a_rival_that_cannot_run_the_model_is_a_gap(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = entry(model)
    (rival,), gaps = bench_rivals.find_rivals([reference], machine(), tmp_path)

    def refuse(_device: str) -> None:
        raise BadInput("model.onnx: OpenVINO has no operator Foo")

    with reference.open("cpu") as base:
        proofs = Proofs(base, reference, None, "cpu", print)
        assert not proofs.admit(replace(rival, open=refuse), gaps)
    assert gaps[-1] == NotMeasured(
        "OpenVINO fp32 on the CPU", "model.onnx: OpenVINO has no operator Foo"
    )


ONE, TWO = CpuSettings(1, 2), CpuSettings(2, 1)
FREE = CpuSettings(1, 2, None)


@pytest.mark.parametrize(("rate", "batches"), [(80.0, (1, 8)), (60.0, (8,))])
def test_a_rival_has_a_column_only_where_the_search_found_it_near_the_fastest(
    affine_onnx: Path, rate: float, batches: tuple[int, ...]
) -> None:
    reference = open_entries([affine_onnx], None, False, print)[0]
    rival = replace(reference, runtime="openvino", rival="OpenVINO fp32", label="OpenVINO fp32")
    rates = {"": (100.0, 100.0), "OpenVINO fp32": (rate, 300.0)}

    def search(item: Entry, batch: int) -> CpuSearch:
        settings = FREE if item.rival else ONE
        trials = (CpuTrial(settings, rates[item.rival][batch == 8]),)
        return CpuSearch(item.artefact.name, batch, trials, item.runtime)

    found: Columns = choose_columns(
        reference, [reference, rival], this_machine(), "cpu", (1, 8), search
    )
    assert [(each.label, each.settings, each.batches) for each in found.setups] == [
        ("fp32 CPU", str(ONE), (1, 8)),
        ("OpenVINO fp32", "1 session of 2 threads", batches),
    ]
    assert {each.entry for each in found.setups} == {reference.key, rival.key}
    behind = [each.why for each in found.gaps if each.what == "OpenVINO fp32 on the CPU at batch 1"]
    assert behind == ["far slower than others in the search"] * (batches == (8,))


@needs_openvino
def test_a_bench_times_openvino_and_names_its_precision_in_the_report(model: Path) -> None:
    report = timed(model, batches=(8,))
    searched = {each.runtime for each in report.cpu_search}
    assert searched == {"onnxruntime", "openvino"}
    for point in report.points:
        if point.label.startswith("OpenVINO"):
            assert point.runtime.startswith("openvino ")
            assert {"fp32": "float32", "bf16": "bfloat16"}[point.precision] in point.options[
                "layers"
            ]
    assert all(label.startswith("fp32 CPU") for label in report.asked)
    assert all("OpenVINO" not in gate.name for gate in report.gates)


@needs_openvino
def test_a_file_built_for_openvino_is_asked_for_and_searched_like_the_others(model: Path) -> None:
    built = dk.build(model, "cpu-openvino").path
    report = timed(built, model)
    assert report.asked == ("model.cpu-openvino in OpenVINO",)
    (point,) = [each for each in report.points if each.label in report.asked]
    assert "thread" in point.settings
    assert [each.name for each in report.gates] == ["outputs of model.cpu-openvino.onnx"]


@pytest.mark.torch
def test_a_checkpoint_is_timed_in_processes_of_its_own_in_both_precisions(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from deploykit.core.recipe import load_recipe
    from deploykit.engines.torch.open import save_checkpoint

    recipe = load_recipe("mnist-cnn")
    checkpoint = tmp_path / "mnist.pt"
    save_checkpoint(checkpoint, recipe.build(), "mnist-cnn", recipe.inputs, recipe.outputs)
    model = save(mnist_like(), tmp_path / "model.onnx")
    every = [entry(model), entry(checkpoint)]
    assert (every[1].runtime, every[1].precision) == ("torch", "fp32")
    found, gaps = bench_rivals.find_rivals(every, machine(), tmp_path)
    (half,) = [each for each in found if each.runtime == "torch"]
    assert (half.rival, half.precision) == ("PyTorch bf16", "bf16")
    assert "PyTorch on the CPU" not in {each.what for each in gaps}
    feeds = {"image": np.random.default_rng(0).standard_normal((2, 1, 28, 28)).astype(np.float32)}
    with every[1].open("cpu") as exact, half.open("cpu") as rounded:
        wanted, found_half = exact(feeds)["logits"], rounded(feeds)["logits"]
    assert found_half.dtype == np.float32
    error = np.abs(found_half - wanted).max() / np.abs(wanted).max()
    assert 1e-5 < error < 5e-2  # 8 bits of mantissa
    with open_on_cpu(half, CpuSettings(1, 1, None, processes=True)) as engine:
        assert isinstance(engine, ProcessEngine)
        np.testing.assert_allclose(engine(feeds)["logits"], found_half, rtol=0.1, atol=0.05)
        assert engine.runtime.startswith("torch ")
