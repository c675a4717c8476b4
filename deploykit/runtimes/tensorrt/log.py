"""The one logger that TensorRT receives, as it keeps the first of a process and ignores any other.

A build sets `sink` to collect its lines; otherwise error lines wait in `errors` for the engine.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

_logger = logging.getLogger(__name__)


@dataclass
class LogLines:
    """Errors and warnings that TensorRT logged, oldest first."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@functools.cache
def logger(nv: Any) -> Any:
    """The process's ILogger for `nv`; every line also goes to `logging`, at level debug."""
    base: Any = nv.ILogger
    severity: Any = base.Severity

    class Log(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.sink: LogLines | None = None
            self.errors: deque[str] = deque(maxlen=50)

        def log(self, level: Any, text: str) -> None:
            if level in (severity.INTERNAL_ERROR, severity.ERROR):
                (self.errors if self.sink is None else self.sink.errors).append(text)
            elif level == severity.WARNING and self.sink is not None:
                self.sink.warnings.append(text)
            _logger.debug("%s: %s", level, text)

    return Log()
