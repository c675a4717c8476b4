"""List the commands by section, each imported when it is looked up, and describe their options."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from deploykit.cli import output
from deploykit.core.errors import BadInput, did_you_mean
from deploykit.core.runtime import BUILT

GENERAL = "General"  # the last section of a help page

JSON = f"{GENERAL}:\n--json  Print one JSON document on stdout"
DEVICE = "--device auto|cpu|cuda|cuda:N  Where the model runs"
TRUST = (
    "--trust  Also run a TensorRT engine whose results cannot be verified here, or one that brings "
    "code from elsewhere"
)
ENGINE = f"{' or '.join(BUILT)} file"
FORCE = "--force  Replace a file that deploykit did not write"
OUT = "-o --out FILE  The file to write [next to the model]"

_Function = TypeVar("_Function", bound=Callable[..., None])


def api_arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a command's `locals()` without `as_json`, as arguments of its API function."""
    return {name: value for name, value in parameters.items() if name != "as_json"}


def described(page: str) -> Callable[[_Function], _Function]:
    """Name and explain the parameters of a command by the lines of `page`, in their order.

    A line reads `NAMES VALUE  Help [default]`; an argument has a VALUE only, a `typer.Context` no
    line. Indented lines continue the one before; one that ends with a colon begins a section.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function, eval_str=True)
        section, infos = None, []
        for row in inspect.cleandoc(re.sub(r"\n {8,}", " ", page)).splitlines():
            head, _, about = row.strip().partition("  ")
            if head.endswith(":"):
                section = head[:-1]
            if not about:
                continue
            infos.append((head.split(), about.strip(), section))
        typed = [each for each in signature.parameters.values() if each.annotation != typer.Context]
        parameters = dict(signature.parameters) | {
            each.name: each.replace(
                annotation=Annotated[each.annotation, _info(each.annotation, *info)]
            )
            for each, info in zip(typed, infos, strict=True)
        }
        ordered = signature.replace(parameters=list(parameters.values()))
        function.__signature__ = ordered  # type: ignore[attr-defined]
        return function

    return decorate


def _info(kind: Any, declared: list[str], about: str, section: str | None) -> Any:
    names = [word for word in declared if word.startswith("-")]
    metavar = " ".join(word for word in declared if not word.startswith("-")) or _choices(kind)
    about, _, default = about.partition(" [") if about.endswith("]") else (about, "", "")
    about = f"{about}. [default: {default}" if default else f"{about}."
    complete = next((do for key, do in _COMPLETE.items() if (metavar or "").startswith(key)), None)
    if not names:
        return typer.Argument(metavar=metavar, help=about, autocompletion=complete)
    return typer.Option(
        *names,
        metavar=metavar,
        help=about,
        rich_help_panel=section,
        show_default=not default,
        show_envvar=False,
        autocompletion=complete,
    )


def _choices(kind: Any) -> str | None:
    """Return the values of a Literal or an optional Literal as the user types them: `auto|cpu`."""
    literals = (each for each in (kind, *get_args(kind)) if get_origin(each) is Literal)
    return next(("|".join(get_args(each)) for each in literals), None)


def _profiles(incomplete: str) -> list[str]:
    from deploykit.core.profile import profile_names

    return [name for name in [*profile_names(), "auto"] if name.startswith(incomplete)]


def _recipes(incomplete: str) -> list[str]:
    from deploykit.core.recipe import list_recipes

    return [name for name in list_recipes() if name.startswith(incomplete)]


_COMPLETE: dict[str, Callable[[str], list[str]]] = {"PROFILE": _profiles, "RECIPE": _recipes}


# section -> command -> its module and the first sentence of its help, which lets the list of all
# commands do without imports
SECTIONS = {
    "Make": {
        "train": ("make", "Train a recipe and write a checkpoint that can be exported."),
        "export": ("make", "Export a PyTorch model to ONNX and check the outputs."),
        "quantize": ("make", "Lower an ONNX model's precision and measure the lost accuracy."),
        "build": ("make", "Build an engine for a hardware target and check its outputs."),
    },
    "Plan": {"plan": ("plan", "Predict memory, latency and throughput on each hardware target.")},
    "Prove": {
        "compare": ("prove", "Compare the outputs of two models; exit 1 if they differ too much."),
        "inspect": ("prove", "Show a model's tensors, precisions, operators and origin."),
        "predict": ("prove", "Answer images or text, or write the outputs for all samples."),
        "bench": ("prove", "Measure latency and throughput against the float32 model on the CPU."),
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
_CONFIGURABLE = ("serve", "boot")
ENVIRONMENT = "DEPLOYKIT"  # prefix of environment variables
LINK = re.compile(r"(tcp|udp|sctp)://")  # the value of DEPLOYKIT_HTTP_PORT for such a Service
LINK_REASON = (
    "Kubernetes sets it for a Service of that name; enableServiceLinks: false in the pod, or "
    "another name of the Service, avoids it"
)
_LINK_NAME = re.compile("_SERVICE_(HOST|PORT)|_PORT_[0-9]+_(TCP|UDP|SCTP)")
_OTHER_VARIABLES = (f"{ENVIRONMENT}_CACHE", f"{ENVIRONMENT}_CONTAINERS")
_PARAMETER = re.compile(r"(?<!the recipe's )`(\w+)`")  # a recipe's fields are no options
_Sections = dict[str, list[tuple[str, str]]]


def reference() -> str:
    """Return the address of the options' documentation, which a wheel does not hold."""
    page = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
    return str(page) if page.is_file() else "docs/cli.md in the sources of deploykit"


class Command(TyperCommand):
    """A command whose help has sections and whose errors name parameters as the user types them."""

    def get_params(self, ctx: Any) -> list[Any]:
        root = ctx.find_root().command
        shared = [each for each in root.params if each.name in ("verbose", "debug")]
        return [*super().get_params(ctx), *shared]

    def invoke(self, ctx: Any) -> Any:
        commands = getattr(ctx.find_root().command, "commands", {})

        def spell(message: str) -> str:
            if not _PARAMETER.search(message):
                return message  # flags would need all commands to be built
            all_of_them = [option for each in commands.values() for option in each.params]
            options = [each for each in all_of_them if each.param_type_name == "option"]
            flags = {each.name: _typed(each) for each in (*options, *self.params)}
            return _PARAMETER.sub(lambda match: flags.get(match[1], match[0]), message)

        output.spell = spell
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [each.replace("{", "").replace("}", "") for each in pieces]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - typer's signature
        about, _, example = inspect.cleandoc(self.help or "").partition("\n\nExample: ")
        formatter.write_paragraph()
        formatter.write_text(about)
        formatter.write(f"\n{output.bold('Example:')}\n  {example}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: _Sections = {"Arguments": [], "Options": []}
        for each in self.get_params(ctx):
            name, about = each.get_help_record(ctx)
            if each.param_type_name == "argument":
                sections["Arguments"].append((_typed(each), about))
            else:
                own = each in self.params and "--help" not in each.opts
                title = each.rich_help_panel or "Options" if own else GENERAL
                sections.setdefault(title, []).append((name, about))
        sections[GENERAL] = sections.pop(GENERAL)
        _write(formatter, sections)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as above
        formatter.write(f"\n{output.bold('Documentation:')} {reference()}\n")


def _typed(parameter: Any) -> str:
    """Spell a parameter as the user types it: `--max-drop`, or an argument's name in capitals."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return str(next((each for each in parameter.opts if each[:2] == "--"), parameter.opts[0]))


def _write(formatter: Any, sections: _Sections) -> None:
    for title, rows in sections.items():
        if rows:
            with formatter.section(output.bold(title)):
                formatter.write_dl([(name, about.replace("  [", " [")) for name, about in rows])


class ConfigurableCommand(Command):
    """A command whose options may also come from the environment and from `--config`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.variables: dict[str, Any] = {}  # options
        for each in self.params:
            if each.param_type_name == "option":
                self.variables[f"{ENVIRONMENT}_{_key(each).upper()}"] = each
            if each.name == "config":
                each.is_eager, each.callback = True, _load

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            own = ctx.info_name == self.name  # `boot` reads the options of `serve` as well
            self._ignore_links(reported=not own)
            if own:
                commands = ctx.find_root().command.commands
                report_unknown_variables(
                    [each for name in _CONFIGURABLE for each in commands[name].variables]
                )
        rest = super().parse_args(ctx, args)
        source = ctx.get_parameter_source("engine")
        if ctx.params.get("models") and source.name != "COMMANDLINE":
            ctx.params["engine"] = None  # arguments override variables and files, as flags do
        return rest

    def _ignore_links(self, *, reported: bool) -> None:
        for name, option in self.variables.items():
            value = os.environ.get(name, "")
            option.envvar = None if LINK.match(value) else name
            if option.envvar is None and not reported:
                output.note(f"note: {name}={value} is ignored: {LINK_REASON}")


def report_unknown_variables(known: Sequence[str]) -> None:
    """Warn of each variable that looks like an option's and is none."""
    short = [name.removeprefix(f"{ENVIRONMENT}_") for name in known]
    for name in sorted(os.environ.keys() - set(known) - set(_OTHER_VARIABLES)):
        if not name.startswith(f"{ENVIRONMENT}_"):
            continue
        if _LINK_NAME.search(name) or LINK.match(os.environ[name]):
            continue
        hint = did_you_mean(name.removeprefix(f"{ENVIRONMENT}_"), short, "see --help") or ""
        hint = re.sub(r"\b[A-Z]{2}", rf"{ENVIRONMENT}_\g<0>", hint)
        output.note(f"warning: the variable {name} is no option: {hint}")


def _key(option: Any) -> str:
    """Return an option's key in the file: `--http-port` is http_port."""
    return _typed(option).lstrip("-").replace("-", "_")


def _load(ctx: Any, _: Any, path: Path | str | None) -> Path | str | None:
    """Make the values of a file the defaults of this call. Raises BadInput on an unknown key."""
    if path is None or ctx.resilient_parsing:
        return path
    from deploykit.core.files import read_toml  # late: `--help` does not need it

    options = {_key(each): each for each in ctx.command.params if each.param_type_name == "option"}
    del options["config"]
    ctx.default_map = {}
    for key, value in read_toml(Path(path)).items():
        name = key.replace("-", "_")
        if name not in options:
            hint = did_you_mean(name, options, "keys: " + ", ".join(options))
            raise BadInput(f"{path}: unknown key '{key}'", hint=hint)
        values = [str(each) for each in value] if isinstance(value, list) else [str(value)]
        option = options[name]
        ctx.default_map[option.name] = values if option.multiple else ",".join(values)
    return path


class Commands(Mapping[str, Any]):
    """Maps names to commands, which are built when they are looked up."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            function = getattr(import_module(f"deploykit.cli.{_MODULES[name]}"), name)
            app = typer.Typer(rich_markup_mode=None, add_completion=False)
            kind = ConfigurableCommand if name in _CONFIGURABLE else Command
            app.command(name, cls=kind)(function)
            self._built[name] = typer.main.get_command(app)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class Group(TyperGroup):
    """Lists the commands by section."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands: Any = Commands()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        return list(self.commands)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: _Sections = {
            title: [(name, summary) for name, (_module, summary) in rows.items()]
            for title, rows in SECTIONS.items()
        }
        options: list[Any] = [each.get_help_record(ctx) for each in self.get_params(ctx)]
        sections["Options"] = options
        _write(formatter, sections)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as above
        formatter.write(f"\n{output.bold('Example:')} deploykit demo\n")
        formatter.write(f"{output.bold('Documentation:')} {reference()}\n")
