"""The form of a pipeline in a real browser: an image in, its answer as JSON, its boxes drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import deploykit as dk
from tests.support.installed import needs
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.tiles import page, png
from tests.support.serving.actions import choose_model, choose_way, open_page, run
from tests.support.serving.browser import CHROMIUM, NO_CHROMIUM, Tab

needs("PIL", "onnxruntime")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]

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
