"""How a plan that does not fit is built again: the command in the hint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deploykit.core.errors import Unsupported
from deploykit.engines.tensorrt.compatibility import check_plan, rebuild
from tests.support.runtimes.plans import CONTENT, HERE, described

PLAN = Path("m.trt")


@pytest.fixture(autouse=True)
def _written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PLAN.write_bytes(CONTENT)


def rebuilt(**built: str) -> str:
    """The hint of the refusal of a plan that was built so."""
    with pytest.raises(Unsupported) as caught:
        check_plan(PLAN, described(**built), HERE)
    assert caught.value.exit_code == 3
    return caught.value.hint or ""


def test_another_tensorrt_is_rebuilt_with_the_same_profile_and_sizes() -> None:
    assert rebuilt(tensorrt="10.3.0", dla="1") == (
        "build it here: deploykit build resnet.onnx --profile h200 --batch 1,8,32 "
        f"--dla 1 -o {PLAN}"
    )


def test_another_gpu_is_rebuilt_for_the_one_that_is_here() -> None:
    assert "--profile auto" in rebuilt(gpu="Orin", compute_capability="8.7")


@pytest.mark.parametrize(
    ("precision", "calib", "says"),
    [
        ("fp16", "", "--precision fp16 --batch 1,8,32"),
        ("int8", "samples/calib.npz", "--precision int8 --batch 1,8,32 --calib calib.npz"),
        ("fp8", "", "--precision fp8 --batch 1,8,32 --calib DATA"),
        ("auto", "c.npz", "--precision auto --batch 1,8,32 --calib c.npz"),
    ],
)
def test_the_rebuild_command_repeats_the_precision(precision: str, calib: str, says: str) -> None:
    built = described(precision=precision, calib=calib)
    words = rebuild(PLAN, replace(built, made_from=("ab" * 32, "cd" * 32)), HERE)
    assert words == f"deploykit build resnet.onnx --profile h200 {says} -o {PLAN}"


def test_the_rebuild_command_of_a_quantized_model_has_no_precision() -> None:
    assert "--precision" not in rebuild(PLAN, described(precision="int8"), HERE)


def test_the_rebuild_command_keeps_compatibility_options_and_axes() -> None:
    words = rebuilt(
        tensorrt="11.0.0",
        version_compatible=True,
        hardware_compatible="ampere-plus",
        axes="T=1,64,128 W=8,8,8",
    )
    assert "--axis T=1,64,128 --axis W=8,8,8" in words
    assert words.count("--hardware-compatible ampere-plus") == 1
    assert words.count("--version-compatible") == 1


@pytest.mark.parametrize("name", ["../../secret.onnx", "/etc/x.onnx", "a/b.onnx"])
def test_model_in_the_hint_is_a_name_never_a_path(name: str) -> None:
    words = rebuilt(tensorrt="10.3.0", model=name)
    assert f"deploykit build {name.rpartition('/')[2]} --profile" in words


def test_the_rebuild_command_is_quoted_for_the_shell() -> None:
    words = rebuilt(tensorrt="10.3.0", model="a b;rm.onnx", profile="x y", batch="$(id)")
    assert "build 'a b;rm.onnx' --profile 'x y'" in words
    assert "--batch '$(id)'" in words


def test_an_unknown_model_is_named_by_its_hash() -> None:
    words = rebuilt(tensorrt="10.3.0", model="")
    assert words.startswith("build it here: deploykit build MODEL.onnx ")
    assert words.endswith("(MODEL.onnx: SHA-256 abababababab...)")
