"""The `deploykit` command: parse, call one API function, print, and turn errors into codes."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from deploykit.cli import output
from deploykit.cli.commands import Group
from deploykit.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    BadInput,
    DeploykitError,
    did_you_mean,
    os_error,
)
from deploykit.core.machine import does_not_fit, lacks_memory

app = typer.Typer(
    name="deploykit",
    cls=Group,
    help="Turn a PyTorch model into fast inference, and prove each step: accuracy and speed.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 10_000},
)
_EXIT_TERMINATED = 128 + signal.SIGTERM


class _Terminated(SystemExit):
    """Raised on SIGTERM, to tell it from exit() in a user's code, a plain SystemExit."""


def _version(wanted: bool) -> None:
    if wanted:
        from deploykit import __version__

        output.line(f"deploykit {__version__}")
        raise typer.Exit


def _log(level: int) -> Callable[[bool], None]:
    def start(wanted: bool) -> None:
        if wanted:
            logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
            logging.root.setLevel(min(level, logging.root.level))

    return start


def _option(*names: str, do: Callable[[bool], None], about: str) -> Any:
    return typer.Option(*names, callback=do, expose_value=False, is_eager=True, help=about)


@app.callback()
def options(
    verbose: Annotated[
        bool, _option("--verbose", "-v", do=_log(logging.INFO), about="Log what is done.")
    ] = False,
    debug: Annotated[
        bool, _option("--debug", do=_log(logging.DEBUG), about="Log more, and show tracebacks.")
    ] = False,
    version: Annotated[bool, _option("--version", do=_version, about="Print the version.")] = False,
) -> None:
    """Options that all commands have."""


class Interrupted(KeyboardInterrupt):
    """Raised on Ctrl-C. After a KeyboardInterrupt in `exec` Python would not exit with 130."""


def main() -> NoReturn:
    """Run the command line and exit with a documented code; SIGTERM and SIGINT stay handled."""
    output.open_streams()
    if "_DEPLOYKIT_COMPLETE" in os.environ:
        app(prog_name="deploykit")
    signal.signal(signal.SIGTERM, _without_echoes(_terminate))
    if callable(signal.getsignal(signal.SIGINT)):  # else SIGINT is ignored
        signal.signal(signal.SIGINT, _without_echoes(_interrupt))
    try:
        code = _run(sys.argv[1:])
        sys.stdout.flush()
        _exit(code)
    except KeyboardInterrupt:
        _exit_interrupted()
    except _Terminated:
        _exit(_EXIT_TERMINATED)
    except BrokenPipeError:  # the reader of the pipe has ended: `deploykit ... | head`
        _exit(0)
    except Exception as exc:  # noqa: BLE001 - every error becomes a line and a code
        if "--debug" in sys.argv:
            output.note(traceback.format_exc())
        _drop_output()
        _exit_with(exc)


def _run(words: list[str]) -> int:
    """Parse and run; typer's own `main` would swallow Ctrl-C and a closed pipe."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("deploykit", words) as context:
            command.invoke(context)
    except typer.Exit as exc:
        return exc.exit_code
    return 0


def _drop_output() -> None:
    """Discard what cannot be written; else Python fails at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _exit_interrupted() -> NoReturn:
    output.note("interrupted")
    _exit(EXIT_INTERRUPTED)


def _exit(code: int) -> NoReturn:
    """Exit and ignore further signals, which could change the code or print a traceback."""
    _drop_output()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def _exit_with(exc: Exception) -> NoReturn:
    """Exit with the code of our error, of typer's usage error (`format_message`), or of a bug."""
    if not isinstance(exc, DeploykitError) and lacks_memory(exc):
        exc = does_not_fit("", str(exc))
    if isinstance(exc, OSError):  # not a file of the user's: a full disk, TMPDIR
        exc = os_error(exc)
    if str(exc).startswith("Symlink loop"):  # Path.resolve before Python 3.13
        exc = BadInput(str(exc))
    if isinstance(exc, UnicodeEncodeError) and exc.reason == "surrogates not allowed":
        exc = BadInput(f"not UTF-8: {exc.object[:200]}", hint="rename the file or its folder")
    if isinstance(exc, DeploykitError):
        output.error(exc)
        _exit(exc.exit_code)
    message = getattr(exc, "format_message", None)
    if message is not None:
        if type(exc).__name__ == "NoArgsIsHelpError":
            output.note(message())
        else:
            output.error(_usage_error(exc, str(message())))
        _exit(BadInput.exit_code)
    output.note(f"error: a bug in deploykit: {type(exc).__name__}: {output.one_line(str(exc))}")
    output.note("hint: run it again with --debug and report what it prints")
    _exit(EXIT_BUG)


def _usage_error(exc: Any, message: str) -> BadInput:
    context: Any = getattr(exc, "ctx", None)
    parameter: Any = getattr(exc, "param", None)
    command = context.command_path if context is not None else "deploykit"
    source = context.get_parameter_source(parameter.name) if context and parameter else None
    if source is not None and source.name == "ENVIRONMENT":
        message = f"{parameter.envvar}: {message}"
    if source is not None and source.name == "DEFAULT_MAP":
        message = f"{context.params['config']}: {message}"
    # pydantic's words, and click's line breaks
    message = re.sub("Value error, |, unable to parse string as an? [a-z]+", "", message)
    message = " ".join(message.replace("Input should be", "must be").split())
    hint, (before, _, choices) = f"see: {command} --help", message.partition(" is not one of ")
    word = before.removesuffix("'").rpartition("'")[2]
    return BadInput(message, hint=did_you_mean(word, re.findall(r"'([^']+)'", choices), hint))


def _interrupt() -> NoReturn:
    raise Interrupted


def _terminate() -> NoReturn:
    """End on SIGTERM through the same clean-up as Ctrl-C."""
    raise _Terminated(_EXIT_TERMINATED)


_IMPORT_S, _AGAIN_S = 5.0, 0.02  # how long an import may put off a signal; until the next look


def _without_echoes(end: Callable[[], NoReturn]) -> Callable[[int, FrameType | None], None]:
    """Return a handler that ignores repeated signals during clean-up: `timeout` sends two.

    During an import it waits: a native module that is loading loses what a handler raises.
    """
    first_s, last_s = math.inf, -math.inf

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_s, last_s
        now_s = time.monotonic()
        first_s = min(first_s, now_s)
        if _imports(frame) and now_s - first_s < _IMPORT_S:
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            return
        before_s, last_s = last_s, now_s
        if last_s - before_s >= 1.0:  # a second signal within this time is the same one
            end()

    return handle


def _imports(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
