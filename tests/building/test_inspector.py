"""Samples of the inspector's format; the files in `inspector/` are as real builders wrote them.

`inspector/classic-*`: TensorRT 8.6.0, whose form 10.x's classic layers have; `rtx-*`: TensorRT for
RTX 1.7.1, whose form 11.x has. The others: "Engine Inspector" in NVIDIA's TensorRT guide, the
engine graphs next to NVIDIA's trt-engine-explorer, and, for TensorRT 11, which splits
"Format/Datatype": "Migrating IEngineInspector Usage from TensorRT 10.x to 11.x".
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


def kgen(inputs: str, outputs: str) -> Layer:
    return one("kgen", Inputs=tensors(*inputs.split()), Outputs=tensors(outputs))


UNKNOWN = ("N/A due to dynamic shapes", "N/A")
FUSED = "[ONNX Layer: /conv/Conv]\x1f[ONNX Layer: /relu/Relu]"


@pytest.mark.parametrize(
    ("layer", "precision"),
    [
        *(
            (conv(text, text), precision)
            for text, precision in {
                "Float": "float32",
                "BFloat16": "bfloat16",
                "FP8": "float8",
                "Channel major FP16 format where channel % 8 == 0": "float16",
                "Four wide channel vectorized row major Int8 format": "int8",
            }.items()
        ),
        # the newer field names
        (one(Inputs=tensors("Half", key="Datatype"), Outputs=tensors("Half")), "float16"),
        (conv(*UNKNOWN, "Half"), "float16"),
        # a convolution computes in the type of its weights and inputs
        (conv("Int8", "Half", "Int8"), "int8"),
        (conv("Half", "Int8", "Half"), "float16"),  # a fused QuantizeLinear
        (conv("Float", "Half", "Half"), "float16"),  # a fused cast of the input
        (conv("Half", "Half", "Int8"), "float16"),  # weights that are only stored in INT8
        (conv("Int8", "Half", "Half"), "float16"),  # recognised by its weights
        (kgen("Half", "Int8"), "float16"),  # a fused quantize after a norm
        (kgen("Bool Float", "Float"), "float32"),  # truth values do not count
        (kgen("Int64", "Int64"), "int64"),
    ],
)
def test_a_layers_type_is_found_in_its_tensors_or_weights(
    layer: Layer, precision: str | None
) -> None:
    assert layer.precision == precision
    assert computes(layer) is (precision not in (None, "int64"))
    assert json.loads(json.dumps(layer.to_dict()))["onnx_nodes"] == ["conv", "relu"]


@pytest.mark.parametrize(
    ("layer", "nodes"),
    [
        ({"Metadata": FUSED}, ("/conv/Conv", "/relu/Relu")),
        ({"Metadata": "[ONNX Layer: a[0]][ONNX Layer: b]"}, ("a[0]", "b")),
        ({}, ("conv", "relu")),
        ({"LayerType": "PointWiseV2", "Name": "PWN(silu)"}, ("silu",)),
        ({"Name": "a\ud800 + b"}, ("a?", "b")),  # half a character cannot be written
    ],
    ids=["metadata", "brackets", "name", "pointwise", "surrogate"],
)
def test_metadata_or_the_name_give_the_fused_nodes(
    layer: dict[str, str], nodes: tuple[str, ...]
) -> None:
    text = json.dumps({"Layers": [{"Name": "conv + relu", **layer}]})
    for each in (text, text.replace("\\u001f", "\x1f")):  # the separator as it is, too
        (found,) = read_layers(each)
        assert found.onnx_nodes == nodes
        assert json.dumps(found.to_dict(), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"Layers": {}}', "null"],
    ids=["empty", "cut", "list", "no-list", "null"],
)
def test_what_is_not_the_inspectors_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_layers(text)


def recorded(name: str) -> tuple[Layer, ...]:
    return read_layers((Path(__file__).parent / "inspector" / f"{name}.json").read_text())


CLASSIC = ("conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "head")


@pytest.mark.parametrize(
    ("name", "nodes", "kind"),
    [
        ("classic-fp16-dynamic-with-context", CLASSIC, "float32"),
        ("rtx-fp16-dynamic", ("ln", "q", "qk", "sm", "av", "tr", "proj"), "float16"),
        ("rtx-int8-dynamic", ("conv0", "conv1", "conv2", "conv3", "head"), "int8"),
    ],
)
def test_a_dynamic_plan_of_a_real_builder_is_read(
    name: str, nodes: tuple[str, ...], kind: str
) -> None:
    layers = recorded(name)
    assert unseen(nodes, layers) == ()
    assert mismatches(dict.fromkeys(nodes, kind), layers) == {}
    if kind == "float32":
        assert len(mismatches(dict.fromkeys(nodes, "float16"), layers)) == len(nodes)


MOVED = [
    one(kind, Inputs=tensors("Float"), Outputs=tensors("Half"))
    for kind in ("Reformat", "NoOp", "Shuffle", "Constant")
]


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        ("float16", [conv("Half", "Half")]),
        ("float32", [conv("Half", "Half")]),  # narrower than requested
        ("bfloat16", [conv("Half", "Half")]),
        ("int8", [kgen("Float", "Float"), conv("Int8", "Int8", "Int8")]),  # the narrowest counts
        ("float16", MOVED),  # they move data
    ],
)
def test_what_is_as_requested_or_computes_nothing_is_not_a_mismatch(
    asked: str, layers: list[Layer]
) -> None:
    assert mismatches({"conv": asked}, layers) == {}


def test_shares_are_of_the_layers_that_compute_or_of_their_time() -> None:
    layers = [conv("Half", "Half"), conv("Half", "Half"), conv("Int8", "Int8"), *MOVED]
    assert shares(layers) == {"float16": pytest.approx(2 / 3), "int8": pytest.approx(1 / 3)}
    assert shares(MOVED) == {}
    layers = [Layer("a", "gemm", "float16", ()), Layer("b", "gemm", "int8", ())]
    assert shares(layers, {"a": 3.0, "b": 1.0}) == {"float16": 0.75, "int8": 0.25}
    assert shares(layers, {"a": 3.0}) == {"float16": 1.0, "int8": 0.0}
