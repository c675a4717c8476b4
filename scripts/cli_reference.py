#!/usr/bin/env python3
"""Write docs/cli.md, the reference of the command line, from its help pages."""

from __future__ import annotations

import os
from pathlib import Path

import typer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
_HEAD = """# Command line

What `deploykit COMMAND --help` prints; written by `scripts/cli_reference.py`.

Exit codes: 0 done; 1 a check failed (accuracy, parity, latency); 2 wrong input; 3 the machine lacks
something; 70 a bug in deploykit; 130 interrupted. An error is one line on stderr, often with a
hint after it; `--debug` adds the traceback. Results are on stdout, as one JSON document with
`--json`.

Colour, tables and a progress bar are for terminals: a pipe gets plain text, and `NO_COLOR=1` turns
colour off. `deploykit --install-completion` sets up completion for your shell.

## `serve` and `boot` from a file or the environment

Each option of `serve` is also a key of the file that `serve --config` or `boot --serve-config`
names, and an environment variable that begins with `DEPLOYKIT_`. A flag overrides a
variable, a variable the file, the file the default. An unknown key is an error, a variable
with an unknown name a warning.

```toml
engine = ["mnist=model.int8.onnx"]
http_port = 9000
max_batch = 16
grpc_port = "none"
```

`DEPLOYKIT_HTTP_PORT=9001 deploykit serve --config serve.toml` listens on port 9001.
"""


def render() -> str:
    """The page. Help is wrapped at 80 columns, which a page shows whole, and has no colour."""
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
    from deploykit.cli.main import app

    root = typer.main.get_command(app)
    parts = [_HEAD]
    with typer.Context(root, info_name="deploykit", **root.context_settings) as top:
        parts.append(_section("deploykit", root.get_help(top)))
        for name, command in root.commands.items():  # type: ignore[attr-defined]
            with typer.Context(command, info_name=name, parent=top) as context:
                parts.append(_section(f"deploykit {name}", command.get_help(context)))
    return "\n".join(parts)


def _section(title: str, text: str) -> str:
    page = text.partition("\nDocumentation:")[0]
    return f"## {title}\n\n```text\n{page.rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
