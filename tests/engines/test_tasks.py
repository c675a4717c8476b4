"""A model with its task takes images or texts, and answers labels, boxes, masks and vectors."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound
from deploykit.core.evidence import RowIndependence
from deploykit.core.task import ImageInput, Task, TaskOutputs, TextInput
from deploykit.core.tensors import parse_spec
from tests.support.fake_engine import Function
from tests.support.installed import needs

needs("PIL", "tokenizers")

from PIL import Image  # noqa: E402

from deploykit.engines.data.images import PlacedImage, read_image  # noqa: E402
from deploykit.engines.data.texts import Tokens  # noqa: E402
from deploykit.engines.tasks import TaskEngine, TaskSteps, answer  # noqa: E402
from tests.support.runtimes.pictures import encoded, image_input, noise  # noqa: E402
from tests.support.runtimes.tokenizer import WORDS, write_tokenizer  # noqa: E402

# --- answers ---

OUTPUTS = TaskOutputs("scores", "boxes", "classes", "mask", "embedding")


def task(kind: str, **more: Any) -> Task:
    return Task(kind, OUTPUTS, image=image_input(), **{"labels": ("cat", "dog", "fox"), **more})


def placed(height: int, width: int, rule: ImageInput) -> PlacedImage:
    return read_image(encoded(noise(height, width)), rule)


SMALL = placed(4, 6, image_input())
CUT = placed(4, 10, image_input(4, 4, resize="shortest-edge", resize_to=4))  # its middle 4x4


def only(*given: Any, **more: Any) -> dict[str, Any]:
    (found,) = answer(*given, **more)
    return json.loads(json.dumps(found, allow_nan=False))


def test_the_labels_come_with_the_highest_score_first() -> None:
    scores = np.array([[0.25, 0.5, 0.125]], np.float32)
    assert only(task("classify", top_k=2), {"scores": scores}, [SMALL]) == {
        "label": "dog",
        "score": 0.5,
        "top": [
            {"label": "dog", "index": 1, "score": 0.5},
            {"label": "cat", "index": 0, "score": 0.25},
        ],
    }
    found = only(task("classify", labels=(), top_k=9), {"scores": scores}, [SMALL])
    assert [each["label"] for each in found["top"]] == ["1", "0", "2"]


def boxes_of(*scores: float) -> dict[str, np.ndarray]:
    places = [[0, 15, 50, 35], [10, 25, 20, 33], [0, 0, 1, 1], [0, 0, 0, 0]]
    boxes = np.array([places[: len(scores)]], np.float32).reshape(1, -1, 4)
    classes = np.array([[2, 1, 0, 0][: len(scores)]])
    return {"scores": np.array([scores], np.float32), "boxes": boxes, "classes": classes}


def test_boxes_have_names_scores_and_places_in_the_original() -> None:
    """Of 40x100 pixels, letterboxed into 50x50: half the size, 15 rows of padding above."""
    image = placed(40, 100, image_input(50, 50, resize="letterbox"))
    found = only(task("detect"), boxes_of(0.3, 0.9, 0.2, 0.0), [image])
    assert (found["width"], found["height"]) == (100, 40)
    assert [(each["label"], each["index"], each["box"]) for each in found["boxes"]] == [
        ("dog", 1, [20, 20, 40, 36]),
        ("fox", 2, [0, 0, 100, 40]),
    ]
    assert [each["score"] for each in found["boxes"]] == pytest.approx([0.9, 0.3])
    found = only(task("detect", threshold=0.0), boxes_of(0.0, 0.125), [SMALL])
    assert [each["score"] for each in found["boxes"]] == [0.125]  # 0 is no box
    assert only(task("detect"), boxes_of(), [SMALL]) == {"boxes": [], "width": 6, "height": 4}


def unpacked(rle: dict[str, Any]) -> np.ndarray:
    """COCO's run lengths as a mask, written from its documentation: columns first, zeros first."""
    flat = np.repeat(np.arange(len(rle["counts"])) % 2, rle["counts"])
    return flat.reshape(rle["size"][::-1]).T


MASK = np.array([[0, 0, 1], [2, 1, 1]])
MASKS: dict[str, tuple[PlacedImage, np.ndarray, np.ndarray]] = {  # -1: what the model did not see
    "stretched": (SMALL, MASK, np.kron(MASK, np.ones((2, 2), int))),
    "one label": (SMALL, np.zeros((2, 3), int), np.zeros((4, 6), int)),
    "cut off": (
        CUT,
        np.full((4, 4), 2),
        np.pad(np.full((4, 4), 2), [(0, 0), (3, 3)], constant_values=-1),
    ),
    "filled up": (
        placed(2, 4, image_input(4, 4, resize="letterbox")),
        np.array([[2] * 4, [0, 0, 1, 1], [0, 0, 1, 1], [2] * 4]),
        np.array([[0, 0, 1, 1]] * 2),
    ),
}


@pytest.mark.parametrize("case", MASKS)
def test_a_mask_is_run_lengths_or_a_png_in_pixels_of_the_original(case: str) -> None:
    image, mask, expected = MASKS[case]
    found = only(task("segment"), {"mask": mask[None]}, [image])
    assert (found["height"], found["width"]) == expected.shape
    indices = sorted({*expected.flat} - {-1})
    assert [each["label"] for each in found["segments"]] == [
        ("cat", "dog", "fox")[n] for n in indices
    ]
    for each in found["segments"]:
        assert each["pixels"] == (expected == each["index"]).sum()
        np.testing.assert_array_equal(unpacked(each["rle"]), expected == each["index"])
    found = only(task("segment"), {"mask": mask[None]}, [image], mask="png")
    with Image.open(io.BytesIO(base64.b64decode(found["png"]))) as opened:
        np.testing.assert_array_equal(np.asarray(opened), expected.astype(np.uint8))


def test_a_png_has_no_place_for_more_labels_than_255() -> None:
    with pytest.raises(BadInput, match="255 labels at most"):
        only(task("segment"), {"mask": np.full((1, 4, 6), 255)}, [SMALL], mask="png")


@pytest.mark.parametrize("kind", ["classify", "detect", "embed"])
def test_nan_is_refused(kind: str) -> None:
    outputs = {**boxes_of(np.nan, 1), "embedding": np.array([[np.inf, 0]])}
    with pytest.raises(BadInput, match="holds NaN or infinity"):
        answer(task(kind), outputs, [SMALL])


# --- engines ---

IMAGES = Task("classify", TaskOutputs("scores"), image=image_input(), labels=("dark", "light"))
IMAGE, SCORES = "image:uint8[N,4,6,3]", "scores:float32[N,2]"


def brightness(sizes: list[int]) -> Function:
    def run(feeds: Any) -> dict[str, np.ndarray]:
        sizes.append(len(feeds["image"]))
        light = feeds["image"].mean((1, 2, 3), dtype=np.float32) / 255
        return {"scores": np.stack([1 - light, light], axis=1)}

    return Function(run, IMAGE, SCORES)


def plain(level: int) -> bytes:
    return encoded(np.full((10, 10, 3), level, np.uint8))


@pytest.fixture
def sentences(tmp_path: Path) -> Task:
    sha256 = write_tokenizer(tmp_path / "words.json")
    text = TextInput("ids", "words.json", sha256, 6, mask="mask")
    return Task("text-classify", TaskOutputs("scores"), text=text, labels=("bad", "good"))


def test_images_are_answered_in_their_order_and_joined_only_where_that_changes_nothing() -> None:
    sizes: list[int] = []
    for passed in (True, False):
        engine = brightness(sizes)
        engine.batching = RowIndependence(passed, "by construction", (32,))
        found = TaskEngine(engine, IMAGES).predict([plain(204)] * 33 + [plain(0)])
        assert [each["label"] for each in found] == ["light"] * 33 + ["dark"]
        assert found[0]["score"] == pytest.approx(0.8)
        assert TaskEngine(engine, IMAGES).predict([]) == []
    assert sizes == [32, 2] + [1] * 34


def test_sentences_of_other_lengths_are_answered_in_their_order(
    sentences: Task, tmp_path: Path
) -> None:
    def run(feeds: Any) -> dict[str, np.ndarray]:
        good = (feeds["ids"] == WORDS["good"]).sum(1) / feeds["mask"].sum(1)
        return {"scores": np.stack([1 - good, good], axis=1).astype(np.float32)}

    engine = Function(run, "ids:int64[N,T]", SCORES)
    engine.inputs += (parse_spec("mask:int64[N,T]"),)
    found = TaskEngine(engine, sentences, tmp_path).predict(
        ["good good good", "bad", b"good good good good", "bad"]
    )
    assert [each["label"] for each in found] == ["good", "bad", "good", "bad"]
    assert found[0]["score"] == pytest.approx(3 / 5)


def test_an_error_names_the_item() -> None:
    engine = TaskEngine(brightness([]), IMAGES)
    with pytest.raises(BadInput, match=r"^item 2: is not a readable image"):
        engine.predict([plain(0), b"?"])
    with pytest.raises(BadInput, match=r"^cat\.jpg: is not a readable image"):
        engine.predict([b"?"], names=["cat.jpg"])
    with pytest.raises(BadInput, match="item 1: is a text, and the model takes images"):
        engine.predict(["cat.jpg"])


PUTS = "puts images into 'image:uint8[N,4,6,3]'"
READS = "reads the output "


TOKENS = "ids:int64[N,T] mask:int64[N,T]"
WORDS_OF = "puts tokens into int64[N,T] ids, mask"
FILLS = "fills rows up with the token"


@pytest.mark.parametrize(
    ("inputs", "outputs", "change", "reason"),
    [
        ("ids:int32[N,T] mask:int64[N,T]", SCORES, {}, WORDS_OF),
        ("ids:int64[N,T]", SCORES, {}, WORDS_OF),
        (f"{TOKENS} z:int64[N,T]", SCORES, {}, WORDS_OF),
        (TOKENS.replace("T", "5"), SCORES, {}, "allows 6 tokens, the model takes 5"),
        (TOKENS, SCORES, {"pad_id": -1}, FILLS),
        (TOKENS, SCORES, {"pad_id": 1 << 80}, FILLS),
        ("image:float32[N,4,6,3]", SCORES, {}, PUTS),
        ("image:uint8[N,4,7,3]", SCORES, {}, PUTS),
        ("image:uint8[8,4,6,3]", SCORES, {}, PUTS),
        ("x:uint8[N,4,6,3]", SCORES, {}, "the model's inputs are: x:uint8"),
        (IMAGE, "y:float32[N,2]", {}, f"{READS}'scores', the model's outputs are: y"),
        (IMAGE, "scores:float32[N,3]", {}, "has 2 labels, the output 'scores' has 3"),
        (
            IMAGE,
            "scores:float32[N,3]",
            {"kind": "classify", "outputs": TaskOutputs("scores", "boxes")},
            "has 2 labels, the output 'scores' has 3",
        ),
        (IMAGE, SCORES, {"outputs": TaskOutputs("scores", "boxes")}, f"{READS}'boxes'"),
        (IMAGE, SCORES, {"outputs": TaskOutputs(*["scores"] * 3)}, f"{READS}'scores'"),
        (
            IMAGE,
            "mask:int64[N,1,4,6]",
            {"kind": "segment", "outputs": TaskOutputs(mask="mask")},
            f"{READS}'mask'",
        ),
        (IMAGE, SCORES, {"image": ImageInput("image", 4, 6, "squeeze")}, "`resize` 'squeeze'"),
    ],
)
def test_a_task_that_does_not_fit_the_model_is_refused(
    inputs: str, outputs: str, change: dict[str, Any], reason: str, sentences: Task, tmp_path: Path
) -> None:
    if inputs.startswith("ids"):
        assert sentences.text is not None
        task = replace(sentences, text=replace(sentences.text, **change))
    else:
        task = replace(IMAGES, **({"kind": "detect", **change} if "outputs" in change else change))
    specs = [parse_spec(each) for each in inputs.split()]
    with pytest.raises(BadInput) as caught:
        TaskSteps(task, specs, [parse_spec(outputs)], tmp_path)
    assert reason in caught.value.message


TOKENS = ["ids:int64[N,T]", "mask:int64[N,T]"]
# --- texts ---

START, END, GOOD, BAD = (WORDS[word] for word in ("[CLS]", "[SEP]", "good", "bad"))


@pytest.fixture
def text(tmp_path: Path) -> TextInput:
    sha256 = write_tokenizer(tmp_path / "words.json")
    return TextInput("ids", "words.json", sha256, 6, mask="mask", types="types", pad_id=9)


def test_a_sentence_becomes_a_row_of_ids(text: TextInput, tmp_path: Path) -> None:
    tokens = Tokens(text, tmp_path)
    feeds = tokens.feeds("bad bad good")
    assert feeds["ids"].tolist() == [[START, BAD, BAD, GOOD, END]]
    assert {name: (a.dtype, a.shape) for name, a in feeds.items()} == {
        name: (np.dtype("int64"), (1, 5)) for name in ("ids", "mask", "types")
    }
    for given in (b"good", memoryview(b"good")):
        assert tokens.feeds(given)["ids"].tolist() == [[START, GOOD, END]]
    alone = Tokens(replace(text, mask=None, types=None), tmp_path)
    assert list(alone.feeds("good")) == ["ids"]


def test_a_model_of_a_fixed_length_gets_as_many_tokens(sentences: Task, tmp_path: Path) -> None:
    assert sentences.text is not None
    padded = replace(sentences, text=replace(sentences.text, pad_id=9))
    specs = [parse_spec(f"{name}:int64[N,8]") for name in ("ids", "mask")]
    feeds = TaskSteps(padded, specs, [parse_spec(SCORES)], tmp_path).read("good").feeds
    assert feeds["ids"].tolist() == [[START, GOOD, END, 9, 9, 9, 9, 9]]
    assert feeds["mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]


def test_the_files_own_truncation_and_padding_do_not_count(tmp_path: Path) -> None:
    """Else a text that is too long would be answered as if its end were not there."""
    sha256 = write_tokenizer(tmp_path / "words.json", truncation=4, padding=6)
    tokens = Tokens(TextInput("ids", "words.json", sha256, 5), tmp_path)
    assert tokens.feeds("good")["ids"].tolist() == [[START, GOOD, END]]
    with pytest.raises(BadInput, match="has 6 tokens, the model takes 5"):
        tokens.feeds("good bad good bad")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (b"", "the text: is empty"),
        (" \n\t ", "the text: is empty"),
        (b"\xff\xfe", "the text: is not UTF-8"),
        ("\ud83d", "the text: is not UTF-8"),
        ("good " * 5, "the text: has 7 tokens, the model takes 6"),
        ("x" * 601, "the text: is above 600 bytes, the model takes 6 tokens"),
        ("\U0001f468" * 151, "the text: is above 600 bytes, the model takes 6 tokens"),
    ],
)
def test_what_is_no_text_or_too_long_is_refused(
    text: TextInput, tmp_path: Path, given: str | bytes, reason: str
) -> None:
    with pytest.raises(BadInput, match=f"^{reason}$"):
        Tokens(text, tmp_path).feeds(given)


def test_a_tokenizer_that_is_not_the_models_own_is_refused(text: TextInput, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(BadInput, match="outside the model's folder"):
        Tokens(replace(text, tokenizer="../words.json"), tmp_path / "model")
    with (tmp_path / "words.json").open("a") as file:
        file.write("\n")
    with pytest.raises(BadInput, match="is not the tokenizer that the model was exported with"):
        Tokens(text, tmp_path)
    (tmp_path / "words.json").unlink()
    with pytest.raises(BadInput, match=r"words\.json"):
        Tokens(text, tmp_path)


@pytest.mark.parametrize("content", [b"{}", b"\xff", b"[1, 2", b'{"version": "1.0", "model": 5}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "words.json").write_bytes(content)
    text = TextInput("ids", "words.json", hashlib.sha256(content).hexdigest(), 6)
    with pytest.raises(BadInput, match="is not a tokenizer: ") as caught:
        Tokens(text, tmp_path)
    assert "\n" not in caught.value.message
    assert not isinstance(caught.value, NotFound)
