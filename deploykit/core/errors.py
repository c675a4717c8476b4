"""The errors that deploykit raises, and the only place that knows exit codes and HTTP statuses.

The command line and the server translate them once, at their edge.
"""

# ruff: noqa: N818 - an error is named after what is wrong: BadInput, not BadInputError

from __future__ import annotations

from typing import Any, ClassVar

EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class DeploykitError(Exception):
    """What is wrong (`message`, one line that names the culprit) and how to fix it (`hint`)."""

    exit_code: ClassVar[int] = EXIT_BUG
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class GateFailed(DeploykitError):
    """A gate was not met: parity, accuracy, SLO. `result` has the measurements: show it first."""

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
    """No file, model, profile or recipe of that name."""

    http_status = 404
    grpc_status = "NOT_FOUND"


class TooLarge(BadInput):
    """A request is larger than the limit that the server was started with."""

    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"


class UnknownEncoding(BadInput):
    """A request's body has an unsupported Content-Encoding."""

    http_status = 415


class Unsupported(DeploykitError):
    """This machine, runtime or version of deploykit cannot do what was asked."""

    exit_code = 3
    http_status = 501
    grpc_status = "UNIMPLEMENTED"


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
    """The first non-empty line of an exception's message, else its class name."""
    for line in str(exc).splitlines():
        if line.strip():
            return line.strip()
    return type(exc).__name__


def os_reason(exc: OSError) -> str:
    """Why the operating system refused, without the errno and the path: 'Permission denied'."""
    return exc.strerror or first_line(exc)


def quote(value: object) -> str:
    """A value that a client sent, for an error message: printable ASCII, at most 80 characters."""
    huge = isinstance(value, int) and value.bit_length() >= 256
    text = "a huge number" if huge else ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
