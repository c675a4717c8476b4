"""`export` with a task: the graph answers as PyTorch's own steps do, and the manifest says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch")
needs("onnxscript")

import deploykit as dk  # noqa: E402
from deploykit.core.task import KINDS, ImageInput, Task, TaskOutputs  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.tasks import TaskEngine  # noqa: E402
from deploykit.engines.torch import presets  # noqa: E402
from deploykit.engines.torch.files import Content  # noqa: E402
from deploykit.engines.torch.open import describe_module  # noqa: E402
from deploykit.exporting.heads.classify import are_probabilities  # noqa: E402
from deploykit.exporting.task import _place_image  # noqa: E402

pytestmark = pytest.mark.torch

SPEC = ["image:float32[N,3,8,12]"]
NORMALISE = "mean = [0.4, 0.5, 0.6]\nstd = [0.2, 0.25, 0.3]\n"
MEAN, STD = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.25, 0.3])
FIVE = ("cat", "dog", "ant hill", "crane", "crane")


class Classifier(torch.nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    """Logits of five classes, and features that a task leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, image: Any) -> Any:
        features = torch.relu(self.conv(image)).mean(dim=(2, 3))
        return {"features": features, "logits": 4 * self.head(features)}


class Tokens(torch.nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    """Two kinds of tokens, as BERT has."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = torch.nn.Embedding(9, 4), torch.nn.Embedding(2, 4)

    def forward(self, input_ids: Any, token_type_ids: Any) -> Any:
        return (self.words(input_ids) + self.kinds(token_type_ids)).mean(1)


def built(kind: type[Any]) -> Any:
    torch.manual_seed(0)
    return kind().eval()


def pixels(rows: int, height: int = 8, width: int = 12) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (rows, height, width, 3), dtype=np.uint8)


def normalised(images: np.ndarray) -> Any:
    """What the documentation promises of `preprocess`, in numpy."""
    return torch.from_numpy(((images / 255 - MEAN) / STD).transpose(0, 3, 1, 2)).float()


def exported(model: Any, folder: Path, rule: str = "", **given: Any) -> Any:
    (folder / "p.toml").write_text(NORMALISE + rule)
    usual = {"inputs": SPEC, "preprocess": str(folder / "p.toml"), "task": "classify"}
    return dk.export(model, out=folder / "m.onnx", **{**usual, **given})


def answered(made: Any, images: np.ndarray) -> np.ndarray:
    with dk.load(made.path, "cpu") as engine:
        (found,) = engine({engine.inputs[0].name: images}).values()
    return found


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("task")
    (folder / "labels.txt").write_text("\n".join(FIVE) + "\n")
    rule = 'resize = "letterbox"\npadding = 7\n'
    return exported(built(Classifier), folder, rule, labels=folder / "labels.txt")


def test_a_classifier_answers_with_the_probabilities_that_pytorch_gives(classifier: Any) -> None:
    images = pixels(3)
    with torch.inference_mode():
        expected = built(Classifier)(normalised(images))["logits"].softmax(1).numpy()
    np.testing.assert_allclose(answered(classifier, images), expected, atol=2e-6)
    assert [str(spec) for spec in classifier.manifest.outputs] == ["scores:float32[N,5]"]
    assert classifier.parity.passed
    assert any("left out: the outputs features" in note for note in classifier.notes)
    placing = ImageInput("image", 8, 12, "letterbox", padding=7)
    task = Task("classify", TaskOutputs(scores="scores"), image=placing, labels=FIVE)
    assert classifier.manifest.task == task


def test_a_build_measures_accuracy_on_images_that_the_task_places(
    classifier: Any, tmp_path: Path
) -> None:
    needs("PIL")
    from PIL import Image

    for label in ("cat", "dog", "ant hill"):
        folder = tmp_path / "data" / label
        folder.mkdir(parents=True)
        for image, height in zip(pixels(2, 20, 30), (10, 20), strict=True):
            Image.fromarray(image[:height]).save(folder / f"{height}.png")
    given = {"data": tmp_path / "data", "max_drop": 0.9}
    made = dk.build(classifier.path, "cpu", out=tmp_path / "e.onnx", **given)
    assert made.evaluation is not None
    assert made.evaluation.samples == 6


def test_bare_weights_are_not_compared_with_a_file_that_has_a_task(
    classifier: Any, tmp_path: Path
) -> None:
    torch.save(built(Classifier).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(dk.BadInput, match=r"m\.onnx: has a task") as refused:
        dk.compare(tmp_path / "weights.pt", classifier.path, arch="tests.nothing:asked")
    assert str(refused.value.hint).endswith(f"deploykit compare {classifier.path}")


def test_labels_may_have_the_joiners_that_scripts_and_emoji_need(tmp_path: Path) -> None:
    labels = ["کتاب\u200cها", "👩\u200d🚒", "c", "d", "e"]
    made = exported(built(Classifier), tmp_path, labels=labels, preprocess="imagenet")
    task = made.manifest.task
    assert task.labels == tuple(labels)
    assert task.image == ImageInput("image", 8, 12, "shortest-edge", 12)


# --- refused ---


class Answers(torch.nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    """Returns the image's brightness in outputs of these names and shapes."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.shapes = shapes

    def forward(self, image: Any) -> Any:
        light = image.mean(dim=(1, 2, 3))
        return {
            name: light.reshape(-1, *[1] * len(shape)).expand(-1, *shape)
            for name, shape in self.shapes.items()
        }


class Conditional(Classifier):
    def forward(self, image: Any, bias: Any) -> Any:
        return {"logits": super().forward(image)["logits"] + bias}


SIDE = 32
SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "image_size": [SIDE, SIDE],
    "patch_size": 8,
}


def of_transformers(name: str, **settings: Any) -> Any:
    needs("transformers")
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**{**SMALL, **settings})).eval()


def classifies() -> Any:
    return built(Classifier)


Q, FIT = 20, "does not fit"
DETR: dict[str, tuple[int, ...]] = {"logits": (Q, 92), "pred_boxes": (Q, 4)}
MASKS = {"class_queries_logits": (Q, 5), "masks_queries_logits": (Q, 8, 8)}
DETECT, SEGMENT, EMBED = ({"task": task} for task in ("detect", "segment", "embed"))
SQUARE = {"inputs": [f"image:float32[N,3,{SIDE},{SIDE}]"]}
FREE = {"inputs": ["image:float32[N,3,H,W]"]}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {  # of what classifies
    "too few labels": ({"labels": ["a", "b"]}, "holds 2 labels, the model has 5 class"),
    "unknown": ({"task": "caption"}, "`task` caption: unknown"),
    "labels alone": ({"task": None, "labels": FIVE}, "`labels` needs `task`"),
    "threshold": (DETECT | {"threshold": 1.5}, "`threshold` must be from 0 to 1, got 1"),
    "iou": (DETECT | {"iou": float("nan")}, "`iou` must be from 0 to 1, got nan"),
    "boxes": (DETECT | {"boxes": 0}, "`boxes` must be from 1 to 3840, got 0"),
    "tokenizer": ({"tokenizer": "t.json"}, "`tokenizer` does not go with `task` class"),
    "length": (EMBED | {"max_length": 9}, "`max_length` is for a text, and the model takes an ima"),
    "pooling": (EMBED | {"pooling": "cls"}, "`pooling` is for a text, and the model takes an ima"),
    "batch": ({"batch": 4}, "`task`: the batch is a single item, or of any size"),
    "text": ({"task": "text-classify", "preprocess": None}, "no input holds token ids"),
    "no preprocess": ({"preprocess": None}, "nothing says how the pixels are normal"),
    "any size": (FREE, "has no fixed height and width"),
    "any ratio": (SEGMENT | FREE, "nothing says how large an image of any ratio is made"),
}
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "a second input": (
        lambda: built(Conditional),
        {"inputs": [*SPEC, "bias:float32[N,5]"]},
        "classify is for one image; .*, bias:float32",
    ),
    "detr": (lambda: Answers(**DETR), DETECT, f"{FIT}.*logits:float32\\[N,20,92\\], pred_boxes"),
    "many outputs": (
        lambda: Answers(**{f"map_{number}": (Q, 92) for number in range(9)}),
        DETECT,
        r"map_5:float32\[N,20,92\] and 3 more .*wrap the model in a module that returns this alone",
    ),
    "yolos": (
        lambda: of_transformers("YolosForObjectDetection", num_detection_tokens=Q),
        DETECT | SQUARE,
        f"{FIT} transformers' YolosForObjectDetection: .*pred_boxes",
    ),
    "masks of queries": (lambda: Answers(**MASKS), SEGMENT, f"{FIT}.*masks_queries_logits:float32"),
    "features as scores": (
        lambda: of_transformers("ViTModel"),
        SQUARE,
        f"{FIT}.*pooler_output",
    ),
    "scores and age": (lambda: Answers(logits=(9,), age=(2,)), {}, f"{FIT}.*age:float32"),
    "boxes as a vector": (lambda: Answers(boxes=(4,), pose=(9,)), EMBED, f"{FIT}.*pose:float"),
}


@pytest.mark.parametrize("case", [*OPTIONS, *MODELS])
def test_what_does_not_fit_is_named_before_the_export(case: str, tmp_path: Path) -> None:
    build, given, reason = MODELS.get(case) or (classifies, *OPTIONS[case])
    with pytest.raises(dk.BadInput) as caught:
        exported(build(), tmp_path, **given)
    found = caught.value
    said = f"{found.message} {found.hint}" if "wrap" in reason else found.message
    assert re.search(reason, said)
    assert FIT not in reason or f"{given.get('task', 'classify')} " in str(found.hint)
    assert [file.name for file in tmp_path.iterdir()] == ["p.toml"]


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
        exported(built(Classifier), tmp_path, labels=path)
    assert str(path) in caught.value.message


# --- heads ---


def normalise(found: Any) -> Any:
    return torch.nn.functional.normalize(found.flatten(1), dim=1)


class Ended(Classifier):
    def __init__(self, last: Callable[[Any], Any], taken: str = "logits") -> None:
        super().__init__()
        self.last, self.taken = last, taken

    def forward(self, image: Any) -> Any:
        return self.last(super().forward(image)[self.taken])


def ended(*given: Any) -> Callable[[], Any]:
    return lambda: built(lambda: Ended(*given))


HEADS: dict[str, tuple[Callable[[], Any], str, Callable[[Any], Any], str]] = {
    "an embedding": (ended(lambda x: x[:, :, None, None], "features"), "embed", normalise, ""),
    "softmax": (ended(lambda x: x.softmax(1)), "classify", lambda found: found, ""),
    "sigmoid": (
        ended(lambda x: x.sigmoid()[:, :, None, None]),
        "classify",
        lambda found: found.flatten(1),
        "",
    ),
    "no sigmoid at the end": (
        ended(lambda x: x.sigmoid() * 4),
        "classify",
        lambda found: found.softmax(1),
        "",
    ),
    "pooled vector": (
        lambda: of_transformers("ViTModel"),
        "embed",
        lambda found: normalise(found.pooler_output),
        "last_hidden_state",
    ),
    "distilled classifier": (
        lambda: of_transformers("DeiTForImageClassificationWithTeacher", num_labels=5),
        "classify",
        lambda found: found.logits.softmax(1),
        "cls_logits, distillation_logits",
    ),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_head_that_is_known_answers_as_the_model_does(case: str, tmp_path: Path) -> None:
    build, task, expected, others = HEADS[case]
    side = SIDE if others else None
    given = SQUARE if others else {}
    made = exported(build(), tmp_path, task=task, **given)
    assert not others or f"left out: the outputs {others}" in made.notes
    images = pixels(3, side or 8, side or 12)
    with torch.inference_mode():
        wanted = expected(build()(normalised(images))).numpy()
    np.testing.assert_allclose(answered(made, images), wanted, atol=2e-6)


def test_the_scores_of_a_known_classifier_are_named_as_a_poor_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "_timm_labels", lambda _module: tuple("abcde"))
    model = built(Classifier)
    given = {"mean": MEAN.tolist(), "std": STD.tolist(), "input_size": (3, 8, 12), "crop_pct": 0.6}
    model.pretrained_cfg = {**given, "num_classes": 5}
    notes = dk.export(model, out=tmp_path / "e.onnx", task="embed").notes
    assert any("embedding is a classifier's scores" in note for note in notes), notes


# --- segmentation ---


class Segments(torch.nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    """Scores of three classes at half the size, as torchvision names them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3, 2, stride=2)

    def forward(self, image: Any) -> Any:
        found = self.conv(image)
        return {"out": found, "aux": found + 1}


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


def classes_of(kind: type[Any], images: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        scores = built(kind)(normalised(images))
    scores = scores["out"] if isinstance(scores, dict) else scores
    resize = torch.nn.functional.interpolate
    return resize(scores, images.shape[1:3], mode="bilinear").argmax(1).numpy()


def test_a_segmentation_answers_the_class_of_each_pixel(tmp_path: Path) -> None:
    made = exported(built(Segments), tmp_path, task="segment", labels=["a", "b", "c"])
    assert [str(spec) for spec in made.manifest.outputs] == ["mask:int32[N,8,12]"]
    assert (answered(made, pixels(3)) == classes_of(Segments, pixels(3))).mean() > 0.99
    assert {row.output for row in made.parity.rows} == {"pixel_scores", "mask"}
    assert made.manifest.task.outputs == TaskOutputs(mask="mask")


def test_a_segmentation_of_any_ratio_sees_the_whole_image(tmp_path: Path) -> None:
    """Resized to 22 pixels of the shorter side, padded, and the mask cropped: as in PyTorch."""
    image = pytest.importorskip("PIL.Image")
    rule = 'resize = "shortest-edge"\nresize_to = 22\npadding = 9\n'
    made = exported(built(SkipConnection), tmp_path, rule, task="segment", **FREE)
    task = made.manifest.task
    assert task.image.multiple == 4
    assert dk.plan(made.path, profiles=["l4"]).axes == {"H": 24, "W": 24}
    assert [str(spec) for spec in made.manifest.outputs] == ["mask:int32[N,H,W]"]
    for width, height, size in ((44, 61, (22, 30)), (90, 44, (45, 22))):
        photo = image.fromarray(pixels(1, height, width)[0])
        path = tmp_path / f"{width}.png"
        photo.save(path)
        seen = np.asarray(photo.resize(size, image.Resampling.BILINEAR))
        more = [(0, -side % 4) for side in seen.shape[:2]]
        filled = np.pad(seen, [*more, (0, 0)], constant_values=9)
        y, x = (
            ((np.arange(many) + 0.5) * seen.shape[axis] / many).astype(int)
            for axis, many in enumerate((height, width))
        )
        expected = classes_of(SkipConnection, filled[None])[0][y[:, None], x]
        with dk.load(made.path, "cpu") as engine:
            (found,) = TaskEngine(engine, task).predict([path.read_bytes()])
        assert (found["width"], found["height"]) == (width, height)
        counts = {each["index"]: each["pixels"] for each in found["segments"]}
        assert len(counts) > 1
        for index in range(3):
            assert abs(counts.get(index, 0) - int((expected == index).sum())) <= 2  # ties
        assert sum(counts.values()) == width * height


def test_scores_of_tokens_are_tried_on_an_id_that_every_vocabulary_has() -> None:
    specs = [parse_spec(f"{name}:int64[N,T]") for name in ("input_ids", "token_type_ids")]
    loaded = describe_module("m", Content("live", built(Tokens)), specs)
    assert not are_probabilities(loaded, 0)


def test_a_librarys_own_rule_is_not_changed_for_a_wide_input() -> None:
    preset = presets.Preset("classify", (), ImageInput("i", 224, 224, "shortest-edge", 256), None)
    wide = ImageInput("image", 224, 448)
    with pytest.raises(dk.BadInput, match="resize_to = 256 is below the model's 224x448"):
        _place_image(wide, KINDS["classify"], preset, imagenet=True, rule={})
    found = _place_image(wide, KINDS["classify"], None, imagenet=True, rule={})
    assert (found.resize, found.resize_to) == ("shortest-edge", 448)
