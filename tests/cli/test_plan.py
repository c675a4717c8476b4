from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.calibrations import keep_round_calibration
from tests.support.cli.command import Run
from tests.support.onnx_zoo import linear, save


@pytest.fixture(autouse=True)
def _round_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_round_calibration(tmp_path / "cache", monkeypatch)


def test_a_few_targets_are_shown_in_full_with_what_was_asked(run: Run, model: Path) -> None:
    ran = run(
        *("plan", model, "--profile", "cpu", "--profile", "l4", "--batches", "1,8"),
        *("--slo-ms", 20, "--rate", 1000),
    )
    assert ran.code == 0
    assert (
        "cpu: This machine's CPU, through ONNX Runtime (one probe of this machine's CPU)" in ran.out
    )
    assert "not yet checked on this GPU" in ran.out
    assert "cpu meets 20.0 ms: int8 at batch 8" in ran.out
    assert "l4 carries 1,000/s with 1 replica of at most" in ran.out
    assert "hint: " in ran.out
    assert "e-" not in ran.out.split("note:")[0].replace("one-", "")  # no exponents
    table = [line.split() for line in ran.out.splitlines() if line.startswith(("fp", "int8", "bf"))]
    assert [row[:2] for row in table[:4]] == [
        ["fp32", "1"],
        ["fp32", "8"],
        ["int8", "1"],
        ["int8", "8"],
    ]
    assert all("yes" in row for row in table)


def test_all_targets_have_a_line_each(run: Run, model: Path) -> None:
    ran = run("plan", model)
    assert ran.code == 0
    for name in ("cpu", "h200", "jetson-thor-t5000", "v100"):
        assert sum(line.startswith(f"{name} ") for line in ran.out.splitlines()) == 1


def test_json_has_every_target_node_and_note(run: Run, model: Path) -> None:
    document = json.loads(run("plan", model, "--profile", "l4", "--json").out)
    assert document["targets"][0]["predictions"][0]["shares"].keys() == {
        "compute",
        "memory",
        "launch",
        "copies",
    }
    assert document["nodes"][0]["flops"] > 0
    assert document["batches"] == [1, 8, 32]


def test_a_latency_that_none_meets_is_exit_1_after_the_table(run: Run, model: Path) -> None:
    ran = run("plan", model, "--profile", "l4", "--slo-ms", "0.0000001")
    assert ran.code == 1
    assert "l4 does not meet 0.000000100 ms" in ran.out
    assert "error: " in ran.err
    assert "another --profile" in ran.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--profile", "h300"), "error: no profile 'h300'\nhint: did you mean h200"),
        (("--slo-ms", "nan"), "error: --slo-ms must be 1e-09 to 1e+15, got nan"),
        (("--rate", "5"), "error: --rate needs the latency"),
        (("--axis", "T"), "error: --axis T: must be names of axes with a size each\nhint: --axis"),
        (("--axis", "T=3"), "no dynamic axis 'T'; it has: none but the batch"),
        (("--axis", "N=3"), "hint: --batches sets the batch"),
        (("--batches", "0"), "error: --batches 0: must be sizes of at least 1"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(
    run: Run, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    ran = run("plan", save(linear(), tmp_path / "m.onnx"), *options)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert "Traceback" not in ran.err
