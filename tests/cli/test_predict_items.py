"""`deploykit predict model.onnx cat.jpg`: what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cli.command import Run
from tests.support.installed import needs

needs("PIL", "tokenizers")

from deploykit.engines.tasks.engine import TaskEngine  # noqa: E402
from tests.support.runtimes.pictures import encoded  # noqa: E402
from tests.support.serving.task_models import write_task_model  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, level in (("sky.png", 204), ("cave.webp", 0)):
        pixels = np.full((32, 48, 3), level, np.uint8)
        (tmp_path / name).write_bytes(encoded(pixels, Path(name).suffix[1:]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(run: Run, folder: Path, kind: str, *arguments: str) -> list[str]:
    model = write_task_model(folder, kind).name
    ran = run("predict", model, *arguments)
    assert ran.code == 0, ran.err
    return ran.out.splitlines()


def test_one_image_is_its_label(run: Run, folder: Path) -> None:
    assert lines(run, folder, "classify", "sky.png") == ["light 80 %"]


def test_several_images_and_those_of_a_folder_are_a_line_each(run: Run, folder: Path) -> None:
    found = ["sky.png: light 80 %", "cave.webp: dark 100 %"]
    assert lines(run, folder, "classify", "sky.png", "cave.webp") == found
    (folder / "sky.txt").write_text("0 0.5 0.5 1 1")  # labels as YOLO's data sets have them
    assert lines(run, folder, "classify", ".") == found[::-1]


def test_files_are_read_as_they_are_needed(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 images, of which 32 are in memory at a time; the one that is damaged comes last."""
    for number in range(70):
        level = 255 * (number % 2)
        (folder / f"{number:02}.png").write_bytes(encoded(np.full((4, 4, 3), level, np.uint8)))
    found = lines(run, folder, "classify", *(f"{number:02}.png" for number in range(70)))
    assert found == [f"{n:02}.png: {('dark', 'light')[n % 2]} 100 %" for n in range(70)]
    calls: list[int] = []
    real = TaskEngine.predict

    def counted(self: TaskEngine, items: list[bytes], **more: Any) -> Any:
        calls.append(len(items))
        return real(self, items, **more)

    monkeypatch.setattr(TaskEngine, "predict", counted)
    lines(run, folder, "classify", *(f"{number:02}.png" for number in range(70)))
    assert calls == [32, 32, 6]


def test_a_detector_prints_boxes_and_a_segmenter_shares(run: Run, folder: Path) -> None:
    assert lines(run, folder, "detect", "sky.png") == ["light 80 % at 0,0 to 24,32"]
    assert lines(run, folder, "segment", "sky.png") == ["light 100 %"]
    assert lines(run, folder, "embed", "sky.png") == ["3 numbers: 0.5774 0.5774 0.5774"]


def test_a_sentence_is_its_label(run: Run, folder: Path) -> None:
    found = lines(run, folder, "text-classify", "--text", "good good good", "--text", "bad")
    assert found == ["good good good: good 60 %", "bad: bad 100 %"]


def test_a_document_holds_all_that_the_server_would_answer(run: Run, folder: Path) -> None:
    document = json.loads("\n".join(lines(run, folder, "classify", "sky.png", "--json")))
    assert (document["task"], document["items"]) == ("classify", ["sky.png"])
    assert [each["label"] for each in document["answers"][0]["top"]] == ["light", "dark"]


REFUSED = {
    "nothing": ([], "there is nothing to predict"),
    "no file": (["absent.png"], "absent.png: no such file"),
    "no image": (["classify.onnx"], "classify.onnx: is not a readable image"),
    "samples": (["x.npz"], "holds samples; --out names the file"),
    "text": (["--text", "good"], "text 1: is a text, and the model takes images"),
    "out for two": (["sky.png", "cave.webp", "-o", "x.npz"], "--out is for the outputs of one"),
    "out for text": (["sky.png", "--text", "a", "-o", "x.npz"], "--out is for the outputs of one"),
    "empty folder": (["empty"], "empty: holds no file that ends in .jpg"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_answered_is_one_line(run: Run, folder: Path, case: str) -> None:
    (folder / "empty").mkdir()
    arguments, reason = REFUSED[case]
    ran = run("predict", write_task_model(folder, "classify").name, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert reason in ran.error()
    assert not (folder / "x.npz").exists()


def test_a_model_without_a_task_says_so(run: Run, folder: Path, affine_onnx: Path) -> None:
    ran = run("predict", affine_onnx, "sky.png")
    assert ran.code == 2
    assert "has no task, so it takes only tensors" in ran.error()
