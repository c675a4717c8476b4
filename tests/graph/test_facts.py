"""What is read of an `.onnx` file before a native library sees it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
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
from deploykit.graph.storage import varint
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


HALF_AT: dict[str, dict[str, Any]] = {
    "weight": {"nodes": [ADD], "weights": {"a": np.ones(4, np.float32), "w": ONES}},
    "input": {"nodes": HALVE[1:], "inputs": [value("h", HALF)]},
    "output": {"nodes": [IDENTITY], "outputs": [value("y", HALF)]},
    "cast": {"nodes": HALVE},
    "constant": {"nodes": [node("Constant", [], ["w"], value=numpy_helper.from_array(ONES)), ADD]},
    "branch": {"nodes": [choose(HALVE)]},
    "function": function("Halve", ["x"], HALVE),
}
NOWHERE: dict[str, dict[str, Any]] = {
    "float32": {"nodes": [ADD], "weights": {"w": np.ones(4, np.float32)}},
    "ten": {"nodes": [node("Concat", ["x"], ["y"], axis=10)], "weights": TEN},
}


@pytest.mark.parametrize("where", [*HALF_AT, *NOWHERE])
def test_half_precision_is_seen_wherever_it_is(tmp_path: Path, where: str) -> None:
    path = write_graph(tmp_path / "m", **(HALF_AT | NOWHERE)[where])
    assert (FLOAT16 in read_facts(path).element_types) is (where in HALF_AT)


NAMED = node("Identity", ["x"], ["Loop"], name="Loop", doc_string="Loop")
SLOWED: dict[str, dict[str, Any]] = {
    "value": {"nodes": range_of("ReduceMax")},
    "If": {"nodes": [FLAG, choose([IDENTITY])]},
    "NonZero": {"nodes": [node("NonZero", ["x"], ["y"])]},
    "loop in a branch": {"nodes": [choose([looping()])], "inputs": COUNTED},
    "loop in a function": {
        **function("Repeat", ["x", "count"], [looping()]),
        "inputs": COUNTED[:2],
    },
}
NOT_SLOWED: dict[str, dict[str, Any]] = {
    "shape": {"nodes": range_of("Shape")},
    "name alone": {"nodes": [NAMED, node("Identity", ["Loop"], ["y"])]},
}


@pytest.mark.parametrize("case", [*SLOWED, *NOT_SLOWED])
def test_work_that_follows_from_values_is_seen(tmp_path: Path, case: str) -> None:
    path = write_graph(tmp_path / "m", **(SLOWED | NOT_SLOWED)[case])
    assert read_facts(path).slowed_by_values is (case in SLOWED)


def deep() -> bytes:
    """A graph in an attribute in a node in a graph ...: 3000 messages."""
    body = b""
    for _ in range(1000):
        for number in (6, 5, 1):  # AttributeProto.g, NodeProto.attribute, GraphProto.node
            body = bytes([number << 3 | 2]) + varint(len(body)) + body
    return b"\x08\x0a\x3a" + varint(len(body)) + body


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


def twice(name: str) -> list[onnx.NodeProto]:
    return [call(name, "x", "a"), call(name, "a", "y")]


def nest(body: Callable[[str], list[onnx.NodeProto]]) -> list[onnx.FunctionProto]:
    return [*(local(f"F{n}", body(f"F{n + 1}")) for n in range(28)), local("F28", [IDENTITY])]


LARGE = numpy_helper.from_array(np.zeros(25_000, np.float32))
CONSTANT = [node("Constant", [], ["c"], value=LARGE), node("Add", ["x", "c"], ["y"])]
EXPANDING = {
    "twice in one another": ([call("F0", "x", "y")], nest(twice)),
    "in branches": ([call("F0", "x", "y")], nest(branches)),
    "a large constant": (
        [*(call("F", "x", f"a{n}") for n in range(5000)), call("F", "x", "y")],
        [local("F", CONSTANT)],
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


def test_large_weights_are_not_read_and_a_file_that_was_replaced_is_read_again(
    tmp_path: Path,
) -> None:
    weights = {"w": np.ones((300, 4), np.float32), "v": np.ones(4, np.float32)}
    path = write_graph(tmp_path / "m", [ADD], weights=weights)
    model, spots = parse.parse_model(path)
    assert [len(tensor.raw_data) for tensor in model.graph.initializer] == [0, 16]
    (offset, length) = spots[0]
    assert path.read_bytes()[offset : offset + length] == weights["w"].tobytes()
    assert isinstance(model, onnx.ModelProto)
    assert read_facts(path).operators == {"Add"}
    write_graph(path, [node("Relu", ["x"], ["y"]), node("Relu", ["x"], ["z"])])
    assert read_facts(path).operators == {"Relu"}


def test_facts_load_neither_onnx_nor_its_checker(tmp_path: Path) -> None:
    path = write_graph(tmp_path / "m", [IDENTITY])
    code = (
        "import sys; from pathlib import Path; from deploykit.graph.facts import read_facts; "
        f"read_facts(Path({str(path)!r})); sys.exit('onnx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
