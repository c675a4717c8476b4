"""What is read of an `.onnx` file before a native library sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.graph import parse
from deploykit.graph.facts import FLOAT16, external_files, read_facts
from deploykit.graph.graph import Graph
from tests.support.graphs.small import node, value, write_graph

FLOAT, HALF, BOOL, INT64 = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.BOOL,
    TensorProto.INT64,
)
ADD = node("Add", ["x", "w"], ["y"])
IDENTITY = node("Identity", ["x"], ["y"])
HALVE = [node("Cast", ["x"], ["h"], to=HALF), node("Cast", ["h"], ["y"], to=FLOAT)]
OPSETS = [helper.make_opsetid("", 18)]


def choose(nodes: list[onnx.NodeProto]) -> onnx.NodeProto:
    branch = helper.make_graph(nodes, "branch", [], [value("y")])
    return node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)


def looping() -> onnx.NodeProto:
    """Answers y = x, taken over as many times as the input `count` says."""
    body = helper.make_graph(
        [node("Identity", ["go"], ["go_on"]), node("Identity", ["before"], ["after"])],
        "body",
        [value("i", INT64, []), value("go", BOOL, []), value("before")],
        [value("go_on", BOOL, []), value("after")],
    )
    return node("Loop", ["count", "", "x"], ["y"], body=body)


def function(name: str, inputs: list[str], nodes: list[onnx.NodeProto]) -> dict[str, Any]:
    made = helper.make_function("local", name, inputs, ["y"], nodes, OPSETS)
    return {"nodes": [node(name, inputs, ["y"], domain="local")], "functions": [made]}


def range_of(source: str) -> list[onnx.NodeProto]:
    """A Range as long as a value or a size of x; in reverse order, which ONNX Runtime accepts."""
    how_many = [
        node("ReduceMax", ["x"], ["most"], keepdims=0),
        node("Cast", ["most"], ["count"], to=INT64),
    ]
    if source == "Shape":
        how_many = [node("Shape", ["x"], ["shape"], end=1), node("Squeeze", ["shape"], ["count"])]
    limit = node("Constant", [], ["limit"], value_int=1)
    return [node("Range", ["limit", "count", "limit"], ["y"]), *how_many[::-1], limit]


COUNTED = [value("x"), value("count", INT64, []), value("flag", BOOL, [])]
FLAG = node("Cast", ["x"], ["flag"], to=BOOL)
ONES = np.ones(4, np.float16)
TEN = {"t": np.full((10,), 10, np.int64)}  # FLOAT16 is 10 in ONNX; here it is no type


@pytest.mark.parametrize(
    ("graph", "half"),
    [
        ({"nodes": [ADD], "weights": {"w": np.ones(4, np.float32)}}, False),
        ({"nodes": [ADD], "weights": {"a": np.ones(4, np.float32), "w": ONES}}, True),
        ({"nodes": HALVE[1:], "inputs": [value("h", HALF)]}, True),
        ({"nodes": [IDENTITY], "outputs": [value("y", HALF)]}, True),
        ({"nodes": HALVE}, True),
        ({"nodes": [node("Constant", [], ["w"], value=numpy_helper.from_array(ONES)), ADD]}, True),
        ({"nodes": [choose(HALVE)]}, True),
        (function("Halve", ["x"], HALVE), True),
        ({"nodes": [node("Concat", ["x"], ["y"], axis=10)], "weights": TEN}, False),
    ],
    ids=["float32", "weight", "input", "output", "cast", "constant", "branch", "function", "ten"],
)
def test_half_precision_is_seen_wherever_it_is(
    tmp_path: Path, graph: dict[str, Any], half: bool
) -> None:
    assert (FLOAT16 in read_facts(write_graph(tmp_path / "m", **graph)).element_types) is half


@pytest.mark.parametrize(
    ("graph", "slowed"),
    [
        ({"nodes": range_of("ReduceMax")}, True),
        ({"nodes": range_of("Shape")}, False),
        ({"nodes": [FLAG, choose([IDENTITY])]}, True),
        ({"nodes": [node("NonZero", ["x"], ["y"])]}, True),
        ({"nodes": [FLAG, node("Compress", ["x", "flag"], ["y"])]}, True),
        ({"nodes": [choose([looping()])], "inputs": COUNTED}, True),
        ({**function("Repeat", ["x", "count"], [looping()]), "inputs": COUNTED[:2]}, True),
        (
            {
                "nodes": [
                    node("Identity", ["x"], ["Loop"], name="Loop", doc_string="Loop"),
                    node("Identity", ["Loop"], ["y"]),
                ]
            },
            False,
        ),
    ],
    ids=[
        "value",
        "shape",
        "If",
        "NonZero",
        "Compress",
        "loop-in-branch",
        "loop-in-function",
        "name-alone",
    ],
)
def test_work_that_follows_from_values_is_seen(
    tmp_path: Path, graph: dict[str, Any], slowed: bool
) -> None:
    assert read_facts(write_graph(tmp_path / "m", **graph)).slowed_by_values is slowed


def deep() -> bytes:
    """A graph in an attribute in a node in a graph ...: 3000 messages."""
    body = b""
    for _ in range(1000):
        for number in (6, 5, 1):  # AttributeProto.g, NodeProto.attribute, GraphProto.node
            body = bytes([number << 3 | 2]) + varint(len(body)) + body
    return b"\x08\x0a\x3a" + varint(len(body)) + body


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


DAMAGE = {
    "truncated": b"\x08\x0a\x3a\xff\xff\xff\xff\x0f",
    "noise": b"\x08\x0a" + np.random.default_rng(1).bytes(100_000),
    "a tensor of 127 bytes in a graph of 2": b"\x08\x0a\x3a\x02\x2a\x7f" + b"\x10\x0a" * 100,
    "zeros": bytes(1000),
    "no graph": b"\x08\x0a",
}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in parts"])
@pytest.mark.parametrize("content", [*DAMAGE.values(), deep()], ids=[*DAMAGE, "deep"])
def test_a_file_that_holds_no_model_is_refused(tmp_path: Path, content: bytes, whole: bool) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"m\.onnx: (is a truncated or damaged|has subgraphs in)"):
        parse.parse_model(path, whole_bytes=len(content) if whole else 0)
    with pytest.raises(BadInput, match=r"m\.onnx: "):
        read_facts(path)
    assert external_files(path) == []


def local(name: str, nodes: list[onnx.NodeProto]) -> onnx.FunctionProto:
    return helper.make_function(
        "l", name, ["x"], ["y"], nodes, [*OPSETS, helper.make_opsetid("l", 1)]
    )


def call(name: str, source: str, made: str) -> onnx.NodeProto:
    return node(name, [source], [made], domain="l")


def branches(name: str) -> list[onnx.NodeProto]:
    """Calls the function `name` in both branches of an If."""
    then, other = (
        helper.make_graph([call(name, "x", made)], made, [], [value(made)]) for made in "ab"
    )
    always = helper.make_tensor("c", BOOL, [], [1])
    constant = node("Constant", [], ["c"], value=always)
    return [constant, node("If", ["c"], ["y"], then_branch=then, else_branch=other)]


LARGE = numpy_helper.from_array(np.zeros(25_000, np.float32))
EXPANDING = {
    "twice in one another": (
        [call("F0", "x", "y")],
        [
            local(f"F{n}", [call(f"F{n + 1}", "x", "a"), call(f"F{n + 1}", "a", "y")])
            for n in range(28)
        ]
        + [local("F28", [IDENTITY])],
    ),
    "in branches": (
        [call("F0", "x", "y")],
        [local(f"F{n}", branches(f"F{n + 1}")) for n in range(28)] + [local("F28", [IDENTITY])],
    ),
    "a large constant": (
        [call("F", "x", f"a{n}") for n in range(5000)] + [call("F", "x", "y")],
        [local("F", [node("Constant", [], ["c"], value=LARGE), node("Add", ["x", "c"], ["y"])])],
    ),
    "itself": ([call("F", "x", "y")], [local("F", [call("F", "x", "y")])]),
}


@pytest.mark.parametrize("read", [read_facts, Graph.open])
@pytest.mark.parametrize("case", EXPANDING)
def test_functions_that_expand_without_end_are_counted_not_inlined(
    tmp_path: Path, case: str, read: Any
) -> None:
    nodes, functions = EXPANDING[case]
    path = write_graph(tmp_path / "m", nodes, functions=functions)
    with pytest.raises(BadInput, match=r"functions call one another so often|calls itself"):
        read(path)


def test_large_weights_are_not_read(tmp_path: Path) -> None:
    weights = {"w": np.ones((300, 4), np.float32), "v": np.ones(4, np.float32)}
    path = write_graph(tmp_path / "m", [ADD], weights=weights)
    model, spots = parse.parse_model(path)
    assert [len(tensor.raw_data) for tensor in model.graph.initializer] == [0, 16]
    (offset, length) = spots[0]
    assert path.read_bytes()[offset : offset + length] == weights["w"].tobytes()
    assert isinstance(model, onnx.ModelProto)


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path = write_graph(tmp_path / "m", [IDENTITY])
    assert read_facts(path).operators == {"Identity"}
    write_graph(path, [node("Relu", ["x"], ["y"]), node("Relu", ["x"], ["z"])])
    assert read_facts(path).operators == {"Relu"}


def test_facts_load_neither_onnx_nor_its_checker(tmp_path: Path) -> None:
    path = write_graph(tmp_path / "m", [IDENTITY])
    code = (
        "import sys; from pathlib import Path; from deploykit.graph.facts import read_facts; "
        f"read_facts(Path({str(path)!r})); sys.exit('onnx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
