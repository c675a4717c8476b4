"""The page in a real browser, on a real server with real models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import deploykit as dk
from deploykit import __version__
from deploykit.engines.engine import load
from tests.support.installed import needs
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.tiles import page as tiles
from tests.support.runtimes.tiles import png
from tests.support.serving.browser import (
    CHROMIUM,
    NO_CHROMIUM,
    Tab,
    box,
    choose_model,
    choose_way,
    chromium,
    open_page,
    run,
    values,
)
from tests.support.serving.running import Running, running

needs("PIL", "tokenizers", "sklearn")

from deploykit.evaluation.verify import open_proven  # noqa: E402
from tests.support.runtimes.pictures import photo  # noqa: E402
from tests.support.serving.task_models import write_task_model  # noqa: E402

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]


HOSTILE = "<img src=x onerror=alert(1)>"
_WEIGHTS = ", ".join("1" if row // 4 == column else "0" for row in range(28) for column in range(7))


def bands(path: Path) -> Path:
    """Take image [N,1,28,28] -> bands [N,7]: the ink in each four of its columns."""
    return _save(
        path,
        f"""(float[N,1,28,28] image) => (float[N,7] bands) <float[28,7] weights = {{{_WEIGHTS}}}> {{
            axes = Constant<value = int64[2] {{1, 2}}>()
            columns = ReduceSum<keepdims=0>(image, axes)
            bands = MatMul(columns, weights)
        }}""",
    )


def colours(path: Path) -> Path:
    """Take photo uint8 [N,24,32,3] -> the mean red, green and blue of its upper half [N,3]."""
    return _save(
        path,
        """(uint8[N,24,32,3] photo) => (float[N,3] HOSTILE) {
            zero = Constant<value_ints=[0]>()
            half = Constant<value_ints=[12]>()
            axis = Constant<value_ints=[1]>()
            upper = Slice(photo, zero, half, axis)
            values = Cast<to=1>(upper)
            HOSTILE = ReduceMean<axes=[1, 2], keepdims=0>(values)
        }""",
    )


def sums(path: Path) -> Path:
    """Take a float32 [N,2] and b int64 [N,2] -> their sum in float64, and b as it came."""
    return _save(
        path,
        """(float[N,2] a, int64[N,2] b) => (double[N,2] sum, int64[N,2] same) {
            wide_a = Cast<to=11>(a)
            wide_b = Cast<to=11>(b)
            sum = Add(wide_a, wide_b)
            same = Identity(b)
        }""",
    )


def _save(path: Path, graph: str) -> Path:
    head = '<ir_version: 8, opset_import: ["" : 17]>'
    model = onnx.parser.parse_model(f"{head} {path.stem} {graph}")
    if model.graph.output[0].name == "HOSTILE":
        model.graph.output[0].name = model.graph.node[-1].output[0] = HOSTILE
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {"bands": bands, "colours": colours, "sums": sums}
    return {name: make(folder / f"{name}.onnx") for name, make in made.items()}


@pytest.fixture(scope="module")
def served(files: dict[str, Path]) -> Iterator[Running]:
    engines = {name: load(path, "cpu") for name, path in files.items()}
    with running(engines) as server:
        yield server
    for engine in engines.values():
        engine.close()


@pytest.fixture
def page(browser: Tab, served: Running) -> Tab:
    """The page of `served`, loaded anew, with figures on it."""
    return open_page(browser, served)


def test_the_page_loads_without_errors_or_requests_to_other_hosts(
    page: Tab, served: Running
) -> None:
    page.until("document.querySelector('#process dd')")
    assert page.problems == []
    origin = f"http://127.0.0.1:{served.port}/"
    assert page.requests
    assert [url for url in page.requests if not url.startswith(origin)] == []
    assert page.text("#state") == "ready"
    assert page.text("#version") == __version__
    assert page.text("#models-rows").split()[::9] == ["bands", "colours", "sums"]


def test_the_page_shows_the_metrics_of_a_model(browser: Tab, files: dict[str, Path]) -> None:
    item = {"name": "a", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    other = {"name": "b", "datatype": "INT64", "shape": [1, 2], "data": [3, 4]}
    body = json.dumps({"inputs": [item, other]}).encode()
    with load(files["sums"], "cpu") as engine, running({"sums": engine}) as server:
        page = open_page(browser, server)
        assert page.ask("document.querySelector('#models').hidden")  # there is but one
        for _ in range(40):
            assert server.ask("POST", "/v2/models/sums/infer", body).status == 200
        assert server.ask("POST", "/v2/models/sums/infer", b"{}").status == 400
        page.until("document.querySelector('#time .legend')")
        assert "Compute" in page.text("#time")
        assert "Queue" in page.text("#time")
        for chart in ("batches", "latencies", "throughput"):
            page.until(f"document.querySelector('#{chart} svg')")
        label = page.ask("document.querySelector('#batches svg').getAttribute('aria-label')")
        assert label == "Rows in a batch: 1 rows 100 percent"
        tiles = page.ask(
            "Object.fromEntries([...document.querySelectorAll('#tiles div')]"
            ".map((tile) => [...tile.children].map((each) => each.textContent))"
            ".map(([name, ...rest]) => [name, rest.join(' ')]))"
        )
        assert float(tiles["p50"].removesuffix(" ms")) > 0
        assert tiles["Other errors"].endswith("/s 1 in total")
        assert tiles["Refused (503)"].endswith("/s 0 in total")
        assert tiles["Timed out (504)"].endswith("/s 0 in total")
        assert tiles["Batch size"] == "1.00 rows"
        assert page.problems == []


def test_examples_can_be_copied_and_fit_a_narrow_page(browser: Tab, served: Running) -> None:
    browser.look(width=390)
    browser.open(f"http://127.0.0.1:{served.port}/docs")
    browser.until("document.querySelectorAll('[role=tab]').length > 2")
    tabs = "[...document.querySelectorAll('[role=tab]')]"
    for number in reversed(range(1, browser.ask(f"{tabs}.length"))):
        browser.ask(f"{tabs}[{number}].click()")
        assert browser.ask("document.documentElement.scrollWidth") <= 390, number
    shown = "[...document.querySelectorAll('.example')].find((each) => !each.hidden)"
    browser.call(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
    )
    browser.call("Emulation.setFocusEmulationEnabled", enabled=True)
    browser.ask(f"{shown}.querySelector('.copy').click()")
    browser.until(f"{shown}.querySelector('.copy').innerText === 'Copied'")
    copied = browser.ask("navigator.clipboard.readText()")
    assert copied.startswith("import numpy as np")
    assert copied == browser.ask(f"{shown}.querySelector('code').textContent")


def test_a_draining_and_an_unreachable_server_are_reported(
    browser: Tab, files: dict[str, Path]
) -> None:
    with load(files["bands"], "cpu") as engine, running({"bands": engine}) as server:
        open_page(browser, server)
        server.server.repository.drain()
        browser.until(
            "document.querySelector('#state').innerText === "
            "'not ready: the server is shutting down'"
        )
        assert "shutting down" in browser.text("#notes")
        server.stop()
        browser.until("document.querySelector('#state').innerText === 'unreachable'")
        assert browser.text("#model-name") == "bands"  # the last figures stay


def test_the_page_asks_for_the_token_and_uses_it(browser: Tab, files: dict[str, Path]) -> None:
    token = "a token of more than 16"
    with load(files["bands"], "cpu") as engine, running({"bands": engine}, token=token) as server:
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.until("!document.querySelector('#token').hidden")
        assert browser.text("#state") == "locked"
        assert browser.ask("document.querySelector('#main').hidden")
        name = browser.ask("document.querySelector('#token-text').labels[0]?.innerText")
        assert name == "This server asks for its token"
        browser.ask(f"document.querySelector('#token-text').value = {json.dumps(token)}")
        browser.ask("document.querySelector('#token button').click()")
        browser.until("document.querySelector('#tiles dd')")
        assert browser.ask("document.querySelector('#token').hidden")
        browser.ask("[...document.querySelectorAll('#panel button')].at(-1).click()")
        assert "bands" in run(browser)


def test_a_drawing_by_pointer_reaches_the_model(page: Tab) -> None:
    pad = box(page, ".pad")
    x = pad["left"] + pad["width"] * 14.0 / 28  # in the fourth band
    page.drag([(x, pad["top"] + pad["height"] * part) for part in (0.2, 0.5, 0.8)])
    text = run(page)
    assert "bands FP32 [1, 7]" in text
    assert "ms round trip" in page.text("#took")
    found = values(page)
    assert int(np.argmax(found)) == 3
    assert found[0] == found[1] == found[5] == found[6] == 0
    assert page.text(".top li span") == "3"
    assert page.problems == []


def test_an_image_is_scaled_to_the_models_input_size(page: Tab, tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    image = image_module.new("RGB", (320, 240), (200, 100, 30))
    image.paste((0, 0, 255), (0, 120, 320, 240))  # the lower half is blue
    image.save(tmp_path / "sunset.png")
    (tmp_path / "page.png").write_text("<html>")
    choose_model(page, "colours")
    page.choose_file("#panel input[type=file]", tmp_path / "page.png")
    hint = "document.querySelector('#panel .hint').textContent"
    page.until(f"{hint}.startsWith('page.png is not an image')")
    assert run(page) == "choose an image first"
    page.choose_file("#panel input[type=file]", tmp_path / "sunset.png")
    page.until(f"{hint}.includes('sent as 32 × 24')")
    text = run(page)
    assert HOSTILE in text  # the name is escaped
    assert page.ask("document.querySelectorAll('#answer img').length") == 0
    assert values(page) == pytest.approx([200, 100, 30], abs=1)
    assert page.problems == []


def test_arrays_are_read_from_npy_files_of_the_right_type_and_order(
    page: Tab, tmp_path: Path
) -> None:
    np.save(tmp_path / "b.npy", np.array([[-(2**40), 7], [8, 9]], np.int64))
    choose_model(page, "sums")
    choose_way(page, ".npy")
    page.choose_file("#panel label:nth-child(2) input", tmp_path / "b.npy")
    for array, message in (
        (np.array([[0.5, 1], [2, 3]], np.float32), "sum FP64 [2, 2]"),
        (np.zeros((1, 2)), "a.npy holds <f8, input a is FP32 (<f4)"),
        (np.asfortranarray(np.zeros((2, 2), np.float32)), "np.ascontiguousarray"),
        (np.zeros((1, 3), np.float32), "shape"),  # the server's own message
    ):
        np.save(tmp_path / "a.npy", array)
        page.choose_file("#panel label:nth-child(1) input", tmp_path / "a.npy")
        assert message in run(page)
        if array[0, 0]:
            assert values(page, 1) == [-(2**40), 7, 8, 9]
            assert values(page, 0)[1:] == [8, 10, 12]
        else:
            assert page.ask("document.querySelector('#answer [role=alert]') !== null")


def test_a_model_without_image_input_starts_with_an_example_and_has_a_json_form(page: Tab) -> None:
    choose_model(page, "sums")
    ways = page.ask("[...document.querySelectorAll('#kinds input')].map((each) => each.value)")
    assert ways == ["Example", "JSON", ".npy"]
    assert "sum FP64 [1, 2]" in run(page)
    choose_way(page, "JSON")
    run(page)
    assert values(page) == [0, 0]
    page.ask("let t = document.querySelector('textarea'); t.value = t.value.replace('0]', '4.5]')")
    run(page)
    assert values(page) == [0, 4.5]
    page.ask("document.querySelector('textarea').value = '{'")
    assert "JSON" in run(page)


def test_the_page_is_never_wider_than_the_window(page: Tab) -> None:
    for width in (320, 390, 768, 1280):
        page.look(width=width)
        page.until(f"window.innerWidth === {width}")
        assert page.ask("document.documentElement.scrollWidth") <= width


def test_every_control_has_an_accessible_name(page: Tab) -> None:
    for model in ("bands", "colours", "sums"):
        choose_model(page, model)
        for way in page.ask("[...document.querySelectorAll('#kinds input')].map((e) => e.value)"):
            choose_way(page, way)
            tree = page.call("Accessibility.getFullAXTree")["nodes"]
            acting = ("button", "link", "textbox", "radio", "combobox", "image", "application")
            for node in tree:
                if node["role"]["value"] in acting and not node["ignored"]:
                    assert node["name"]["value"], (model, way, node)


# -- Tasks and pipelines: what is sent, and the answer drawn


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


STEPS = {
    "found": """
import numpy as np
import onnx
import onnx.parser
def places(page: np.ndarray) -> list[list[int]]:
    ys, xs = np.nonzero(page.min(axis=2) < 128)
    return [[int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1]]
def answer(places: list[list[int]]) -> list[dict]:
    return [{"box": place, "label": "<b>tile</b>"} for place in places]
""",
    "turned": """
import io
import numpy as np
import onnx
import onnx.parser
from PIL import Image
def answer(data: bytes) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).rotate(90, expand=True).save(file, "PNG")
    return file.getvalue()
""",
}


@pytest.fixture(scope="module")
def piped(
    browser: Tab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Tab, dk.RunningServer, Path]]:
    folder = tmp_path_factory.mktemp("pages")
    model = save(linear(), folder / "linear.onnx")
    (folder / "page.png").write_bytes(png(tiles(*[""] * 41, "red", *[""] * 22)))
    for name, text in STEPS.items():
        (folder / f"{name}.py").write_text(text)
    files = {name: folder / f"{name}.py" for name in STEPS}
    with dk.serve(model, pipelines=files, device="cpu", grpc_port=None) as server:
        server.port = int(server.url.rpartition(":")[2])  # type: ignore[attr-defined]
        yield browser, server, folder / "page.png"


def test_the_answer_of_a_pipeline_is_drawn(piped: tuple[Tab, dk.RunningServer, Path]) -> None:
    tab, server, file = piped
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
    choose_model(tab, "turned")
    choose_way(tab, "File")
    tab.choose_file("#panel input[type=file]", file)
    tab.ask("document.querySelector('#answer').replaceChildren()")
    tab.ask("document.querySelector('#run').click()")
    tab.until("document.querySelector('#answer canvas')")
    assert tab.ask("document.querySelector('#answer canvas').height") == 64
