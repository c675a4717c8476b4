"""Samples of the inspector's format; the files in `inspector/` are as real builders wrote them.

`inspector/classic-*`: TensorRT 8.6.0, whose form 10.x's classic layers have; `rtx-*`: TensorRT for
RTX 1.7.1, whose form 11.x has. The others:
TensorRT 8 to 10: "Engine Inspector" in NVIDIA's TensorRT guide, and the engine graphs next to
NVIDIA's trt-engine-explorer (github.com/NVIDIA/TensorRT, tools/experimental). TensorRT 11, which
splits "Format/Datatype": "Migrating IEngineInspector Usage from TensorRT 10.x to 11.x".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploykit.core.evidence import Layer
from deploykit.engines.tensorrt.inspector import computes, mismatches, read_layers, shares, unseen


def tensors(*kinds: str, key: str = "Format/Datatype") -> list[dict[str, Any]]:
    return [{"Name": "t", "Location": "Device", "Dimensions": [1, 8], key: k} for k in kinds]


def one(kind: str = "CaskConvolution", **fields: Any) -> Layer:
    item = {"Name": "conv + relu", "LayerType": kind, **fields}
    return read_layers(json.dumps({"Layers": [item], "Bindings": ["x", "y"]}))[0]


def conv(inputs: str, outputs: str, weights: str | None = None, **more: Any) -> Layer:
    fields: dict[str, Any] = {"Inputs": tensors(inputs), "Outputs": tensors(outputs), **more}
    if weights:
        fields["Weights"] = {"Type": weights, "Count": 864}
    return one(**fields)


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("Float", "float32"),
        ("Half", "float16"),
        ("BFloat16", "bfloat16"),
        ("Int8", "int8"),
        ("FP8", "float8"),
        ("Row major linear FP32", "float32"),
        ("Channel major FP16 format where channel % 8 == 0", "float16"),
        ("Four wide channel vectorized row major Int8 format", "int8"),
        ("Row major linear INT8 format", "int8"),
        ("Row major linear BF16 format", "bfloat16"),
    ],
)
def test_a_type_is_found_in_the_name_or_the_sentence(text: str, precision: str) -> None:
    assert conv(text, text).precision == precision


def test_the_newer_field_names_are_read_too() -> None:
    fields = {"Format": "Row major linear", "Datatype": "Half"}
    layer = one(Inputs=[{"Name": "x", **fields}], Outputs=[{"Name": "y", **fields}])
    assert layer.precision == "float16"


@pytest.mark.parametrize(
    ("layer", "nodes"),
    [
        (
            {"Metadata": "[ONNX Layer: /conv/Conv]\x1f[ONNX Layer: /relu/Relu]"},
            ("/conv/Conv", "/relu/Relu"),
        ),
        ({"Metadata": "[ONNX Layer: a[0]][ONNX Layer: b]"}, ("a[0]", "b")),
        ({}, ("conv", "relu")),
        ({"LayerType": "PointWiseV2", "Name": "PWN(silu)"}, ("silu",)),
    ],
    ids=str,
)
def test_metadata_or_the_name_give_the_fused_nodes(
    layer: dict[str, str], nodes: tuple[str, ...]
) -> None:
    text = json.dumps({"Layers": [{"Name": "conv + relu", **layer}]})
    for each in (text, text.replace("\\u001f", "\x1f")):  # the separator as it is, too
        assert read_layers(each)[0].onnx_nodes == nodes


def recorded(name: str) -> tuple[Layer, ...]:
    return read_layers((Path(__file__).parent / "inspector" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["without-context", "with-context"])
def test_a_dynamic_plan_of_a_classic_builder_is_read(name: str) -> None:
    """Without an execution context every tensor is "N/A due to dynamic shapes"."""
    layers = recorded(f"classic-fp16-dynamic-{name}")
    asked = dict.fromkeys(("conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "head"), "float16")
    assert unseen(asked, layers) == ()
    assert len(mismatches(asked, layers)) == len(asked)
    assert mismatches(dict.fromkeys(asked, "float32"), layers) == {}


def test_a_dynamic_plan_of_the_newer_builder_is_read() -> None:
    nodes = ("ln", "q", "qk", "sm", "av", "tr", "proj")
    layers = recorded("rtx-fp16-dynamic")
    assert unseen(nodes, layers) == ()
    assert mismatches(dict.fromkeys(nodes, "float16"), layers) == {}
    layers = recorded("rtx-int8-dynamic")
    weighed = dict.fromkeys(("conv0", "conv1", "conv2", "conv3", "head"), "int8")
    assert (mismatches(weighed, layers), unseen(weighed, layers)) == ({}, ())


@pytest.mark.parametrize(
    ("kernel", "precision"),
    [
        ("ampere_scudnn_128x32_relu_small_nn_v1", "float32"),
        ("volta_h884cudnn_256x64_ldg8_relu_exp_small_nhwc_tn_v1", "float16"),
        ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc", "float16"),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc", "bfloat16"),
        ("sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32", "int8"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc", "float32"),
        ("sm90_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n", "float8"),
        ("__myelin_CASK_STUB", None),
    ],
)
def test_a_kernels_name_tells_what_nothing_else_does(kernel: str, precision: str | None) -> None:
    assert conv("N/A due to dynamic shapes", "N/A", TacticName=kernel).precision == precision


def test_weights_tell_the_type_before_the_kernels_name() -> None:
    layer = conv("N/A due to dynamic shapes", "N/A", "Half", TacticName="x_scudnn_y")
    assert layer.precision == "float16"


def test_layers_given_as_names_have_no_precision() -> None:
    layer = read_layers('{"Layers": ["conv + relu"]}')[0]
    assert (layer.precision, computes(layer)) == (None, False)
    assert layer.onnx_nodes == ("conv", "relu")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"Layers": {}}', '{"Layers": [3]}', "null", f'{{"Layers": {"[" * 200_000}'],
    ids=["empty", "cut", "list", "no-list", "number", "null", "deep"],
)
def test_what_is_not_the_inspectors_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_layers(text)


def test_half_a_character_in_a_name_can_be_written() -> None:
    (layer,) = read_layers('{"Layers": [{"Name": "a\\ud800 + b", "TacticName": "\\udfff"}]}')
    assert layer.onnx_nodes == ("a?", "b")
    assert json.dumps(layer.to_dict(), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("inputs", "outputs", "weights", "precision"),
    [
        ("Int8", "Half", "Int8", "int8"),
        ("Half", "Int8", "Half", "float16"),  # a fused QuantizeLinear
        ("Float", "Half", "Half", "float16"),  # a fused cast of the input
        ("Half", "Half", "Int8", "float16"),  # weights that are only stored in INT8
        ("Int8", "Half", "Half", "float16"),  # recognised by its weights
    ],
)
def test_a_convolution_computes_in_the_type_of_its_weights_and_inputs(
    inputs: str, outputs: str, weights: str, precision: str
) -> None:
    assert conv(inputs, outputs, weights).precision == precision


def test_a_fused_quantize_does_not_make_its_producer_int8() -> None:
    norm = one(kind="kgen", Inputs=tensors("Half"), Outputs=tensors("Int8"))
    assert norm.precision == "float16"


def test_truth_values_and_indices_do_not_count_as_precision() -> None:
    mask = one(kind="kgen", Inputs=tensors("Bool", "Float"), Outputs=tensors("Float"))
    assert mask.precision == "float32"
    shape = one(kind="kgen", Inputs=tensors("Int64"), Outputs=tensors("Int64"))
    assert (shape.precision, computes(shape)) == ("int64", False)


def test_a_node_in_a_wider_precision_than_requested_is_a_mismatch() -> None:
    found = mismatches({"conv": "int8", "relu": "float32"}, [conv("Half", "Half", "Half")])
    assert found == {"conv": "'conv' was requested in int8 and runs in float16"}


@pytest.mark.parametrize(
    ("asked", "runs"),
    [("float16", "Half"), ("float32", "Half"), ("int8", "Int8"), ("bfloat16", "Half")],
)
def test_the_requested_or_a_narrower_precision_is_not_a_mismatch(asked: str, runs: str) -> None:
    assert mismatches({"conv": asked}, [conv(runs, runs)]) == {}


@pytest.mark.parametrize("kind", ["Reformat", "NoOp", "Shuffle", "Constant"])
def test_a_layer_that_moves_data_is_not_a_mismatch(kind: str) -> None:
    moved = one(kind=kind, Inputs=tensors("Float"), Outputs=tensors("Float"))
    assert mismatches({"conv": "float16"}, [moved]) == {}
    assert not computes(moved)


def test_a_node_in_several_layers_counts_as_the_narrowest() -> None:
    float32 = one(kind="kgen", Inputs=tensors("Float"), Outputs=tensors("Float"))
    assert mismatches({"conv": "int8"}, [float32, conv("Int8", "Int8", "Int8")]) == {}


def test_a_folded_node_is_not_a_mismatch_but_is_listed() -> None:
    layers = [conv("Half", "Half")]
    assert mismatches({"bn": "int8"}, layers) == {}
    assert unseen(["conv", "bn"], layers) == ("bn",)


def test_shares_count_computing_layers_by_precision() -> None:
    moved = one(kind="Reformat", Inputs=tensors("Float"), Outputs=tensors("Half"))
    layers = [conv("Half", "Half"), conv("Half", "Half"), conv("Int8", "Int8"), moved]
    assert shares(layers) == {"float16": pytest.approx(2 / 3), "int8": pytest.approx(1 / 3)}
    assert shares([moved]) == {}


def test_shares_of_time_are_by_the_layers_names() -> None:
    layers = [Layer("a", "gemm", "float16", ()), Layer("b", "gemm", "int8", ())]
    assert shares(layers, {"a": 3.0, "b": 1.0}) == {"float16": 0.75, "int8": 0.25}
    assert shares(layers, {"a": 3.0}) == {"float16": 1.0, "int8": 0.0}


def test_a_layer_becomes_json() -> None:
    assert json.loads(json.dumps(conv("Half", "Half").to_dict()))["onnx_nodes"] == ["conv", "relu"]
