"""The strings of the command line that say what to serve, and how."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from deploykit.core.errors import BadInput, os_reason
from deploykit.core.files import check_readable

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,128})=(?P<file>.+)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
SIZES = re.compile(r"(?P<name>[^=]+)=(?P<value>\d{1,9}(,\d{1,9})*)")
PAD = re.compile(r"(?P<name>[^=]+)=(?P<value>[-+]?(inf|nan|(\d+\.?\d*|\.\d+)(e[-+]?\d+)?))", re.I)


def name_models(values: Sequence[str]) -> dict[str, Path]:
    """`FILE` or `NAME=FILE` by name. Raises BadInput."""
    files: dict[str, Path] = {}
    for text in values:
        match = _NAMED.fullmatch(text)
        path = Path(match["file"] if match else text)
        name = match["name"] if match else path.stem
        given, equals, _ = text.partition("=")
        if equals and not match and "/" not in given and not path.exists():
            raise BadInput(
                f"{text}: '{given}' cannot be the name of a model"
                if not _NAME.fullmatch(given)
                else f"{text}: the file is missing",
                hint="NAME=FILE, with a NAME of 1 to 128 letters, digits, '.', '_' or '-'",
            )
        if name in files:
            raise BadInput(f"{text}: the name '{name}' is taken", hint="give it another: NAME=FILE")
        files[name] = path
    return files


def name_shadows(shadows: Sequence[str], models: Sequence[str]) -> dict[str, Path]:
    """Shadows by the model that they belong to."""
    found: dict[str, Path] = {}
    for text in shadows:
        match = _NAMED.fullmatch(text)
        if not match and len(models) > 1:
            raise BadInput(f"`shadow` {text}: of which model?", hint="`shadow` NAME=FILE")
        name = match["name"] if match else "".join(models[:1])
        if name not in models or name in found:
            raise BadInput(
                f"`shadow` {text}: " + ("is given twice" if name in found else "no such model"),
                hint="served here: " + ", ".join(models),
            )
        found[name] = Path(match["file"] if match else text)
    return found


def read_token(file: Path | None) -> str | None:
    """The first line of the file. Raises BadInput."""
    if file is None:
        return None
    try:
        first = check_readable(file).read_text("utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = os_reason(exc) if isinstance(exc, OSError) else "is not text"
        raise BadInput(f"`token_file` {file}: {reason}") from exc
    if not first:
        raise BadInput(f"`token_file` {file}: its first line is empty")
    return first


def assignments(
    parameter: str, values: Sequence[str], form: re.Pattern[str], example: str, hint: str
) -> dict[str, str]:
    """Strings NAME=VALUE as a dict. Raises BadInput for another form, or a name given twice."""
    found: dict[str, str] = {}
    for each in values:
        match = form.fullmatch(each)
        if not match or match["name"] in found:
            raise BadInput(f"`{parameter}` {each}: {example} is needed, each name once", hint=hint)
        found[match["name"]] = match["value"]
    return found
