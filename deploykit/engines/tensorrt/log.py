"""Collect TensorRT's errors: one logger for the process, one recorder for each object.

TensorRT keeps the first logger of a process and ignores any other. An object with an error recorder
reports only there, as seen with TensorRT for RTX 1.7.1; objects that cannot have one yet, and
libraries below TensorRT, write to the logger.
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

from deploykit.core.errors import DeploykitError, Unsupported, first_line
from deploykit.engines.cuda.errors import CODES, MESSAGES, cuda_error

_logger = logging.getLogger(__name__)
_KEPT = 50  # lines
_CUDA_FAILURE = re.compile(r"Cuda (?:Runtime|Driver)[^(]*\((.+?)\)", re.IGNORECASE)
# Forms of a CUDA error: in a layer of Myelin; if TensorRT's CUDA is newer than the driver
_CUDA_CODE = re.compile(r"\bCUDA (?:error|initialization failure with error:) (\d{1,4})\b")
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


@functools.cache
def recorder(nv: Any) -> Any:
    """Return the class of the error recorder of one runtime, engine or context.

    TensorRT calls it from any of its threads, and an exception would end the process.
    """
    base: Any = nv.IErrorRecorder

    class Recorder(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.errors: deque[tuple[Any, str]] = deque(maxlen=_KEPT)

        def report_error(self, code: Any, text: str) -> bool:
            self.errors.append((code, text))
            _logger.debug("%s: %s", code, text)
            return True

        def num_errors(self) -> int:
            return len(self.errors)

        get_num_errors = num_errors  # the name that TensorRT calls, whatever its documents say

        def get_error_code(self, index: int) -> Any:
            return self.errors[index][0]

        def get_error_desc(self, index: int) -> str:
            return self.errors[index][1]

        def has_overflowed(self) -> bool:
            return len(self.errors) == _KEPT

        def clear(self) -> None:
            self.errors.clear()

    return Recorder


class LogErrors:
    """Makes errors from TensorRT's reports.

    TensorRT reports errors even in calls that succeed: `call` forgets them before each.
    """

    def __init__(self, nv: Any, path: Path, device: str) -> None:
        self.nv, self.path, self.device = nv, path, device
        self.recorder = recorder(nv)()

    def of(self, owner: Any) -> LogErrors:
        """Return a LogErrors for `owner`, a runtime, engine or context, with its own recorder."""
        found = LogErrors(self.nv, self.path, self.device)
        owner.error_recorder = found.recorder
        return found

    def call(self, what: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a member of TensorRT returns, which is neither None nor False.

        Raises the refusal: NVIDIA's bindings return one of these, or raise, each member as it is.
        """
        self.forget()
        try:
            answer = run(*arguments)
        except (RuntimeError, TypeError, ValueError) as exc:  # a null pointer, a rank of -1
            raise self.refusal(f"{what} ({first_line(exc)})") from exc
        if answer is None or answer is False:
            raise self.refusal(what)
        return answer

    def forget(self) -> None:
        self.recorder.clear()
        logger(self.nv).errors.clear()

    def refusal(self, what: str) -> DeploykitError:
        """Return the error for the lines since `forget`; CUDA's failures by their code."""
        reported = [text for _, text in self.recorder.errors]
        lines = [*reported, *logger(self.nv).errors]  # root cause first
        self.forget()
        for line in lines:
            name, text = "", ""
            if match := _CUDA_FAILURE.search(line):
                name, text = MESSAGES.get(match[1], ""), match[1]
            elif match := _CUDA_CODE.search(line):
                name, text = CODES.get(int(match[1]), ""), match[0]
            elif _NO_MEMORY.search(line):
                name = "MemoryAllocation"
            if name:
                return cuda_error(f"{self.path}: {self.device}", what, f"cudaError{name}", text)
        why = _WHERE.sub("", first_line(lines[0])).strip() if lines else "no reason in its log"
        return Unsupported(f"{self.path}: TensorRT refused it ({what}): {why}")
