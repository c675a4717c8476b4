"""The `deploykit` command: parse, call one API function, print, and turn errors into codes."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from deploykit.cli import output
from deploykit.cli.help import Command, reference, reword, write_sections
from deploykit.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    BadInput,
    DeploykitError,
    Unsupported,
    os_reason,
)
from deploykit.core.memory import does_not_fit

# The options of `serve` from flags, DEPLOYKIT_ variables and a TOML file, in this order.


class ConfigurableCommand(Command):
    """A command whose options may also come from the environment and from `--config`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        params: list[Any] = self.params
        for each in params:
            if each.param_type_name == "option":
                each.envvar, each.show_envvar = f"DEPLOYKIT_{_key(each).upper()}", False
            if each.name == "config":
                each.is_eager, each.callback = True, _load

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        source = ctx.get_parameter_source("engine")
        if ctx.params.get("models") and source.name != "COMMANDLINE":
            ctx.params["engine"] = None  # arguments outrank a variable and a file, as flags do
        return rest


def _key(option: Any) -> str:
    """The flag as a key: `--http-port` is http_port."""
    return str(max(option.opts, key=len)).lstrip("-").replace("-", "_")


def _load(ctx: Any, _: Any, given: Path | str | None) -> Path | str | None:
    """Make the values of a file the defaults of this call. Raises BadInput on a wrong one."""
    if given is None or ctx.resilient_parsing:
        return given
    from deploykit.core.files import read_toml  # late: `--help` does without

    path = Path(given)  # typer before 0.29 converts it later
    options = {_key(each): each for each in ctx.command.params if each.param_type_name == "option"}
    del options["config"]
    ctx.default_map = {}
    for name, value in read_toml(path)[0].items():
        option = options.get(name.replace("-", "_"))
        if option is None:
            close = get_close_matches(name.replace("-", "_"), options, 1)
            raise BadInput(
                f"{path}: unknown key '{name}'",
                hint=f"did you mean {close[0]}?" if close else "keys: " + ", ".join(options),
            )
        ctx.default_map[option.name] = _check_value(ctx, option, value, f"{path}: {name}")
    return given


def _check_value(ctx: Any, option: Any, value: Any, where: str) -> Any:
    """The value as the command line would give it: a list for an option that may be repeated."""
    if isinstance(value, dict):
        raise BadInput(f"{where}: must be a value, not a table")
    if isinstance(value, bool) != bool(option.is_flag):
        raise BadInput(f"{where}: must {'' if option.is_flag else 'not '}be true or false")
    values = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    found: Any = values if option.multiple else ",".join(values)
    if option.is_flag:
        found = value
    try:
        option.process_value(ctx, found)
    except typer.BadParameter as exc:
        raise BadInput(f"{where}: {reword(exc.message)}") from exc
    return found


# The commands by section. Each is imported and parsed into options when it is asked for.

# section -> command -> the module that holds it and the first sentence of its help, which the list
# of all commands shows without an import
SECTIONS = {
    "Make": {
        "train": ("make", "Train a recipe and write a checkpoint that can be exported."),
        "export": ("make", "Export a PyTorch model to ONNX and check the outputs."),
        "quantize": ("make", "Lower an ONNX model's precision and measure the lost accuracy."),
        "build": ("make", "Build an engine for a hardware target and check its outputs."),
    },
    "Plan": {
        "plan": ("plan", "Predict memory, latency and throughput on each hardware target."),
    },
    "Prove": {
        "compare": ("prove", "Compare the outputs of two models; exit 1 if they differ too much."),
        "inspect": ("prove", "Show a model's tensors, precisions, operators and origin."),
        "predict": (
            "prove",
            "Answer images or text, or write the outputs for all samples.",
        ),
        "bench": (
            "prove",
            "Measure latency and throughput against the float32 model on the CPU.",
        ),
    },
    "Serve": {
        "serve": ("serve", "Serve models over HTTP and gRPC, with dynamic batching."),
        "load": ("serve", "Measure a running server under load."),
        "health": ("serve", "Ask a running server whether it is ready; exit 1 if not."),
    },
    "Deploy": {
        "bundle": ("deploy", "Bundle a model with all that a device or a cluster needs."),
        "boot": (
            "deploy",
            "Build a bundle's engine on this device, check its outputs and serve it.",
        ),
    },
    "Machine": {
        "doctor": ("machine", "Show what this machine has and which commands work on it."),
        "profiles": ("machine", "List the hardware targets with their figures and sources."),
        "demo": ("machine", "Run all steps, from training to serving, on real data."),
    },
}
_MODULES = {name: module for rows in SECTIONS.values() for name, (module, _summary) in rows.items()}


class Commands(Mapping[str, Any]):
    """The commands by name, each built when it is looked up."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = _build(name, _MODULES[name])
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


def _build(name: str, module: str) -> Any:
    function = getattr(import_module(f"deploykit.cli.{module}"), name)
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.command(name, cls=ConfigurableCommand if name in ("serve", "boot") else Command)(function)
    return typer.main.get_command(app)


class Group(TyperGroup):
    """The commands by section."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands: Any = Commands()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        return list(self.commands)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections = {
            title: [(name, summary) for name, (_module, summary) in rows.items()]
            for title, rows in SECTIONS.items()
        }
        write_sections(formatter, sections)
        rows = (each.get_help_record(ctx) for each in self.get_params(ctx))
        write_sections(formatter, {"Options": [row for row in rows if row is not None]})

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as above
        formatter.write(f"\n{output.bold('Example:')} deploykit demo\n")
        formatter.write(f"{output.bold('Documentation:')} {reference()}\n")


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
_ECHO_S = 1.0  # a second signal within it counts as the same one


class _Terminated(SystemExit):
    """The exit that SIGTERM asks for: exit() in a user's code is a plain SystemExit."""


def _version(wanted: bool) -> None:
    if wanted:
        from deploykit import __version__

        output.line(f"deploykit {__version__}")
        raise typer.Exit


def _log(wanted: bool, level: int) -> None:
    if wanted:
        logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
        logging.root.setLevel(min(level, logging.root.level))


def _verbose(wanted: bool) -> None:
    _log(wanted, logging.INFO)


def _debug(wanted: bool) -> None:
    _log(wanted, logging.DEBUG)


@app.callback()
def options(
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", callback=_verbose, expose_value=False, help="Log what is done."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", callback=_debug, expose_value=False, help="Log more, and show tracebacks."
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options that all commands have."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. Python would end by the signal, not by 130, once its own has left `exec(text)`."""


def main() -> NoReturn:
    """Run the command line and exit with a documented code; signals are handled as before then."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        script()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def script() -> NoReturn:
    """The same in a process that ends then: SIGTERM stays ignored."""
    output.open_streams()
    if "_DEPLOYKIT_COMPLETE" in os.environ:
        app(prog_name="deploykit")
    interrupted = threading.Event()

    def interrupt() -> NoReturn:
        interrupted.set()  # a native module that is loading turns this into an ImportError
        raise Interrupted

    signal.signal(signal.SIGTERM, _without_echoes(_terminate))
    if callable(signal.getsignal(signal.SIGINT)):  # else it is ignored
        signal.signal(signal.SIGINT, _without_echoes(interrupt))
    try:
        code = _run(sys.argv[1:])
        sys.stdout.flush()
        _exit(code)
    except KeyboardInterrupt:
        _exit_interrupted()
    except _Terminated:
        _exit(_EXIT_TERMINATED)
    except BrokenPipeError:
        _drop_output()  # the reader has gone: `deploykit ... | head`
        _exit(0)
    except Exception as exc:  # noqa: BLE001 - the edge: every error becomes a line and a code
        if "--debug" in sys.argv:
            traceback.print_exc()
        if interrupted.is_set():
            _exit_interrupted()
        _drop_output()
        _exit_with(exc)


def _run(words: list[str]) -> int:
    """Parse and run; typer's own `main` would swallow Ctrl-C and a reader that has gone."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("deploykit", words) as context:
            command.invoke(context)
    except typer.Exit as exc:
        return exc.exit_code
    return 0


def _drop_output() -> None:
    """Discard what stdout still holds and cannot take; else Python fails at exit."""
    try:
        sys.stdout.flush()
    except (OSError, BadInput):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_interrupted() -> NoReturn:
    output.note("interrupted")
    _exit(EXIT_INTERRUPTED)


def _exit(code: int) -> NoReturn:
    """Exit; a signal at Python's end would change the code, or print a traceback."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def _exit_with(exc: Exception) -> NoReturn:
    """One of our errors, a usage error of typer's (it has `format_message`), or a bug."""
    if isinstance(exc, MemoryError):
        exc = does_not_fit("", str(exc))
    if isinstance(exc, FileNotFoundError) and "temporary directory" in str(exc):  # tempfile's
        exc = Unsupported(os_reason(exc), hint="TMPDIR=DIR, a folder that can be written to")
    if isinstance(exc, DeploykitError):
        output.error(exc)
        _exit(exc.exit_code)
    message = getattr(exc, "format_message", None)
    if type(exc).__name__ == "NoArgsIsHelpError" and message is not None:
        typer.echo(message(), err=True)
        _exit(BadInput.exit_code)
    if message is not None:
        output.error(_usage_error(exc, str(message())))
        _exit(BadInput.exit_code)
    output.note(f"error: a bug in deploykit: {type(exc).__name__}: {output.one_line(str(exc))}")
    output.note("hint: run it again with --debug and report what it prints")
    _exit(EXIT_BUG)


def _usage_error(exc: Any, message: str) -> BadInput:
    context = getattr(exc, "ctx", None)
    command = context.command_path if context is not None else "deploykit"
    parameter: Any = getattr(exc, "param", None)
    source = context.get_parameter_source(parameter.name) if context and parameter else None
    if source is not None and source.name == "ENVIRONMENT":
        message = f"{parameter.envvar}: {message}"
    text = reword(message)
    return BadInput(text or "a command is needed", hint=f"see: {command} --help")


def _terminate() -> NoReturn:
    """SIGTERM ends through the same clean-up as Ctrl-C."""
    raise _Terminated(_EXIT_TERMINATED)


def _without_echoes(end: Callable[[], NoReturn]) -> Callable[[int, FrameType | None], None]:
    """A handler that leaves alone what cleans up; `timeout` sends a signal twice."""
    last_s = -math.inf

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal last_s
        before_s, last_s = last_s, time.monotonic()
        if last_s - before_s >= _ECHO_S:
            end()

    return handle
