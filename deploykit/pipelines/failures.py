"""What goes wrong in a stage, with the stage's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deploykit.core.errors import DeploykitError, first_line


class StageFailed(DeploykitError):  # noqa: N818 - named after what is wrong
    """A stage raised, or gave what its annotation does not allow. `message` names the stage."""

    exit_code = 2


@contextmanager
def named(stage: str) -> Iterator[None]:
    """Name the stage in our errors."""
    try:
        yield
    except DeploykitError as exc:
        raise name_stage(exc, stage) from exc


def name_stage(error: DeploykitError, stage: str) -> DeploykitError:
    """The same error with the stage's name, once."""
    where = f"stage '{stage}'"
    if error.message.startswith(where):
        return error
    return type(error)(f"{where}: {error.message}", hint=error.hint)


def failure_reason(exc: DeploykitError) -> str:
    """What a stage raised and where, in one line, for the log and the command line."""
    cause = exc.__cause__ if isinstance(exc, StageFailed) else None
    if cause is None:
        return exc.message
    frame = cause.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = (
        ""
        if frame is None
        else (f" ({frame.tb_frame.f_code.co_filename.rpartition('/')[2]}, line {frame.tb_lineno})")
    )
    text = first_line(cause)
    what = "" if text == type(cause).__name__ else f": {text}"
    return f"{exc}{what}{where}"


def stage_error(error: BaseException, stage: str) -> DeploykitError:
    """What a stage raised, with the stage's name; of an exception of its own, the class alone."""
    if isinstance(error, DeploykitError):
        return name_stage(error, stage)
    found = StageFailed(f"stage '{stage}' failed: {type(error).__name__}")
    found.__cause__ = error
    return found
