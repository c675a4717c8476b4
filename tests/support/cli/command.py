"""Command lines: what one gave back, and a process that runs one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ran:
    """What a command gave back."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """The one `error:` line; asserts that there is exactly one, and no traceback."""
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0]


Run = Callable[..., Ran]
PROGRAM = """
import contextlib, io, json, os, sys

replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    folder, words = json.loads(line)
    if folder:
        os.chdir(folder)
    code, (out, err) = 0, (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if words[0] == "-c":
                exec(compile(words[1], "<block>", "exec"), {"__name__": "__main__"})
            else:
                from deploykit.cli.main import main
                sys.argv = ["deploykit", *words]
                main()
        except SystemExit as ended:
            code = ended.code
    for stream in (out, err):
        stream.seek(0)
    print(json.dumps([code, out.read(), err.read()]), file=replies, flush=True)
"""


@contextmanager
def one_process(
    before: str = "", python: Path | str = sys.executable, **options: Any
) -> Iterator[Run]:
    """Run each command line in the same process: packages are imported once.

    `before` is code that comes first; `-c` in place of a command runs code. `folder`, if it is
    given, is where the line runs.
    """
    with subprocess.Popen(
        [python, "-c", before + PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    ) as process:

        def call(*words: object, folder: Path | None = None) -> Ran:
            assert process.stdin is not None
            assert process.stdout is not None
            line = json.dumps([folder and str(folder), [*map(str, words)]])
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            reply = process.stdout.readline()
            assert reply, f"{words}: the process ended"
            return Ran(*json.loads(reply))

        try:
            yield call
        finally:
            process.kill()
