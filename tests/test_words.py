"""The package, the docs, `--help` and names in tests use the field's words, not an old dialect.

`tests/support/dialect.json` counts what is left in each file. It only shrinks:
`pytest tests/test_words.py --update-golden` writes the smaller counts.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

ROOT = Path(__file__).resolve().parent.parent
LEFT = Path(__file__).with_name("support") / "dialect.json"
KINDS = {".py", ".js", ".css", ".html", ".toml", ".proto", ".md"}
PLACES = ("deploykit", "models", "profiles", "docs", "examples", "README.md", "CONTRIBUTING.md")
DIALECT = {  # what we do not write -> what we write instead
    "whole numbers?": "integer",
    "pictures?": "image",
    r"(?<![.\"])texts(?![.\"])": "strings, messages",  # but for the module and the key of JSON
    "told|untold|tellable|said": "given, reported",
    "in words": "as text",
    "beside": "next to, or name the two things",
    "held back": "throttled",
    "deaf": "closed for reading",
    "aside": "offloaded",
    "(left|leaves?|leaving|kept|keeps?|stays?|staying) wide|widened?|widens": "kept in float32",
    "harm(s|ed|ful|less)?": "sensitivity",
    "check alike": "check_compatible",
    "judged?|judges|judging|judgements?": "evaluate",
    "of ours|of theirs|of its own accord": "our, their",
    "here rows": "inline_max_rows",
    "rows a batch|a batch's rows": "rows per batch",
    r"(?<!there\s)is no (error|reason|answer|file|folder|number|proof|failure|model)": "is not",
    "who (asks?|sends?|reads?|calls?|waits?|wants?)": "a client that, which",
    "(?-i:Out):": "one sentence on what the file is for",
}
_LETTER = "[A-Za-z]"


def pattern_of(words: str) -> str:
    """Whole words, in prose or as parts of a name: `was_told` holds `told`, `stolid` does not."""
    between = r"[\s_]+"  # a name's parts, or the words of prose that goes on in the next line
    return rf"(?<!{_LETTER})(?:{words.replace(' ', between)})(?!{_LETTER})"


_ANY = re.compile("|".join(map(pattern_of, DIALECT)), re.IGNORECASE)


def found_in(text: str) -> list[str]:
    """Each occurrence with the line that it begins on."""
    return [
        f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]}" for match in _ANY.finditer(text)
    ]


def files() -> Iterator[Path]:
    for place in PLACES:
        path = ROOT / place
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (one for one in below if one.suffix in KINDS and one.is_file())


def helps() -> Iterator[tuple[str, str]]:
    """The `--help` of the program and of each command."""
    from deploykit.cli.main import app

    program = get_command(app)
    with program.make_context("deploykit", [], resilient_parsing=True) as context:
        yield "deploykit --help", program.get_help(context)
        for name in program.list_commands(context):  # type: ignore[attr-defined]
            command = program.get_command(context, name)  # type: ignore[attr-defined]
            with command.make_context(name, [], resilient_parsing=True) as below:
                yield f"deploykit {name} --help", command.get_help(below)


def test_no_file_and_no_help_uses_the_dialect(request: pytest.FixtureRequest) -> None:
    found = {path.relative_to(ROOT).as_posix(): found_in(path.read_text()) for path in files()}
    found |= {name: found_in(" ".join(text.split())) for name, text in helps()}
    found = {name: words for name, words in found.items() if words}
    left: dict[str, int] = json.loads(LEFT.read_text())
    if request.config.getoption("--update-golden"):
        counts = {name: len(words) for name, words in sorted(found.items())}
        LEFT.write_text(f"{json.dumps(counts, indent=1)}\n")
        left = counts
    assert {n: words for n, words in found.items() if len(words) > left.get(n, 0)} == {}


def test_no_name_in_the_tests_uses_the_dialect() -> None:
    wrong = [
        f"{path.relative_to(ROOT).as_posix()}:{name}"
        for folder in ("tests", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in re.findall(r"^ *(?:async def|def|class) (\w+)", path.read_text(), re.M)
        if found_in(name)
    ]
    assert wrong == []


def test_a_function_that_acts_is_a_verb() -> None:
    """Of those that return nothing, none is named by a past participle, which tells no action."""
    participle = re.compile(r"_?(\w*[^e]ed|made|sent|done|lost|kept|found|drawn|written|broken)")
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{node.lineno}: {node.name}"
        for path in sorted((ROOT / "deploykit").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and isinstance(node.returns, (ast.Constant, ast.Name))
        and ast.unparse(node.returns) in ("None", "NoReturn")
        and "_" not in node.name.strip("_")
        and participle.fullmatch(node.name)
    ]
    assert found == []
