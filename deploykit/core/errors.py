"""The errors that deploykit raises, and the only place that knows exit codes and HTTP statuses.

The command line and the server translate them once, at their edge.
"""

# ruff: noqa: N818 - an error's name says what is wrong: BadInput, not BadInputError

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, ClassVar

EXIT_BUG = 70
EXIT_INTERRUPTED = 130
_NAMED = 6  # suggestions; a longer list does not help


class DeploykitError(Exception):
    """`message`: one line that names the culprit and what is wrong. `hint`: how to fix it."""

    exit_code: ClassVar[int] = EXIT_BUG
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class StageFailed(DeploykitError):
    """A stage raised, or returned another type than annotated. `message` names the stage."""

    exit_code = 2


class GateFailed(DeploykitError):
    """A gate failed: parity, accuracy or SLO. Show its `result`, the measurements, first."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, result: Any = None) -> None:
        super().__init__(message, hint=hint)
        self.result = result


class BadInput(DeploykitError):
    """A file, option, request, shape or dtype is wrong."""

    exit_code = 2
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class NotFound(BadInput):
    """There is no file, model, profile or recipe of that name."""

    http_status = 404
    grpc_status = "NOT_FOUND"


class TooLarge(BadInput):
    """A request is larger than the limit that the server was started with."""

    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class UnknownEncoding(BadInput):
    """A request's body has an unsupported Content-Encoding."""

    http_status = 415
    grpc_status = "UNIMPLEMENTED"


class Unsupported(DeploykitError):
    """This machine, runtime or version of deploykit cannot do what was asked."""

    exit_code = 3
    http_status = 501
    grpc_status = "UNIMPLEMENTED"


class OutOfMemory(Unsupported):
    """A device or this machine has too little free memory; a smaller call may succeed."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class MissingExtra(Unsupported):
    """An optional package is not installed; the hint holds the command that installs it."""


class Overloaded(DeploykitError):
    """The queue is full, or the server is shutting down; try again later."""

    exit_code = 3
    http_status = 503
    grpc_status = "UNAVAILABLE"


class Expired(DeploykitError):
    """The request's deadline passed before an engine could run it."""

    exit_code = 3
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


def first_line(exc: BaseException) -> str:
    """Return the first non-empty line of an exception's message, else its class name."""
    try:
        message = str(exc)
    except Exception:  # noqa: BLE001 - the __str__ of a user's class may raise anything
        message = ""
    lines = filter(None, map(str.strip, message.splitlines()))
    return next(lines, type(exc).__name__)


def without_secrets(url: str) -> str:
    """Return `url` without user name, password, query and fragment, for a message."""
    return re.split("[?#]", re.sub(r"^(\w+://)?.*@", r"\1", url), maxsplit=1)[0]


def causes(exc: BaseException) -> Iterator[BaseException]:
    """Yield `exc`, its cause, the cause of that, and so on."""
    current: BaseException | None = exc
    while current is not None:
        yield current
        current = current.__cause__


@contextmanager
def users_code(where: object) -> Iterator[None]:
    """Turn any exception of the user's own code, exit() too, into a BadInput: "`where`: reason".

    Ctrl-C passes, and so does a subclass of SystemExit, which a signal raises.
    """
    try:
        yield
    except (DeploykitError, KeyboardInterrupt, GeneratorExit, MemoryError):
        raise
    except SystemExit as exc:
        if type(exc) is not SystemExit:
            raise
        raise BadInput(
            f"{where}: it called exit({exc.code!r})",
            hint="what a script does belongs below: if __name__ == '__main__':",
        ) from exc
    except BaseException as exc:
        chain = [exc, *list(causes(exc))[1:][-1:]]  # a lazy import wraps the original error
        found = [f"{type(each).__name__}: {first_line(each)}" for each in chain]
        raise BadInput(f"{where}: {', caused by '.join(found)}") from exc


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return a hint with the `known` names that contain `name` or resemble it, in any case."""
    spelled = {each.lower(): each for each in known}
    wanted = name.lower()
    close = [each for each in spelled if wanted in each] if len(wanted) > 1 else []
    close = close or get_close_matches(wanted, spelled, 3)
    named = ", ".join(spelled[each] for each in close)
    return f"did you mean {named}?" if 0 < len(close) <= _NAMED else otherwise


def os_reason(exc: OSError) -> str:
    """Return the operating system's reason, such as 'Permission denied', without errno and path."""
    return exc.strerror or first_line(exc)


_SCARCE: Mapping[int, tuple[str, str | None]] = {  # of this machine, whatever was asked for
    errno.ENOSPC: ("no space left on the disk", None),
    errno.EDQUOT: ("no space left on the disk: your quota is used up", None),
    errno.EMFILE: ("too many open files", "allow more of them: ulimit -n 4096"),
    errno.ENFILE: ("too many open files on this machine", None),
}


def os_error(exc: OSError, where: object = "") -> DeploykitError:
    """Return the DeploykitError for `exc`; `where` begins it, by default the file that it names."""
    where = str(where or exc.filename or "")
    start = f"{where}: " if where else ""
    if "temporary directory" in str(exc):
        return Unsupported(first_line(exc), hint="name a folder with space in it: TMPDIR=FOLDER")
    if (scarce := _SCARCE.get(exc.errno or 0)) is not None:
        what, hint = scarce
        return Unsupported(f"{start}{what}", hint=hint)
    short = "choose a shorter name: files next to it have longer ones"
    hint = short if exc.errno == errno.ENAMETOOLONG else None
    return BadInput(f"{start}{os_reason(exc)}", hint=hint)


def quote(value: object) -> str:
    """Return a client's value for an error message: printable ASCII, at most 80 characters."""
    if isinstance(value, (str, bytes, list, tuple)):
        value = value[:81]  # repr of 60 MB would block the event loop for 0.3 s
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    huge = isinstance(value, int) and value.bit_length() >= 256
    text = "a huge number" if huge else ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


# CUDA's error codes, mapped without importing CUDA: other libraries report them too.


class DeviceLost(Unsupported):
    """The CUDA context is lost, so that every later call fails: end the process."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


# Source: CUDA Runtime API, "Data types used by CUDA Runtime", enum cudaError; the driver API's
# CUresult has the same numbers.
_BUGS = frozenset((1, 400))  # invalid value, invalid handle: wrong use of CUDA
_MEMORY, _NOT_INITIALIZED, _NO_DEVICE = 2, 3, 101
# Hardware failed, or a kernel did, and the context is gone with it.
_LOST = frozenset((4, 53, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721))
_LOST |= {805, 806, 810, 911, 999}
_OTHER_GPU = frozenset((98, 200, 209, 218, 221, 222, 223))  # code of another GPU or newer driver

USE_LESS_MEMORY = (
    "use a smaller batch or `max_batch`, fewer `instances`, or stop other programs that use the GPU"
)
_DOCTOR = "see: deploykit doctor"


def cuda_error(device: str, call: str, code: int, text: str) -> DeploykitError:
    """Return the error for a CUDA `call` that returned `code`, which the library calls `text`.

    A code for wrong use of CUDA, a bug in deploykit, gives a plain DeploykitError.
    """
    failed = f"{device}: {call}: {text} (CUDA error {code})"
    if code == _MEMORY:
        return OutOfMemory(f"{device}: out of memory in {call}", hint=USE_LESS_MEMORY)
    if code in _LOST:
        return DeviceLost(
            f"{device}: the GPU is lost to this process ({call}: {text}, CUDA error {code})",
            hint="restart the process; if it happens again: dmesg | grep Xid; deploykit doctor",
        )
    if code in _OTHER_GPU:
        hint = "the file or package was built for another GPU: build it on this machine"
        return Unsupported(failed, hint=hint)
    if code in _BUGS:
        return DeploykitError(failed)
    if code == _NO_DEVICE:
        return Unsupported(f"{device}: this machine has no such GPU", hint=_DOCTOR)
    if code == _NOT_INITIALIZED:
        fork = "a process that fork() made cannot use CUDA (multiprocessing: use 'spawn')"
        return Unsupported(failed, hint=f"{fork}; {_DOCTOR}")
    return Unsupported(failed, hint=_DOCTOR)


@contextmanager
def unless_lost() -> Iterator[None]:
    """Ignore any DeploykitError in the block except DeviceLost."""
    try:
        yield
    except DeviceLost:
        raise
    except DeploykitError:
        return


def out_of_memory(device: str, need_bytes: int, free_bytes: int, total_bytes: int) -> OutOfMemory:
    need, free, total = (
        f"{count / 2**20:,.1f} MiB" for count in (need_bytes, free_bytes, total_bytes)
    )
    return OutOfMemory(
        f"{device}: out of memory: {need} needed, {free} free of {total}", hint=USE_LESS_MEMORY
    )
