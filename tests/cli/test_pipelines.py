"""`predict`, `bench` and `serve` of a pipeline: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploykit.reporting.report import read
from tests.support.cli.command import Run
from tests.support.runtimes.tiles import page, png, write_pipeline

pytest.importorskip("onnxruntime")
pytest.importorskip("PIL")


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    (tmp_path / "page.png").write_bytes(png(page("red", "blue")))
    return write_pipeline(tmp_path)


def test_one_file_is_answered_on_stdout(run: Run, pipeline: Path) -> None:
    ran = run("predict", pipeline, pipeline.with_name("page.png"))
    assert (ran.code, json.loads(ran.out)) == (0, ["red", "blue"])
    ran = run("predict", pipeline, pipeline.with_name("page.png"), "--json")
    assert list(json.loads(ran.out)["answers"].values()) == [["red", "blue"]]


def test_files_become_json_lines(run: Run, pipeline: Path, tmp_path: Path) -> None:
    data, out = pipeline.with_name("page.png"), tmp_path / "answers.jsonl"
    ran = run("predict", pipeline, data, data, "-o", out)
    assert ran.code == 0
    assert "wrote" in ran.out
    assert [json.loads(line)["answer"] for line in out.read_text().splitlines()] == [
        ["red", "blue"],
        ["red", "blue"],
    ]


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
    assert all(name in (out / "report.html").read_text() for name in stages)
    assert all(f" {name} " in ran.out or f"\n{name} " in ran.out for name in stages)


WRONG = {
    "an option of models": (("predict", "tiles.py", "page.png", "--on", "ray"), "--on has no"),
    "nothing to answer": (("predict", "tiles.py"), "there is no file"),
    "a file that is missing": (("predict", "tiles.py", "no.png"), "no.png"),
    "no image": (("predict", "tiles.py", "mean.onnx"), "mean.onnx: the image"),
    "no data": (("bench", "tiles.py"), "measured on files"),
    "another report": (("bench", "tiles.py", "--slo-ms", "3"), "--slo-ms has no effect"),
    "no pipeline": (("serve", "--pipeline", "page.png"), "a pipeline is a .py or a .toml file"),
    "a missing pipeline": (("serve", "--pipeline", "no.py"), "no.py: no such file"),
    "the name of a model": (
        ("serve", "mean.onnx", "--pipeline", "mean=tiles.py"),
        "'mean' is that of a model and of a pipeline",
    ),
    "types that do not meet": (("serve", "--pipeline", "wrong.py"), "'crops' as int"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    run: Run,
    pipeline: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    wrong = pipeline.read_text().replace("def answer(", "def answer(crops: int, ")
    pipeline.with_name("wrong.py").write_text(wrong)
    monkeypatch.chdir(pipeline.parent)
    ran = run(*words)
    assert ran.code == 2, ran.err
    assert message in ran.error()
