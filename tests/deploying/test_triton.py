"""A Triton bundle: its configuration is read by Triton's own protobuf messages."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import Unsupported
from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import DTYPE_BYTES, TensorSpec
from deploykit.deploying import triton
from tests.support.bundling.contents import INDEPENDENT, contents_of

pytest.importorskip("tritonclient", reason="needs Triton's protobuf messages")
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

IMAGE = TensorSpec("image", "float32", ("N", 3, 8, 8))


def written(folder: Path, specs: Sequence[TensorSpec] = (IMAGE,), **given: Any) -> Any:
    """Triton's ModelConfig of a bundle that was written to `folder`/out."""
    (folder / "out").mkdir()
    contents = contents_of(folder, specs, **given)
    triton.write(folder / "out", contents)
    text = (folder / "out" / contents.name / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_a_proven_model_is_joined_up_to_the_largest_batch_and_warmed_up(tmp_path: Path) -> None:
    config = written(tmp_path, [IMAGE, TensorSpec("ids", "int64", ("N", "T"))])
    out = tmp_path / "out"
    found = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    assert {"m/config.pbtxt", "m/1/model.onnx", "m/warmup/input-0", "README.md"} <= found
    assert config.max_batch_size == 32
    assert list(config.dynamic_batching.preferred_batch_size) == [8, 32]
    assert list(config.input[0].dims) == [3, 8, 8]
    assert [entry.batch_size for entry in config.model_warmup] == [1, 8, 32]
    entry = config.model_warmup[1].inputs["ids"]
    assert list(entry.dims) == [3]
    assert len((out / "m/warmup" / entry.input_data_file).read_bytes()) == 3 * 8
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert accelerators(config) == {}


@pytest.mark.parametrize(
    ("proof", "spec", "dims", "why"),
    [
        (None, IMAGE, [-1, 3, 8, 8], ""),
        (
            RowIndependence(False, "row 1 changed row 0"),
            IMAGE,
            [-1, 3, 8, 8],
            "off, as row 1 changed row 0.",
        ),
        (INDEPENDENT, TensorSpec("x", "float32", (4, "T")), [4, -1], ""),  # it has no batch axis
    ],
    ids=["none", "failed", "no batch"],
)
def test_rows_without_a_proof_are_not_joined(
    tmp_path: Path, proof: RowIndependence | None, spec: TensorSpec, dims: list[int], why: str
) -> None:
    config = written(tmp_path, [spec], proof=proof)
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert list(config.input[0].dims) == dims
    assert why in (tmp_path / "out/README.md").read_text("utf-8")


@pytest.mark.parametrize(("shape", "reshaped"), [((), False), (("N",), True)], ids=str)
def test_scalars_have_one_element(tmp_path: Path, shape: tuple[str, ...], reshaped: bool) -> None:
    config = written(tmp_path, [TensorSpec("x", "int64", shape)])
    for tensor in config.input[0], config.output[0]:
        assert list(tensor.dims) == [1]
        assert tensor.HasField("reshape") is reshaped  # Triton refuses it without a batch
        assert list(tensor.reshape.shape) == []
    assert (tmp_path / "out/m/warmup/input-0").read_bytes() == bytes(8)


@pytest.mark.parametrize("dtype", [*sorted({*DTYPE_BYTES} - {"bfloat16"}), "string"])
def test_every_dtype_has_its_type_and_warm_up_bytes(tmp_path: Path, dtype: str) -> None:
    config = written(tmp_path, [TensorSpec("x", dtype, ("N", 2))])
    names = {"float16": "FP16", "float32": "FP32", "float64": "FP64"}
    found = model_config_pb2.DataType.Name(config.input[0].data_type)
    assert found == f"TYPE_{names.get(dtype, dtype.upper())}"
    warm = (tmp_path / "out/m/warmup/input-0").read_bytes()
    if dtype == "string":
        assert warm == b"".join(struct.pack("<I", 3) + f"ü{n}".encode() for n in range(2))
    else:
        assert np.frombuffer(warm, dtype).tolist() == [0, 1]


NAMES = ['a "quoted" one', "two\nlines", "back\\slash", "tab\t", "größe ✓", "\x7f", "x:0"]


def test_any_tensor_name_survives(tmp_path: Path) -> None:
    config = written(tmp_path, [TensorSpec(name, "float32", ("N", 2)) for name in NAMES])
    assert [each.name for each in config.input] == NAMES
    assert set(config.model_warmup[0].inputs) == set(NAMES)


def accelerators(config: Any) -> dict[str, dict[str, str]]:
    found = config.optimization.execution_accelerators.gpu_execution_accelerator
    return {each.name: dict(each.parameters) for each in found}


IDS = TensorSpec("ids", "int64", ("N", "T"))  # more than the batch varies


@pytest.mark.parametrize(
    ("spec", "precision", "mode", "shapes"),
    [
        (IMAGE, {"float32": 2}, "FP32", "image:8x3x8x8"),
        (IMAGE, {"float32": 2, "float16": 1}, "FP16", "image:8x3x8x8"),
        (IMAGE, {"float16": 2, "int8": 1}, "INT8", "image:8x3x8x8"),
        (IDS, {"float32": 2}, "FP32", None),
        (IMAGE, {"bfloat16": 3}, None, None),  # the option lacks it
    ],
)
def test_a_gpu_profile_gets_tensorrt_with_the_precision_of_the_graph(
    tmp_path: Path, spec: TensorSpec, precision: dict[str, int], mode: str | None, shapes: str
) -> None:
    config = written(tmp_path, [spec], profile="l4", precision=precision)
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    options = accelerators(config).get("tensorrt", {})
    assert options.get("precision_mode") == mode
    assert options.get("trt_profile_opt_shapes") == shapes


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (TensorSpec("x", "float32", (0, 3)), "'x' is empty"),
        (TensorSpec("x", "bfloat16", ("N", 3)), "'x' is bfloat16"),
    ],
)
def test_what_the_backend_does_not_take_is_refused(
    tmp_path: Path, spec: TensorSpec, why: str
) -> None:
    with pytest.raises(Unsupported, match=why):
        written(tmp_path, [spec])
