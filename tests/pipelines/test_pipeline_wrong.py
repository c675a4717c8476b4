"""A pipeline that cannot run is refused when its file is read, in a line that names the place."""

from __future__ import annotations

from pathlib import Path

import pytest

import deploykit as dk
from tests.support.onnx_zoo import save, two_inputs
from tests.support.runtimes.tiles import write_pipeline

pytest.importorskip("onnxruntime")
pytest.importorskip("PIL")

HEAD = "import numpy as np\ncolours = {'model': 'mean.onnx', 'image': 'crops'}\n"
CROPS = "def crops(page: np.ndarray) -> list[np.ndarray]:\n    return []\n"
LAST = "def c(b: int) -> int: ...\n"
ANSWER = "def answer(colours: np.ndarray) -> str:\n    return ''\n"

WRONG = {
    "no Python": (HEAD + "def crops(:", "not a Python program: SyntaxError: .* line 3"),
    "bytes": ("\0", "not a Python program"),
    "raises": ("1 / 0", "running it failed: ZeroDivisionError"),
    "ends the process": ("exit(0)", "it called exit"),
    "empty": ("# nothing", "defines no function and no model"),
    "a cycle of functions": (
        "def a(page: bytes, c: int) -> int: ...\ndef b(a: int) -> int: ...\n" + LAST,
        "a cycle: a -> b -> c -> a",
    ),
    "a cycle through a model": (
        HEAD + "def crops(page: np.ndarray, answer: str) -> np.ndarray: ...\n" + ANSWER,
        "a cycle: colours -> answer -> crops -> colours",
    ),
    "a stage that takes itself": ("def a(a: int) -> int: ...", "a cycle: a -> a"),
    "an unknown stage": (
        HEAD + CROPS + "def answer(colors: np.ndarray) -> str: ...",
        "takes 'colors', which is neither a stage nor an output of a model; the request's input is",
    ),
    "a stage that no other takes": (
        HEAD + CROPS + "def boxes(page: np.ndarray) -> int: ...\n" + ANSWER,
        "no other stage takes 'boxes', and the answer is that of 'answer'",
    ),
    "a model that no other takes": (
        HEAD + CROPS + "def answer(crops: list[np.ndarray]) -> str: ...",
        "no other stage takes 'colours'",
    ),
    "types that do not meet": (
        HEAD + CROPS + "def answer(colours: dict[str, float]) -> str: ...",
        "stage 'answer' takes 'colours' as dict[str, float], 'colours' gives list[numpy.ndarray]",
    ),
    "elements that do not meet": (
        HEAD + "def crops(page: np.ndarray) -> list[str]: ...\n" + ANSWER,
        "stage 'colours' takes 'image' as numpy.ndarray, 'crops' gives list[str]",
    ),
    "two types of the request's input": (
        HEAD + CROPS + "def answer(page: bytes, colours: np.ndarray) -> str: ...",
        "the request's input 'page' is numpy.ndarray in 'crops' and bytes in 'answer'",
    ),
    "an input that nothing is read as": (
        "def answer(page: set) -> str: ...",
        "the request's input is set",
    ),
    "a parameter without annotation": (
        HEAD + "def crops(page) -> list[np.ndarray]: ...\n" + ANSWER,
        "stage 'crops': the annotation of 'page' is missing",
    ),
    "a result without annotation": (
        HEAD + "def crops(page: np.ndarray): ...\n" + ANSWER,
        "stage 'crops': the annotation of what it returns is missing",
    ),
    "an annotation of an unknown name": (
        HEAD + "def crops(page: 'Page') -> list[np.ndarray]: ...\n" + ANSWER,
        "stage 'crops': its annotations cannot be read: NameError",
    ),
    "two stages of one name": (
        HEAD + CROPS + CROPS + ANSWER,
        "two stages are called 'crops', in lines 3 and 5",
    ),
    "a function with a model's name": (
        HEAD + CROPS + "def colours(crops: list[np.ndarray]) -> str: ...",
        "two stages are called 'colours', in lines 2 and 5",
    ),
    "async": ("async def answer(page: bytes) -> str: ...", "stage 'answer' is async"),
    "a generator": (
        "def answer(page: bytes) -> int:\n    yield 1",
        "stage 'answer' is a generator",
    ),
    "not UTF-8": (
        "# coding: ascii\ndef answer(page: bytes) -> str: return 'é'",
        "not a Python pro",
    ),
    "any arguments": ("def answer(*page: bytes) -> str: ...", "takes no value by its name"),
    "a model that is missing": (
        "answer = 'nothere.onnx'",
        "model 'answer': .*nothere.onnx: no such file",
    ),
    "a model that is none": ("answer = {'model': 3}", "'answer' is not a model"),
    "an input that the model lacks": (
        "import numpy as np\nanswer = {'model': 'mean.onnx', 'picture': 'page'}",
        "model 'answer' has no input 'picture'",
    ),
    "a limit of an unknown stage": (
        "IN_FLIGHT = {'crop': 3}\n" + HEAD + CROPS + ANSWER,
        "IN_FLIGHT: there is no stage 'crop'",
    ),
    "a limit of nothing": (
        "TIMEOUT_MS = {'crops': 0}\n" + HEAD + CROPS + ANSWER,
        "TIMEOUT_MS: 'crops' must be from 1 to 86,400,000, got 0",
    ),
    "an output of two models": (
        HEAD + "again = {'model': 'mean.onnx', 'image': 'crops'}\n"
        "def crops(page: np.ndarray) -> np.ndarray: ...\n"
        "def answer(scores: np.ndarray) -> str: ...",
        "stage 'answer' takes 'scores', an output of colours and again",
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_it_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write_pipeline(tmp_path, text)
    pattern = "".join(f"\\{each}" if each in "[(" else each for each in message)
    with pytest.raises(dk.BadInput, match=pattern) as raised, dk.pipeline(path):
        pass
    assert "tiles.py" in raised.value.message
    assert "\n" not in raised.value.message


TOML = {
    "no model": ("before = 'steps.py:crops'", "needs the file of a model"),
    "an unknown key": ("model = 'mean.onnx'\nafterr = 'a:b'", "unknown key 'afterr'"),
    "no such function": ("model = 'mean.onnx'\nafter = 'tiles.py:nothere'", "has no 'nothere'"),
    "no function": ("model = 'mean.onnx'\nafter = 'tiles.py:colours'", "is not a function"),
    "several inputs": ("model = 'two.onnx'\nbefore = 'tiles.py:crops'", "has 2 inputs"),
}


@pytest.mark.parametrize(("text", "message"), TOML.values(), ids=TOML)
def test_toml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write_pipeline(tmp_path)
    save(two_inputs(), tmp_path / "two.onnx")
    path = tmp_path / "steps.toml"
    path.write_text(text)
    with pytest.raises(dk.BadInput, match=message) as raised, dk.pipeline(path):
        pass
    assert "steps.toml" in raised.value.message


def test_the_name_says_which_kind_of_file_it_is(tmp_path: Path) -> None:
    with pytest.raises(dk.BadInput, match=r"a pipeline is a \.py or a \.toml file"):
        dk.pipeline(write_pipeline(tmp_path, name="steps.txt"))
