"""The one logger that TensorRT is given: it keeps the first of a process and ignores all others.

In: the module, `tensorrt` or `tensorrt_rtx`. Out: its ILogger. Whoever builds sets a `sink` for
that time; error lines that nobody collects are kept for whoever runs an engine.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from typing import Any, Protocol

_logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where lines go while somebody collects them, oldest first."""

    errors: list[str]
    warnings: list[str]


@functools.cache
def logger(nv: Any) -> Any:
    """The process's ILogger for `nv`, with `sink` and `errors`; all lines go to `logging`, too."""
    base: Any = nv.ILogger
    severity: Any = base.Severity

    class Log(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.sink: Sink | None = None
            self.errors: deque[str] = deque(maxlen=50)

        def log(self, level: Any, text: str) -> None:
            if level in (severity.INTERNAL_ERROR, severity.ERROR):
                (self.errors if self.sink is None else self.sink.errors).append(text)
            elif level == severity.WARNING and self.sink is not None:
                self.sink.warnings.append(text)
            _logger.debug("%s: %s", level, text)

    return Log()
