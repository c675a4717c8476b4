"""Write log lines from a thread, as text or as JSON, so that a slow reader cannot block the server.

Each record is one line of printable characters, written to a file descriptor. While nothing reads
it, lines are dropped, counted (`deploykit_log_lines_dropped_total`) and reported later.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.engines.engine import Closing
from deploykit.serving.observe.metrics import Sample

QUEUE_RECORDS = 1000  # records that may be queued
MAX_LINE = 16_384  # characters
CLOSE_S = 1.0  # time limit for writing the last lines
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogQueue(logging.Handler, Closing):
    """Queues records for a thread that formats them and writes them to the file descriptor `fd`."""

    def __init__(self, formatter: logging.Formatter, fd: int, worker: int | None = None) -> None:
        super().__init__()
        self.queue = queue.SimpleQueue[logging.LogRecord | None]()  # None: the end
        self.dropped = 0
        self.replaced: list[logging.Handler] = []
        self._formatter = formatter
        self._fd = os.dup(fd)
        self._worker = worker
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._worker is not None:
            record.worker = self._worker
        if self.queue.qsize() < QUEUE_RECORDS:
            self.queue.put(record)
        else:
            self.dropped += 1

    def close(self) -> None:
        """Write the queued lines, for a second at most, and restore the loggers."""
        root = logging.getLogger()
        if self in root.handlers:
            root.handlers = self.replaced
            logging.getLogger("deploykit").setLevel(logging.NOTSET)
            self.queue.put(None)
            self._thread.join(CLOSE_S)  # a daemon: perhaps nothing reads its output
        super().close()

    def _write_all(self) -> None:
        reported = 0
        while (record := self.queue.get()) is not None:
            dropped = self.dropped
            if dropped > reported:  # the log is being read again
                text = f"{dropped - reported} log lines were dropped: the log was not read"
                reported = dropped
                self._write(logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None))
            self._write(record)
        os.close(self._fd)

    def _write(self, record: logging.LogRecord) -> None:
        try:  # not with sys.stderr: its lock would delay the interpreter's exit
            data = f"{self._formatter.format(record)}\n".encode("utf-8", "backslashreplace")
            while data:
                data = data[os.write(self._fd, data) :]
        except Exception:  # noqa: BLE001 - there is nowhere to report it
            self.dropped += 1


def configure(
    kind: str, fd: int = 2, *, worker: int | None = None, level: int = logging.INFO
) -> LogQueue:
    """Send all log lines of this process to `fd` alone, our own from `level` on, until `close`.

    `kind`: text or json. `worker`: a number to add to each line. Raises BadInput on another kind.
    """
    if kind not in _FORMATTERS:
        raise BadInput(f"`log_format` {kind}: must be one of {', '.join(_FORMATTERS)}")
    handler = LogQueue(_FORMATTERS[kind](), fd, worker)
    root = logging.getLogger()
    handler.replaced, root.handlers = root.handlers, [handler]  # also that of --verbose
    logging.getLogger("deploykit").setLevel(level)
    return handler


def samples() -> list[Sample]:
    """Return the number of dropped lines for Prometheus, if `configure` was called."""
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, LogQueue)]
    dropped = sum(handler.dropped for handler in handlers)
    return [Sample("deploykit_log_lines_dropped_total", {}, dropped)] if handlers else []


class TextFormatter(logging.Formatter):
    """Writes `2026-11-21T10:11:12.123Z INFO serving.http: listening key=value`, cut at MAX_LINE."""

    def format(self, record: logging.LogRecord) -> str:
        more = "".join(f" {name}={value}" for name, value in _extra(record).items())
        name = record.name.removeprefix("deploykit.")
        line = f"{_time(record)} {record.levelname} {name}: {record.getMessage()}{more}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return escape(line)[:MAX_LINE]


class JsonFormatter(logging.Formatter):
    """Writes an object of time, level, logger, message, `extra` fields, and an error's trace."""

    def format(self, record: logging.LogRecord) -> str:
        ours = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage()[:MAX_LINE],
        }
        if record.exc_info:
            ours["trace"] = self.formatException(record.exc_info)[-MAX_LINE:]
        line = json.dumps({**ours, **_extra(record), **ours}, default=str)
        return line.replace("\x7f", "\\u007f")


_FORMATTERS: Mapping[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


def escape(text: str) -> str:
    """Escape unprintable characters: line ends, terminal commands, direction marks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03}Z"


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}
