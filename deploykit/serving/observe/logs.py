"""Log lines for people or for machines, written by a thread, so that no reader can stop serving.

In: records of `logging`. Out: one line each on standard error, as text or as JSON, with whatever a
terminal could take for a command escaped. A pipe that nobody reads fills up; then lines are dropped
and counted (`deploykit_log_lines_dropped_total`), and none is waited for.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.runtimes.engine import Closing
from deploykit.serving.observe.prometheus import Sample

KEPT = 1000  # lines that may wait to be written
LONGEST = 16_384  # characters of one line
CLOSE_S = 1.0  # how long the last lines may take
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogQueue(logging.Handler, Closing):
    """Hands records to a thread that writes them to the file descriptor `fd`."""

    def __init__(self, line: Callable[[logging.LogRecord], str], fd: int) -> None:
        super().__init__()
        self.dropped = 0
        self._line = line
        self._fd = os.dup(fd)  # ours alone: a thread that still writes must not meet a stranger's
        self._records: deque[logging.LogRecord] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._loop, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            if self._ended or len(self._records) >= KEPT:
                self.dropped += 1
                return
            self._records.append(record)
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, for a second at most, and give the loggers back as they were."""
        root, ours = logging.getLogger(), logging.getLogger("deploykit")
        if self in root.handlers:
            root.removeHandler(self)
            ours.setLevel(logging.NOTSET)
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(CLOSE_S)  # it is a daemon: a full pipe keeps nobody from leaving
        with self._changed:
            self._records.clear()
        super().close()

    def _loop(self) -> None:
        try:
            self._write_all()
        finally:
            os.close(self._fd)

    def _write_all(self) -> None:
        told = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._records or self._ended)
                if not self._records:
                    return
                record, dropped = self._records.popleft(), self.dropped
            if dropped > told:  # there is a reader again: say so
                self._write(_record(f"{dropped - told} log lines were dropped, nobody read them"))
                told = dropped
            self._write(record)

    def _write(self, record: logging.LogRecord) -> None:
        try:
            data = f"{self._line(record)}\n".encode("utf-8", "backslashreplace")
            while data:  # not through sys.stderr: its lock would hold up the interpreter's end
                data = data[os.write(self._fd, data) :]
        except Exception:  # noqa: BLE001 - nowhere is left to complain to
            with self._changed:
                self.dropped += 1


def _record(text: str) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)


def configure(kind: str, fd: int = 2) -> LogQueue:
    """Send every log line of this process to `fd`, ours from INFO on; `close` ends that.

    `kind`: text or json. Raises BadInput on another.
    """
    if kind not in LINES:
        raise BadInput(f"--log {kind}: must be one of {', '.join(LINES)}")
    queue = LogQueue(LINES[kind], fd)
    logging.getLogger().addHandler(queue)
    logging.getLogger("deploykit").setLevel(logging.INFO)
    return queue


def samples() -> list[Sample]:
    """The lines dropped so far for Prometheus, if the log was configured here."""
    queues = [each for each in logging.getLogger().handlers if isinstance(each, LogQueue)]
    dropped = sum(queue.dropped for queue in queues)
    return [Sample("deploykit_log_lines_dropped_total", {}, dropped)] if queues else []


def text_line(record: logging.LogRecord) -> str:
    """`2026-11-21T10:11:12.123Z INFO serving.http: listening key=value`, cut at LONGEST."""
    more = "".join(f" {name}={value}" for name, value in _fields(record).items())
    name = record.name.removeprefix("deploykit.")
    line = f"{_time(record)} {record.levelname} {name}: {record.getMessage()}{more}"
    trace = _trace(record)
    return escaped(f"{line}\n{trace}" if trace else line)[:LONGEST]


def json_line(record: logging.LogRecord) -> str:
    """An object of time, level, logger, message, what `extra` gave, and the trace of an error."""
    ours = {
        "time": _time(record),
        "level": record.levelname,
        "logger": record.name,
        "message": record.getMessage()[:LONGEST],
    }
    trace = _trace(record)
    if trace:
        ours["trace"] = trace[-LONGEST:]
    return json.dumps({**ours, **_fields(record), **ours}, default=str).replace("\x7f", "\\u007f")


LINES: Mapping[str, Callable[[logging.LogRecord], str]] = {"text": text_line, "json": json_line}


def escaped(text: str) -> str:
    """`text` with all that is not printable written out: line ends, escapes, direction marks."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03}Z"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _trace(record: logging.LogRecord) -> str:
    return logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
