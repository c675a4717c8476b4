"""`predict` of files by a model with a task or a pipeline, and `bench` of a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cli.command import Run
from tests.support.installed import needs

needs("PIL", "tokenizers")

from deploykit.engines.tasks import TaskEngine  # noqa: E402
from deploykit.reporting.report import read  # noqa: E402
from tests.support.runtimes.pictures import encoded  # noqa: E402
from tests.support.runtimes.tiles import page, png, write_pipeline  # noqa: E402
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


def test_an_image_is_its_label_and_several_are_a_line_each(run: Run, folder: Path) -> None:
    assert lines(run, folder, "classify", "sky.png") == ["light 80 %"]
    found = ["sky.png: light 80 %", "cave.webp: dark 100 %"]
    assert lines(run, folder, "classify", "sky.png", "cave.webp") == found
    (folder / "sky.txt").write_text("0 0.5 0.5 1 1")  # labels as YOLO's data sets have them
    assert lines(run, folder, "classify", ".") == found[::-1]
    document = json.loads("\n".join(lines(run, folder, "classify", "sky.png", "--json")))
    assert (document["task"], document["items"]) == ("classify", ["sky.png"])
    assert [each["label"] for each in document["answers"][0]["top"]] == ["light", "dark"]


def test_files_are_read_as_they_are_needed(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 images, of which 32 are in memory at a time."""
    for number in range(70):
        level = 255 * (number % 2)
        (folder / f"{number:02}.png").write_bytes(encoded(np.full((4, 4, 3), level, np.uint8)))
    calls: list[int] = []
    real = TaskEngine.predict

    def counted(self: TaskEngine, items: list[bytes], **more: Any) -> Any:
        calls.append(len(items))
        return real(self, items, **more)

    monkeypatch.setattr(TaskEngine, "predict", counted)
    found = lines(run, folder, "classify", *(f"{number:02}.png" for number in range(70)))
    assert found == [f"{n:02}.png: {('dark', 'light')[n % 2]} 100 %" for n in range(70)]
    assert calls == [32, 32, 6]


def test_each_task_prints_its_answers(run: Run, folder: Path) -> None:
    assert lines(run, folder, "detect", "sky.png") == ["light 80 % at 0,0 to 24,32"]
    assert lines(run, folder, "segment", "sky.png") == ["light 100 %"]
    assert lines(run, folder, "embed", "sky.png") == ["3 numbers: 0.5774 0.5774 0.5774"]
    found = lines(run, folder, "text-classify", "--text", "good good good", "--text", "bad")
    assert found == ["good good good: good 60 %", "bad: bad 100 %"]


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    (tmp_path / "page.png").write_bytes(png(page("red", "blue")))
    return write_pipeline(tmp_path)


def test_a_file_is_answered_on_stdout_and_several_in_json_lines(
    run: Run, pipeline: Path, tmp_path: Path
) -> None:
    data, out = pipeline.with_name("page.png"), tmp_path / "answers.jsonl"
    ran = run("predict", pipeline, data)
    assert (ran.code, json.loads(ran.out)) == (0, ["red", "blue"])
    ran = run("predict", pipeline, data, "--json")
    assert list(json.loads(ran.out)["answers"].values()) == [["red", "blue"]]
    ran = run("predict", pipeline, data, data, "-o", out)
    assert (ran.code, "wrote" in ran.out) == (0, True)
    answers = [json.loads(line)["answer"] for line in out.read_text().splitlines()]
    assert answers == [["red", "blue"]] * 2


def test_a_bench_has_every_stage_in_an_ordinary_report(
    run: Run, pipeline: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    words = ("--data", pipeline.with_name("page.png"), "--batches", "1,4", "-o", out)
    ran = run("bench", pipeline, *words, "--seconds", "0.05")
    assert ran.code == 0, ran.err
    report = read(out)
    stages = ["page", "crops", "colours", "answer", "JSON"]
    for batch in (1, 4):
        whole, *parts = [each for each in report.points if each.batch == batch]
        assert (whole.label, whole.scenario) == ("tiles", "closed-loop")
        assert [each.label for each in parts] == stages
        assert {each.scenario for each in parts} == {"stage of tiles"}
        assert {(each.samples, each.rounds) for each in parts} == {(whole.samples, whole.rounds)}
        together_s = sum(each.duration_s for each in parts)
        assert 0 < together_s <= whole.duration_s  # of the same calls
        assert whole.throughput_per_s.low <= whole.throughput_per_s.value
    assert not report.speedups
    assert report.command.startswith("deploykit bench")
    assert all(name in (out / "report.html").read_text() for name in stages)
    assert all(f" {name} " in ran.out or f"\n{name} " in ran.out for name in stages)
