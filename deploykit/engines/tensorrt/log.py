"""Collect TensorRT's errors, which it gives only in its log.

TensorRT keeps the first logger of a process and ignores any other, so that one serves all engines:
it keeps the lines of each thread, as engines of several threads fail apart from each other.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported, first_line
from deploykit.engines.cuda.errors import USE_LESS_MEMORY

_logger = logging.getLogger(__name__)
_KEPT = 50  # lines
_NO_MEMORY = re.compile(
    r"\bout ?of ?memory\b|Requested amount of GPU memory|ALLOC\w*_FAILED", re.IGNORECASE
)
_WHERE = re.compile(r"^\[.*?\]|\.?\s*In \w+ at \S+:\d+\)?$")  # a place in TensorRT's source


@dataclass
class LogLines:
    """Errors and warnings that TensorRT logged, oldest first."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@functools.cache
def logger(nv: Any) -> Any:
    """Return the process's ILogger for `nv`; every line also goes to `logging`, at level debug.

    A build sets `sink` to collect its lines, also from TensorRT's own threads; otherwise error
    lines stay in `errors` of the thread that they came from.
    """
    base: Any = nv.ILogger
    severity: Any = base.Severity

    class Log(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.sink: LogLines | None = None
            self._of_thread = threading.local()

        @property
        def errors(self) -> deque[str]:
            lines: deque[str] = vars(self._of_thread).setdefault("errors", deque(maxlen=_KEPT))
            return lines

        def log(self, level: Any, text: str) -> None:
            if level in (severity.INTERNAL_ERROR, severity.ERROR):
                (self.errors if self.sink is None else self.sink.errors).append(text)
            elif level == severity.WARNING and self.sink is not None:
                self.sink.warnings.append(text)
            _logger.debug("%s: %s", level, text)

    return Log()


@dataclass(frozen=True)
class LogErrors:
    """Makes errors of the plan `path` on `device` from the log's lines.

    TensorRT logs errors even in calls that succeed: `call` forgets them before each.
    """

    nv: Any
    path: Path
    device: str

    def call(self, what: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a member of TensorRT returns, which is neither None nor False.

        Raises the refusal: NVIDIA's bindings return one of these, or raise, each member as it is.
        """
        logger(self.nv).errors.clear()
        try:
            answer = run(*arguments)
        except (RuntimeError, TypeError, ValueError) as exc:  # a null pointer, a rank of -1
            raise self.refusal(f"{what} ({first_line(exc)})") from exc
        if answer is None or answer is False:
            raise self.refusal(what)
        return answer

    def refusal(self, what: str) -> DeploykitError:
        """Return the error for the lines of the last call, whose first one is the root cause."""
        lines = [*logger(self.nv).errors]
        if any(map(_NO_MEMORY.search, lines)):
            text = f"{self.path}: {self.device}: out of memory in {what}"
            return OutOfMemory(text, hint=USE_LESS_MEMORY)
        why = _WHERE.sub("", first_line(lines[0])).strip() if lines else "no reason in its log"
        return Unsupported(f"{self.path}: TensorRT refused it ({what}): {why}")
