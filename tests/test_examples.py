"""The examples, run as their first lines say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import deploykit as dk
from tests.support.onnx_zoo import mnist_like, save

ROOT = Path(__file__).resolve().parent.parent


def run(place: Path, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.torch
@pytest.mark.slow
def test_a_users_recipe_is_trained_and_exported(tmp_path: Path) -> None:
    for module in ("torch", "onnxscript", "sklearn"):
        pytest.importorskip(module)
    recipe = str(ROOT / "examples/own_recipe.py")
    trained = dk.train(recipe, tmp_path / "d.pt", epochs=5, device="cpu").evidence.training
    assert trained is not None
    assert trained.score.value > 0.85
    assert dk.export(tmp_path / "d.pt", arch=recipe).path == tmp_path / "d.onnx"
    with pytest.raises(dk.BadInput, match="does not come with deploykit") as raised:
        dk.export(tmp_path / "d.pt")
    assert "`arch`" in str(raised.value.hint)


def test_the_example_client_gets_an_answer(tmp_path: Path) -> None:
    model = save(mnist_like(), tmp_path / "model.onnx")
    with dk.serve({"mnist": model}, http_port=0, grpc_port=None) as server:
        out = run(tmp_path, ROOT / "examples/client.py", server.url, "mnist")
    name, _, values = out.partition(": ")
    assert name == mnist_like().graph.output[0].name
    assert len(json.loads(values)[0]) == 10


def test_the_example_pipeline_reads_every_digit_of_its_page(tmp_path: Path) -> None:
    for module in ("PIL", "sklearn", "onnxruntime"):
        pytest.importorskip(module)
    pipeline = tmp_path / "examples" / "read_digits.py"
    pipeline.parent.mkdir()
    pipeline.write_text((ROOT / "examples/read_digits.py").read_text())
    save(mnist_like(), tmp_path / "model.onnx")
    drawn = run(tmp_path, pipeline, "page.png").split()
    assert [len(line) for line in drawn] == [6, 6, 6]
    read = json.loads(run(tmp_path, "-m", "deploykit", "predict", pipeline, "page.png"))
    assert [len(line) for line in read] == [6, 6, 6]  # the model is not trained: any digits
    assert all(line.isdigit() for line in read)
