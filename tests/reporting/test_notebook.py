"""What a notebook shows of the verbs' results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from tests.support.onnx_zoo import mnist_like, save

pytest.importorskip("onnxruntime")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "a<b>.onnx")


def test_results_show_their_tables_in_a_notebook(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", image=np.zeros((3, 1, 28, 28), np.float32))
    made = dk.build(str(model), "cpu", out=str(tmp_path / "built.onnx"))
    compared = dk.compare(str(model), str(made.path))
    predicted = dk.predict(str(made.path), str(tmp_path / "data.npz"), str(tmp_path / "out.npz"))
    for result, shown in (
        (made, "built.onnx"),
        (compared, "compared with"),
        (dk.inspect(str(model)), "float32"),
        (predicted, "out.npz"),
    ):
        html = result._repr_html_()
        assert "<table" in html
        assert shown in html
        assert "a<b>" not in html


def test_quantize_writes_next_to_the_model_that_a_string_names(model: Path) -> None:
    made = dk.quantize(str(model), "fp16")
    assert made.path.parent == model.parent
    assert made.path != model
    assert "<table" in made._repr_html_()


def test_the_accuracy_of_predictions_is_a_share_with_its_interval(
    model: Path, tmp_path: Path
) -> None:
    images = np.zeros((3, 1, 28, 28), np.float32)
    np.savez(tmp_path / "data.npz", image=images, labels=np.zeros(3, np.int64))
    html = dk.predict(model, tmp_path / "data.npz", tmp_path / "out.npz")._repr_html_()
    assert "Interval" not in html
    assert "% (95 %)" in html


def test_the_machine_and_a_server_show_themselves(model: Path) -> None:
    assert "inspect, profiles" in dk.doctor()._repr_html_()
    with dk.serve({"m": model}, grpc_port=None) as server:
        assert f'<a href="{server.url}">' in server._repr_html_()
