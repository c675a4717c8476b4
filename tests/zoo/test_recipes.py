"""Each recipe, and a user's own, from training to an answer of the server: the real parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript", "sklearn", "PIL", "tritonclient")

import deploykit as dk  # noqa: E402
from deploykit.core.files import folder  # noqa: E402
from deploykit.core.recipe import list_recipes  # noqa: E402
from tests.support.campaign import only_in_a_campaign  # noqa: E402
from tests.support.training import torchvision_weights, write_photos  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
OWN = str(Path(__file__).parents[2] / "examples/own_recipe.py")
ANSWERS = 5


def short_text(place: Path) -> dict[str, Any]:
    text = (folder("models") / "constitution.txt").read_text()
    (place / "t.txt").write_text(text[:6000])
    return {"data": place / "t.txt"}


def photos(place: Path, weights: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"data": write_photos(place / "photos", 40)}  # 8 of 80 calibrate
    return found | ({"weights": torchvision_weights(weights, place)} if weights else {})


CHAINS: dict[str, Callable[[Path], dict[str, Any]]] = {  # what makes `train` of a recipe small
    "mnist-cnn": lambda _: {},
    "cats-dogs": photos,
    "char-lstm": short_text,
    "resnet18-transfer": partial(photos, weights="resnet18"),
    "vgg16-transfer": partial(photos, weights="vgg16"),
    OWN: lambda _: {},
}
LONG = ("resnet18-transfer", "vgg16-transfer", "mnist-cnn")  # the README takes the last one along


def test_every_recipe_has_a_chain() -> None:
    assert list_recipes().keys() == set(CHAINS) - {OWN}


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(n, marks=[only_in_a_campaign] if n in LONG else []) for n in CHAINS],
    ids=lambda name: Path(name).stem,
)
def test_a_recipe_trains_exports_quantises_and_serves(recipe: str, tmp_path: Path) -> None:
    from tritonclient import http as triton
    from tritonclient.utils import np_to_triton_dtype

    trained = dk.train(
        recipe,
        tmp_path / "m.pt",
        epochs=1,
        device="cpu",
        save_splits=tmp_path / "s",
        **CHAINS[recipe](tmp_path),
    )
    assert trained.evidence.training is not None
    assert 0 <= trained.evidence.training.score.value <= 1
    exported = dk.export(trained.path, arch=OWN if recipe == OWN else None)
    assert exported.manifest.evidence.parity.passed
    how: dict[str, Any] = {"calib": tmp_path / "s/calibration.npz", "runtime": "onnxruntime"}
    to = "int8"
    if recipe == "char-lstm":
        to, how = "int8-dynamic", {"metric": "perplexity"}
    made = dk.quantize(exported.path, to, data=tmp_path / "s/test.npz", max_drop=1.0, **how)
    assert made.drop is not None
    assert made.drop.n > 0
    assert made.manifest.precision["int8"] >= 1
    (spec,) = made.manifest.inputs
    with np.load(tmp_path / "s" / "test.npz") as samples:
        feed = samples[spec.name][:ANSWERS]
    with dk.load(made.path, "cpu") as engine:
        wanted = engine({spec.name: feed})
    with dk.serve({"m": made.path}, grpc_port=None) as server:
        client = triton.InferenceServerClient(server.url.removeprefix("http://"))
        given = triton.InferInput(spec.name, feed.shape, np_to_triton_dtype(feed.dtype))
        given.set_data_from_numpy(feed)
        answer = client.infer("m", [given])
        client.close()
    for name, values in wanted.items():
        np.testing.assert_array_equal(answer.as_numpy(name), values)
