"""Each chain is of the kind that it is meant to time, and runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from deploykit.engines.engine import load
from deploykit.graph import cost as kinds
from deploykit.graph.cost import costs_of, node_costs
from deploykit.graph.graph import Graph
from deploykit.graph.shapes import fixed_shapes
from deploykit.planning import probe as chains
from deploykit.planning.probe import Chain
from tests.support.onnx_zoo import make

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
    nodes = [helper.make_node(operator, ["x"], ["y"], name="n")]
    graph = Graph(make(nodes, {"x": ("N", 4)}, {"y": ("N", 4)}, {}))
    (cost,) = node_costs(graph, {"N": 1})
    assert cost.kind == kind
