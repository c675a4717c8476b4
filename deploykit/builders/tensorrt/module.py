"""NVIDIA's builder: the one file of this room that imports `tensorrt` or `tensorrt_rtx`.

In: which of the two is wanted. Out: the module, with one logger a process whose lines go to
whoever collects at that moment: TensorRT keeps the first logger it is given and ignores others.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from deploykit.builders.tensorrt.errors import ParserError, Refusal, build_refusal, parser_refusal
from deploykit.core.errors import BadInput, MissingExtra, Unsupported
from deploykit.core.extras import installed, require
from deploykit.runtimes.tensorrt.log import logger

if TYPE_CHECKING:
    import tensorrt as trt

FLAVOURS: Mapping[str, str] = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
OLDEST = (10, 0)  # what has the API used here; tested from 10.3
RTX_MAGIC = b"vtrt"  # a plan of TensorRT for RTX, whichever module's name it was made under
_T = TypeVar("_T")


def module(flavour: str = "tensorrt") -> Any:
    """`tensorrt`; for "rtx" `tensorrt_rtx`, or the `tensorrt` that has RTX's library behind it.

    Which library that is shows only in the plan it writes. Raises MissingExtra when neither is
    installed, Unsupported when it does not load or is older than TensorRT 10, BadInput for another
    flavour.
    """
    if flavour not in FLAVOURS:
        raise BadInput(f"unknown flavour '{flavour}'", hint="one of: " + ", ".join(FLAVOURS))
    if flavour == "rtx" and installed(FLAVOURS["rtx"]):
        return require(FLAVOURS["rtx"])
    if flavour == "rtx" and not installed(FLAVOURS["tensorrt"]):
        raise MissingExtra("tensorrt_rtx is not installed", hint="pip install tensorrt-rtx")
    found = require("tensorrt")
    check_version(str(found.__version__))
    return found


def version(nv: Any) -> tuple[int, int]:
    """Major and minor version of a module that `module` gave."""
    return numbers(str(nv.__version__))


def check_version(text: str) -> tuple[int, int]:
    """Major and minor of TensorRT's version `text`; raises Unsupported for one before 10."""
    found = numbers(text)
    if found < OLDEST:
        raise Unsupported(
            f"TensorRT {text} is here, 10.3 or later is needed: before 10 a network has no types "
            "of its own, so the precision that a file was checked in would not be kept",
            hint="JetPack 6.1 brings TensorRT 10.3; elsewhere: pip install 'deploykit[tensorrt]'",
        )
    return found


def member(owner: Any, name: str, what: str) -> Any:
    """`owner.name`, for what came after 10.3. Raises Unsupported saying that `what` needs more."""
    try:
        return getattr(owner, name)
    except AttributeError as exc:
        raise Unsupported(f"{what}: needs a newer TensorRT, this one has no {name}") from exc


@dataclass
class Lines:
    """What TensorRT logged: errors and warnings, oldest first."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@contextlib.contextmanager
def collected(nv: Any) -> Iterator[Lines]:
    """Collect the log lines of this block; one thread at a time, as the logger is the process's."""
    lines = Lines()
    with _busy:
        log = logger(nv)
        before, log.sink = log.sink, lines
        try:
            yield lines
        finally:
            log.sink = before


_busy = threading.RLock()


def start(nv: Any) -> trt.Builder:
    """A builder. Raises Unsupported where it cannot start: TensorRT itself needs a driver."""
    with collected(nv) as lines:
        try:
            builder: trt.Builder = nv.Builder(logger(nv))
            return builder
        except (TypeError, RuntimeError) as exc:  # pybind11: the factory returned nullptr
            refusal = build_refusal(lines.errors or [str(exc)])
            raise Unsupported(
                f"TensorRT {nv.__version__} cannot start: {refusal.text}", hint=refusal.hint
            ) from exc


def maybe(value: _T) -> _T | None:
    """`value`, which may be None though NVIDIA's signatures do not say so: that is how it fails."""
    return value


def parser_errors(parser: trt.OnnxParser) -> tuple[ParserError, ...]:
    """All errors of the last parse; a node without a name is told by its number."""
    found = []
    for number in range(parser.num_errors):
        error = parser.get_error(number)
        code = re.sub(r".*\.", "", str(error.code()))
        operator = error.node_operator()
        node = error.node_name() or (f"#{error.node()}" if operator else "")
        found.append(ParserError(code, operator, node, error.desc()))
    return tuple(found)


def refusals(lines: Lines, parser: trt.OnnxParser | None = None) -> tuple[Refusal, ...]:
    """Why a parse (with its `parser`) or a build was refused, one or more."""
    found = parser_errors(parser) if parser is not None else ()
    told = [parser_refusal(error, lines.errors) for error in found]
    return tuple(dict.fromkeys(told)) or (build_refusal(lines.errors),)


def reason(lines: Sequence[str], parser: trt.OnnxParser | None = None) -> str:
    """The first of `refusals` in one line; `lines`: the errors of the log."""
    return refusals(Lines(list(lines)), parser)[0].text


def numbers(text: str) -> tuple[int, int]:
    """Major and minor of "10.13.3.9"; zeros for what is no version."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
