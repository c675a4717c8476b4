"""Import NVIDIA's builder, `tensorrt` or `tensorrt_rtx`, and read what it refuses from its log.

TensorRT keeps the first logger of a process and ignores any other, so one logger serves all: each
`collect_log` block receives the lines of its time.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from deploykit.builders.tensorrt.errors import ParserError, Reason, build_refusal, parser_refusal
from deploykit.core.errors import BadInput, MissingExtra, Unsupported
from deploykit.core.extras import installed, require
from deploykit.runtimes.tensorrt.compatibility import check_version, version_numbers
from deploykit.runtimes.tensorrt.log import LogLines, logger

if TYPE_CHECKING:
    import tensorrt as trt

FLAVOURS: Mapping[str, str] = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
RTX_MAGIC = b"vtrt"  # the first bytes of a plan of TensorRT for RTX, whatever the module's name
_T = TypeVar("_T")


def module(flavour: str = "tensorrt") -> Any:
    """Import `tensorrt`; for "rtx" `tensorrt_rtx`, else a `tensorrt` that wraps RTX's library.

    Which library `tensorrt` wraps shows only in its plans. Raises MissingExtra when neither is
    installed, Unsupported when it does not load or is older than TensorRT 10, BadInput for another
    flavour.
    """
    if flavour not in FLAVOURS:
        raise BadInput(
            f"`flavour`: unknown value '{flavour}'", hint="one of: " + ", ".join(FLAVOURS)
        )
    if flavour == "rtx" and installed(FLAVOURS["rtx"]):
        return require(FLAVOURS["rtx"])
    if flavour == "rtx" and not installed(FLAVOURS["tensorrt"]):
        raise MissingExtra("tensorrt_rtx is not installed", hint="pip install tensorrt-rtx")
    found = require("tensorrt")
    check_version(str(found.__version__))
    return found


def version(nv: Any) -> tuple[int, ...]:
    """Major and minor version of TensorRT."""
    return version_numbers(str(nv.__version__))[:2]


def member(owner: Any, name: str, what: str) -> Any:
    """`owner.name`, newer than 10.3. Raises Unsupported: `what` needs a newer TensorRT."""
    try:
        return getattr(owner, name)
    except AttributeError as exc:
        raise Unsupported(
            f"{what}: needs a newer TensorRT; the installed one has no {name}"
        ) from exc


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


def start(nv: Any) -> trt.Builder:
    """Create a builder. Raises Unsupported where TensorRT cannot start, as without a driver."""
    with collect_log(nv) as lines:
        try:
            builder: trt.Builder = nv.Builder(logger(nv))
            return builder
        except (TypeError, RuntimeError) as exc:  # pybind11: the factory returned nullptr
            refusal = build_refusal(lines.errors or [str(exc)])
            raise Unsupported(
                f"TensorRT {nv.__version__} cannot start: {refusal.text}", hint=refusal.hint
            ) from exc


def maybe(value: _T) -> _T | None:
    """`value`, typed as optional: TensorRT returns None on failure, which its signatures omit."""
    return value


def parser_errors(parser: trt.OnnxParser) -> tuple[ParserError, ...]:
    """All errors of the last parse; a node without a name is given by its number."""
    found = []
    for number in range(parser.num_errors):
        error = parser.get_error(number)
        code = re.sub(r".*\.", "", str(error.code()))
        operator = error.node_operator()
        node = error.node_name() or (f"#{error.node()}" if operator else "")
        found.append(ParserError(code, operator, node, error.desc()))
    return tuple(found)


def refusals(lines: LogLines, parser: trt.OnnxParser | None = None) -> tuple[Reason, ...]:
    """Why TensorRT refused a parse (with its `parser`) or a build: one reason or more."""
    found = parser_errors(parser) if parser is not None else ()
    reasons = [parser_refusal(error, lines.errors) for error in found]
    return tuple(dict.fromkeys(reasons)) or (build_refusal(lines.errors),)
