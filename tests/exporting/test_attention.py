"""Attention in an exported graph has the nodes of its formula, and the values it had before."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from deploykit.core.tensors import parse_spec
from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")

from onnxscript import ir  # noqa: E402

from deploykit.engines.engine import load  # noqa: E402
from deploykit.exporting import onnx as finishing  # noqa: E402
from deploykit.exporting.onnx import export_module  # noqa: E402

pytestmark = pytest.mark.torch


class Attention(torch.nn.Module):
    """As in transformers: a boolean mask [N,1,1,T] of what is padding."""

    def forward(self, x: Any, keep: Any) -> Any:
        heads = x.reshape(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        mask = keep[:, None, None].expand(-1, 1, x.shape[1], -1)
        return (torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, mask),)


def test_a_masked_attention_has_the_nodes_of_its_formula(tmp_path: Path) -> None:
    specs = [parse_spec("x:float32[N,T,8]"), parse_spec("keep:bool[N,T]")]
    export_module(Attention(), specs, [parse_spec("y:float32[N,2,T,4]")], tmp_path / "m.onnx")
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node)
    assert (kinds["IsNaN"], kinds["Where"], kinds["Reshape"], kinds["Transpose"]) == (0, 1, 1, 2)
    x = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)
    keep = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    (wanted,) = Attention()(torch.tensor(x), torch.tensor(keep))
    with load(tmp_path / "m.onnx", "cpu") as engine:
        got = engine({"x": x, "keep": keep})["y"]
    np.testing.assert_allclose(got[:2], wanted[:2], atol=1e-6)
    assert np.isfinite(got[2]).all()  # masked as a whole


GUARDED = """<ir_version: 9, opset_import: ["" : 20]>
attention ({t}[2,2,3,4] q, {t}[2,2,4,3] k, bool[2,1,3,3] keep, {t}[2,2,3,3] seen)
 => ({t}[2,2,3,3] y)
<{t} zero = {{{zero}}}, {t} low = {{{low}}}>
{{
  product = MatMul(q, k)
  mask = Where(keep, zero, low)
  masked = Add({scores}, mask)
  p = Softmax(masked)
  nan = IsNaN({tested})
  y_ = Where(nan, zero, p)
  y = Identity(y_)
}}"""
FORMULA = {"t": "float", "zero": "0.0", "low": "-3.4e38", "scores": "product", "tested": "p"}
SWAPPED = """<ir_version: 9, opset_import: ["" : 20]>
keys (float[{key}] k) => (float[A,B,C,D] y)
<int64[3] merge = {{{merge}}}, int64[4] split = {{{split}}},
 float[{merged}] m, float[{made}] y_>
{{
  m = Reshape(k, merge)
  turned = Transpose<perm = [{perm}]>(m)
  y_ = Reshape(turned, split)
  y = Identity(y_)
}}"""
KEY = {"key": "2,3,5,4", "merge": "-1,5,4", "merged": "6,5,4", "perm": "0,2,1", "split": "2,3,4,5"}
KEY |= {"made": "2,3,4,5"}


def simplify(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto, Counter[str]]:
    """A graph before and after, and its operators after."""
    before = onnx.parser.parse_model(text)
    model = ir.from_proto(before)
    finishing.simplify(model)
    after = ir.to_proto(model)
    return before, after, Counter(node.op_type for node in after.graph.node)


@pytest.mark.parametrize("text", [GUARDED.format(**FORMULA), SWAPPED.format(**KEY)])
def test_what_is_left_out_changes_no_bit(text: str) -> None:
    before, after, _ = simplify(text)
    assert len(after.graph.node) == len(before.graph.node) - 2
    rng = np.random.default_rng(0)
    feeds = {}
    for value in before.graph.input:
        array = rng.normal(size=[axis.dim_value for axis in value.type.tensor_type.shape.dim])
        feeds[value.name] = array > 0 if value.name == "keep" else np.float32(array)
    answers = [ReferenceEvaluator(each).run(None, feeds)[0] for each in (before, after)]
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize(
    ("text", "kind", "other"),
    [
        (GUARDED, "IsNaN", {"low": "-inf"}),  # a row masked as a whole is NaN: made 0
        (GUARDED, "IsNaN", {"t": "float16", "zero": "0", "low": "64511"}),  # -65504
        (GUARDED, "IsNaN", {"zero": "1.0"}),
        (GUARDED, "IsNaN", {"tested": "seen"}),
        (GUARDED, "IsNaN", {"scores": "seen"}),  # it may hold -infinity
        (SWAPPED, "Reshape", {"perm": "2,1,0"}),
        (SWAPPED, "Reshape", {"split": "3,2,4,5", "made": "3,2,4,5"}),
        (SWAPPED, "Reshape", {"split": "2,3,5,4", "made": "2,3,5,4"}),
        (SWAPPED, "Reshape", {"merge": "-1,4,5", "merged": "6,4,5"}),
        (SWAPPED, "Reshape", {"merge": "2,15,4", "merged": "2,15,4", "split": "2,4,3,5"}),
        (SWAPPED, "Reshape", {"key": "?,3,5,4", "made": "?,3,4,5"}),
    ],
    ids=str,
)
def test_nodes_that_may_change_a_value_stay(text: str, kind: str, other: dict[str, str]) -> None:
    usual = FORMULA if text == GUARDED else KEY
    before, _, kinds = simplify(text.format(**{**usual, **other}))
    assert kinds[kind] == sum(node.op_type == kind for node in before.graph.node)


MASKED = """<ir_version: 10, opset_import: ["" : {opset}]>
attention (float[{q}] q, float[2,{kv},5,4] k, float[2,{kv},5,4] v, {t}[{mask}] mask)
 => (float[2,2,3,4] y)
{{ y = Attention<is_causal = {causal}>(q, k, v, mask) }}"""
CAUSAL = {"opset": "23", "q": "2,2,3,4", "kv": "2", "t": "float", "causal": "0"}


@pytest.mark.parametrize(
    ("mask", "other", "added"),
    [
        ("2,1,1,5", {}, 4),
        ("2,1,1,5", {"t": "bool"}, 4),
        ("2,1,1,5", {"causal": "1"}, 4),
        ("2,1,1,5", {"opset": "24"}, 4),
        ("2,1,1,5", {"q": "B,2,Q,4"}, 4),
        ("2,1,1,5", {"kv": "1"}, 4),  # grouped queries
        ("1,1,1,5", {}, 4),
        ("2,1,5", {}, 4),  # of heads
        ("1,5", {}, 4),
        ("5", {"t": "bool"}, 4),
        ("2,1,3,1", {}, 4),
        ("2,1,1,1", {}, 4),
        ("3,5", {}, 0),
        ("2,2,3,5", {"t": "bool"}, 0),
    ],
    ids=str,
)
def test_masks_for_all_queries_or_keys_reach_onnx_runtime_expanded(
    tmp_path: Path, mask: str, other: dict[str, str], added: int
) -> None:
    """Its kernel takes no mask that the standard would broadcast along these."""
    if other.keys() & {"opset", "kv"} and version("onnxruntime").startswith(("1.23.", "1.24.")):
        pytest.skip("this ONNX Runtime has no Attention of opset 24, or none of grouped queries")
    text = MASKED.format(**{**CAUSAL, **other, "mask": mask})
    _, after, kinds = simplify(text)
    assert (kinds["Expand"], kinds.total()) == (int(added > 0), 1 + added)
    onnx.save(after, tmp_path / "after.onnx")
    whole = MASKED.format(**{**CAUSAL, **other, "mask": "2,2,3,5"})
    onnx.save(onnx.parser.parse_model(whole), tmp_path / "whole.onnx")
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 2, 3, 4), "k": (2, int(other.get("kv", "2")), 5, 4)}
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    feeds["v"] = feeds["k"][::-1].copy()
    seen = rng.normal(size=[int(size) for size in mask.split(",")])
    feeds["mask"] = seen > -0.5 if "bool" in text else seen.astype(np.float32)
    with load(tmp_path / "after.onnx", "cpu") as engine:
        got = engine(feeds)["y"]
    feeds["mask"] = np.broadcast_to(feeds["mask"], (2, 2, 3, 5)).copy()
    with load(tmp_path / "whole.onnx", "cpu") as engine:
        np.testing.assert_allclose(got, engine(feeds)["y"], atol=1e-6)
