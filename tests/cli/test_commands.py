"""Each command once, as a user types it: what it writes, prints and returns."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from deploykit import __version__
from deploykit.cli import output, tables
from deploykit.core.artefact import Artefact
from deploykit.core.evidence import Interval
from deploykit.core.machine import Gpu, this_machine
from deploykit.core.profile import profile_names
from deploykit.evaluation import doctor
from deploykit.reporting import report as reports
from tests.support.calibrations import keep_round_calibration
from tests.support.cli.command import Run
from tests.support.http_server import Handler, http_server
from tests.support.measure.simulated import simulated


def test_no_command_shows_the_help_and_is_exit_2_and_a_bug_70_with_one_line(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("--version")
    assert (ran.code, ran.out) == (0, f"deploykit {__version__}\n")
    ran = run()
    assert ran.code == 2
    assert "error:" not in ran.err
    assert "\n  quantize " in ran.err

    def broken(*_: object) -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("deploykit.evaluation.inspect.inspect", broken)
    ran = run("inspect", model)
    assert ran.code == 70
    assert "RuntimeError: first second" in ran.error()


def test_quantize_to_int8_writes_file_manifest_and_accuracy(
    run: Run, model: Path, samples: Path, tmp_path: Path
) -> None:
    out = tmp_path / "q.onnx"
    ran = run(
        *("quantize", model, "--to", "int8", "--calib", samples, "--data", samples),
        *("--max-drop", 0.5, "-o", out, "--json"),
    )
    assert ran.code == 0, ran.err
    drop = json.loads(ran.out)["drop"]
    assert drop["n"] == 60
    assert drop["drop"]["low"] <= drop["drop"]["value"] <= drop["drop"]["high"] <= 0.5
    manifest = Artefact(out).manifest
    assert manifest is not None
    assert manifest.precision["int8"] > 0
    assert manifest.evidence.accuracy.drop.n == 60


def test_what_a_metric_prints_leaves_stdout_to_the_result(
    run: Run, model: Path, samples: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text("print('read')\ndef f(outputs, labels):\n    print('run'); return 0 * labels\n")
    ran = run(
        *("quantize", model, "--to", "fp16", "--data", samples, "--metric", f"{own}:f"),
        *("--max-drop", 0.5, "--json"),
    )
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["drop"]["n"] == 60
    assert "\nread\nrun\n" in ran.err


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
    made = json.loads(ran.out)
    assert made["manifest"]["precision"]["int8"] >= 3
    assert made["manifest"]["built_on"]["profile"] == "cpu"
    assert made["parity"]["passed"]
    quantized = tmp_path / "q.onnx"
    words = ("--to", "int8", "--calib", samples, "--profile", "cpu", "-o", quantized)
    assert run("quantize", model, *words).code == 0  # its pairs are placed for the CPU
    ran = run("build", quantized, "--force")
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
    seen = json.loads(ran.out)
    assert seen["precision"]["float16"] > 0
    assert seen["details"]["operators"]["Conv"] == 2
    assert "t4" in seen["fits"]
    assert len(seen["manifest"]["made_from"]) == 1


def test_quantize_says_what_was_not_checked_and_compare_fails_by_the_bound(
    run: Run, model: Path
) -> None:
    ran = run("quantize", model, "--to", "fp16")
    assert ran.code == 0, ran.err
    assert "accuracy not measured" in ran.out
    assert "not checked for float16 overflow" in ran.out
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
    assert json.loads(ran.out)["accuracy"]["value"] == 1.0
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
    report = json.loads((out / "report.json").read_text())
    assert report == json.loads(ran.out)
    assert report["baseline"] == "fp32 CPU"
    assert {point["batch"] for point in report["points"]} == {1, 2}
    assert {row["precision"] for row in report["accuracy"]} == {"fp32", "fp16"}
    gaps = {gap["what"] for gap in report["not_measured"]}
    assert {"GPU", "INT8 on the CPU", "PyTorch on the CPU"} <= gaps
    assert "accuracy" not in gaps
    assert "fp32 CPU" in (out / "report.html").read_text()
    assert "fp32 CPU" in (out / "report.md").read_text()


def test_doctor_says_what_the_demo_and_an_engine_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo needs neither TensorRT nor a GPU; an engine needs both."""
    gpu = Gpu("NVIDIA L4", 24_000_000_000, "580.0", "8.9")
    monkeypatch.setattr(doctor, "installed", lambda name: name not in ("tensorrt", "cuda", "PIL"))
    whys = []
    for gpus in ((), (gpu,)):
        here = replace(this_machine(), gpus=gpus)
        monkeypatch.setattr(doctor, "this_machine", lambda _root, here=here: here)
        checks = {each.command: each for each in doctor.doctor().checks}
        assert checks["demo"].works
        whys.append(checks["build, bench, serve of TensorRT engines"].why)
    assert "no NVIDIA GPU" in whys[0]
    assert whys[1].startswith("tensorrt, cuda: pip install")
    assert whys[1].count("[tensorrt-cu12]") == 1  # of both packages


def test_profiles_mark_what_was_derived_and_what_is_not_verified(run: Run) -> None:
    shown = " ".join(run("profiles", "jetson-thor-t4000").out.split())
    for row in (
        "memory 56.0 GiB derived: 64 GiB less 1/8, as no report of the driver is known",
        "multiprocessors 12 not verified",
        "derived: 1200e12 / 2: the vendor's figure is sparse",
        "nvcr.io/nvidia/cuda:13.0.1-base-ubuntu24.04",
        "power 70 W at most",
    ):
        assert row in shown
    assert "source: http" in run("profiles", "jetson-agx-orin-64gb@MODE_30W").out
    assert [each["name"] for each in json.loads(run("profiles", "--json").out)] == profile_names()
    lines = run("profiles").out.splitlines()
    stars = {line.split()[0]: line.count("*") for line in lines if line}
    assert stars.keys() >= set(profile_names())
    assert (stars["t4"], stars["l4"], stars["gb10"]) == (0, 2, 1)  # l4: fp16 and int8


class NotReady(Handler):
    """Answers every request with 503 and the protocol's error document."""

    def reply(self) -> None:
        self.answer(503, b'{"error": "model \'digits\' is loading\\u0007"}')


def test_health_is_exit_0_only_from_a_server_that_is_ready(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dk.serve(model, http_port=0, grpc_port=None) as server:
        assert run("health", server.url).out == f"{server.url} is ready\n"
        # as the health check of a container calls it
        monkeypatch.setenv("DEPLOYKIT_HTTP_PORT", server.url.rpartition(":")[2])
        assert run("health").code == 0
    with http_server(NotReady) as url:
        ran = run("health", url)
    loading = "not ready: it answered 503: model 'digits' is loading"
    assert (ran.code, ran.error()) == (1, f"error: {url}: {loading}")
    ran = run("health", "http://127.0.0.1:1")
    assert ran.code == 1
    assert "http://127.0.0.1:1: no server answers there: Connection refused" in ran.error()


def test_plan_shows_a_few_targets_in_full_and_all_in_a_line_each(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_round_calibration(tmp_path / "cache", monkeypatch)
    ran = run(
        *("plan", model, "--profile", "cpu", "--profile", "l4", "--batches", "1,8"),
        *("--slo-ms", 20, "--rate", 1000),
    )
    assert ran.code == 0
    for shown in (
        "cpu: This machine's CPU, through ONNX Runtime (one probe of this machine's CPU)",
        "not yet checked on this GPU",
        "cpu meets 20.0 ms: int8 at batch 8",
        "l4 carries 1,000/s with 1 replica of at most",
        "hint: ",
    ):
        assert shown in ran.out
    assert "e-" not in ran.out.split("note:")[0].replace("one-", "")  # no exponents
    table = [line.split() for line in ran.out.splitlines() if line.startswith(("fp", "int8", "bf"))]
    begin = [[precision, batch] for precision in ("fp32", "int8") for batch in "18"]
    assert [row[:2] for row in table[:4]] == begin
    assert all("yes" in row for row in table)
    ran = run("plan", model)
    assert ran.code == 0
    for name in ("cpu", "h200", "jetson-thor-t5000", "v100"):
        assert sum(line.startswith(f"{name} ") for line in ran.out.splitlines()) == 1


def test_plan_has_json_and_a_latency_that_none_meets_is_exit_1_after_the_table(
    run: Run, model: Path
) -> None:
    document = json.loads(run("plan", model, "--profile", "l4", "--json").out)
    shares = document["targets"][0]["predictions"][0]["shares"]
    assert shares.keys() == {"compute", "memory", "launch", "copies"}
    assert document["nodes"][0]["flops"] > 0
    assert document["batches"] == [1, 8, 32]
    ran = run("plan", model, "--profile", "l4", "--slo-ms", "0.0000001")
    assert ran.code == 1
    assert "l4 does not meet 0.000000100 ms" in ran.out
    assert "error: " in ran.err
    assert "another --profile" in ran.err


def test_compare_of_reports_takes_folders_and_files_and_exits_by_the_bound(
    run: Run, tmp_path: Path
) -> None:
    for name, report in (("a", simulated(1)), ("b", simulated(2, 1.2))):  # b is 20 % slower
        reports.write(report, tmp_path / name)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    shown = run("compare", f"{a}/report.json", b)
    assert shown.code == 0
    assert f"{b} (B) against {a}/report.json (A): 9 slower" in shown.out
    assert "The intervals of all 9 ratios hold together" in shown.out
    failed = run("compare", a, b, "--fail-on-regression", "5%", "--json")
    assert failed.code == 1
    assert len(json.loads(failed.out)["regressions"]) == 9
    assert f"error: {b} is slower than {a} by more than 5.00 %: model, batch 1" in failed.err
    assert run("compare", b, a, "--fail-on-regression", "5%").code == 0


def test_a_slow_engine_has_a_rate_and_six_conclusions_follow_the_headline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    many = replace(simulated(1), verdict=tuple(f"Sentence {number}." for number in range(12)))
    rate = Interval(0.0123, 0.012, 0.0125)
    slow = replace(many, points=tuple(replace(p, throughput_per_s=rate) for p in many.points))
    output.show_parts(tables.report(slow, tmp_path))
    shown = capsys.readouterr().out
    assert shown.count("  0.0123") == len(slow.points)
    assert re.findall(r"Sentence (\d+)", shown) == [*"0123456"]
    assert "more conclusions are in the report" in shown
