"""What a bare start imports: help must be quick, and a server must not carry torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    "numpy",
    "torch",
    "onnx",
    "onnxruntime",
    "sklearn",
    "starlette",
    "google",
    "hpack",
    "httptools",
    "rich",
    "email",  # by importlib.metadata
}


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    program = (
        f"{code}\nimport sys, json; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_command_line_imports_nothing_heavy() -> None:
    assert not modules_after("import deploykit.cli.main") & HEAVY


def test_importing_the_package_imports_nothing_else() -> None:
    assert modules_after("import deploykit, sys; assert 'deploykit.api' not in sys.modules")
    assert not modules_after("import deploykit") & (HEAVY | {"typer"})


def test_every_public_name_is_there() -> None:
    code = "import deploykit\nfor name in deploykit._PUBLIC: getattr(deploykit, name)"
    modules_after(code)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import deploykit

    with pytest.raises(AttributeError, match="nothing"):
        deploykit.nothing  # noqa: B018


def test_the_list_of_commands_imports_no_command() -> None:
    code = (
        "import contextlib, io, sys; from deploykit.cli.main import main\n"
        "sys.argv = ['deploykit', '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as page:\n"
        "    main()\n"
        "assert 'quantize' in page.getvalue()\n"
        "loaded = {name for name in sys.modules if name.startswith('deploykit.cli.')}\n"
        "assert loaded.isdisjoint('deploykit.cli.' + name for name in "
        "('make', 'prove', 'serve', 'machine')), loaded"
    )
    modules_after(code)
