"""Log lines: one per event, printable, and written without waiting for a reader."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from deploykit.serving.observe.logs import QUEUE_RECORDS, LogQueue, configure, samples
from tests.support.serving.running import WAIT_S

log = logging.getLogger("deploykit.serving.test")


@contextmanager
def logged(kind: str = "text") -> Iterator[tuple[LogQueue, TextIO, Callable[[], None]]]:
    """A queue of log lines, the end of its pipe that is read, and what closes the other end."""
    read, write = os.pipe()
    with open(read, encoding="utf-8") as reader, open(write, "wb") as writer:  # noqa: PTH123
        queue = configure(kind, write)

        def end() -> None:
            queue.close()
            writer.close()

        try:
            yield queue, reader, end
        finally:
            end()


def lines_of(kind: str, act: Callable[[], object]) -> list[str]:
    with logged(kind) as (_, reader, end):
        act()
        end()
        return reader.read().splitlines()


def test_a_line_has_time_level_logger_message_and_as_json_extra_fields() -> None:
    extra = {"status": 400, "model": "m", "level": "forged", "odd": object}
    (line,) = lines_of("text", lambda: log.info("model '%s' is %d ms old", "m", 7))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO serving\.test: model 'm' is 7 ms old", line
    )
    (line,) = lines_of("json", lambda: log.warning("no: %s", "x", extra=extra))
    found = json.loads(line)
    assert list(found)[:4] == ["time", "level", "logger", "message"]
    assert (found["level"], found["logger"]) == ("WARNING", "deploykit.serving.test")
    assert (found["message"], found["status"], found["model"]) == ("no: x", 400, "m")


@pytest.mark.parametrize("kind", ["text", "json"])
@pytest.mark.parametrize(
    "hostile", ["a\nINFO forged", "\x1b[2J", "\u2028\u202e", "\ud800"], ids=ascii
)
def test_every_record_is_one_line_of_printable_characters(kind: str, hostile: str) -> None:
    (line,) = lines_of(kind, lambda: log.info("got %s.", hostile))
    assert line.isprintable()
    if kind == "json":
        assert json.loads(line)["message"] == f"got {hostile}."
    else:
        assert hostile.encode("unicode_escape").decode() in line


@pytest.mark.parametrize("kind", ["text", "json"])
def test_an_error_with_its_traceback_is_one_line_of_limited_length(kind: str) -> None:
    def act() -> None:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            log.exception("it broke")
        log.info("%s", "x" * 10_000_000)

    error, long = lines_of(kind, act)
    assert "it broke" in error
    assert "ValueError: two" in error
    if kind == "json":
        assert json.loads(error)["trace"].endswith("ValueError: two\nlines")
    assert len(long) < 20_000


def test_closing_restores_the_loggers_and_other_libraries_log_warnings_alone() -> None:
    root, ours = logging.getLogger(), logging.getLogger("deploykit")
    before = (list(root.handlers), ours.level)

    def act() -> None:
        logging.getLogger("asyncio").warning("slow")
        logging.getLogger("asyncio").info("chatter")
        log.debug("chatter")

    (line,) = lines_of("text", act)
    assert line.endswith("WARNING asyncio: slow")
    assert (list(root.handlers), ours.level) == before
    assert samples() == []


def test_the_handler_of_verbose_does_not_write_the_lines_again() -> None:
    root, verbose = logging.getLogger(), logging.StreamHandler(io.StringIO())
    root.addHandler(verbose)
    try:
        assert len(lines_of("json", lambda: log.info("once"))) == 1
        log.warning("later")
    finally:
        root.removeHandler(verbose)
    assert verbose.stream.getvalue() == "later\n"


def test_a_record_that_cannot_be_formatted_is_counted_and_skipped() -> None:
    with logged() as (queue, reader, end):
        queue.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
        log.info("still here")
        end()
        assert queue.dropped == 1
        assert reader.read().splitlines()[-1].endswith(": still here")


def test_a_full_pipe_drops_lines_and_reports_how_many_later(
    eventually: Callable[[Callable[[], bool]], None],
) -> None:
    with logged() as (queue, reader, end):
        for i in range(3000):  # the pipe holds 64 KiB, some 260 lines; 1,000 wait
            log.info("%d %s", i, "x" * 200)
        dropped = queue.dropped
        (sample,) = samples()
        assert 0 < sample.value == dropped <= 3000 - QUEUE_RECORDS
        found: list[str] = []
        draining = threading.Thread(target=lambda: found.extend(reader.read().splitlines()))
        draining.start()
        eventually(queue.queue.empty)
        log.info("after")
        end()
        draining.join(WAIT_S)
        reports = [line for line in found if "log lines were dropped" in line]
        assert sum(int(line.split()[3]) for line in reports) == dropped
        assert found[-1].endswith("after")
        assert len(found) == 3000 - dropped + 1 + len(reports)


def test_queued_lines_are_written_when_the_process_ends() -> None:
    program = (
        "import logging; from deploykit.serving.observe.logs import configure\n"
        "configure('json'); logging.getLogger('deploykit.x').info('last words')"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stderr)["message"] == "last words"
