"""Check our TensorRT code with mypy --strict against the bindings of several versions.

    python -m scripts.nvidia.typed .rig/stubs 10.3.0 11.4.0.106

In: folders of stubs (`stubs.py`). Out: mypy's errors, none when all is well; a version whose stubs
cannot be made is skipped, with the reason. Each run holds a file with wrong members too, which mypy
must find on just the versions that lack them: a check that cannot fail is none.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.nvidia import fetch, stubs

ROOT = Path(__file__).resolve().parent.parent.parent
# In a copy of our files, what stands for the module gets a type that mypy can check.
_USES = re.compile(r'^ +import tensorrt as|\bnv: Any\b|require\("tensorrt"\)', re.MULTILINE)
_IMPORTS = f"from {stubs.MODULE} import Module as NvidiaModule"
_TYPED = (
    (r"\bnv: Any\b", "nv: NvidiaModule"),
    (r"(?m)^(def module\(.*\)) -> Any:", r"\1 -> NvidiaModule:"),
    (r'(?m)^(\w+) = require\("tensorrt"\)', r'\1: NvidiaModule = require("tensorrt")'),
    (r"(?m)^(from __future__ import annotations)$", rf"\1; {_IMPORTS}"),
)
SAMPLE = Path(__file__).with_name("sample.py")
# Statements that are wrong in some versions: from the first number on, up to before the second.
CANARY = (
    ("config.set_flag(trt.BuilderFlag.FP16)", (11, 0), (99, 0)),
    ("config.tiling_optimization_level", (0, 0), (10, 13)),
    ("config.max_workspace_size = 1", (0, 0), (99, 0)),
    ("engine.device_memory_size", (11, 0), (99, 0)),
    ("trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH", (11, 0), (99, 0)),
    ("nv.BuilderFlag.FP16", (11, 0), (99, 0)),
    ("nv.Builder(nv.Logger()).create_builder_config().no_such", (0, 0), (99, 0)),
    ('context.set_tensor_address("x", "y")', (0, 0), (99, 0)),
    ("config.set_flag(trt.BuilderFlag.REFIT)", (99, 0), (99, 0)),
)
_CANARY = "canary.py"
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "_data")
_HEAD = f"""import tensorrt as trt
from {stubs.MODULE} import Module
def wrong(
    nv: Module, config: trt.IBuilderConfig, engine: trt.ICudaEngine, context: trt.IExecutionContext
) -> None:
"""
_ERROR = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): error: (?P<text>.*)")


def wrong_lines(version: str) -> set[int]:
    """The lines of the canary that mypy must complain of."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    first = len(_HEAD.splitlines()) + 1
    return {first + at for at, (_, since, until) in enumerate(CANARY) if since <= numbers < until}


def users(root: Path) -> list[Path]:
    """Our files that speak to TensorRT, relative to `root`."""
    files = sorted((root / "deploykit").rglob("*.py"))
    return [path.relative_to(root) for path in files if _USES.search(path.read_text("utf-8"))]


def copied(root: Path, files: Sequence[Path], out: Path) -> None:
    """The package in `out`, `files` of it with types for what is handed about as a module.

    No line is added, so that mypy's line numbers are those of the originals.
    """
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(root / "deploykit", out / "deploykit", ignore=_NOT_COPIED)
    for file in files:
        text = (root / file).read_text(encoding="utf-8")
        for pattern, instead in _TYPED:
            text = re.sub(pattern, instead, text)
        (out / file).write_text(text, encoding="utf-8")
    (out / SAMPLE.name).write_text(SAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    body = "".join(f"    {statement}\n" for statement, _, _ in CANARY)
    (out / _CANARY).write_text(_HEAD + body, encoding="utf-8")


def problems(folder: Path, version: str, files: Sequence[Path]) -> list[str]:
    """What mypy finds in the copy `folder` with the stubs beside it, and what it fails to find."""
    command = [sys.executable, "-m", "mypy", "--no-pretty", "--no-error-summary"]
    command += ["--config-file", str(ROOT / "pyproject.toml"), "--strict", "--no-color-output"]
    # the copy knows more types than the original: what was Any, and the ignores for that, are left
    command += ["--no-warn-unused-ignores", "--no-warn-return-any"]
    # what these files import is the lint's affair, and would take a minute more: here it is Any
    command += ["--follow-imports=skip", "--allow-subclassing-any", "--allow-any-generics"]
    command += ["--allow-untyped-decorators", "--no-warn-unreachable"]
    command += ["--cache-dir", str(folder.parent / "mypy")]
    done = subprocess.run(
        [*command, *map(str, files), SAMPLE.name, _CANARY],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(folder.parent / version)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        return [f"mypy failed: {(done.stdout + done.stderr).strip()}"]
    found = [match for line in done.stdout.splitlines() if (match := _ERROR.match(line))]
    caught = {int(match["line"]) for match in found if match["file"] == _CANARY}
    said = [match[0] for match in found if match["file"] != _CANARY]
    lines = (folder / _CANARY).read_text(encoding="utf-8").splitlines()
    for line in sorted(caught ^ wrong_lines(version)):
        verb = "refuses" if line in caught else "accepts"
        said.append(
            f"mypy with the stubs of {version} {verb} what it should not: {lines[line - 1]}"
        )
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="*", default=list(stubs.VERSIONS))
    options = parser.parse_args()
    folder, files = options.folder.resolve() / "checked", users(ROOT)
    failed = False
    for version in options.versions:
        try:
            stubs.setup(options.folder, version)
        except fetch.Unobtainable as exc:
            sys.stdout.write(f"skipped: types against TensorRT {version}: {exc}\n")
            continue
        copied(ROOT, files, folder)
        said = problems(folder, version, files)
        failed |= bool(said)
        sys.stdout.write("".join(f"{line}\n" for line in said))
        verdict = f"{len(said)} problems" if said else "no error"
        sys.stdout.write(f"TensorRT {version}: mypy --strict: {verdict} in {len(files)} files\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
