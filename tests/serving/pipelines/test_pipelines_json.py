"""JSON to a pipeline: its limit at every door, its memory in the budget, one parser at a time."""

from __future__ import annotations

import gc
import gzip
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.json_value import MOST_JSON_BYTES, MOST_JSON_VALUES, ONE_JSON
from deploykit.pipelines.connect import connect_engines
from deploykit.pipelines.file import read_pipeline
from deploykit.serving.models.pipelines import _json_parts
from tests.support.serving.pipelines import Client, form, served, serving_words

pytest.importorskip("onnxruntime")

ROW = json.dumps({"row": [1, 2, 3, 4], "id": "a"}).encode()
LARGE = b'{"row":[' + b"1," * MOST_JSON_VALUES + b"1]}"
FORM, FORM_TYPE = form("request", LARGE)
LIMIT_MESSAGE = f"the JSON has more than {MOST_JSON_VALUES} values"
WAITING = """
import threading
GATE = threading.Event()
def count(request: list) -> int:
    if request == ["wait"]:
        GATE.wait(20)
    if request == ["open"]:
        GATE.set()
    return len(request)
"""


@pytest.fixture
def words(tmp_path: Path) -> Iterator[Client]:
    with serving_words(tmp_path) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (LARGE, {}),
        (gzip.compress(LARGE), {"Content_Encoding": "gzip"}),
        (FORM, {"Content_Type": FORM_TYPE}),
        (gzip.compress(FORM), {"Content_Type": FORM_TYPE, "Content_Encoding": "gzip"}),
    ],
    ids=["plain", "gzip", "form", "form-gzip"],
)
def test_json_above_the_limit_is_refused_with_the_other_formats(
    words: Client, body: bytes, headers: dict[str, str]
) -> None:
    status, answer = words.predict("echo", body, **headers)
    assert status == 413
    assert answer["error"].startswith(f"stage 'request': {LIMIT_MESSAGE}")
    assert all(each in answer["error"] for each in ("str", "numpy.ndarray", ".npy"))


def test_a_long_document_of_few_values_is_refused_as_well(words: Client) -> None:
    """A parser holds the interpreter's lock for each of its bytes."""
    gzipped = gzip.compress(b'["' + b"a" * MOST_JSON_BYTES + b'"]', 1)
    headers = {"Content_Type": "application/json", "Content_Encoding": "gzip"}
    status, answer = words.predict("echo", gzipped, **headers)
    assert (status, "the JSON is longer than 24 MiB" in answer["error"]) == (413, True)


def test_a_text_has_the_limit_as_json_only(words: Client) -> None:
    text = b'"' + b"," * (MOST_JSON_VALUES + 1) + b'"'
    status, answer = words.predict("words", text, Content_Type="application/json")
    assert (status, LIMIT_MESSAGE in answer["error"]) == (413, True)
    assert words.predict("words", text) == (200, {"done": [text.decode()]})


def test_the_values_of_json_count_in_the_memory_budget(tmp_path: Path) -> None:
    path = tmp_path / "held.py"
    path.write_text(WAITING)
    lists = b"[" + b"[]," * 10_000 + b"1]"  # 30 kB, and 20 times as much in memory
    with served(path, max_held_bytes=500_000) as client:
        assert client.predict("held", lists) == (200, "10001")  # it is alone
        waiting = threading.Thread(target=client.predict, args=("held", b'["wait"]'))
        waiting.start()
        labels = {"pipeline": "held", "stage": "count"}
        client.until(lambda: client.metric("deploykit_pipeline_stage_in_flight", **labels))
        status, answer = client.predict("held", lists)
        assert (status, "holds too many bytes" in answer["error"]) == (503, True)
        assert client.predict("held", b'["open"]') == (200, "1")
        waiting.join()
        assert client.predict("held", lists) == (200, "10001")


def test_one_large_json_is_parsed_at_a_time_and_small_ones_do_not_wait(tmp_path: Path) -> None:
    blanks = b" " * 100_000
    with serving_words(tmp_path, timeout_ms=500) as words:
        with ONE_JSON:
            for status, more in ((504, blanks), (200, b"")):
                assert words.predict("echo", ROW + more)[0] == status
                text = b'"a"' + more
                assert words.predict("words", text, Content_Type="application/json")[0] == status
            assert words.ask("/v2/health/live")[0] == 200
        assert words.predict("echo", ROW + blanks)[0] == 200


def test_numbers_of_many_digits_do_not_hold_up_other_threads(tmp_path: Path) -> None:
    path = tmp_path / "count.py"
    path.write_text("def count(request: list) -> int: return len(request)")
    graph = connect_engines(read_pipeline(path), {})
    body = b"[" + b",".join([b"9" * 4200] * 3000) + b"]"  # 0.2 s
    with ThreadPoolExecutor() as pool:
        reading, turns = pool.submit(graph.read, body), 0
        while not reading.done():
            threading.Event().wait(0.001)
            turns += 1
        assert len(reading.result()) == 3000
    assert turns > 5  # 1 where the parser holds the interpreter's lock throughout


def test_a_refused_input_is_freed_without_the_garbage_collector(words: Client) -> None:
    count = 4321
    gc.disable()
    try:
        assert words.predict("echo", json.dumps([0.5] * count).encode())[0] == 400
        words.until(lambda: not any(type(x) is list and len(x) == count for x in gc.get_objects()))
    finally:
        gc.enable()


LONG = 1 << 17


@pytest.mark.parametrize(
    "answer",
    [
        [[0.5] * LONG, []],
        [[1, 2]] * LONG,
        {"a": ["x"] * LONG, "b": {"c": [], "d": None}},
        {},
        [[]],
        "text",
        np.linspace(0, 1, LONG, dtype=np.float16).reshape(-1, 2, 4)[::2],
        np.where(np.arange(LONG) % 3, np.inf, np.nan)[None],
        np.arange(LONG, dtype=">i4").reshape(2, -1),
        [np.zeros((LONG, 1), bool), {"a": np.ones((1, LONG), np.uint8)}, np.arange(3), 1.5],
    ],
    ids=lambda each: str(each)[:12],
)
def test_a_long_answer_is_written_in_steps_and_is_one_document(
    tmp_path: Path, answer: object
) -> None:
    path = tmp_path / "a.py"
    path.write_text("def a(x: dict) -> object: return x")
    graph = connect_engines(read_pipeline(path), {})
    parts = list(_json_parts(graph.answer_json(answer, keep_arrays=True)))
    assert json.loads(b"".join(parts)) == graph.answer_json(answer)
    assert max(map(len, parts)) < 3_000_000
