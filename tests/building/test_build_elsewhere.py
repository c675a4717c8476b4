"""`build` for a target of another machine: refused with what works here, or checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deploykit as dk
from deploykit.building import build as making
from deploykit.building.builder import Shapes
from deploykit.core.machine import this_machine
from tests.support.onnx_zoo import mnist_like, save
from tests.support.runtimes.fake_tensorrt import Use

Machine = Callable[..., Any]


# elsewhere


def test_a_target_of_another_machine_is_refused_with_what_works_here(model: Path) -> None:
    if this_machine().gpus:
        pytest.skip("a GPU is here")
    with pytest.raises(dk.Unsupported, match="profile 'h200' is not this machine") as caught:
        dk.build(model, "h200")
    assert "--check" in caught.value.hint
    assert "--profile cpu" in caught.value.hint


def test_shape_options_are_refused_for_a_target_without_tensorrt(model: Path) -> None:
    with pytest.raises(dk.BadInput, match="has no such options") as caught:
        dk.build(model, "cpu", shapes=Shapes(batch="1,2,3", tf32=False, dla=0))
    assert caught.value.hint == "leave out `dla`, `tf32`, for TensorRT only"
    with pytest.raises(dk.BadInput, match="nothing to check"):
        making.check_build(model, "cpu")


def test_a_refused_check_fails_and_names_the_reason(model: Path, use: Use) -> None:
    use(strong_error="Error Code 10: no implementation for node gemm")
    checked = making.check_build(model, "l4")
    assert not checked.accepted
    with pytest.raises(dk.GateFailed, match=r"m\.onnx: refused: "):
        checked.raise_if_refused()


@pytest.mark.nvidia
def test_a_check_with_nvidias_builder_passes_and_writes_no_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt", reason="NVIDIA's parser and builder are not here")
    path = save(mnist_like(), tmp_path / "m.onnx")
    before = sorted(tmp_path.iterdir())
    found = making.check_build(path, "l4")
    assert found.accepted
    assert found.plan_bytes > 0
    assert any("not proven" in note for note in found.notes)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.nvidia
def test_nvidias_parser_names_an_operator_that_it_lacks(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt", reason="NVIDIA's parser and builder are not here")
    from onnx import helper

    from tests.support.onnx_zoo import make as graph

    node = helper.make_node("Det", ["x"], ["y"], name="determinant")
    path = save(graph([node], {"x": ("N", 3, 3)}, {"y": ("N",)}, {}), tmp_path / "det.onnx")
    found = making.check_build(path, "l4")
    assert not found.accepted
    assert any("Det" in problem for problem in found.problems)
