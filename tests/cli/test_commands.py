"""Each command once, as a user types it: what it writes, prints and returns."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deploykit import __version__
from deploykit.core.artefact import Artefact
from deploykit.core.machine import Gpu, this_machine
from deploykit.core.profile import profile_names
from tests.support.cli.command import Run


def document(text: str) -> dict:
    """The single JSON document on stdout."""
    return json.loads(text)


def test_version(run: Run) -> None:
    ran = run("--version")
    assert (ran.code, ran.out) == (0, f"deploykit {__version__}\n")


def test_no_command_shows_the_help_and_is_exit_2(run: Run) -> None:
    ran = run()
    assert ran.code == 2
    assert "error:" not in ran.err
    assert "\n  quantize " in ran.err


def test_quantize_to_int8_writes_file_manifest_and_accuracy(
    run: Run, model: Path, samples: Path, tmp_path: Path
) -> None:
    out = tmp_path / "q.onnx"
    ran = run(
        *("quantize", model, "--to", "int8", "--calib", samples, "--data", samples),
        *("--max-drop", 0.5, "-o", out, "--json"),
    )
    assert ran.code == 0, ran.err
    drop = document(ran.out)["drop"]
    assert drop["n"] == 60
    assert drop["drop"]["low"] <= drop["drop"]["value"] <= drop["drop"]["high"] <= 0.5
    manifest = Artefact(out).manifest
    assert manifest is not None
    assert manifest.precision["int8"] > 0
    assert manifest.evidence.accuracy.drop.n == 60


def test_quantize_to_fp16_without_data_says_what_was_not_checked(run: Run, model: Path) -> None:
    ran = run("quantize", model, "--to", "fp16")
    assert ran.code == 0, ran.err
    assert "accuracy not measured" in ran.out
    assert "not checked for float16 overflow" in ran.out
    assert model.with_suffix(".fp16.onnx").is_file()


def test_an_accuracy_gate_that_fails_keeps_the_file_under_another_name(
    run: Run, model: Path, samples: Path, tmp_path: Path
) -> None:
    out = tmp_path / "q.onnx"
    out.write_text("what was there before")
    ran = run(
        *("quantize", model, "--to", "int8", "--calib", samples, "--data", samples),
        *("--max-drop", 0.0001, "-o", out, "--force"),
    )
    assert ran.code == 1
    assert "n = 60" in ran.error()
    assert "above 0.01 pp" in ran.error()
    assert "drop" in ran.out  # the table is shown before the error
    assert out.read_text() == "what was there before"
    assert (tmp_path / "q.rejected.onnx").is_file()


def test_build_for_the_cpu_reads_the_precision_back(
    run: Run, model: Path, samples: Path, tmp_path: Path
) -> None:
    out = tmp_path / "built.onnx"
    ran = run(
        *("build", model, "--profile", "cpu", "--precision", "int8", "--calib", samples),
        *("-o", out, "--json"),
    )
    assert ran.code == 0, ran.err
    made = document(ran.out)
    assert made["manifest"]["precision"]["int8"] >= 3
    assert made["manifest"]["built_on"]["profile"] == "cpu"
    assert made["parity"]["passed"]


def test_build_for_the_cpu_refuses_pairs_that_it_cannot_move(
    run: Run, model: Path, samples: Path, tmp_path: Path
) -> None:
    quantized, out = tmp_path / "q.onnx", tmp_path / "built.onnx"
    words = ("quantize", model, "--to", "int8", "--calib", samples, "-o", quantized)
    assert run(*words, "--other-nodes", "fp16").code == 0
    ran = run("build", quantized, "--profile", "cpu", "-o", out)
    assert ran.code == 2
    assert "INT8 nodes in integers" in ran.error()
    assert "it computes in float16 between" in ran.error()
    assert "--profile cpu --precision int8 --calib FILE.npz" in ran.err
    assert not out.exists()


def test_quantize_for_a_cpu_profile_places_pairs_for_it(
    run: Run, model: Path, samples: Path, tmp_path: Path
) -> None:
    quantized, out = tmp_path / "q.onnx", tmp_path / "built.onnx"
    asked = ("quantize", model, "--to", "int8", "--calib", samples, "--profile", "cpu")
    assert run(*asked, "-o", quantized).code == 0
    ran = run("build", quantized, "--profile", "cpu", "-o", out, "--json")
    assert ran.code == 0, ran.err
    made = document(ran.out)
    assert made["manifest"]["precision"]["int8"] >= 3
    assert made["notes"] == []


def test_build_auto_names_the_profile_it_chose(run: Run, model: Path) -> None:
    ran = run("build", model)
    assert ran.code == 0, ran.err
    assert "note: profile auto: cpu (" in ran.out


def test_build_for_tensorrt_says_what_would_work_here(
    run: Run, model: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    ran = run("build", model, "--profile", "jetson-orin-nano-8gb")
    assert ran.code == 3
    assert "jetson-orin-nano-8gb" in ran.error()
    assert "--profile cpu" in ran.err
    assert sorted(tmp_path.iterdir()) == before


def test_inspect_shows_tensors_operators_and_provenance(run: Run, model: Path) -> None:
    run("quantize", model, "--to", "fp16")
    ran = run("inspect", model.with_suffix(".fp16.onnx"), "--json")
    assert ran.code == 0, ran.err
    seen = document(ran.out)
    assert seen["precision"]["float16"] > 0
    assert seen["details"]["operators"]["Conv"] == 2
    assert "t4" in seen["fits"]
    assert len(seen["manifest"]["made_from"]) == 1


def test_compare_passes_and_fails_by_the_bound(run: Run, model: Path) -> None:
    run("quantize", model, "--to", "fp16")
    half = model.with_suffix(".fp16.onnx")
    assert run("compare", model, half, "--max-error", 0.1).code == 0
    ran = run("compare", model, half, "--max-error", 1e-9)
    assert ran.code == 1
    assert "SQNR" in ran.out
    assert "is above 1e-09" in ran.error()


def test_predict_writes_every_row_and_scores_it(
    run: Run, model: Path, samples: Path, tmp_path: Path
) -> None:
    from deploykit.engines.engine import load

    out = tmp_path / "answers.npz"
    ran = run("predict", model, samples, "-o", out, "--batch", 7, "--json")
    assert ran.code == 0, ran.err
    assert document(ran.out)["accuracy"]["value"] == 1.0
    with load(model, "cpu") as engine, np.load(samples) as given, np.load(out) as answers:
        name, output = engine.inputs[0].name, engine.outputs[0].name
        whole = engine({name: given[name]})[output]
        np.testing.assert_allclose(answers[output], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("onnxruntime_alone")
def test_bench_writes_a_report_with_baseline_and_accuracy(
    run: Run, model: Path, samples: Path, tmp_path: Path
) -> None:
    run("quantize", model, "--to", "fp16")
    half, out = model.with_suffix(".fp16.onnx"), tmp_path / "report"
    ran = run(
        *("bench", half, "--against", model, "--batches", "1,2", "--data", samples),
        *("--seconds", 0.05, "--device", "cpu", "-o", out, "--json"),
    )
    assert ran.code == 0, ran.err
    report = document((out / "report.json").read_text())
    assert report == document(ran.out)
    assert report["baseline"] == "fp32 CPU"
    assert {point["batch"] for point in report["points"]} == {1, 2}
    assert {row["precision"] for row in report["accuracy"]} == {"fp32", "fp16"}
    gaps = {gap["what"] for gap in report["not_measured"]}
    assert {"GPU", "INT8 on the CPU", "PyTorch on the CPU"} <= gaps
    assert "accuracy" not in gaps
    assert "fp32 CPU" in (out / "report.html").read_text()
    assert "fp32 CPU" in (out / "report.md").read_text()


def test_bench_asks_for_the_float32_model_of_an_engine(run: Run, model: Path) -> None:
    run("quantize", model, "--to", "fp16")
    half = model.with_suffix(".fp16.onnx")
    model.unlink()  # else it is the baseline, as the file next to it that it was made from
    ran = run("bench", half, "--seconds", 0.05)
    assert ran.code == 2
    assert "is fp16 in onnx, and the float32 model that it was made from is not next" in ran.err
    assert "hint: --against: the float32 .onnx file" in ran.err


def test_bench_refuses_to_compare_models_of_other_inputs(
    run: Run, model: Path, tmp_path: Path
) -> None:
    from tests.support.onnx_zoo import linear, save

    other = save(linear(), tmp_path / "other.onnx")
    ran = run("bench", other, "--against", model, "--seconds", 0.05, "-o", tmp_path / "r")
    assert ran.code == 2
    assert "other.onnx" in ran.error()
    assert not (tmp_path / "r" / "report.json").exists()


def test_doctor_says_what_the_demo_and_an_engine_need(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A demo needs neither TensorRT nor a GPU; an engine needs both."""
    from deploykit.evaluation import doctor

    here = replace(this_machine(), gpus=())
    monkeypatch.setattr(doctor, "this_machine", lambda _root: here)
    monkeypatch.setattr(doctor, "installed", lambda name: name not in ("tensorrt", "cuda", "PIL"))
    checks = {each.command: each for each in doctor.doctor().checks}
    assert checks["demo"].works
    assert "[tensorrt]" in checks["build --check"].why
    assert "no NVIDIA GPU" in checks["build, bench, serve of TensorRT engines"].why
    gpu = Gpu("NVIDIA L4", 24_000_000_000, "580.0", "8.9")
    monkeypatch.setattr(doctor, "this_machine", lambda _root: replace(here, gpus=(gpu,)))
    checks = {each.command: each for each in doctor.doctor().checks}
    why = checks["build, bench, serve of TensorRT engines"].why
    assert why.startswith("tensorrt, cuda: pip install")
    assert why.count("[tensorrt-cu12]") == 1  # of both packages


@pytest.mark.parametrize("name", ["cpu", "h200", "l4", "t4", "jetson-agx-orin-64gb@MODE_30W"])
def test_profiles_shows_one_in_full(run: Run, name: str) -> None:
    ran = run("profiles", name)
    assert ran.code == 0
    assert "source: http" in ran.out


def test_a_profiles_card_marks_what_was_derived_and_what_is_not_verified(run: Run) -> None:
    lines = run("profiles", "jetson-thor-t4000").out.splitlines()
    row = {line.partition("  ")[0]: " ".join(line.split()) for line in lines}
    assert row["memory"] == (
        "memory 56.0 GiB derived: 64 GiB less 1/8, as no report of the driver is known"
    )
    assert row["multiprocessors"] == "multiprocessors 12 not verified"
    assert row["peak fp4"].endswith("derived: 1200e12 / 2: the vendor's figure is sparse")
    assert row["jetpack-7.0"].endswith("nvcr.io/nvidia/cuda:13.0.1-base-ubuntu24.04")
    assert row["power"] == "power 70 W at most"


def test_profiles_lists_all(run: Run) -> None:
    ran = run("profiles", "--json")
    assert [profile["name"] for profile in json.loads(ran.out)] == profile_names()
    lines = run("profiles").out.splitlines()
    assert len(lines) > len(profile_names())
    stars = {line.split()[0]: line.count("*") for line in lines if line}
    assert (stars["t4"], stars["l4"], stars["gb10"]) == (0, 2, 1)  # l4: fp16 and int8


def test_build_takes_auto_for_the_precision(
    run: Run, model: Path, samples: Path, tmp_path: Path
) -> None:
    out = tmp_path / "built.onnx"
    ran = run(
        *("build", model, "--profile", "cpu", "--precision", "auto", "--calib", samples),
        *("-o", out, "--json"),
    )
    assert ran.code == 0, ran.err
    made = document(ran.out)
    assert made["manifest"]["evidence"]["source_graph"]["quantize"]["to"] == "auto"
    assert any("float32 stays" in note or "INT8" in note for note in made["notes"])


@pytest.mark.parametrize("words", [("--version",), ("inspect", "nothere.onnx")])
def test_a_program_that_runs_the_command_line_keeps_its_signal_handlers(
    run: Run, words: tuple[str, ...]
) -> None:
    def own(*_: object) -> None:
        """The program's."""

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, own)
    run(*words)
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == [own, own]
