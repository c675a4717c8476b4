"""The forms of tasks and pipelines in a real browser: what is sent, and the answer drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import deploykit as dk
from tests.support.installed import needs
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.tiles import page, png
from tests.support.serving.actions import choose_model, choose_way, open_page, run
from tests.support.serving.browser import CHROMIUM, NO_CHROMIUM, Tab
from tests.support.serving.running import Running, running

needs("PIL", "tokenizers", "sklearn")

from deploykit.evaluation.verify import open_proven  # noqa: E402
from tests.support.runtimes.pictures import photo  # noqa: E402
from tests.support.serving.task_models import write_task_model  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]

# the share of the canvas's pixels that differ from those of the image alone
CHANGED = """(() => {
  const canvas = document.querySelector('canvas.found');
  const read = () => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const now = read();
  return now.reduce((n, value, i) => n + (value !== window.before[i]), 0) / now.length;
})()"""
REMEMBER = """(() => {
  const canvas = document.querySelector('canvas.found');
  window.before = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
})()"""


@pytest.fixture(scope="module")
def tasks(
    browser: Tab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Tab, Running, Path]]:
    folder = tmp_path_factory.mktemp("tasks")
    file = folder / "china.jpg"
    file.write_bytes(photo())
    with ExitStack() as stack:
        models = {}
        for kind in ("classify", "detect", "segment", "embed", "text-classify"):
            (engine,) = open_proven(write_task_model(folder, kind), threads=1)
            models[kind] = stack.enter_context(engine)
        yield browser, stack.enter_context(running(models)), file


@pytest.mark.parametrize(
    ("kind", "answer", "changed"),
    [
        ("classify", "light 56 % dark 44 %", (0, 1)),
        ("detect", "light 56 % dark 44 %", (0.005, 0.1)),  # boxes are drawn and listed
        ("segment", "light 52 % dark 48 %", (0.5, 1)),  # the pixels of each label are coloured
        ("embed", "(3 numbers)", (0, 1)),
    ],
)
def test_the_answer_for_a_photo_is_drawn_and_written(
    tasks: tuple[Tab, Running, Path], kind: str, answer: str, changed: tuple[float, float]
) -> None:
    tab, server, file = tasks
    open_page(tab, server)
    choose_model(tab, kind)
    choose_way(tab, "Photo")
    tab.choose_file("#panel input[type=file]", file)
    tab.until("document.querySelector('canvas.found').width === 640")
    tab.ask(REMEMBER)
    assert answer in " ".join(run(tab).split())
    assert changed[0] <= tab.ask(CHANGED) <= changed[1]
    assert tab.problems == []


def test_a_sentence_is_answered_and_an_error_is_shown(tasks: tuple[Tab, Running, Path]) -> None:
    tab, server, _ = tasks
    open_page(tab, server)
    choose_model(tab, "text-classify")
    choose_way(tab, "Sentence")
    tab.ask("document.querySelector('#panel textarea').value = 'good good good'")
    assert run(tab).split() == ["good", "60", "%", "bad", "40", "%"]
    tab.ask("document.querySelector('#panel textarea').value = ' '")
    assert "the text: is empty" in run(tab)


# -- Pipelines


STEPS = {
    "found": """
import numpy as np
def places(page: np.ndarray) -> list[list[int]]:
    ys, xs = np.nonzero(page.min(axis=2) < 128)
    return [[int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1]]
def answer(places: list[list[int]]) -> list[dict]:
    return [{"box": place, "label": "<b>tile</b>"} for place in places]
""",
    "sizes": """
def answer(request: dict) -> dict:
    return {name: len(request[name]) for name in request}
""",
    "turned": """
import io
import numpy as np
from PIL import Image
def answer(data: bytes) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).rotate(90, expand=True).save(file, "PNG")
    return file.getvalue()
""",
}


@pytest.fixture(scope="module")
def served(
    browser: Tab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Tab, dk.RunningServer, Path]]:
    folder = tmp_path_factory.mktemp("pages")
    model = save(linear(), folder / "linear.onnx")
    (folder / "page.png").write_bytes(png(page(*[""] * 41, "red", *[""] * 22)))
    for name, text in STEPS.items():
        (folder / f"{name}.py").write_text(text)
    files = {name: folder / f"{name}.py" for name in STEPS}
    with dk.serve(model, pipelines=files, device="cpu", grpc_port=None) as server:
        server.port = int(server.url.rpartition(":")[2])  # type: ignore[attr-defined]
        yield browser, server, folder / "page.png"


def test_boxes_of_an_answer_are_drawn_over_the_image(
    served: tuple[Tab, dk.RunningServer, Path],
) -> None:
    tab, server, file = served
    open_page(tab, server)  # type: ignore[arg-type]
    assert tab.text("#try-title") == "Try found"  # pipelines come first
    assert tab.text("#model-about") == "pipeline: places → answer"
    tab.choose_file("#panel input[type=file]", file)
    tab.until("document.querySelector('canvas.found').width === 480")
    assert json.loads(run(tab)) == [{"box": [8, 40, 16, 48], "label": "<b>tile</b>"}]
    canvas = "document.querySelector('canvas.found').getContext('2d')"
    pixel = "[...%s.getImageData(%d, %d, 1, 1).data]"
    assert tab.ask(pixel % (canvas, 120, 330)) != [255, 255, 255, 255]  # the edge of the box
    assert tab.ask(pixel % (canvas, 450, 450)) == [255, 255, 255, 255]
    assert tab.problems == []


def test_json_and_files_are_sent_as_they_are(served: tuple[Tab, dk.RunningServer, Path]) -> None:
    tab, server, file = served
    open_page(tab, server)  # type: ignore[arg-type]
    choose_model(tab, "sizes")
    choose_way(tab, "JSON")
    tab.ask("document.querySelector('#panel textarea').value = '{\"a\": [1, 2]}'")
    assert json.loads(run(tab)) == {"a": 2}
    tab.ask("document.querySelector('#panel textarea').value = '[1]'")
    assert "dict is needed" in run(tab)
    choose_model(tab, "turned")
    choose_way(tab, "File")
    tab.choose_file("#panel input[type=file]", file)
    tab.ask("document.querySelector('#answer').replaceChildren()")
    tab.ask("document.querySelector('#run').click()")
    tab.until("document.querySelector('#answer canvas')")
    assert tab.ask("document.querySelector('#answer canvas').height") == 64
