"""Load on /predict: files and texts as requests, over HTTP and gRPC, with their answers checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deploykit as dk
from deploykit.loadtest.grpc import read_message
from deploykit.loadtest.load import load_test
from deploykit.loadtest.wire import BodyCheck
from deploykit.pipelines.pipeline import predict_files
from tests.support.installed import needs
from tests.support.measure.loads import at_least, load
from tests.support.runtimes.tiles import page, png, write_pipeline

needs("onnxruntime", "PIL", "tokenizers", "hpack")

from tests.support.serving.task_models import write_task_model  # noqa: E402

QUICK: dict[str, Any] = {"concurrency": 2, "duration_s": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("load")
    pages = found / "pages"
    pages.mkdir()
    for number, colours in enumerate([("red",), (), ("green", "blue")]):
        (pages / f"{number}.png").write_bytes(png(page(*colours)))
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[dk.RunningServer]:
    (folder / "say.py").write_text("def say(text: str) -> bytes: return text.upper().encode()\n")
    models = [write_task_model(folder, kind) for kind in ("classify", "text-classify")]
    pipelines = [write_pipeline(folder), folder / "say.py"]
    with dk.serve(models, pipelines=pipelines, device="cpu") as running:
        yield running


def urls(server: dk.RunningServer) -> tuple[str, str]:
    return server.url, f"grpc://{server.grpc_url}"


def test_files_are_sent_to_a_pipeline_and_to_a_task(server: dk.RunningServer, folder: Path) -> None:
    for url, model in zip(urls(server), ("tiles", "classify"), strict=True):
        found = load(url, model=model, data=folder / "pages", **QUICK)
        assert (found.failed, found.ok > 0) == (0, True), found.errors
        assert found.sends.startswith("3 image/png, ")
        assert found.sends.endswith("bytes: 0.png, 1.png, 2.png")
        assert not found.shapes


def test_sentences_are_sent_in_the_open_loop_and_they_are_in_the_report(
    server: dk.RunningServer, folder: Path
) -> None:
    options: dict[str, Any] = {"text": ["good", "bad\nbad"], "rate": 50, "duration_s": 0.2}
    for url, model in zip(urls(server), ("text-classify", "say"), strict=True):
        found = load_test(url, model=model, out=folder / "report", force=True, **options)
        assert (found.failed, found.ok > 0, found.mode) == (0, True, "open"), found.errors
        assert found.sends == "2 text/plain, 4 to 7 bytes: good, bad bad"
    assert found.sends in (folder / "report" / "report.md").read_text()


def test_an_answer_that_is_not_the_expected_one_has_failed(
    server: dk.RunningServer, folder: Path
) -> None:
    path = folder / "answers.jsonl"
    predict_files(folder / "tiles.py", [folder / "pages"], path)
    found = load(urls(server)[1], model="tiles", expect=path, **QUICK)
    assert (found.failed, found.ok > 0) == (0, True), found.errors
    path.write_text(path.read_text().replace("green", "greem"))
    found = load(server.url, enough=at_least(3), model="tiles", expect=path, **QUICK)
    assert found.failed > 0
    assert found.ok > 0  # of the other two files
    assert found.first_error == "a wrong answer: it differs by more than 0.001"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a pipeline alone": ({"model": "tiles"}, "its requests are not made up"),
    "no task": ({"model": "tiles.colours", "text": ["a"]}, "has no task, so it takes only tensors"),
    "a batch": ({"model": "tiles", "data": "pages", "batch": 2}, "`batch` is for tensors"),
    "axes": ({"model": "tiles", "data": "pages", "axes": {"T": 2}}, "`axes` is for tensors"),
    "no file": ({"model": "tiles", "data": "nothere.png"}, "nothere.png: no such file"),
    "an empty folder": ({"model": "tiles", "data": "empty"}, "empty: holds no file"),
    "text and answers": ({"model": "say", "text": ["a"], "expect": "a.jsonl"}, "exclude each"),
    "no lines": ({"model": "tiles", "expect": "tiles.jsonl"}, "line 1 holds no file with its"),
    "not an image": ({"model": "tiles", "data": "tiles.py"}, "answered 400: stage 'page': the im"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_sent_is_one_line(
    server: dk.RunningServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "tiles.jsonl").write_text('{"file": 3}\n')
    monkeypatch.chdir(folder)
    with pytest.raises(dk.BadInput) as raised:
        load_test(server.url, duration_s=0.2, concurrency=1, **options)
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("right", "got", "equal"),
    [
        ({"a": [1.0, "x"]}, {"a": [1.0005, "x"]}, True),
        ({"a": [1.0, "x"]}, {"a": [1.002, "x"]}, False),
        ({"a": 2000}, {"a": 2001.9}, True),
        ([1, 2], [1, 2, 3], False),
        ({"a": 1}, {"b": 1}, False),
        ([None, "y"], [None, "y"], True),
        (1, True, False),
    ],
)
def test_numbers_may_differ_by_the_bound_and_nothing_else(
    right: Any, got: Any, equal: bool
) -> None:
    check = BodyCheck(is_json=True, answers=[right], max_error=1e-3)
    problem = check.problem(json.dumps(got).encode(), 0, read_message)
    assert (problem is None) is equal
    assert check.problem(b"", 0, read_message) == "200 with an empty body"
    assert check.problem(b"{", 0, read_message) == "200 with a body that is not JSON"
