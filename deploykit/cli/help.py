"""Help pages in sections, options that work before and after the command, errors with flags."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from deploykit.cli import output
from deploykit.cli.options import GENERAL

_PARAMETER = re.compile(r"`(\w+)`")
_BRACKETS = re.compile(r"<([^>]*)>")
_EXTRA = re.compile(r"\[[^\[\]]*\]$")
_DEFAULT = re.compile(r"(default: )\(([^()]*)\)")
_REWORDED = {
    "Value error, ": "",
    "Input should be": "must be",
    ", unable to parse string as an integer": "",
    ", unable to parse string as a number": "",
    ". Choose from:": "; choose from",
    "\n\t": " ",
}
_COLUMN = 26  # longer names have their help on the next line
_EXAMPLE = "\n\nExample: "


def reference() -> str:
    """Where this page is described: in the checkout that runs; a wheel holds no documentation."""
    page = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
    return str(page) if page.is_file() else "docs/cli.md in the sources of deploykit"


class Command(TyperCommand):
    """A command whose help has sections and which names its parameters as they are typed."""

    def get_params(self, ctx: Any) -> list[Any]:
        root = ctx.find_root().command
        shared = [each for each in root.params if each.name in ("verbose", "debug")]
        return [*super().get_params(ctx), *shared]

    def invoke(self, ctx: Any) -> Any:
        commands = getattr(ctx.find_root().command, "commands", {})

        def spell(message: str) -> str:
            if not _PARAMETER.search(message):
                return message  # without building all commands
            of_others = [option for each in commands.values() for option in each.params]
            options = [each for each in of_others if each.opts[0][0] == "-"]
            return with_flags([*options, *self.params], message)  # the last of a name counts

        output.spell = spell
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        pieces = ["[OPTIONS]"]
        for each in self.params:
            if each.param_type_name == "argument":
                name = f"{spell(each)}..." if each.nargs == -1 else spell(each)
                pieces.append(name if each.required else f"[{name}]")
        return pieces

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as above
        about, _, example = inspect.cleandoc(self.help or "").partition(_EXAMPLE)
        formatter.write_paragraph()
        formatter.write_text(about)
        if example:
            formatter.write(f"\n{output.bold('Example:')}\n  {example}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        root = ctx.find_root().command
        for each in self.get_params(ctx):
            row = each.get_help_record(ctx)
            if row is None:
                continue
            if each.param_type_name == "argument":
                sections["Arguments"].append((spell(each), row[1]))
            else:
                shared = each in root.params or "--help" in each.opts
                name = GENERAL if shared else each.rich_help_panel or "Options"
                sections.setdefault(name, []).append(row)
        sections[GENERAL] = sections.pop(GENERAL)
        write_sections(formatter, sections)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as above
        formatter.write(f"\n{output.bold('Documentation:')} {reference()}\n")


def write_sections(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    """Two columns under each heading, of one width on the whole page."""
    names = [_plain(name) for rows in sections.values() for name, _ in rows]
    width = max((len(name) for name in names if len(name) <= _COLUMN), default=0)
    indent = " " * (width + 4)
    for title, rows in sections.items():
        if rows:
            formatter.write(f"\n{output.bold(title + ':')}\n")
        for name, about in rows:
            first = f"  {_plain(name)}".ljust(len(indent))
            if len(first) > len(indent):
                formatter.write(f"{first}\n")
                first = indent
            wrapped = textwrap.wrap(
                _unbroken(_plain(about), formatter.width - len(indent)),
                formatter.width,
                initial_indent=first,
                subsequent_indent=indent,
                break_on_hyphens=False,
                break_long_words=False,
            )
            formatter.write("\n".join(wrapped).replace("\0", " ") + "\n")


def _unbroken(text: str, width: int) -> str:
    """With the `[default: ...]` at its end as one word, where it fits into a line."""
    match = _EXTRA.search(text)
    if match is None or len(match[0]) > width:
        return text
    return text[: match.start()] + match[0].replace(" ", "\0")


def _plain(text: str) -> str:
    """Choices without typer's `<>`, a default that is a sentence without its `()`, 10 for 10.0."""
    text = _BRACKETS.sub(r"\1", _DEFAULT.sub(r"\1\2", text)).replace("  [", " [")
    return text.replace(".0]", "]")


def spell(parameter: Any) -> str:
    """A parameter as the user types it: `--max-drop`, or an argument's name in capitals."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return str(max(parameter.opts, key=len))


def with_flags(parameters: Iterable[Any], message: str) -> str:
    """`message` with each parameter name in backticks spelled as it is typed."""
    flags = {each.name: spell(each) for each in parameters}
    return _PARAMETER.sub(lambda match: flags.get(match[1], match[0]), message)


def reword(message: str) -> str:
    """An error of typer's or pydantic's on one line, in plain words."""
    for old, new in _REWORDED.items():
        message = message.replace(old, new)
    return message.rstrip(".")
