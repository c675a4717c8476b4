from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.benchmarking.bench import BenchInputs
from deploykit.core.artefact import Artefact
from deploykit.core.tensors import parse_spec
from deploykit.deploying.bundle import complete_model
from tests.support.runtimes.cases import Case, onnx_model

pytestmark = pytest.mark.usefixtures("onnxruntime_alone")

SEQUENCE = Case(
    "sequence",
    ("x:float32[batch_size,T,4]", "lengths:int64[batch_size]"),
    ("y:float32[batch_size,T,4]", "n:int64[batch_size]"),
    (("Mul", ["x", "two"], "y"), ("Identity", ["lengths"], "n")),
    "",
    lambda feeds: feeds,
    {"two": np.float32(2)},
)


@pytest.fixture(name="sequence")
def sequence_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "sequence.onnx"
    path.write_bytes(onnx_model(SEQUENCE).SerializeToString())
    return path


@pytest.fixture(name="data")
def data_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "data.npz"
    x = np.arange(3 * 5 * 4, dtype=np.float32).reshape(3, 5, 4)
    np.savez(path, x=x, lengths=np.array([5, 4, 3]))
    return path


def timed(path: Path, **options: Any) -> Any:
    short = {"seconds": 0.02, "batches": (1, 8), **options}
    return dk.bench([path], out=path.parent / "report", force=True, **short)


def shapes(report: Any) -> dict[int, Any]:
    return {point.batch: point.shapes for point in report.points}


def test_a_batch_axis_of_any_name_is_swept_with_the_sizes_asked_for(sequence: Path) -> None:
    report = timed(sequence, axis={"T": 7})
    assert shapes(report) == {batch: {"x": (batch, 7, 4), "lengths": (batch,)} for batch in (1, 8)}
    assert "inputs: random numbers, T = 7" in report.notes


def test_random_numbers_that_a_model_refuses_are_named_before_the_search(tmp_path: Path) -> None:
    """Token types of two kinds: ONNX Runtime's own words did not say whose numbers these were."""
    case = Case(
        "table",
        ("i:int64[N]",),
        ("y:float32[N,2]",),
        (("Gather", ["table", "i"], "y"),),
        "",
        lambda feeds: feeds,
        {"table": np.zeros((1, 2), np.float32)},
    )
    path = tmp_path / "table.onnx"
    path.write_bytes(onnx_model(case).SerializeToString())
    with pytest.raises(dk.BadInput, match="out of data bounds") as caught:
        timed(path)
    assert caught.value.hint == "`data`: inputs that the model takes; these were random numbers"


def test_a_size_that_nothing_tells_is_asked_for(sequence: Path) -> None:
    """Sequences of length 1 were timed, and nothing said so."""
    with pytest.raises(dk.BadInput, match="how large is the axis T of its inputs") as caught:
        timed(sequence)
    assert caught.value.hint is not None
    assert "`axis` T=SIZE" in caught.value.hint


def test_the_data_given_are_what_is_timed(sequence: Path, data: Path) -> None:
    report = timed(sequence, data=data)
    assert shapes(report)[8] == {"x": (8, 5, 4), "lengths": (8,)}
    assert "inputs: the data given, T = 5" in report.notes
    assert shapes(timed(sequence, data=data, axis={"T": 9}))[1]["x"] == (1, 9, 4)


def test_golden_samples_are_the_default(tmp_path: Path, sequence: Path, data: Path) -> None:
    out = tmp_path / "recorded.onnx"
    complete_model(Artefact.open(sequence), data, out, "onnxruntime")
    report = timed(out)
    assert shapes(report)[8]["x"] == (8, 5, 4)
    assert "inputs: golden samples, T = 5" in report.notes
    text = (tmp_path / "report" / "report.md").read_text("utf-8")
    assert "x 8×5×4; lengths 8" in text
    assert "inputs: golden samples, T = 5" in text


@pytest.mark.parametrize(
    ("axis", "problem"),
    [
        ({"batch_size": 4}, "`axis` batch_size is the batch"),
        ({"H": 4}, "no input has a dynamic axis 'H'"),
        ({"T": 0}, "`axis` T must be 1 or more, got 0"),
    ],
)
def test_axes_that_make_no_sense_are_refused(
    sequence: Path, axis: dict[str, int], problem: str
) -> None:
    with pytest.raises(dk.BadInput, match=problem):
        timed(sequence, axis=axis)


def test_rows_are_repeated_and_lengths_stay_within_their_rows() -> None:
    specs = (parse_spec("x:float32[T,N,2]"), parse_spec("lengths:int64[N]"))
    x = np.arange(4 * 3 * 2, dtype=np.float32).reshape(4, 3, 2)
    inputs = BenchInputs(specs, {"T": 2}, "data", {"x": x, "lengths": np.array([4, 1, 2])})
    feeds = inputs(5)
    assert (feeds["x"] == x[:2][:, [0, 1, 2, 0, 1]]).all()
    assert feeds["lengths"].tolist() == [2, 1, 2, 2, 1]
    assert feeds["lengths"].dtype == np.int64
