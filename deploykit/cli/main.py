"""The `deploykit` command: parse, call one API function, print, and turn errors into codes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from types import FrameType
from typing import Annotated, NoReturn

import typer

from deploykit.cli import artefacts, info, measuring, output, serving, training
from deploykit.core.errors import EXIT_BUG, EXIT_INTERRUPTED, BadInput, DeploykitError

app = typer.Typer(
    name="deploykit",
    help="From a PyTorch model to fast, proven inference: export, quantise, build, serve, measure.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for family in (training, artefacts, measuring, serving, info):
    family.register(app)

_EXIT_TERMINATED = 128 + signal.SIGTERM


def _version(wanted: bool) -> None:
    if wanted:
        from deploykit import __version__

        output.line(f"deploykit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log more; show tracebacks.")] = False,
    _: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    if verbose or debug:
        level = logging.DEBUG if debug else logging.INFO
        logging.basicConfig(
            level=level, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
        )


def main() -> NoReturn:
    """Run the command line and exit with the code of cli.md."""
    interrupted = threading.Event()

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        interrupted.set()  # a native module that is loading turns this into an ImportError
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    debug = "--debug" in sys.argv
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except KeyboardInterrupt:
        _interrupted()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone
        sys.exit(0)
    except Exception as exc:  # noqa: BLE001 - the edge: every error becomes a line and a code
        if debug:
            traceback.print_exc()
        if interrupted.is_set():
            _interrupted()
        _failed(exc)


def _interrupted() -> NoReturn:
    output.note("interrupted")
    sys.exit(EXIT_INTERRUPTED)


def _failed(exc: Exception) -> NoReturn:
    """One of our errors, a usage error of typer's (it has `format_message`), or a bug of ours."""
    if isinstance(exc, DeploykitError):
        output.error(exc)
        sys.exit(exc.exit_code)
    message = getattr(exc, "format_message", None)
    if type(exc).__name__ == "NoArgsIsHelpError" and message is not None:
        output.note(message())
        sys.exit(BadInput.exit_code)
    if message is not None:
        context = getattr(exc, "ctx", None)
        command = context.command_path if context is not None else "deploykit"
        text = str(message()).rstrip(".") or "a command is needed"
        output.error(BadInput(text, hint=f"see: {command} --help"))
        sys.exit(BadInput.exit_code)
    output.note(f"error: a bug in deploykit: {type(exc).__name__}: {output.one_line(str(exc))}")
    output.note("hint: run it again with --debug before the command and report what it prints")
    sys.exit(EXIT_BUG)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM ends through the same clean-up as Ctrl-C."""
    sys.exit(_EXIT_TERMINATED)
