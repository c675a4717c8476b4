"""What is read of an `.onnx` file before a native library sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.graph import parse
from deploykit.graph.graph import Graph
from deploykit.graph.parse import FLOAT16, external_files, read_facts
from deploykit.graph.storage import varint
from tests.support.onnx_zoo import save

HALF, INT64 = TensorProto.FLOAT16, TensorProto.INT64
ROW, ANY = "(float[N,4] x)", "(float[N,4] y)"
HALVE = f"h = Cast <to = {HALF}> (x) y = Cast <to = 1> (h)"
ONES = {"w": np.ones(4, np.float32)}


def write(
    folder: Path, body: str, head: str = f"{ROW} => {ANY}", functions: str = "", **weights: Any
) -> Path:
    """A graph that no checker has seen; the domain `local` has the functions."""
    opsets = '<ir_version: 10, opset_import: ["" : 18, "local" : 1]>'
    model = onnx.parser.parse_model(f"{opsets} g {head} {{ {body} }} {functions}")
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    model.graph.initializer.extend(tensors)
    return save(model, folder / "m.onnx")


def function(name: str, head: str, body: str) -> str:
    opsets = 'opset_import: ["" : 18, "local" : 1]'
    return f'<domain: "local", {opsets}> {name} {head} {{ {body} }}'


def choose(body: str) -> str:
    branch = f"() => (float[] y) {{ {body} }}"
    return f"y = If <then_branch = t {branch}, else_branch = e {branch}> (flag)"


# y = x, taken over as many times as the input `count` says
LOOP = """y = Loop <body = b (int64 i, bool go, float[] before) => (bool go_on, float[] after) {
    go_on = Identity(go) after = Identity(before)
}> (count, "", x)"""
COUNTED = f"(float[N,4] x, int64 count, bool flag) => {ANY}"
REPEAT = function("Repeat", "(x, count) => (y)", LOOP)
# a Range as long as a value or a size of x; in reverse order, which ONNX Runtime accepts
LIMIT = "limit = Constant <value_int = 1> ()"
RANGE = "y = Range(limit, count, limit)"
OF_A_VALUE = f"{RANGE} count = Cast <to = {INT64}> (m) m = ReduceMax <keepdims = 0> (x) {LIMIT}"
OF_A_SHAPE = f"{RANGE} count = Squeeze(shape) shape = Shape <end = 1> (x) {LIMIT}"
TEN = {"t": np.full((10,), 10, np.int64)}  # FLOAT16 is 10 in ONNX; here it is no type


@pytest.mark.parametrize(
    ("half", "body", "more"),
    [
        (True, "y = Add(x, w)", {"a": ONES["w"], "w": np.ones(4, np.float16)}),
        (True, "y = Cast <to = 1> (h)", {"head": f"(float16[N,4] h) => {ANY}"}),
        (True, "y = Identity(x)", {"head": f"{ROW} => (float16[N,4] y)"}),
        (True, HALVE, {}),
        (True, "w = Constant <value = float16[1] {1}> () y = Add(x, w)", {}),
        (True, choose(HALVE), {}),
        (True, "y = local.H(x)", {"functions": function("H", "(x) => (y)", HALVE)}),
        (False, "y = Add(x, w)", ONES),
        (False, "y = Concat <axis = 10> (x)", TEN),
    ],
)
def test_half_precision_is_seen_wherever_it_is(
    tmp_path: Path, half: bool, body: str, more: dict[str, Any]
) -> None:
    assert (FLOAT16 in read_facts(write(tmp_path, body, **more)).element_types) is half


@pytest.mark.parametrize(
    ("slowed", "body", "more"),
    [
        (True, OF_A_VALUE, {}),
        (True, f"flag = Cast <to = 9> (x) {choose('y = Identity(x)')}", {}),
        (True, "y = NonZero(x)", {}),
        (True, choose(LOOP), {"head": COUNTED}),
        (True, "y = local.Repeat(x, count)", {"head": COUNTED, "functions": REPEAT}),
        (False, OF_A_SHAPE, {}),
        (False, "[Loop] Loop = Identity(x) y = Identity(Loop)", {}),  # a name alone
    ],
)
def test_work_that_follows_from_values_is_seen(
    tmp_path: Path, slowed: bool, body: str, more: dict[str, Any]
) -> None:
    assert read_facts(write(tmp_path, body, **more)).slowed_by_values is slowed


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
    "three bytes": b"\x08\x0a\x12",
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


def nest(body: str) -> str:
    """28 functions, each of which calls the next as `body` does."""
    bodies = [*(body.replace("F", f"F{n + 1}") for n in range(28)), "y = Identity(x)"]
    return " ".join(function(f"F{n}", "(x) => (y)", each) for n, each in enumerate(bodies))


THEN, ELSE = (f"{name} () => (float[] {name}) {{ {name} = local.F(x) }}" for name in "ab")
CONSTANT = (
    "c = Constant <value = float[25000] {" + ", ".join(["0"] * 25_000) + "}> () y = Add(x, c)"
)
EXPANDING = {
    "twice in one another": ("y = local.F0(x)", nest("a = local.F(x) y = local.F(a)")),
    "in branches": (
        "y = local.F0(x)",
        nest(
            "c = Constant <value = bool {1}> () "
            f"y = If <then_branch = {THEN}, else_branch = {ELSE}> (c)"
        ),
    ),
    "a large constant": (
        " ".join(f"{name} = local.F(x)" for name in (*(f"a{n}" for n in range(5000)), "y")),
        function("F", "(x) => (y)", CONSTANT),
    ),
    "itself": ("y = local.F(x)", function("F", "(x) => (y)", "y = local.F(x)")),
}


@pytest.mark.parametrize("read", [read_facts, Graph.open])
@pytest.mark.parametrize("case", EXPANDING)
def test_functions_that_expand_without_end_are_counted_not_inlined(
    tmp_path: Path, case: str, read: Any
) -> None:
    body, functions = EXPANDING[case]
    path = write(tmp_path, body, functions=functions)
    with pytest.raises(BadInput, match=r"functions call one another so often|calls itself"):
        read(path)


def test_large_weights_are_not_read_and_a_file_that_was_replaced_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"w": np.ones((300, 4), np.float32), "v": np.ones(4, np.float32)}
    path = write(tmp_path, "y = Add(x, w)", **weights)
    model, spots = parse.parse_model(path)
    assert [len(tensor.raw_data) for tensor in model.graph.initializer] == [0, 16]
    (offset, length) = spots[0]
    assert path.read_bytes()[offset : offset + length] == weights["w"].tobytes()
    assert read_facts(path).operators == {"Add"}
    write(tmp_path, "y = Relu(x) z = Relu(x)")
    assert read_facts(path).operators == {"Relu"}
    monkeypatch.setattr(parse, "_MAX_FIELDS", 3)  # a file of more could keep a server for minutes
    with pytest.raises(BadInput, match="is a truncated or damaged"):
        parse.parse_model(path)


def test_facts_load_neither_onnx_nor_its_checker(tmp_path: Path) -> None:
    path = write(tmp_path, "y = Identity(x)")
    code = (
        "import sys; from pathlib import Path; from deploykit.graph.parse import read_facts; "
        f"read_facts(Path({str(path)!r})); sys.exit('onnx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
