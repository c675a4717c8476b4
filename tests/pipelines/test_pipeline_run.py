"""A pipeline in this process: what reaches which stage, how models are called, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.core.artefact import Manifest, write_manifest
from deploykit.core.errors import StageFailed
from deploykit.core.files import sha256
from deploykit.core.task import CLASSIFY, ImageInput, Task, TaskOutputs
from deploykit.engines.engine import Arrays, Engine
from deploykit.evaluation.predict import answer_file
from deploykit.pipelines.file import read_answers
from deploykit.pipelines.pipeline import predict_files
from deploykit.pipelines.stages import Definition, StageGraph
from tests.support.onnx_zoo import linear, save, two_inputs
from tests.support.runtimes.tiles import mean_model, page, png, write_pipeline

pytest.importorskip("onnxruntime")
pytest.importorskip("PIL")


def run(folder: Path, text: str, value: Any) -> Any:
    with dk.pipeline(write_pipeline(folder, text), batch=4) as opened:
        return opened(value)


@pytest.mark.parametrize(
    ("pages", "calls"),
    [
        ([["red", "", "blue", "green"]], [3]),
        ([["red", "blue"] * 5], [4, 4, 2]),  # full batches and a rest
        ([[""]], []),
        ([["red"], [], ["green", "blue"], ["blue"]], [4]),  # requests share calls
    ],
)
def test_crops_of_requests_run_in_full_batches_and_each_gets_its_own_answers(
    tmp_path: Path, pages: list[list[str]], calls: list[int]
) -> None:
    with dk.pipeline(write_pipeline(tmp_path), batch=4) as opened:
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
        found = opened.run([page(*colours) for colours in pages])
    assert found == [[colour for colour in colours if colour] for colours in pages]
    assert rows == calls


BATCH = """
import numpy as np
model = {"model": "mean.onnx", "image": "rows"}
def rows(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)[:, None, None, None] * np.ones((1, 3, 8, 8), "f4")
def answer(model: np.ndarray) -> list:
    return model[:, 0].tolist()
"""


def test_an_array_with_a_batch_axis_is_divided_and_joined_again(tmp_path: Path) -> None:
    for count in (0, 1, 4, 9):
        assert run(tmp_path, BATCH, count) == list(range(count))
    text = BATCH.replace("(1, 3, 8, 8)", "(1, 3, 8, 80)")
    with pytest.raises(StageFailed, match=r"stage 'model': input 'image' is float32\[N,3,8,8\]"):
        run(tmp_path, text, 2)


def test_outputs_of_a_model_are_taken_by_their_names(tmp_path: Path) -> None:
    save(two_inputs(), tmp_path / "two.onnx")
    text = """
import numpy as np
pair = "two.onnx"
def a(row: list[float]) -> np.ndarray: return np.array(row, np.float32)
def b(a: np.ndarray) -> np.ndarray: return a + 1
def sum(pair_sum: np.ndarray) -> np.ndarray: return -pair_sum  # a stage comes before an output
def answer(sum: np.ndarray, pair_product: np.ndarray, pair: dict[str, np.ndarray]) -> dict:
    return {"sum": sum, "product": pair_product, "all": sorted(pair)}
"""
    found = answer_json(run(tmp_path, text, [0.0, 1.0, 2.0, 3.0]))
    assert found == {"sum": [-1, -3, -5, -7], "product": [0, 2, 6, 12], "all": ["product", "sum"]}


def test_a_value_that_is_no_list_reaches_every_element_and_a_cached_function_is_a_stage(
    tmp_path: Path,
) -> None:
    text = """
from functools import lru_cache
@lru_cache
def words(line: str) -> list[str]: return line.split()
def marked(words: str, line: str, sign: str = "/") -> str: return f"{words}{sign}{len(line)}"
def _helper(x): return x
"""
    with dk.pipeline(write_pipeline(tmp_path, text, "json.py")) as opened:  # any name
        assert opened("a b") == ["a/3", "b/3"]


def test_a_model_alone_after_one_function_and_toml(tmp_path: Path) -> None:
    save(linear(), tmp_path / "linear.onnx")
    (tmp_path / "steps.py").write_text(
        "import numpy as np\n"
        "def row(given: list) -> np.ndarray: return np.array(given, np.float32)\n"
        "def best(scores: np.ndarray, names: str = 'abc') -> str:\n"
        "    return names[int(scores.argmax())]\n"
    )
    path, text = tmp_path / "abc.toml", "model = 'linear.onnx'\nbefore = 'steps.py:row'\n"
    path.write_text(text)
    with dk.pipeline(path) as opened, dk.load(tmp_path / "linear.onnx", "cpu") as engine:
        scores = engine({"x": np.ones((1, 4), np.float32)})["y"]
        np.testing.assert_allclose(opened([1, 1, 1, 1]), scores[0], rtol=1e-6)
    path.write_text(f"{text}after = 'steps.py:best'\n")
    with dk.pipeline(path) as opened:
        assert opened([1, 1, 1, 1]) == "abc"[int(scores.argmax())]


@pytest.mark.parametrize(
    ("body", "message"),
    [("return ['a', 3]", "list of int and str, its annotation is list[str]"), ("pass", "None")],
)
def test_a_stage_gives_what_its_annotation_says(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(StageFailed) as raised:
        run(tmp_path, f"def answer(page: str) -> list[str]:\n    {body}\n", "a")
    assert f"stage 'answer' gave {message}" in raised.value.message


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
    endless: list[object] = []
    endless.append(endless)
    for wrong, why in (({1, 2}, "a set has no JSON form"), (endless, "its answer is too deep")):
        with pytest.raises(StageFailed, match=f"stage 'a': {why}"):
            answer_json(wrong)


# -- Files


def test_what_a_stage_prints_is_not_among_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "print('read')\ndef answer(page: str) -> str:\n    print('ran')\n    return page\n"
    path = write_pipeline(tmp_path, text)
    assert list(predict_files(path, [path]).answers.values()) == [text]
    captured = capsys.readouterr()
    assert (captured.out, captured.err.split()) == ("", ["read", "ran"])


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


def test_a_file_of_any_name_and_its_answer_are_one_line_that_is_read_again(tmp_path: Path) -> None:
    out, names = tmp_path / "answers.jsonl", [os.fsdecode(b"caf\xe9.png"), "a\u2028b.png"]
    with answer_file(out) as write:
        for name in names:
            write(name, {"label": "\x85"})
    assert read_answers(out) == [(Path(name), {"label": "\x85"}) for name in names]


BAD = """
class Bad(Exception):
    def __str__(self): return 1 / 0
def answer(page: str) -> str:
    if len(page) < 6: raise Bad
    return page
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def answer(page: str) -> str: return page[9]\n", r"IndexError: .*tiles\.py, line 1"),
        (BAD, r"Bad \(tiles\.py, line 5\)"),
    ],
    ids=["a message", "none"],
)
def test_the_file_and_line_of_a_failing_stage_are_named(
    tmp_path: Path, text: str, why: str
) -> None:
    path, files = write_pipeline(tmp_path, text), [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, content in zip(files, ("long enough", "short"), strict=True):  # one call for both
        file.write_text(content)
    with pytest.raises(dk.BadInput, match=rf"b\.txt: stage 'answer' failed: {why}"):
        predict_files(path, files)


# -- Models with a task


def save_with_task(folder: Path) -> None:
    """Names the colour of an image of any size: its manifest has the task."""
    model = mean_model()
    value = helper.make_tensor_value_info("pixels", TensorProto.UINT8, ["N", 8, 8, 3])
    model.graph.input[0].CopyFrom(value)
    first = helper.make_node("Cast", ["pixels"], ["floats"], to=TensorProto.FLOAT)
    second = helper.make_node("Transpose", ["floats"], ["image"], perm=[0, 3, 1, 2])
    model.graph.node.insert(0, second)
    model.graph.node.insert(0, first)
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


def test_a_model_with_a_task_takes_images_of_any_size_and_gives_its_answers(tmp_path: Path) -> None:
    save_with_task(tmp_path)
    pixels = np.concatenate([page(*["red"] * 9, width=3), page(*["blue"] * 9, width=3)], axis=1)
    assert run(tmp_path, TASK, pixels) == ["red", "blue"]
    with pytest.raises(StageFailed, match=r"stage 'names': .* uint8\[height,width,3\] is needed"):
        run(tmp_path, TASK, pixels.astype(np.float32))
    alone = "names = {'model': 'named.onnx', 'image': 'photo'}\n"  # it takes the request's bytes
    found = run(tmp_path, alone, png(page("green", width=1)))
    assert (found["label"], found["score"]) == ("green", 255.0)


# -- A pipeline that cannot run is refused when its file is read, in a line that names the place


# The message, then the program; $HEAD is a model, $CROPS and $ANSWER the stages around it
WRONG = """
not a Python program: SyntaxError: .* line 3
$HEAD; def crops(:
running it failed: ZeroDivisionError
1 / 0
it called exit
exit(0)
defines no function and no model
# nothing
a cycle: a -> b -> c -> a
def a(x: bytes, c: int) -> int: ...; def b(a: int) -> int: ...; def c(b: int) -> int: ...
a cycle: colours -> answer -> crops -> colours
$HEAD; def crops(page: np.ndarray, answer: str) -> np.ndarray: ...; $ANSWER
a cycle: a -> a
def a(a: int) -> int: ...
takes 'colors', which is neither a stage nor an output of a model; the request's input is
$HEAD; $CROPS; def answer(colors: np.ndarray) -> str: ...
no other stage takes 'boxes', and the answer is that of 'answer'
$HEAD; $CROPS; def boxes(page: np.ndarray) -> int: ...; $ANSWER
no other stage takes 'colours'
$HEAD; $CROPS; def answer(crops: list[np.ndarray]) -> str: ...
stage 'answer' takes 'colours' as dict[str, float], 'colours' gives list[numpy.ndarray]
$HEAD; $CROPS; def answer(colours: dict[str, float]) -> str: ...
stage 'colours' takes 'image' as numpy.ndarray, 'crops' gives list[str]
$HEAD; def crops(page: np.ndarray) -> list[str]: ...; $ANSWER
stage 'answer' takes 'page' as bytes, the request has numpy.ndarray
$HEAD; $CROPS; def answer(page: bytes, colours: np.ndarray) -> str: ...
stage 'tiny' takes 'image' as numpy.ndarray, the request has bytes
tiny = {'model': 'mean.onnx', 'image': 'page'}; def answer(tiny: dict, page: bytes) -> str: ...
the request's input is set
def answer(page: set) -> str: ...
stage 'crops': the annotation of 'page' is missing
$HEAD; def crops(page) -> list[np.ndarray]: ...; $ANSWER
stage 'crops': the annotation of what it returns is missing
$HEAD; def crops(page: np.ndarray): ...; $ANSWER
stage 'crops': its annotations cannot be read: NameError
$HEAD; def crops(page: 'Page') -> list[np.ndarray]: ...; $ANSWER
two stages are called 'crops', in lines 3 and 4
$HEAD; $CROPS; $CROPS; $ANSWER
two stages are called 'colours', in lines 2 and 4
$HEAD; $CROPS; def colours(crops: list[np.ndarray]) -> str: ...
stage 'answer' is async
async def answer(page: bytes) -> str: ...
stage 'answer' is a generator
def answer(page: bytes) -> int: yield 1
not a Python pro
# coding: ascii; def answer(page: bytes) -> str: return 'é'
takes no value by its name
def answer(*page: bytes) -> str: ...
model 'answer': .*nothere.onnx: no such file
answer = 'nothere.onnx'
'answer' is not a model
answer = {'model': 3}
model 'colours' has no input 'picture'
colours = {'model': 'mean.onnx', 'picture': 'page'}
IN_FLIGHT: there is no stage 'crop'
IN_FLIGHT = {'crop': 3}; $HEAD; $CROPS; $ANSWER
TIMEOUT_MS: 'crops' must be from 1 to 86,400,000, got 0
TIMEOUT_MS = {'crops': 0}; $HEAD; $CROPS; $ANSWER
stage 'answer' takes 'scores', an output of colours and again
$HEAD; again = {'model': 'mean.onnx', 'image': 'crops'}; $CROPS; def answer(scores: str) -> str: ...
""".strip().split("\n")
MACROS = {
    "; ": "\n",
    "$HEAD": "import numpy as np\ncolours = {'model': 'mean.onnx', 'image': 'crops'}",
    "$CROPS": "def crops(page: np.ndarray) -> list[np.ndarray]: return []",
    "$ANSWER": "def answer(colours: np.ndarray) -> str: return ''",
}


@pytest.mark.parametrize(("message", "text"), [*zip(WRONG[::2], WRONG[1::2], strict=True)])
def test_it_is_refused(tmp_path: Path, message: str, text: str) -> None:
    for macro, meaning in MACROS.items():
        text = text.replace(macro, meaning)
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
    with pytest.raises(dk.BadInput, match=r"a pipeline is a \.py or a \.toml file"):
        dk.pipeline(write_pipeline(tmp_path, name="steps.txt"))
