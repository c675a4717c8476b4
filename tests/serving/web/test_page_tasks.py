"""The form of a model with a task in a real browser: what is sent, and the answer drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.installed import needs
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
def page(
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
    page: tuple[Tab, Running, Path], kind: str, answer: str, changed: tuple[float, float]
) -> None:
    tab, server, file = page
    open_page(tab, server)
    choose_model(tab, kind)
    choose_way(tab, "Photo")
    tab.choose_file("#panel input[type=file]", file)
    tab.until("document.querySelector('canvas.found').width === 640")
    tab.ask(REMEMBER)
    assert answer in " ".join(run(tab).split())
    assert changed[0] <= tab.ask(CHANGED) <= changed[1]
    assert tab.problems == []


def test_a_sentence_is_answered_and_an_error_is_shown(page: tuple[Tab, Running, Path]) -> None:
    tab, server, _ = page
    open_page(tab, server)
    choose_model(tab, "text-classify")
    choose_way(tab, "Sentence")
    tab.ask("document.querySelector('#panel textarea').value = 'good good good'")
    assert run(tab).split() == ["good", "60", "%", "bad", "40", "%"]
    tab.ask("document.querySelector('#panel textarea').value = ' '")
    assert "the text: is empty" in run(tab)
