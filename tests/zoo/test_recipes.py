"""Each recipe, and a user's own, from training to an answer of the server: the real parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Chain:
    """What makes a recipe small: `train`'s options; and how it is exported and quantised."""

    train: Callable[[Path], dict[str, Any]]
    to: str = "int8"
    export: tuple[tuple[str, str], ...] = ()
    quantize: tuple[tuple[str, str], ...] = (("runtime", "onnxruntime"),)


def short_text(place: Path) -> dict[str, Any]:
    text = (folder("models") / "constitution.txt").read_text()
    (place / "t.txt").write_text(text[:6000])
    return {"data": place / "t.txt"}


def photos(place: Path) -> dict[str, Any]:
    return {"data": write_photos(place / "photos", 40)}  # 8 of these 80 calibrate


def photos_and_weights(name: str) -> Callable[[Path], dict[str, Any]]:
    return lambda place: photos(place) | {"weights": torchvision_weights(name, place)}


CHAINS = {
    "mnist-cnn": Chain(lambda _: {}),
    "cats-dogs": Chain(photos),
    "char-lstm": Chain(short_text, "int8-dynamic", quantize=(("metric", "perplexity"),)),
    "resnet18-transfer": Chain(photos_and_weights("resnet18")),
    "vgg16-transfer": Chain(photos_and_weights("vgg16")),
    "own": Chain(lambda _: {}, export=(("arch", OWN),)),
}
LONG = ("resnet18-transfer", "vgg16-transfer", "mnist-cnn")  # the README takes the last one along


def triton_type(array: np.ndarray) -> str:
    return {"uint8": "UINT8", "int64": "INT64", "float32": "FP32"}[str(array.dtype)]


def test_every_recipe_has_a_chain() -> None:
    assert {each.name for each in list_recipes()} == set(CHAINS) - {"own"}


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(n, marks=[only_in_a_campaign] if n in LONG else []) for n in CHAINS],
)
def test_a_recipe_trains_exports_quantises_and_serves(recipe: str, tmp_path: Path) -> None:
    """Its answers at the server are those of the engine."""
    from tritonclient import http as triton

    chain = CHAINS[recipe]
    trained = dk.train(
        OWN if recipe == "own" else recipe,
        tmp_path / "m.pt",
        epochs=1,
        device="cpu",
        save_splits=tmp_path / "s",
        **chain.train(tmp_path),
    )
    assert trained.evidence.training is not None
    assert 0 <= trained.evidence.training.score.value <= 1
    exported = dk.export(trained.path, **dict(chain.export))
    assert exported.parity is not None
    assert exported.parity.passed
    calibration = {"calib": tmp_path / "s" / "calibration.npz"} if chain.to == "int8" else {}
    made = dk.quantize(
        exported.path,
        to=chain.to,
        data=tmp_path / "s" / "test.npz",
        max_drop=1.0,
        **calibration,
        **dict(chain.quantize),
    )
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
        given = triton.InferInput(spec.name, feed.shape, triton_type(feed))
        given.set_data_from_numpy(feed)
        answer = client.infer("m", [given])
        client.close()
    for name, values in wanted.items():
        np.testing.assert_array_equal(answer.as_numpy(name), values)
