"""The training loop on a tiny recipe, and the one recipe that comes with deploykit."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.campaign import only_in_a_campaign

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput, NotFound, Unsupported  # noqa: E402
from deploykit.core.files import import_object  # noqa: E402
from deploykit.core.recipe import Recipe, Split, Splits, load_recipe  # noqa: E402
from deploykit.core.task import IMAGENET  # noqa: E402
from deploykit.core.tensors import TensorSpec  # noqa: E402
from deploykit.engines.data.preprocess import load_preprocess  # noqa: E402
from deploykit.evaluation.statistics import proportion  # noqa: E402
from deploykit.training.loop import (  # noqa: E402
    run_training,
    score_module,
    use_tf32,
)
from deploykit.training.options import TrainingOptions, choose_device  # noqa: E402
from tests.support.training import LINE, SPLITS  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("amp", "precision"), [("off", "float32"), ("bf16", "bfloat16")])
def test_training_learns(amp: str, precision: str) -> None:
    trained = run_training(LINE, SPLITS, TrainingOptions(device="cpu", amp=amp))
    assert trained.figures["precision"] == precision
    before = score_module(LINE.build(), LINE, SPLITS.test).mean()
    assert trained.scores.mean() > 0.95 > before
    assert trained.figures["train_samples"] == 200
    assert not trained.module.training


def test_the_same_seed_gives_the_same_weights_and_another_does_not() -> None:
    first, again, other = (
        run_training(LINE, SPLITS, TrainingOptions(device="cpu", seed=s)) for s in (1, 1, 2)
    )
    assert torch.equal(first.module.weight, again.module.weight)
    assert not torch.equal(first.module.weight, other.module.weight)


def test_training_starts_from_given_weights() -> None:
    weights = {"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)}
    still = replace(LINE, learning_rate=1e-30)
    trained = run_training(still, SPLITS, TrainingOptions(device="cpu", epochs=1), weights=weights)
    assert torch.equal(trained.module.weight, weights["weight"])


def test_progress_ends_at_one() -> None:
    shares: list[float] = []
    run_training(
        LINE,
        SPLITS,
        TrainingOptions(device="cpu", epochs=3),
        on_progress=lambda _, s: shares.append(s),
    )
    assert {1 / 3, 2 / 3, 1.0} <= set(shares)  # a slow machine also reports within an epoch
    assert shares == sorted(shares)


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    broken = replace(LINE, loss=lambda y, _: (y * float("nan")).sum())
    with pytest.raises(Unsupported, match="diverged"):
        run_training(broken, SPLITS, TrainingOptions(device="cpu"))


@pytest.mark.parametrize(
    ("name", "error"), [("cuda", Unsupported), ("tpu", BadInput), ("meta", BadInput)]
)
def test_a_device_that_is_not_there_is_refused(name: str, error: type[Exception]) -> None:
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(error, match=name):
        choose_device(name)


@pytest.fixture(scope="module")
def mnist_cnn() -> Recipe:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    return load_recipe("mnist-cnn")


def test_the_digits_are_split_without_overlap(mnist_cnn: Recipe) -> None:
    splits = mnist_cnn.data(None)
    parts = (splits.train, splits.calibration, splits.test)
    assert [len(part.labels) for part in parts] == [1077, 180, 540]
    images = np.concatenate([part.inputs["image"] for part in parts])
    assert images.shape == (1797, 1, 28, 28)
    assert images.dtype == np.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert len({image.tobytes() for image in images}) == 1797


def test_the_network_is_the_articles(mnist_cnn: Recipe) -> None:
    """Layer by layer: 320 + 18,496 + 36,928 + 36,928 + 650 parameters."""
    module = mnist_cnn.build()
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in module.children()]
    assert sizes == [320, 18_496, 36_928, 36_928, 650]
    assert tuple(module(torch.zeros(3, 1, 28, 28)).shape) == (3, 10)


@only_in_a_campaign
def test_the_recipe_reaches_97_percent_on_the_digits(mnist_cnn: Recipe) -> None:
    """The lower end of the interval does, of the mean of three seeds."""
    options = [TrainingOptions(device="cpu", seed=seed) for seed in range(3)]
    scores = [run_training(mnist_cnn, mnist_cnn.data(None), each).scores for each in options]
    mean = np.mean(scores, axis=0)
    assert proportion(float(mean.sum()), len(mean)).low >= 0.97


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    """IDX files in MNIST's format and names: 1,010 to train, 5 to test; two of them packed."""
    random = np.random.default_rng(0)
    for name, count in (("train", 1010), ("t10k", 5)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path


def test_idx_files_are_read(mnist_cnn: Recipe, mnist_folder: Path) -> None:
    splits = mnist_cnn.data(mnist_folder)
    parts = (splits.train, splits.calibration, splits.test)
    assert [len(part.labels) for part in parts] == [10, 1000, 5]
    raw = gzip.decompress((mnist_folder / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    expected = np.frombuffer(raw, np.uint8).reshape(5, 1, 28, 28) / np.float32(255)
    np.testing.assert_array_equal(splits.test.inputs["image"], expected)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("train-labels-idx1-ubyte", None, "no such file"),
        ("train-labels-idx1-ubyte", b"", "not an IDX file"),
        ("train-labels-idx1-ubyte", b"<html>", "not an IDX file"),
        ("train-labels-idx1-ubyte", idx(np.zeros(1010, np.uint8))[:-1], "declares 1010 bytes"),
        ("train-labels-idx1-ubyte", idx(np.full(1010, 11, np.uint8)), "0 to 9"),
        ("train-labels-idx1-ubyte", idx(np.zeros(7, np.uint8)), "different numbers of images"),
        ("t10k-images-idx3-ubyte.gz", b"not gzip", "cannot be read"),
        (
            "t10k-images-idx3-ubyte.gz",
            gzip.compress(idx(np.zeros((5, 8, 8), np.uint8)), mtime=0),
            "28x28",
        ),
    ],
)
def test_damaged_idx_files_are_refused(
    mnist_cnn: Recipe, mnist_folder: Path, name: str, content: bytes | None, told: str
) -> None:
    path = mnist_folder / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(BadInput, match=told):
        mnist_cnn.data(mnist_folder)


def test_a_data_folder_that_is_not_there(mnist_cnn: Recipe, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        mnist_cnn.data(tmp_path / "nowhere")


def test_training_on_bytes_and_export_normalise_alike(tmp_path: Path) -> None:
    """The recipe's preprocess, and `export --preprocess` of the same weights: the same answers."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    import deploykit as dk

    text = "import torch\n\ndef build():\n    return torch.nn.Sequential("
    text += "torch.nn.Flatten(), torch.nn.Linear(48, 2))\n"
    (tmp_path / "net.py").write_text(text)
    (tmp_path / "p.toml").write_text("mean = [0.4, 0.5, 0.6]\nstd = [0.2, 0.3, 0.1]\n")
    build = import_object(f"{tmp_path / 'net.py'}:build")
    images = np.random.default_rng(0).integers(0, 256, (120, 4, 4, 3), dtype=np.uint8)
    part = Split({"image": images}, (images[..., 0].mean((1, 2)) > 127).astype(np.int64))
    recipe = replace(
        LINE,
        build=build,
        inputs=(TensorSpec("image", "uint8", ("N", 4, 4, 3)),),
        preprocess=load_preprocess(str(tmp_path / "p.toml")),
    )
    trained = run_training(
        recipe, Splits(part, part, part, "bytes"), TrainingOptions(device="cpu", epochs=40)
    )
    assert trained.scores.mean() > 0.9
    torch.save(trained.module.state_dict(), tmp_path / "w.pt")
    made = dk.export(
        tmp_path / "w.pt",
        arch=f"{tmp_path / 'net.py'}:build",
        inputs=["image:float32[N,3,4,4]"],
        preprocess=str(tmp_path / "p.toml"),
    )
    with dk.load(made.path, "cpu") as engine:
        answers = engine({"image": images})[engine.outputs[0].name].argmax(1)
    assert (answers == part.labels).mean() == trained.scores.mean()


def test_a_preprocess_without_an_input_of_bytes_is_refused() -> None:
    with pytest.raises(BadInput, match="no input uint8"):
        run_training(replace(LINE, preprocess=IMAGENET), SPLITS, TrainingOptions(device="cpu"))


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize(("matmul", "conv"), [("tf32", "ieee"), ("ieee", "tf32")])
def test_torchs_newer_switch_of_tf32_is_understood_and_comes_back(
    on: bool, matmul: str, conv: str
) -> None:
    """A recipe or a library may have set it: torch then refuses to read its older one."""
    backends = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        pytest.skip(f"torch {torch.__version__} has the older switch only")
    places: list[Any] = [backends.cuda.matmul, backends.cudnn.conv]
    older: list[Any] = [backends.cuda.matmul, backends.cudnn]
    allowed = [each.allow_tf32 for each in older]
    before = [each.fp32_precision for each in places]
    try:
        places[0].fp32_precision, places[1].fp32_precision = matmul, conv
        with use_tf32(on):
            assert {each.fp32_precision for each in places} == {"tf32" if on else "ieee"}
            assert backends.cuda.matmul.allow_tf32 == backends.cudnn.allow_tf32 == on
        assert [each.fp32_precision for each in places] == [matmul, conv]
    finally:
        for each, allows in zip(older, allowed, strict=True):
            each.allow_tf32 = allows  # else a later export fails to read it
        for each, value in zip(places, before, strict=True):
            each.fp32_precision = value
