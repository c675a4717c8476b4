"""The examples, run as their first lines say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.files import load_py
from tests.support.installed import needs
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
    needs("torch", "onnxscript", "sklearn")
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
    needs("PIL", "sklearn", "onnxruntime")
    pipeline = tmp_path / "examples" / "read_digits.py"
    pipeline.parent.mkdir()
    pipeline.write_text((ROOT / "examples/read_digits.py").read_text())
    save(mnist_like(), tmp_path / "model.onnx")
    drawn = run(tmp_path, pipeline, "page.png").split()
    assert [len(line) for line in drawn] == [6, 6, 6]
    read = json.loads(run(tmp_path, "-m", "deploykit", "predict", pipeline, "page.png"))
    assert [len(line) for line in read] == [6, 6, 6]  # the model is not trained: any digits
    assert all(line.isdigit() for line in read)


EXAMPLE = load_py(Path(__file__).resolve().parent.parent / "examples/average_precision.py")
FoundBoxes, MeanPrecision = EXAMPLE.FoundBoxes, EXAMPLE.MeanPrecision
map_of_each, mean_average_precision = EXAMPLE.map_of_each, EXAMPLE.mean_average_precision

COCO, AT_50 = 0.42978093701685, 0.76851867653743


def scene(images: int = 20, seed: int = 0) -> tuple[list[Any], np.ndarray]:
    """True boxes of three classes; some are found, some twice, some beside or as another class."""
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 60, (images, 5, 2))
    boxes = np.concatenate((corner, corner + rng.uniform(8, 40, (images, 5, 2))), -1)
    classes = rng.integers(0, 3, (images, 5))
    labels = np.concatenate((classes[..., None], boxes), -1).astype(np.float32)
    labels[rng.random((images, 5)) < 0.3, 0] = -1
    found = []
    for own in labels:
        own = own[own[:, 0] >= 0]
        own = np.concatenate((own, own[: len(own) // 2]))
        moved = own[:, 1:] + rng.normal(0, 2, own[:, 1:].shape)
        kinds = np.where(rng.random(len(own)) < 0.15, 2, own[:, 0])
        scores = rng.uniform(0.05, 1, len(own))
        found.append(
            FoundBoxes(moved.astype(np.float32), scores.astype(np.float32), kinds.astype(int))
        )
    return found, labels


def test_it_is_what_pycocotools_computes() -> None:
    """COCOeval(iouType="bbox"), stats 0 and 1."""
    got = mean_average_precision(*scene())
    assert got == MeanPrecision(pytest.approx(COCO, abs=1e-9), pytest.approx(AT_50, abs=1e-9))


def test_ties_and_many_boxes_are_taken_as_pycocotools_takes_them() -> None:
    """COCOeval of 1,050 random scenes gave the same; here are the two that once differed."""
    left, both = np.array([[0, 0, 8, 8]]), np.array([[0, 0, 16, 8], [0, 0, 8, 8]])
    labels = np.array([[[0, 0, 0, 8, 8], [0, 8, 0, 16, 8]]], np.float32)
    found = [FoundBoxes(both, np.array([0.9, 0.8]), np.zeros(2))]
    assert mean_average_precision(found, labels).at_50 == 1  # the first overlaps both by half
    many = FoundBoxes(np.repeat(left, 151, 0), np.linspace(1, 0.5, 151), np.arange(151) // 150)
    labels = np.array([[[1, 0, 0, 8, 8]]], np.float32)
    assert mean_average_precision([many], labels).at_50 == 1  # after 150 of another class


def test_the_score_of_an_image_is_that_of_a_set_of_one() -> None:
    found, labels = scene(4)
    labels[2, :, 0] = -1  # nothing is there
    rows = max(len(each.scores) for each in found) + 2
    outputs = {}
    for name in ("boxes", "scores", "classes"):
        arrays = [getattr(each, name) for each in found]
        padded = [np.concatenate((a, np.zeros((rows - len(a), *a.shape[1:])))) for a in arrays]
        outputs[name] = np.stack(padded)
    got = map_of_each(outputs, labels)
    alone = [mean_average_precision(found[n : n + 1], labels[n : n + 1]).coco for n in (0, 1, 3)]
    np.testing.assert_allclose(got, [alone[0], alone[1], 1.0, alone[2]])
    assert 0 < alone[0] < 1
