"""Import NVIDIA's builder, `tensorrt` or `tensorrt_rtx`, and read what it refuses from its log.

TensorRT keeps the first logger of a process and ignores any other, so one logger serves all: each
`collect_log` block receives the lines of its time.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from deploykit.core.errors import BadInput, DeploykitError, Unsupported
from deploykit.core.extras import installed, require
from deploykit.engines.tensorrt.compatibility import check_version, version_numbers
from deploykit.engines.tensorrt.log import LogLines, logger

if TYPE_CHECKING:
    import tensorrt as trt

# TensorRT reports the condition that failed in its source ("false") or only writes to its log; the
# messages matched here were collected by giving it files that it refuses.

NO_DRIVER = "cudaError 35"  # follows every other error of a machine without a driver
NO_REASON = "TensorRT gave no reason in its log"


@dataclass(frozen=True)
class Reason:
    """The reason for a refused file or build. `damaged`: invalid, not just unsupported."""

    text: str
    hint: str | None = None
    damaged: bool = False


# pattern in an operator's name, the parser's message or the builder's log -> hint
_HINTS = {
    "must have same input types|must be of same type": (
        "write the precision into the file: deploykit quantize MODEL --to fp16"
    ),
    "QLinear|QGemm|QAttention|MatMulInteger|ConvInteger|type Int32 but must|Non-zero zero point"
    "|unsupported input type of UINT8": (
        "TensorRT takes symmetric Q/DQ pairs: deploykit quantize MODEL --to int8 --calib DATA"
    ),
    "Could not infer output types for dequantize": (  # 10.16.2 on Orin, with float16 scales
        "quantize again without `other_nodes` fp16, or build with another TensorRT"
    ),
    "workspace limit|insufficient workspace|increase the .*workspace": (
        "a larger `workspace_bytes` in the profile"
    ),
    "libnvinfer_lean|libnvinfer_builder|libnvinfer_dispatch": (
        "a version compatible plan needs TensorRT's lean runtime, which is not installed"
    ),
    "out of memory|OutOfMemory|Requested amount of GPU memory": (
        "stop other programs that use the GPU, or choose a smaller batch"
    ),
}
_DAMAGED = re.compile(
    "Failed to parse the ONNX model|Failed to import initializer|must have same input types"
    "|must be of same type"
)
_WARNINGS = 5  # number that a note repeats


def parser_refusal(error: trt.ParserError) -> Reason:
    """Explain one parser error: its node and its own words."""
    operator, message = error.node_operator(), error.desc()
    name = error.node_name() or (f"#{error.node()}" if operator else "")
    node = f"{operator or 'a node'} '{name}'" if name else operator
    own = [line for line in message.splitlines() if not line.startswith("Invalid Node - ")]
    # `Assertion failed: (the condition in C++): the reason`, or `the condition && "the reason"`
    why = re.sub(r'^.*(\): |&& "(?=.*"$))', "", first_sentence("\n".join(own))).rstrip('".')
    text = f"{node}: {why}" if node else why
    if str(error.code()).endswith("UNSUPPORTED_NODE") and node:
        reason = "" if why in ("", "false", NO_REASON) else f": {why}"
        text = f"operator {node} is not supported by TensorRT{reason}"
    return Reason(text, _hint(f"{operator} {message}"), bool(_DAMAGED.search(message)))


def build_refusal(errors: Sequence[str]) -> Reason:
    """Explain why a build produced no plan, from the error lines of its log, oldest first."""
    lines = [line for line in errors if NO_DRIVER not in line]
    if lines:
        cause = next(filter(_hint, lines), lines[0])
        return Reason(first_sentence(cause), _hint(cause))
    if errors:
        return Reason("no NVIDIA driver on this machine", "see: deploykit doctor")
    return Reason(NO_REASON)


def _hint(text: str) -> str | None:
    found = (hint for pattern, hint in _HINTS.items() if re.search(pattern, text, re.IGNORECASE))
    return next(found, None)


def error_of(where: str, refusals: Sequence[Reason]) -> DeploykitError:
    """Return BadInput or Unsupported with all refusals in its message and the first one's hint."""
    first = refusals[0]
    text = "; ".join(refusal.text for refusal in refusals)
    kind = BadInput if first.damaged else Unsupported
    return kind(f"{where}: {text}", hint=first.hint)


def build_warnings(lines: Sequence[str]) -> list[str]:
    """Return TensorRT's warnings as notes, each once; those of the timing cache have their own."""
    found = [first_sentence(line) for line in lines if "timing cache" not in line.lower()]
    distinct = list(dict.fromkeys(line for line in found if NO_DRIVER not in line))
    notes = [f"TensorRT warns: {line}" for line in distinct[:_WARNINGS]]
    if len(distinct) > _WARNINGS:
        notes.append(f"TensorRT gave {len(distinct) - _WARNINGS} more warnings: see `--debug`")
    return notes


def first_sentence(text: str) -> str:
    """Return the first log line without TensorRT's function name, error code and position."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), NO_REASON)
    line = re.sub(r"^(\[\S+?\]|\w+::\w+:)\s*", "", line)
    line = re.sub(r"^Error Code \d+: [\w ]+ \((.*)\)$", r"\1", line)
    line = re.sub(r"\.? In \w+ at \S+:\d+\)?$", "", line)
    return re.sub(r"^Assertion failed: ", "", line)


RTX_MAGIC = b"vtrt"  # the first bytes of a plan of TensorRT for RTX, whatever the module's name
_T = TypeVar("_T")


def module(*, rtx: bool = False) -> Any:
    """Import `tensorrt`; with `rtx` TensorRT for RTX, where that alone is installed.

    Which library `tensorrt` wraps shows only in its plans. Raises MissingExtra when it is not
    installed, Unsupported when it does not load or is older than TensorRT 10.
    """
    if rtx and installed("tensorrt_rtx") and not installed("tensorrt"):
        return require("tensorrt_rtx")
    found = require("tensorrt")
    check_version(str(found.__version__))
    return found


def version(nv: Any) -> tuple[int, ...]:
    return version_numbers(str(nv.__version__))[:2]


@contextlib.contextmanager
def collect_log(nv: Any) -> Iterator[LogLines]:
    """Collect TensorRT's log lines during the block; one thread at a time."""
    lines = LogLines()
    with _busy:
        log = logger(nv)
        before, log.sink = log.sink, lines
        try:
            yield lines
        finally:
            log.sink = before


_busy = threading.RLock()

FAILURES = (RuntimeError, TypeError, ValueError)  # a null pointer, a failed call, a rank of -1


class Refused(Exception):  # noqa: N818 - a result of a check, not an error
    """TensorRT's reasons against a file or a build."""

    def __init__(self, reasons: tuple[Reason, ...]) -> None:
        super().__init__(reasons[0].text)
        self.reasons = reasons


def given(value: _T | None) -> _T:
    """Return what TensorRT returned. Raises RuntimeError for None, by which it reports failure."""
    if value is None:
        raise RuntimeError(NO_REASON)
    return value


def reason_of(exc: Exception, lines: LogLines) -> Reason:
    """Explain one of FAILURES, by the log where it says more."""
    return build_refusal(lines.errors or [str(exc)])


def start(nv: Any) -> trt.Builder:
    """Create a builder. Raises Unsupported where TensorRT cannot start, as without a driver."""
    with collect_log(nv) as lines:
        try:
            builder: trt.Builder = given(nv.Builder(logger(nv)))
            return builder
        except FAILURES as exc:
            reason = reason_of(exc, lines)
            raise Unsupported(
                f"TensorRT {nv.__version__} cannot start: {reason.text}", hint=reason.hint
            ) from exc


def parser_reasons(parser: trt.OnnxParser, lines: LogLines) -> tuple[Reason, ...]:
    """Explain why `parser` refused a file: one reason or more, each once."""
    errors = (parser.get_error(number) for number in range(parser.num_errors))
    return tuple(dict.fromkeys(map(parser_refusal, errors))) or (build_refusal(lines.errors),)
