"""Give the options of commands their names and help, and define shared choices."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from deploykit.core.precision import OTHER_NODES, QUANTIZED
from deploykit.core.runtime import BUILT, TARGET_RUNTIMES
from deploykit.core.task import KINDS
from deploykit.deploying import WRITERS

GENERAL = "General"  # the last section of a help page

_WRITTEN = (*QUANTIZED, "auto")
_BUILT = ("fp32", *_WRITTEN)
if TYPE_CHECKING:  # at run time typer reads the choices
    LowPrecision = str
    AnyPrecision = str
    OtherPrecision = str
    TargetRuntime = str
    BundleKind = str
    TaskKind = str
else:
    LowPrecision = Literal[_WRITTEN]
    AnyPrecision = Literal[_BUILT]
    OtherPrecision = Literal[OTHER_NODES]
    TargetRuntime = Literal[TARGET_RUNTIMES]
    BundleKind = Literal[tuple(WRITERS)]
    TaskKind = Literal[tuple(KINDS)]

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

    return [each.name for each in list_recipes() if each.name.startswith(incomplete)]


_COMPLETE: dict[str, Callable[[str], list[str]]] = {"PROFILE": _profiles, "RECIPE": _recipes}
