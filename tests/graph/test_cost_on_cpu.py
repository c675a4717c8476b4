"""Which INT8 pairs ONNX Runtime's CPU runs in integers, and what the others cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from deploykit.engines.engine import load
from deploykit.graph import cost as kinds
from deploykit.graph.cost import costs_of, node_costs
from deploykit.graph.graph import Graph
from deploykit.graph.shapes import fixed_shapes
from deploykit.planning import probe as chains
from deploykit.planning.probe import Chain
from tests.support.graphs.small import parse


def pairs(operator: str, bias: str, after: str, zero: np.generic) -> onnx.ModelProto:
    """`operator` on quantized tensors. `after`: what its result goes through, "Relu Q"."""
    matrix, shape = ((8, 8, 3, 3), "8,6,6") if operator == "Conv" else ((8, 8), "8")
    body = "xq = QuantizeLinear(x, s, zero) xd = DequantizeLinear(xq, s, zero) "
    body += "w = DequantizeLinear(w8, s, zero8) "
    body += "b = DequantizeLinear(b32, s2) " if bias == "int32" else ""
    body += f"node = {operator}(xd, w{', b' * bool(bias)}) "
    last = "node"
    for step in after.split():
        if step == "Q":
            body += f"yq = QuantizeLinear({last}, s, zero) yd = DequantizeLinear(yq, s, zero) "
            last = "yd"
        else:
            body += f"cut = {step}({last}) "
            last = "cut"
    weights: dict[str, Any] = {"w8": np.ones(matrix, np.int8), "s": 0.1, "s2": 0.01}
    weights |= {"b32": np.ones(8, np.int32)} if bias == "int32" else {"b": np.ones(8)}
    head = f"(float[2,{shape}] x) => (float[] y)"
    weights |= {"zero": zero, "zero8": np.int8(0)}
    return parse(head, f"{body} y = Neg({last})", **weights)


@pytest.mark.parametrize("zero", [np.uint8(128), np.uint8(0), np.int8(0)], ids=repr)
@pytest.mark.parametrize("after", ["", "Q", "Relu Q"])
@pytest.mark.parametrize(
    ("operator", "bias"),
    [("Conv", ""), ("Conv", "float"), ("Gemm", "float"), ("Gemm", "int32"), ("MatMul", "")],
)
def test_a_cpu_runs_in_integers_what_onnx_runtime_does(
    operator: str, bias: str, after: str, zero: np.generic, tmp_path: Path
) -> None:
    model = pairs(operator, bias, after, zero)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    runs = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    integers = {"QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat"} & runs
    known = fixed_shapes(Graph(model), {})
    found = {cost.name: cost for cost in costs_of(known, on_cpu=True)}
    assert found["node"].precision == ("int8" if integers else "float32")
    assert {each.precision for each in costs_of(known) if each.name == "node"} == {"int8"}


def test_pairs_that_a_cpu_has_no_kernel_for_are_converted_in_every_call() -> None:
    known = fixed_shapes(Graph(pairs("Conv", "", "Relu Q", np.int8(0))), {})
    found = {cost.name: cost for cost in costs_of(known, on_cpu=True)}
    elements = 2 * 8 * 6 * 6
    assert found["xd"].traffic_bytes == elements * (1 + 4)
    assert found["w"].traffic_bytes == 8 * 8 * 9 * (1 + 4)
    assert found["yq"].traffic_bytes == 2 * 8 * 4 * 4 * (4 + 1)  # not in the convolution's kernel
    assert found["node"].read_bytes == elements * 4
    compiled = {cost.name: cost for cost in costs_of(known)}
    assert [compiled[name].traffic_bytes for name in ("xd", "w", "yq")] == [0, 0, 0]


CHAINS = [
    chains.convolution(kinds.CONVOLUTION, 8, 6, 3),
    chains.convolution(kinds.POINTWISE, 8, 6, 1),
    chains.convolution(kinds.DEPTHWISE, 8, 6, 3),
    chains.convolution(kinds.STEM, 8, 6, 3),
    chains.convolution(kinds.CONVOLUTION, 8, 6, 3, precision="int8"),
    chains.product(4, 16),
    chains.product(4, 16, precision="int8"),
    chains.attention(2, 5),
    chains.recurrent(4, 3, 2),
    *(
        chains.passing(kind, 2048)
        for kind in (
            kinds.SIMPLE,
            kinds.FUNCTION,
            kinds.NORMALISATION,
            kinds.POOLING,
            kinds.MOVEMENT,
        )
    ),
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda each: f"{each.precision} {each.kind}")
def test_a_chain_holds_equal_nodes_of_its_kind_with_the_work_it_states(
    chain: Chain, tmp_path: Path
) -> None:
    costs = [c for c in node_costs(chain.graph, {}) if c.kind == chain.kind and c.precision]
    assert len(costs) == chain.count
    dtype = "int8" if chain.precision == "int8" else "float32"
    assert {cost.precision for cost in costs} == {dtype}
    assert {cost.steps for cost in costs} == {chain.steps}
    if chain.flops:
        assert {cost.flops for cost in costs} == {chain.flops}
        assert chain.work == chain.flops / chain.steps
    else:
        alone = costs_of(fixed_shapes(chain.graph, {}), on_cpu=True)
        assert {cost.traffic_bytes for cost in alone[1:]} == {chain.work}
    path = tmp_path / "chain.onnx"
    chain.graph.save(path, temporary=True)
    with load(path, "cpu", threads=1) as engine:
        (found,) = engine({"x": np.zeros(chain.shape, np.float32)}).values()
    assert found.size


def test_every_kind_but_other_has_a_chain() -> None:
    assert {chain.kind for chain in CHAINS} == set(kinds.KINDS) - {kinds.OTHER}


@pytest.mark.parametrize(
    ("operator", "kind"),
    [("HardSwish", kinds.FUNCTION), ("HardSigmoid", kinds.SIMPLE), ("Relu", kinds.SIMPLE)],
)
def test_an_activation_is_of_the_kind_that_takes_as_long(operator: str, kind: str) -> None:
    """ONNX Runtime computes HardSwish as two nodes: it takes as long as tanh."""
    (cost,) = node_costs(Graph(parse("(float[N,4] x) => (float[] y)", f"y = {operator}(x)")), {})
    assert cost.kind == kind
