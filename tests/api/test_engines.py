"""`build` for TensorRT: what is proven of an engine, and what is said where nothing can be.

A stand-in for TensorRT takes the builder's place: no machine here has a GPU. With NVIDIA's own
parser and builder (`nvidia`) `--check` is run for real.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deploykit as dk
from deploykit.api import making
from deploykit.api.engines import Shapes, build_plan
from deploykit.core.artefact import read_manifest
from deploykit.core.machine import this_machine
from deploykit.core.profile import load_profile
from tests.builders.fake_tensorrt import Behaviour, make
from tests.onnx_zoo import linear, mnist_like, save

Use = Callable[..., Behaviour]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    def install(**behaviour: Any) -> Behaviour:
        does = Behaviour(**behaviour)
        monkeypatch.setitem(sys.modules, "tensorrt", make(does))
        return does

    return install


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(linear(), tmp_path / "m.onnx")


def layers(kind: str) -> str:
    """One layer of the node `gemm` that computes in `kind`, as the engine inspector tells it."""
    tensor = {"Name": "t", "Location": "Device", "Dimensions": [1, 4], "Format/Datatype": kind}
    layer = {
        "Name": "gemm",
        "LayerType": "MatrixMultiply",
        "Inputs": [tensor],
        "Outputs": [tensor],
        "Metadata": "[ONNX Layer: gemm]",
    }
    return json.dumps({"Layers": [layer], "Bindings": ["x", "y"]})


def built(model: Path, folder: Path, **shapes: Any) -> Any:
    stage = folder / "stage"
    stage.mkdir()
    return build_plan(
        model,
        model,
        stage / "m.trt",
        folder / "m.trt",
        load_profile("l4"),
        Shapes(**shapes),
    )


def test_an_engine_that_cannot_run_here_is_kept_and_not_called_verified(
    model: Path, tmp_path: Path, use: Use
) -> None:
    use(layers=layers("Float"))
    made = built(model, tmp_path)
    assert made.path.read_bytes()[1:4] == b"trt"
    manifest = read_manifest(made.path)
    assert manifest is not None
    assert manifest.format == "tensorrt"
    assert manifest.precision == {"float32": 1}
    assert manifest.checks["verified"] is False
    assert manifest.built_on["profile"] == "l4"
    assert manifest.built_on["batch"] == "1,8,32"
    assert any("not verified" in note for note in made.notes)


def test_inspect_shows_an_engine_by_its_manifest(model: Path, tmp_path: Path, use: Use) -> None:
    use(layers=layers("Float"))
    found = dk.inspect(built(model, tmp_path).path)
    assert found.format == "tensorrt"
    assert found.precision == {"float32": 1}
    assert found.details["verified"] is False
    assert found.fits == ("l4",)


def test_an_engine_without_a_manifest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.trt"
    path.write_bytes(b"ftrt" + bytes(60))
    with pytest.raises(dk.BadInput, match="without a manifest"):
        dk.inspect(path)


def test_a_plan_that_cannot_be_read_back_says_so(model: Path, tmp_path: Path, use: Use) -> None:
    use(layers=None)
    made = built(model, tmp_path)
    assert made.manifest.checks["layers"] is None
    assert any("not read back" in note for note in made.notes)


def test_a_layer_wider_than_the_graph_asks_fails_and_is_named(
    tmp_path: Path, use: Use, model: Path
) -> None:
    half = dk.quantize(model, "fp16", tmp_path / "half.onnx").path
    use(layers=layers("Float"))
    with pytest.raises(dk.GateFailed, match="gemm") as caught:
        built(half, tmp_path)
    assert not (tmp_path / "m.trt").exists()
    assert caught.value.result.path.name == "m.rejected.trt"
    assert caught.value.result.manifest.checks["mismatches"]


def test_a_layer_as_narrow_as_asked_passes(tmp_path: Path, use: Use, model: Path) -> None:
    half = dk.quantize(model, "fp16", tmp_path / "half.onnx").path
    use(layers=layers("Half"))
    made = built(half, tmp_path)
    assert made.manifest.precision == {"float16": 1}
    assert made.manifest.checks["mismatches"] == []


def test_shapes_reach_the_builder(model: Path, tmp_path: Path, use: Use) -> None:
    use(layers=layers("Float"))
    assert built(model, tmp_path, batch="2,4,64", level=5).manifest.built_on["batch"] == "2,4,64"


@pytest.mark.parametrize("batch", ["8,4,1", "x", "1,2", "-1,2,3"])
def test_a_batch_that_is_no_range_is_refused(
    model: Path, tmp_path: Path, use: Use, batch: str
) -> None:
    use()
    with pytest.raises(dk.BadInput, match="--batch"):
        built(model, tmp_path, batch=batch)


def test_a_target_elsewhere_is_refused_with_what_works_here(model: Path) -> None:
    if this_machine().gpus:
        pytest.skip("a GPU is here")
    with pytest.raises(dk.Unsupported, match="profile 'h200' is not this machine") as caught:
        dk.build(model, "h200")
    assert "--check" in caught.value.hint
    assert "--profile cpu" in caught.value.hint


def test_a_target_without_tensorrt_takes_no_shapes(model: Path) -> None:
    with pytest.raises(dk.BadInput, match="needs no shapes"):
        dk.build(model, "cpu", shapes=Shapes(batch="1,2,3"))
    with pytest.raises(dk.BadInput, match="nothing to check"):
        making.check(model, "cpu")


def test_a_check_that_is_refused_fails_and_names_the_reason(model: Path, use: Use) -> None:
    use(strong_error="Error Code 10: no implementation for node gemm")
    checked = making.check(model, "l4")
    assert not checked.checked.accepted
    with pytest.raises(dk.GateFailed, match=r"m\.onnx: refused: "):
        checked.raise_if_refused()


@pytest.mark.nvidia
def test_nvidias_builder_takes_the_file_and_nothing_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt", reason="NVIDIA's parser and builder are not here")
    path = save(mnist_like(), tmp_path / "m.onnx")
    before = sorted(tmp_path.iterdir())
    found = making.check(path, "l4")
    assert found.checked.accepted
    assert found.checked.plan_bytes > 0
    assert any("not proven" in note for note in found.checked.notes)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.nvidia
def test_nvidias_parser_names_an_operator_that_it_lacks(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt", reason="NVIDIA's parser and builder are not here")
    from onnx import helper

    from tests.onnx_zoo import make as graph

    node = helper.make_node("Det", ["x"], ["y"], name="determinant")
    path = save(graph([node], {"x": ("N", 3, 3)}, {"y": ("N",)}, {}), tmp_path / "det.onnx")
    found = making.check(path, "l4")
    assert not found.checked.accepted
    assert any("Det" in problem for problem in found.checked.problems)
