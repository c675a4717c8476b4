"""`export` with a task: the graph answers as PyTorch's own steps do, and the manifest says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.campaign import only_in_a_campaign
from tests.support.installed import needs

torch = pytest.importorskip("torch")
needs("onnxscript")

import deploykit as dk  # noqa: E402
from deploykit.core.artefact import Artefact  # noqa: E402
from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.task import ImageInput, Task, TaskOutputs  # noqa: E402
from deploykit.engines.tasks.engine import TaskEngine  # noqa: E402
from deploykit.engines.torch import presets  # noqa: E402

pytestmark = pytest.mark.torch

SPEC = ["image:float32[N,3,8,12]"]
NORMALISE = "mean = [0.4, 0.5, 0.6]\nstd = [0.2, 0.25, 0.3]\n"
MEAN, STD = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.25, 0.3])


class Classifier(torch.nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    """Logits of five classes, and features that a task leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, image: Any) -> dict[str, Any]:
        features = torch.relu(self.conv(image)).mean(dim=(2, 3))
        return {"features": features, "logits": 4 * self.head(features)}


def built(kind: type[Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind().eval()


def pixels(rows: int, height: int = 8, width: int = 12) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (rows, height, width, 3), dtype=np.uint8)


def normalised(images: np.ndarray, mean: np.ndarray = MEAN, std: np.ndarray = STD) -> Any:
    """What the documentation promises of `preprocess`, in numpy."""
    return torch.from_numpy(((images / 255 - mean) / std).transpose(0, 3, 1, 2)).float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("task")
    (found / "p.toml").write_text(NORMALISE + 'resize = "letterbox"\npadding = 7\n')
    (found / "labels.txt").write_text("cat\ndog\nant hill\ncrane\ncrane\n")
    return found


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Any:
    return dk.export(
        built(Classifier),
        out=folder / "c.onnx",
        inputs=SPEC,
        preprocess=str(folder / "p.toml"),
        task="classify",
        labels=folder / "labels.txt",
    )


def test_a_classifier_answers_with_the_probabilities_that_pytorch_gives(classifier: Any) -> None:
    images = pixels(3)
    with torch.inference_mode():
        expected = built(Classifier)(normalised(images))["logits"].softmax(1).numpy()
    with dk.load(classifier.path, "cpu") as engine:
        assert [str(spec) for spec in engine.outputs] == ["scores:float32[N,5]"]
        np.testing.assert_allclose(engine({"image": images})["scores"], expected, atol=2e-6)
    assert classifier.parity.passed
    assert any("left out: the outputs features" in note for note in classifier.notes)


def test_the_manifest_says_what_the_model_takes_and_answers(classifier: Any) -> None:
    found = Artefact(classifier.path).manifest
    assert found is not None
    assert found.task == Task(
        "classify",
        TaskOutputs(scores="scores"),
        image=ImageInput("image", 8, 12, "letterbox", padding=7),
        labels=("cat", "dog", "ant hill", "crane", "crane"),
    )


def test_bare_weights_are_not_compared_with_a_file_that_has_a_task(
    classifier: Any, tmp_path: Path
) -> None:
    """One answers with probabilities, the other with logits."""
    torch.save(built(Classifier).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(BadInput, match=r"c\.onnx: has a task") as refused:
        dk.compare(tmp_path / "weights.pt", classifier.path, arch="tests.nothing:asked")
    assert str(refused.value.hint).endswith(f"deploykit compare {classifier.path}")


def test_the_task_survives_quantize_and_build(classifier: Any, folder: Path) -> None:
    task = classifier.manifest.task
    calib = folder / "calib.npz"
    np.savez(calib, image=pixels(16))
    for made in (
        dk.quantize(
            classifier.path, "int8", out=folder / "q.onnx", calib=calib, runtime="onnxruntime"
        ),
        dk.build(classifier.path, "cpu", out=folder / "b.onnx"),
    ):
        found = Artefact(made.path).manifest
        assert found is not None
        assert found.task == task


def test_the_user_states_labels_in_python_and_without_any_they_are_indices(folder: Path) -> None:
    given: dict[str, Any] = {"inputs": SPEC, "preprocess": "imagenet", "task": "classify"}
    named = dk.export(built(Classifier), out=folder / "n.onnx", labels=list("abcde"), **given)
    task = named.manifest.task
    assert task is not None
    assert task.label(4) == "e"
    assert task.image == ImageInput("image", 8, 12, "shortest-edge", 12)


class Conditional(Classifier):
    """Takes a second tensor, which no client of a task has."""

    def forward(self, image: Any, bias: Any) -> dict[str, Any]:
        found = super().forward(image)
        return {**found, "logits": found["logits"] + bias}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few labels": ({"labels": ["a", "b"]}, "holds 2 labels, the model has 5 classes"),
    "unknown": ({"task": "caption"}, "`task` caption: unknown"),
    "labels alone": ({"task": None, "labels": list("abcde")}, "`labels` needs `task`"),
    "threshold": ({"task": "detect", "threshold": 1.5}, "`threshold` must be from 0 to 1, got 1.5"),
    "iou": ({"task": "detect", "iou": float("nan")}, "`iou` must be from 0 to 1, got nan"),
    "boxes": ({"task": "detect", "boxes": 0}, "`boxes` must be from 1 to 3840, got 0"),
    "tokenizer": ({"tokenizer": "t.json"}, "`tokenizer` does not go with `task` classify"),
    "length": (
        {"task": "embed", "max_length": 9},
        "`max_length` is for a text, and the model takes an image",
    ),
    "batch": ({"batch": 4}, "`task`: the batch is a single item, or of any size"),
    "rows": ({"inputs": ["image:float32[4,3,8,12]"]}, "`task`: the batch is a single item, or"),
    "iou of a classifier": ({"iou": 0.5}, "`iou` does not go with `task` classify"),
    "detect": ({"task": "detect"}, "`task` detect does not fit the model: its outputs are"),
    "segment": ({"task": "segment"}, "`task` segment does not fit the model: its outputs are"),
    "text": ({"task": "text-classify", "preprocess": None}, "no input holds token ids"),
    "no preprocess": ({"preprocess": None}, "nothing says how the pixels are normalised"),
    "labels of embed": ({"task": "embed", "labels": ["a"]}, "`labels` does not go with"),
    "any size": ({"inputs": ["image:float32[N,3,H,W]"]}, "has no fixed height and width"),
    "any height": (
        {"inputs": ["image:float32[N,3,H,8]"], "task": "segment"},
        "has no fixed height and width",
    ),
    "any ratio": (
        {"inputs": ["image:float32[N,3,H,W]"], "task": "segment"},
        "nothing says how large an image of any ratio is made",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named_before_the_export(case: str, tmp_path: Path) -> None:
    given, reason = WRONG[case]
    usual = {"inputs": SPEC, "preprocess": "imagenet", "task": "classify"}
    with pytest.raises(dk.BadInput, match=reason.replace("[", r"\[")):
        dk.export(built(Classifier), out=tmp_path / "m.onnx", **{**usual, **given})
    assert list(tmp_path.iterdir()) == []


def test_a_second_input_is_refused_before_the_export(tmp_path: Path) -> None:
    given: dict[str, Any] = {"inputs": [*SPEC, "bias:float32[N,5]"], "preprocess": "imagenet"}
    with pytest.raises(dk.BadInput, match=r"classify is for one image; .*, bias:float32"):
        dk.export(built(Conditional), out=tmp_path / "m.onnx", task="classify", **given)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is an empty file|is empty"),
        (b"a\n\nb\n", "line 2 is empty"),
        (b"\xff\xfe\x00", "is not a text file in UTF-8"),
        (b" \n\n", "line 1 is empty"),
        (b"a\x00b\n", "is not a text file with one label per line"),
    ],
)
def test_a_labels_file_that_is_none_is_refused_by_name(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(content)
    with pytest.raises(dk.BadInput, match=reason) as caught:
        dk.export(
            built(Classifier), out=tmp_path / "m.onnx", inputs=SPEC, task="classify", labels=path
        )
    assert str(path) in caught.value.message


def test_labels_may_have_the_joiners_that_scripts_and_emoji_need(tmp_path: Path) -> None:
    """Persian's "books", and a woman who is a firefighter."""
    (tmp_path / "labels.txt").write_text("کتاب\u200cها\n👩\u200d🚒\nc\nd\ne\n")
    given: dict[str, Any] = {"task": "classify", "labels": tmp_path / "labels.txt"}
    usual = {"inputs": SPEC, "preprocess": "imagenet", "out": tmp_path / "m.onnx"}
    found = dk.export(built(Classifier), **usual, **given).manifest.task.labels
    assert found == ("کتاب\u200cها", "👩\u200d🚒", "c", "d", "e")


class Segments(torch.nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    """Scores of three classes at half the size, as torchvision names them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3, 2, stride=2)

    def forward(self, image: Any) -> dict[str, Any]:
        found = self.conv(image)
        return {"out": found, "aux": found + 1}


def test_a_segmentation_answers_the_class_of_each_pixel(tmp_path: Path) -> None:
    given: dict[str, Any] = {"inputs": SPEC, "preprocess": "imagenet", "labels": ["a", "b", "c"]}
    made = dk.export(built(Segments), out=tmp_path / "s.onnx", task="segment", **given)
    assert [str(spec) for spec in made.manifest.outputs] == ["mask:int32[N,8,12]"]
    images = pixels(3)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    with torch.inference_mode():
        scores = built(Segments)(normalised(images, mean, std))["out"]
        grown = torch.nn.functional.interpolate(scores, (8, 12), mode="bilinear")
    with dk.load(made.path, "cpu") as engine:
        mask = engine({"image": images})["mask"]
    assert (mask == grown.argmax(1).numpy()).mean() > 0.99
    assert {row.output for row in made.parity.rows} == {"pixel_scores", "mask"}
    assert made.manifest.task.outputs == TaskOutputs(mask="mask")


class SkipConnection(torch.nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    """Scores of three classes at half the size; takes multiples of 4 alone, as a small U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Conv2d(3, 3, 2, stride=2)
        self.across = torch.nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, image: Any) -> Any:
        skip = self.down(image)
        deep = self.across(torch.nn.functional.max_pool2d(skip, 2))
        return skip + torch.nn.functional.interpolate(deep, scale_factor=2)


class Whole(SkipConnection):
    """Takes even sizes alone, and answers in the image's own: its axes are H and W."""

    def forward(self, image: Any) -> Any:
        deep = self.across(torch.nn.functional.max_pool2d(image, 2))
        return image + torch.nn.functional.interpolate(deep, scale_factor=2)


@pytest.mark.parametrize(
    ("kind", "multiple"),
    [(Segments, 1), (SkipConnection, 4), pytest.param(Whole, 2, marks=only_in_a_campaign)],
)
def test_a_segmentation_of_any_ratio_sees_the_whole_image(
    kind: type[Any], multiple: int, tmp_path: Path
) -> None:
    """Resized to 22 pixels of the shorter side, padded, and the mask cropped: as in PyTorch."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "p.toml").write_text(
        NORMALISE + 'resize = "shortest-edge"\nresize_to = 22\npadding = 9\n'
    )
    made = dk.export(
        built(kind),
        out=tmp_path / "s.onnx",
        inputs=["image:float32[N,3,H,W]"],
        preprocess=str(tmp_path / "p.toml"),
        task="segment",
    )
    task = made.manifest.task
    assert task.image.multiple == multiple
    side = -(-22 // multiple) * multiple
    assert dk.plan(made.path, profiles=["l4"]).axes == {"H": side, "W": side}
    assert [str(spec) for spec in made.manifest.outputs] == ["mask:int32[N,H,W]"]
    for width, height, size in ((44, 61, (22, 30)), (90, 44, (45, 22))):
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        photo = image.fromarray(pixels)
        path = tmp_path / f"{width}.png"
        photo.save(path)
        seen = np.asarray(photo.resize(size, image.Resampling.BILINEAR))
        more = [(0, -side % multiple) for side in seen.shape[:2]]
        filled = np.pad(seen, [*more, (0, 0)], constant_values=9)
        with torch.inference_mode():
            scores = built(kind)(normalised(filled[None]))
        scores = scores["out"] if isinstance(scores, dict) else scores
        resize = torch.nn.functional.interpolate
        mask = resize(scores, filled.shape[:2], mode="bilinear").argmax(1)[0].numpy()
        y, x = (
            ((np.arange(many) + 0.5) * seen.shape[axis] / many).astype(int)
            for axis, many in enumerate((height, width))
        )
        expected = mask[y[:, None], x]
        with dk.load(made.path, "cpu") as engine:
            (found,) = TaskEngine(engine, task).predict([path.read_bytes()])
        assert (found["width"], found["height"]) == (width, height)
        counts = {each["index"]: each["pixels"] for each in found["segments"]}
        assert len(counts) > 1
        for index in range(3):
            assert abs(counts.get(index, 0) - int((expected == index).sum())) <= 2  # ties
        assert sum(counts.values()) == width * height


def test_an_embedding_has_length_1(tmp_path: Path) -> None:
    class Vectors(Classifier):
        def forward(self, image: Any) -> Any:
            return super().forward(image)["features"][:, :, None, None]

    made = dk.export(
        built(Vectors), out=tmp_path / "e.onnx", inputs=SPEC, preprocess="imagenet", task="embed"
    )
    with dk.load(made.path, "cpu") as engine:
        found = engine({"image": pixels(3)})["embedding"]
    assert found.shape == (3, 4)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_the_scores_of_a_known_classifier_are_named_as_a_poor_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "_timm_labels", lambda _module: tuple("abcde"))
    model, given = (
        built(Classifier),
        {"mean": MEAN.tolist(), "std": STD.tolist(), "input_size": (3, 8, 12), "crop_pct": 0.6},
    )
    model.pretrained_cfg = {**given, "num_classes": 5}
    notes = dk.export(model, out=tmp_path / "e.onnx", task="embed").notes
    assert any("embedding is a classifier's scores" in note for note in notes), notes


@pytest.mark.parametrize(
    ("end", "whole"),
    [
        (lambda logits: logits.softmax(1), lambda found: found),
        (lambda logits: logits.sigmoid()[:, :, None, None], lambda found: found.flatten(1)),
        (lambda logits: logits.sigmoid() * 4, lambda found: found.softmax(1)),
    ],
    ids=["softmax", "sigmoid", "no sigmoid at the end"],
)
def test_probabilities_get_no_second_softmax(end: Any, whole: Any, tmp_path: Path) -> None:
    class Done(Classifier):
        def forward(self, image: Any) -> Any:
            return end(super().forward(image)["logits"])

    given: dict[str, Any] = {"inputs": SPEC, "preprocess": str(tmp_path / "p.toml")}
    (tmp_path / "p.toml").write_text(NORMALISE)
    made = dk.export(built(Done), out=tmp_path / "d.onnx", task="classify", **given)
    with dk.load(made.path, "cpu") as engine:
        found = engine({"image": pixels(3)})["scores"]
    with torch.inference_mode():
        expected = whole(built(Done)(normalised(pixels(3)))).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-6)
