"""A pipeline in this process: what reaches which stage, and how models are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.core.errors import StageFailed
from deploykit.core.files import sha256
from deploykit.core.manifest import Manifest, write_manifest
from deploykit.core.task import CLASSIFY, ImageInput, Task, TaskOutputs
from deploykit.engines.engine import Arrays, Engine
from deploykit.pipelines.connect import StageGraph
from deploykit.pipelines.pipeline import OpenPipeline, predict_files
from deploykit.pipelines.stages import Definition
from tests.support.onnx_zoo import linear, save, two_inputs
from tests.support.runtimes.tiles import mean_model, page, png, write_pipeline

pytest.importorskip("onnxruntime")
pytest.importorskip("PIL")


@pytest.fixture
def tiles(tmp_path: Path) -> Any:
    with dk.pipeline(write_pipeline(tmp_path), batch=4) as opened:
        yield opened


def calls_of(opened: OpenPipeline) -> list[int]:
    """The rows of each call of the only model, from now on."""
    ((name, engine),) = opened.engines.items()
    rows: list[int] = []

    class Counted(Engine):
        inputs, outputs = engine.inputs, engine.outputs
        device, runtime = engine.device, engine.runtime

        def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
            rows.append(len(next(iter(feeds.values()))))
            return engine(feeds)

        def close(self) -> None:
            engine.close()

    opened.engines = {name: Counted()}
    return rows


def test_a_list_goes_element_by_element_through_model_and_function(tiles: Any) -> None:
    assert tiles(page("red", "", "blue", "green")) == ["red", "blue", "green"]


def test_crops_run_in_full_batches_and_a_rest(tiles: Any) -> None:
    rows = calls_of(tiles)
    assert tiles(page(*["red", "blue"] * 5)) == ["red", "blue"] * 5
    assert rows == [4, 4, 2]


def test_no_crop_is_no_call_and_an_empty_answer(tiles: Any) -> None:
    rows = calls_of(tiles)
    assert tiles(page("")) == []
    assert rows == []


def test_requests_of_a_batch_share_calls_and_get_their_own_answers(tiles: Any) -> None:
    rows = calls_of(tiles)
    pages = [page("red"), page(), page("green", "blue"), page("blue")]
    assert tiles.run(pages) == [["red"], [], ["green", "blue"], ["blue"]]
    assert rows == [4]


def run(folder: Path, text: str, value: Any) -> Any:
    with dk.pipeline(write_pipeline(folder, text), batch=4) as opened:
        return opened(value)


BATCH = """
import numpy as np
model = {"model": "mean.onnx", "image": "rows"}
def rows(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)[:, None, None, None] * np.ones((1, 3, 8, 8), "f4")
def answer(model: np.ndarray) -> list:
    return model[:, 0].tolist()
"""


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_an_array_with_a_batch_axis_is_divided_and_joined_again(tmp_path: Path, count: int) -> None:
    assert run(tmp_path, BATCH, count) == list(range(count))


def test_outputs_of_a_model_are_taken_by_their_names(tmp_path: Path) -> None:
    save(two_inputs(), tmp_path / "two.onnx")
    text = """
import numpy as np
pair = "two.onnx"
def a(row: list[float]) -> np.ndarray: return np.array(row, np.float32)
def b(a: np.ndarray) -> np.ndarray: return a + 1
def answer(sum: np.ndarray, pair_product: np.ndarray, pair: dict[str, np.ndarray]) -> dict:
    return {"sum": sum, "product": pair_product, "all": sorted(pair)}
"""
    found = answer_json(run(tmp_path, text, [0.0, 1.0, 2.0, 3.0]))
    assert found == {"sum": [1, 3, 5, 7], "product": [0, 2, 6, 12], "all": ["product", "sum"]}


def test_a_value_that_is_no_list_reaches_every_element(tmp_path: Path) -> None:
    text = """
def words(line: str) -> list[str]: return line.split()
def marked(words: str, line: str, sign: str = "/") -> str: return f"{words}{sign}{len(line)}"
def _helper(x): return x
"""
    assert run(tmp_path, text, "a b") == ["a/3", "b/3"]


def test_a_model_alone_after_one_function_and_toml(tmp_path: Path) -> None:
    save(linear(), tmp_path / "linear.onnx")
    (tmp_path / "steps.py").write_text(
        "import numpy as np\n"
        "def row(given: list) -> np.ndarray: return np.array(given, np.float32)\n"
        "def best(scores: np.ndarray, names: str = 'abc') -> str:\n"
        "    return names[int(scores.argmax())]\n"
    )
    path = tmp_path / "abc.toml"
    path.write_text("model = 'linear.onnx'\nbefore = 'steps.py:row'\nafter = 'steps.py:best'\n")
    with dk.pipeline(path) as opened, dk.load(tmp_path / "linear.onnx", "cpu") as engine:
        scores = engine({"x": np.ones((1, 4), np.float32)})["y"]
        assert opened([1, 1, 1, 1]) == "abc"[int(scores.argmax())]
    path.write_text("model = 'linear.onnx'\nbefore = 'steps.py:row'\n")
    with dk.pipeline(path) as opened:
        np.testing.assert_allclose(opened([1, 1, 1, 1]), scores[0], rtol=1e-6)


FAILS = {
    "raises": ("raise ValueError('no page')", "stage 'answer' failed: ValueError"),
    "ends the process": ("exit(3)", "stage 'answer' failed: SystemExit"),
    "another type": ("return 3", "stage 'answer' gave int, its annotation is list[str]"),
    "another element": ("return ['a', 3]", "stage 'answer' gave list of int and str"),
    "nothing": ("pass", "stage 'answer' gave None, its"),
}


@pytest.mark.parametrize(("body", "message"), FAILS.values(), ids=FAILS)
def test_a_stage_that_fails_is_named(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(StageFailed) as raised:
        run(tmp_path, f"def answer(page: str) -> list[str]:\n    {body}\n", "a")
    assert message in raised.value.message


def test_our_own_errors_of_a_stage_keep_their_kind(tmp_path: Path) -> None:
    text = "import deploykit as dk\ndef answer(page: str) -> str: raise dk.BadInput('no face')\n"
    with pytest.raises(dk.BadInput, match=r"^stage 'answer': no face$"):
        run(tmp_path, text, "a")


def test_crops_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    text = BATCH.replace("(1, 3, 8, 8)", "(1, 3, 8, 9)")
    with pytest.raises(StageFailed, match=r"stage 'model': input 'image' is float32\[N,3,8,8\]"):
        run(tmp_path, text, 2)


def test_lists_of_different_lengths_do_not_pair(tmp_path: Path) -> None:
    text = """
def a(n: int) -> list[int]: return [1]
def b(n: int) -> list[str]: return ["x", "y"]
def answer(a: int, b: str) -> str: return b * a
"""
    with pytest.raises(StageFailed, match="lists of different lengths: 'a' 1, 'b' 2"):
        run(tmp_path, text, 1)


def answer_json(value: object) -> object:
    return StageGraph(Definition(Path(), (), {}, {}), {}, "", None, "json", "a").answer_json(value)


def test_answers_as_json_have_no_nan() -> None:
    value = {1: np.array([1.5, np.nan]), "b": (np.float32(2), float("inf")), "c": np.int64(3)}
    assert answer_json(value) == {"1": [1.5, None], "b": [2.0, None], "c": 3}
    with pytest.raises(StageFailed, match="stage 'a': a set has no JSON form"):
        answer_json({1, 2})
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(StageFailed, match="stage 'a': its answer is too deep for JSON"):
        answer_json(endless)


def test_what_a_stage_prints_is_not_among_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "print('read')\ndef answer(page: str) -> str:\n    print('ran')\n    return page\n"
    path = write_pipeline(tmp_path, text)
    assert list(predict_files(path, [path]).answers.values()) == [text]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.split() == ["read", "ran"]


def test_a_cached_function_is_a_stage_and_the_file_may_be_called_json(tmp_path: Path) -> None:
    text = """
from functools import lru_cache
@lru_cache
def sized(page: str) -> int: return len(page)
def answer(sized: int) -> int: return sized + 1
"""
    with dk.pipeline(write_pipeline(tmp_path, text, "json.py")) as opened:
        assert opened("abc") == 4


def test_an_error_that_has_no_message_is_named_by_its_class(tmp_path: Path) -> None:
    text = "class Bad(Exception):\n    def __str__(self): return 1 / 0\n"
    path = write_pipeline(tmp_path, text + "def answer(page: str) -> str: raise Bad\n")
    with pytest.raises(dk.BadInput, match=r"stage 'answer' failed: Bad \(tiles\.py, line 3\)"):
        predict_files(path, [path])


def test_files_are_answered_as_json_lines_in_the_order_of_their_names(tmp_path: Path) -> None:
    path, data = write_pipeline(tmp_path), tmp_path / "pages"
    data.mkdir()
    for number, colours in enumerate([("red",), (), ("blue", "green")]):
        (data / f"{number}.png").write_bytes(png(page(*colours)))
    out = tmp_path / "answers.jsonl"
    made = predict_files(path, [data], out, batch=2)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [Path(line["file"]).name for line in lines] == ["0.png", "1.png", "2.png"]
    assert [line["answer"] for line in lines] == [["red"], [], ["blue", "green"]]
    assert (made.files, made.path) == (3, out)
    two = data / "2.png"
    assert predict_files(path, [two]).answers == {str(two): ["blue", "green"]}
    (data / "1.png").write_bytes(b"no image")
    before = out.read_bytes()
    with pytest.raises(dk.BadInput, match=r"1\.png: the image"):
        predict_files(path, [data], out)
    assert out.read_bytes() == before
    other = tmp_path / "mine.jsonl"
    other.write_text("{}\n")
    with pytest.raises(dk.BadInput, match="is not what deploykit wrote"):
        predict_files(path, [data], other)


def test_the_file_and_line_of_a_failing_stage_are_named_offline(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, "def answer(page: str) -> str:\n    return page[9]\n")
    for name, text in (("a.txt", "long enough"), ("b.txt", "short")):
        (tmp_path / name).write_text(text)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]  # one call for both
    with pytest.raises(
        dk.BadInput, match=r"b\.txt: stage 'answer' failed: IndexError: .*tiles\.py, line 2"
    ):
        predict_files(path, files)


def save_with_task(folder: Path) -> None:
    """Names the colour of an image of any size: its manifest has the task."""
    model = mean_model()
    value = helper.make_tensor_value_info("pixels", TensorProto.UINT8, ["N", 8, 8, 3])
    model.graph.input[0].CopyFrom(value)
    first = helper.make_node("Cast", ["pixels"], ["floats"], to=TensorProto.FLOAT)
    model.graph.node.insert(0, first)
    second = helper.make_node("Transpose", ["floats"], ["image"], perm=[0, 3, 1, 2])
    model.graph.node.insert(1, second)
    path = save(model, folder / "named.onnx")
    with dk.load(path, "cpu") as engine:
        specs = engine.inputs, engine.outputs
    image, scores = ImageInput("pixels", 8, 8), TaskOutputs(scores="scores")
    task = Task(CLASSIFY, scores, image, labels=("red", "green", "blue"))
    write_manifest(path, Manifest("onnx", *specs, sha256=sha256(path), task=task))


TASK = """
import numpy as np
names = {"model": "named.onnx", "image": "crops"}
def crops(page: np.ndarray) -> list[np.ndarray]: return [page[:, :24], page[:16, 24:]]
def answer(names: dict) -> str: return names["label"]
"""


def test_a_model_with_a_task_takes_crops_of_any_size_and_gives_its_answers(tmp_path: Path) -> None:
    save_with_task(tmp_path)
    pixels = np.concatenate([page(*["red"] * 9, width=3), page(*["blue"] * 9, width=3)], axis=1)
    assert run(tmp_path, TASK, pixels) == ["red", "blue"]
    with pytest.raises(StageFailed, match=r"stage 'names': .* uint8\[height,width,3\] is needed"):
        run(tmp_path, TASK, pixels.astype(np.float32))


def test_a_model_with_a_task_alone_takes_the_bytes_of_the_request(tmp_path: Path) -> None:
    save_with_task(tmp_path)
    text = "names = {'model': 'named.onnx', 'image': 'photo'}\n"
    found = run(tmp_path, text, png(page("green", width=1)))
    assert (found["label"], found["score"]) == ("green", 255.0)


# -- A pipeline that cannot run is refused when its file is read, in a line that names the place


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
