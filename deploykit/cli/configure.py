"""The options of `serve` from flags, DEPLOYKIT_ variables and a TOML file, in this order."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from deploykit.cli.help import Command, reword
from deploykit.core.errors import BadInput


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
