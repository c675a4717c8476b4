"""Models of others that run at some sizes only: which inputs they are proven on."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import deploykit as dk
from deploykit.evaluation.feeds import random_inputs
from tests.support.graphs.small import write_text

RNG = np.random.default_rng(0)
KERNEL = RNG.standard_normal((1, 1, 33)).astype(np.float32)
# name -> head, body, constants, and the sizes that must be among those that run
MODELS = {
    "least": (  # an audio front end: 65 samples or more
        "(float[N,T] x) => (float[N,1,L] y)",
        'p = Pad<mode = "reflect">(x, pads) u = Unsqueeze(p, one) y = Conv(u, K)',
        {"pads": np.array([0, 64, 0, 64]), "one": np.array([1]), "K": KERNEL},
        {"N": 32, "T": 80},
    ),
    "step": (
        "(float[N,T] x) => (float[N,K,160] y)",
        "r = Relu(x) y = Reshape(r, s)",
        {"s": np.array([0, -1, 160])},
        {"N": 32, "T": 160},
    ),
    "batch of 1": (  # a state for one row
        "(float[N,5,4] x) => (float[N,5,4] y)",
        "r = MatMul(x, W) h = Reshape(r, s) y = Reshape(h, t)",
        {"W": np.eye(4, dtype=np.float32), "s": np.array([1, 20]), "t": np.array([1, 5, 4])},
        {"N": 1},
    ),
    "a state": (  # whose batch has no name
        "(float[N,T] x, float[2,K,4] h) => (float[N,4] y)",
        """p = Pad<mode = "reflect">(x, pads) m = ReduceMax<axes = [1]>(p)
           i = ReduceSum<keepdims = 0>(h, zero) y = Add(i, m)""",
        {"pads": np.array([0, 64, 0, 64]), "zero": np.array([0])},
        {"N": 2, "T": 80, "K": 2},
    ),
    "relation": (
        "(float[N,T] x, float[N,U] z) => (float[M,T] y)",
        "d = Concat<axis = 1>(z, z, z) c = Concat<axis = 0>(x, d) y = Relu(c)",
        {},
        None,
    ),
}


def write(folder: Path, name: str) -> Path:
    return write_text(folder, *MODELS[name][:3])


@pytest.mark.parametrize("name", ["least", "step", "batch of 1", "a state"])
def test_sizes_at_which_a_model_runs_are_found_and_named(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    with dk.load(path, "cpu") as engine:
        sizes, notes, _ = random_inputs(engine, {})
        assert MODELS[name][3] in sizes
        assert "at other sizes it does not run: " in notes[0]
    found = dk.compare(path, path)
    assert found.parity.passed
    assert "at other sizes" in found.note
    for made in (dk.quantize(path, "fp16"), dk.build(path, "cpu", out=tmp_path / "b.onnx")):
        assert any("at other sizes" in note for note in made.notes)


def test_a_busy_machine_does_not_end_the_search_for_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = itertools.count(0.0, 3600.0)
    clock = SimpleNamespace(monotonic=lambda: next(hours), thread_time=time.thread_time)
    monkeypatch.setattr("deploykit.evaluation.feeds.time", clock)
    with dk.load(write(tmp_path, "least"), "cpu") as engine:
        assert random_inputs(engine, {}).sizes


def test_the_reason_of_a_failed_run_is_that_of_the_innermost_node(tmp_path: Path) -> None:
    body = "then_branch = t () => (float t) "
    body += '{ p = Pad<mode = "reflect">(x, pads) t = ReduceMax<keepdims=0>(p) }'
    body += ", else_branch = e () => (float e) { e = ReduceMax<keepdims=0>(x) }"
    constants = {"c": np.array(True), "pads": np.array([0, 64, 0, 64])}
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
def test_sizes_that_no_input_can_have_are_refused(
    tmp_path: Path, given: dict[str, object], reason: str
) -> None:
    path = write(tmp_path, "step")
    for run in (
        lambda: dk.compare(path, path, **given),
        lambda: dk.quantize(path, "fp16", **given),
    ):
        with pytest.raises(dk.BadInput, match=reason):
            run()


def test_sizes_next_to_data_are_refused(tmp_path: Path) -> None:
    path, data = write(tmp_path, "step"), tmp_path / "d.npz"
    np.savez(data, x=RNG.standard_normal((16, 320)).astype(np.float32))
    with pytest.raises(dk.BadInput, match="have theirs"):
        dk.compare(path, path, data=data, axis={"T": 160})
    assert dk.quantize(path, "fp16", data=data, batch=4).evaluation.samples == 16


def test_an_engine_is_run_with_no_fewer_rows_than_it_takes(tmp_path: Path) -> None:
    path = write(tmp_path, "step")
    with dk.load(path, "cpu") as engine:
        sizes = random_inputs(engine, {"T": 160}, {"N": (4, 16)}).sizes
    assert [each["N"] for each in sizes] == [4, 7, 16]
