"""A model with its task takes images or texts and gives answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.evidence import RowIndependence
from deploykit.core.task import ImageInput, Task, TaskOutputs, TextInput
from deploykit.core.tensors import parse_spec
from tests.support.fake_engine import Function
from tests.support.installed import needs

needs("PIL", "tokenizers")

from deploykit.engines.tasks.engine import TaskEngine, TaskSteps  # noqa: E402
from tests.support.runtimes.pictures import encoded, image_input  # noqa: E402
from tests.support.runtimes.tokenizer import WORDS, write_tokenizer  # noqa: E402

IMAGES = Task("classify", TaskOutputs("scores"), image=image_input(), labels=("dark", "light"))


def brightness(**more: Any) -> Function:
    """Scores of "dark" and "light": how bright the image is."""

    def run(feeds: Any) -> dict[str, np.ndarray]:
        light = feeds["image"].mean((1, 2, 3), dtype=np.float32) / 255
        return {"scores": np.stack([1 - light, light], axis=1)}

    return Function(run, "image:uint8[N,4,6,3]", "scores:float32[N,2]", **more)


def plain(level: int) -> bytes:
    return encoded(np.full((10, 10, 3), level, np.uint8))


def counting(task: Task, folder: Path) -> TaskEngine:
    """A model of texts: the share of the word "good" among the real tokens."""

    def run(feeds: Any) -> dict[str, np.ndarray]:
        good = (feeds["ids"] == WORDS["good"]).sum(1) / feeds["mask"].sum(1)
        return {"scores": np.stack([1 - good, good], axis=1).astype(np.float32)}

    engine = Function(run, "ids:int64[N,T]", "scores:float32[N,2]")
    engine.inputs += (parse_spec("mask:int64[N,T]"),)
    return TaskEngine(engine, task, folder)


@pytest.fixture
def sentences(tmp_path: Path) -> Task:
    sha256 = write_tokenizer(tmp_path / "words.json")
    text = TextInput("ids", "words.json", sha256, 6, mask="mask")
    return Task("text-classify", TaskOutputs("scores"), text=text, labels=("bad", "good"))


def test_images_are_answered_in_their_order() -> None:
    engine = TaskEngine(brightness(), IMAGES)
    found = engine.predict([plain(255), plain(0), plain(204)])
    assert [(each["label"], each["score"]) for each in found] == [
        ("light", 1.0),
        ("dark", 1.0),
        ("light", pytest.approx(0.8)),
    ]


def test_rows_are_joined_only_where_that_is_known_to_change_nothing() -> None:
    sizes = []
    for passed in (True, False):
        engine = brightness()
        engine.batching = RowIndependence(passed, "by construction", (32,))
        run = engine.function
        engine.function = lambda feeds, run=run: (sizes.append(len(feeds["image"])), run(feeds))[1]
        found = TaskEngine(engine, IMAGES).predict([plain(255)] * 33 + [plain(0)])
        assert [each["label"] for each in found] == ["light"] * 33 + ["dark"]
    assert sizes == [32, 2] + [1] * 34


def test_sentences_of_other_lengths_are_answered_in_their_order(
    sentences: Task, tmp_path: Path
) -> None:
    engine = counting(sentences, tmp_path)
    found = engine.predict(["good good good", "bad", b"good good good good", "bad"])
    assert [each["label"] for each in found] == ["good", "bad", "good", "bad"]
    assert found[0]["score"] == pytest.approx(3 / 5)


def test_an_error_names_the_item() -> None:
    engine = TaskEngine(brightness(), IMAGES)
    with pytest.raises(BadInput, match=r"^item 2: is not a readable image"):
        engine.predict([plain(0), b"?"])
    with pytest.raises(BadInput, match=r"^cat\.jpg: is not a readable image"):
        engine.predict([b"?"], names=["cat.jpg"])
    with pytest.raises(BadInput, match="item 1: is a text, and the model takes images"):
        engine.predict(["cat.jpg"])


def test_without_items_there_are_no_answers() -> None:
    assert TaskEngine(brightness(), IMAGES).predict([]) == []


IMAGE, SCORES = "image:uint8[N,4,6,3]", "scores:float32[N,2]"


@pytest.mark.parametrize(
    ("inputs", "outputs", "task", "reason"),
    [
        ("image:float32[N,4,6,3]", SCORES, IMAGES, "puts images into 'image:uint8[N,4,6,3]'"),
        ("image:uint8[N,4,7,3]", SCORES, IMAGES, "puts images into 'image:uint8[N,4,6,3]'"),
        ("x:uint8[N,4,6,3]", SCORES, IMAGES, "the model's inputs are: x:uint8"),
        ("image:uint8[8,4,6,3]", SCORES, IMAGES, "puts images into 'image:uint8[N,4,6,3]'"),
        (IMAGE, "y:float32[N,2]", IMAGES, "reads the output 'scores', the model's outputs are: y"),
        (IMAGE, "scores:float32[N,3]", IMAGES, "has 2 labels, the output 'scores' has 3"),
        (
            IMAGE,
            SCORES,
            Task("detect", TaskOutputs("scores", "boxes"), image=image_input()),
            "reads the output 'boxes'",
        ),
        (
            IMAGE,
            SCORES,
            Task("detect", TaskOutputs("scores", "scores", "scores"), image=image_input()),
            "reads the output 'scores'",
        ),
        (
            IMAGE,
            "mask:int64[N,1,4,6]",
            Task("segment", TaskOutputs(mask="mask"), image=image_input()),
            "reads the output 'mask'",
        ),
        (
            IMAGE,
            SCORES,
            Task("classify", TaskOutputs("scores"), image=ImageInput("image", 4, 6, "squeeze")),
            "`resize` 'squeeze'",
        ),
    ],
)
def test_a_task_that_does_not_fit_the_model_is_refused(
    inputs: str, outputs: str, task: Task, reason: str
) -> None:
    with pytest.raises(BadInput) as caught:
        TaskSteps(task, [parse_spec(inputs)], [parse_spec(outputs)], Path())
    assert reason in caught.value.message


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (["ids:int32[N,T]", "mask:int64[N,T]"], "puts tokens into int64[N,T] ids, mask"),
        (["ids:int64[N,T]"], "puts tokens into int64[N,T] ids, mask"),
        (["ids:int64[N,T]", "mask:int64[N,T]", "z:int64[N,T]"], "puts tokens into int64[N,T]"),
        (["ids:int64[N,5]", "mask:int64[N,5]"], "allows 6 tokens, the model takes 5"),
    ],
)
def test_a_text_task_that_does_not_fit_the_model_is_refused(
    sentences: Task, tmp_path: Path, inputs: list[str], reason: str
) -> None:
    with pytest.raises(BadInput) as caught:
        TaskSteps(sentences, [parse_spec(each) for each in inputs], [parse_spec(SCORES)], tmp_path)
    assert reason in caught.value.message


def test_a_padding_that_is_no_token_is_refused(sentences: Task, tmp_path: Path) -> None:
    assert sentences.text is not None
    specs = [parse_spec("ids:int64[N,T]"), parse_spec("mask:int64[N,T]")]
    for number in (-1, 1 << 80):
        task = replace(sentences, text=replace(sentences.text, pad_id=number))
        with pytest.raises(BadInput, match="fills rows up with the token"):
            TaskSteps(task, specs, [parse_spec(SCORES)], tmp_path)


def test_a_model_of_a_fixed_length_gets_padded_sentences(sentences: Task, tmp_path: Path) -> None:
    specs = [parse_spec(f"{name}:int64[N,8]") for name in ("ids", "mask")]
    steps = TaskSteps(sentences, specs, [parse_spec(SCORES)], tmp_path)
    assert steps.read("good").feeds["mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]
