"""A classifier that answers with names goes through each verb, or is refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.core.errors import GateFailed, Unsupported
from deploykit.engines.batching import JoinedRun
from deploykit.engines.engine import load
from deploykit.evaluation.batching import keep_runs, prove_batch
from deploykit.evaluation.compare import compare
from deploykit.evaluation.predict import predict
from tests.support.string_labels import samples, write_classifier


@pytest.fixture(name="model")
def model_fixture(tmp_path: Path) -> Path:
    return write_classifier(tmp_path / "m.onnx")


def test_its_rows_are_proven_independent_alone_and_with_batches_that_ran(model: Path) -> None:
    joined: list[JoinedRun] = []
    with load(model, "cpu") as engine:
        assert prove_batch(engine, model, None).passed
        feeds = [{"X": samples(rows)} for rows in (1, 8)]
        keep = keep_runs(engine, feeds, joined)
        for number, each in enumerate(feeds):
            keep(number, {}, engine(each))
        proof = prove_batch(engine, model, None, 8, joined)
    assert (proof.passed, len(joined)) == (True, 2)


def test_it_equals_itself(model: Path) -> None:
    assert compare(model, model).parity.passed


def test_another_one_differs_in_its_strings(model: Path, tmp_path: Path) -> None:
    found = compare(model, write_classifier(tmp_path / "other.onnx", scale=-1.0))
    with pytest.raises(GateFailed, match=r"output 'label' .* strings differ") as caught:
        found.raise_if_over()
    assert "LinearClassifier" in str(caught.value.hint)


def test_predictions_of_strings_are_refused_by_the_name_of_the_output(
    model: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", X=samples(4))
    with pytest.raises(Unsupported, match="output 'label' holds strings"):
        predict(model, tmp_path / "x.npz", tmp_path / "y.npz")
