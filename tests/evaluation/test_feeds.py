"""The inputs on which two engines are compared: how many rows at once, and at which sizes."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.tensors import parse_spec
from deploykit.evaluation import feeds
from deploykit.evaluation.feeds import (
    first_rows,
    parity_sizes,
    random_inputs,
    rows_that_fit,
)
from deploykit.graph.graph import Graph
from tests.support.graphs.small import parse, write_text
from tests.support.onnx_zoo import save

RNG = np.random.default_rng(0)


def test_parity_sizes_cover_batches_lengths_and_image_sizes_within_limits() -> None:
    sizes = parity_sizes([parse_spec("ids:int64[N,T]"), parse_spec("image:float32[N,3,H,64]")])
    assert [each["N"] for each in sizes] == [1, 2, 7, 32]
    assert len({each["T"] for each in sizes}) == 4
    assert all(each["H"] >= 64 for each in sizes)
    assert parity_sizes([parse_spec("x:float32[2,3]")]) == [{}]
    sizes = parity_sizes([parse_spec("x:float32[N,3]")], {"N": (2, 8)})
    assert [each["N"] for each in sizes] == [2, 7, 8]


def wide(path: Path, side: int, weight: float = 0.0) -> Path:
    """A convolution to 64 channels, 67 MB for each row of 512 x 512, and the channels' maxima.

    Outputs of that size would only take time: the bound is on the largest tensor in the graph.
    """
    head = f"(float[N,1,{side},{side}] x) => (float[N,64,1,1] z)"
    body = "y = Conv(x, w) z = GlobalMaxPool(y)"
    return save(parse(head, body, w=np.full((64, 1, 1, 1), weight)), path)


@pytest.mark.parametrize(("side", "rows"), [(16, 32), (256, 8), (512, 2), (4096, 2)])
def test_no_more_rows_are_compared_than_fit_into_memory(
    tmp_path: Path, side: int, rows: int
) -> None:
    model = wide(tmp_path / "m.onnx", side)
    inputs = [{"x": np.empty((n, 1, side, side), np.uint8)} for n in (1, 2, 7, 32)]
    assert rows_that_fit(inputs, model) == rows
    sizes = [len(each["x"]) for each in first_rows(inputs, rows, Graph.open(model).inputs)]
    assert sizes == [min(n, rows) for n in (1, 2, 7, 32)]


@pytest.mark.parametrize("given", [False, True])
def test_compare_and_bench_use_as_many_rows_as_fit_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, onnxruntime_alone: None, given: bool
) -> None:
    first, second, third = (
        wide(tmp_path / f"{name}.onnx", 32, weight)
        for name, weight in (("a", 1.0), ("b", 1.0001), ("c", 1.5))
    )
    whole = dk.compare(first, first)
    assert (max(row.batch for row in whole.parity.rows), whole.note) == (32, "")
    monkeypatch.setattr(feeds, "MOST_CALL_BYTES", 2 << 20)
    data = tmp_path / "data.npz" if given else None
    if data:
        np.savez(data, x=RNG.random((11, 1, 32, 32), np.float32))
    note = "compared at batches of up to 8: larger ones take too much memory"
    found = dk.compare(first, second, data=data)
    batches = [row.batch for row in found.parity.rows]
    assert (batches, found.note) == ([8, 3] if given else [1, 2, 7, 8], note)
    if data is None:
        far = dk.compare(first, third).divergence
        assert (far.operator, far.tensor) == ("Conv", "y")
        options = {"out": tmp_path, "device": "cpu", "batches": (1,), "seconds": 0.02}
        report = dk.bench([first, second], **options)
        assert max(row["batch"] for row in report.parity[0]["rows"]) == 8
        assert f"parity: {note}" in report.notes


# Models of others that run at some sizes only

# name -> head, body, and the sizes that must be among those that run
MODELS = {
    "least": (  # an audio front end: 65 samples or more
        "(float[N,T] x) => (float[N,1,L] y)",
        'p = Pad<mode = "reflect">(x, pads) u = Unsqueeze(p, one) y = Conv(u, K)',
        {"N": 32, "T": 80},
    ),
    "step": (
        "(float[N,T] x) => (float[N,K,160] y)",
        "r = Relu(x) y = Reshape(r, s)",
        {"N": 32, "T": 160},
    ),
    "batch of 1": (  # a state for one row
        "(float[N,5,4] x) => (float[N,5,4] y)",
        "r = MatMul(x, W) h = Reshape(r, row) y = Reshape(h, back)",
        {"N": 1},
    ),
    "a state": (  # whose batch has no name
        "(float[N,T] x, float[2,K,4] h) => (float[N,4] y)",
        """p = Pad<mode = "reflect">(x, pads) m = ReduceMax<axes = [1]>(p)
           i = ReduceSum<keepdims = 0>(h, zero) y = Add(i, m)""",
        {"N": 2, "T": 80, "K": 2},
    ),
    "relation": (
        "(float[N,T] x, float[N,U] z) => (float[M,T] y)",
        "d = Concat<axis = 1>(z, z, z) c = Concat<axis = 0>(x, d) y = Relu(c)",
        None,
    ),
}
CONSTANTS = {
    "pads": np.array([0, 64, 0, 64]),
    "one": np.array([1]),
    "zero": np.array([0]),
    "s": np.array([0, -1, 160]),
    "row": np.array([1, 20]),
    "back": np.array([1, 5, 4]),
    "W": np.eye(4),
    "K": RNG.standard_normal((1, 1, 33)),
}


def write(folder: Path, name: str) -> Path:
    return write_text(folder, *MODELS[name][:2], CONSTANTS)


@pytest.mark.parametrize("name", ["least", "step", "batch of 1", "a state"])
def test_sizes_at_which_a_model_runs_are_found_and_named(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    with dk.load(path, "cpu") as engine:
        sizes, notes, _ = random_inputs(engine, {})
        assert MODELS[name][2] in sizes
        assert "at other sizes it does not run: " in notes[0]
    found = dk.compare(path, path)
    assert found.parity.passed
    assert "at other sizes" in found.note
    for made in (dk.quantize(path, "fp16"), dk.build(path, "cpu", out=tmp_path / "b.onnx")):
        assert any("at other sizes" in note for note in made.notes)


def test_a_busy_machine_searches_sizes_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = itertools.count(0.0, 3600.0)
    clock = SimpleNamespace(monotonic=lambda: next(hours), thread_time=time.thread_time)
    monkeypatch.setattr(feeds, "time", clock)
    with dk.load(write(tmp_path, "least"), "cpu") as engine:
        assert random_inputs(engine, {}).sizes


def test_the_reason_of_a_failed_run_is_that_of_the_innermost_node(tmp_path: Path) -> None:
    body = "then_branch = t () => (float t) "
    body += '{ p = Pad<mode = "reflect">(x, pads) t = ReduceMax<keepdims=0>(p) }'
    body += ", else_branch = e () => (float e) { e = ReduceMax<keepdims=0>(x) }"
    constants = {**CONSTANTS, "c": np.array(True)}
    path = write_text(tmp_path, "(float[N,T] x) => (float y)", f"y = If(c) <{body}>", constants)
    with dk.load(path, "cpu") as engine, pytest.raises(dk.BadInput) as caught:
        engine({"x": np.zeros((1, 5), np.float32)})
    assert "refused it: node '" in caught.value.message
    assert "(Pad): Pad reflect" in caught.value.message
    assert "Status Message" not in caught.value.message


def test_sizes_that_the_user_gives_are_those_that_are_compared(tmp_path: Path) -> None:
    path = write(tmp_path, "relation")
    with pytest.raises(dk.BadInput, match=r"no random inputs .* run: .*m\.onnx") as caught:
        dk.compare(path, path)
    assert "`axis` T=SIZE" in caught.value.hint
    found = dk.compare(path, path, axis={"T": 6, "U": 2}, batch=4)
    assert [(row.batch, row.values) for row in found.parity.rows] == [(4, 48)]
    assert dk.quantize(path, "fp16", axis={"T": 6, "U": 2}).evaluation.passed


def test_samples_are_run_one_at_a_time_where_a_model_takes_no_more(tmp_path: Path) -> None:
    path, data = write(tmp_path, "batch of 1"), tmp_path / "d.npz"
    np.savez(data, x=RNG.standard_normal((16, 5, 4)).astype(np.float32))
    for to, given in (("int8", {"calib": data}), ("fp16", {"data": data})):
        made = dk.quantize(path, to, tmp_path / f"{to}.onnx", **given)
        assert made.evaluation.samples == 16
        assert any(note.startswith("run one sample at a time") for note in made.notes)
        assert dk.compare(made.path).parity.passed
    assert dk.compare(path, path, data=data).note.startswith("run one sample at a time")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"axis": {"Z": 3}}, "no input has a dynamic axis 'Z'"),
        ({"axis": {"T": 0}}, "`axis` T must be 1 or more"),
        ({"batch": 0}, "must be 1 or more"),
        ({"axis": {"N": 3}, "batch": 2}, "`batch` is the size of `axis` N: give one"),
    ],
)
def test_sizes_that_no_input_has_are_refused(
    tmp_path: Path, given: dict[str, object], reason: str
) -> None:
    path = write(tmp_path, "step")
    with pytest.raises(dk.BadInput, match=reason):
        dk.compare(path, path, **given)
    with pytest.raises(dk.BadInput, match=reason):
        dk.quantize(path, "fp16", **given)


def test_sizes_next_to_data_are_refused(tmp_path: Path) -> None:
    path, data = write(tmp_path, "step"), tmp_path / "d.npz"
    np.savez(data, x=RNG.standard_normal((16, 320)).astype(np.float32))
    with pytest.raises(dk.BadInput, match="have theirs"):
        dk.compare(path, path, data=data, axis={"T": 160})
    assert dk.quantize(path, "fp16", data=data, batch=4).evaluation.samples == 16


def test_an_engine_is_run_with_no_fewer_rows_than_it_takes(tmp_path: Path) -> None:
    with dk.load(write(tmp_path, "step"), "cpu") as engine:
        sizes = random_inputs(engine, {"T": 160}, {"N": (4, 16)}).sizes
    assert [each["N"] for each in sizes] == [4, 7, 16]
