"""`make test`'s second part: NVIDIA's own parser, builder and type signatures, on any machine.

    python -m scripts.nvidia.run [--folder .rig] [-- what pytest gets]

Makes the rig, runs every test marked `nvidia` with it, and checks our TensorRT code against the
stubs of several versions. What cannot be had here is skipped, with its reason; the exit code is
that of the tests and the type check. A machine with TensorRT itself tests that instead of the rig.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.nvidia import fetch, rig, typed

ROOT = typed.ROOT
_MARKED = ("mark.nvidia", "nvidia_cases")  # the mark itself, and the helpers that hold it
_NO_TESTS = 5  # pytest's exit code where nothing was selected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".rig")
    parser.add_argument("pytest", nargs="*", help="options for pytest, after --")
    options = parser.parse_args()
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "scripts.nvidia.typed",
        str(options.folder.resolve() / "stubs"),
    ]
    # types are checked beside the tests: a type check and a build each keep one core busy
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as types:
        try:
            say("== NVIDIA's parser and builder")
            code = tests(options.folder, options.pytest)
            said, _ = types.communicate()
        except BaseException:
            types.kill()
            raise
    say(f"== NVIDIA's types\n{said.rstrip()}\n== {time.perf_counter() - started:.0f} s")
    return max(code, types.returncode)


def tests(folder: Path, more: list[str]) -> int:
    """The exit code of `pytest -m nvidia`, the rig before everything else on its path."""
    paths = [os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("tensorrt") is None:
        try:
            paths.insert(0, str(rig.setup(folder)))
        except fetch.Unobtainable as exc:
            say(f"skipped: tests with NVIDIA's parser and builder: {exc}")
            return 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    files = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if any(word in path.read_text(encoding="utf-8") for word in _MARKED)
    ]
    command = [sys.executable, "-m", "pytest", "-m", "nvidia and not gpu", *map(str, files), *more]
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code == _NO_TESTS:
        say("error: no test is marked nvidia")
    return code


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
