#!/usr/bin/env python3
"""Write locks/*.lock: the packages of a bundle's container, with the hashes of their wheels.

`python scripts/lock_wheels.py [NAME...]` asks the package index through uv (`pip install uv`); a
release of deploykit writes them anew. Each serves Linux on x86-64 and aarch64, Python 3.10 to 3.13.
TensorRT is in none: on a Jetson it comes with JetPack, and elsewhere from NVIDIA's own index.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "locks"
TENSORRT = ("tensorrt-cu12", "tensorrt-cu13")
EXTRAS = ("cpu", "jetson", *TENSORRT)
TASKS = ("images", "text")  # one package each: tokenizers needs its own only to download files
_PYTHON = re.compile(r"-(?:cp3(?:10|11|12|13)-cp3\d+|cp3(?:[6-9]|1[0-3])-abi3|py3|py2\.py3)-")
_PLATFORM = re.compile(r"none-any\.whl|manylinux\S*_(?:x86_64|aarch64)\.whl")


def compiled(extra: str) -> dict[str, Any]:
    """What uv writes as pylock.toml for the extra and, but for a task's, `serve`; no TensorRT."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = project["optional-dependencies"]
    lines = [each for each in wanted[extra] if not each.startswith("tensorrt")]
    if extra not in TASKS:
        lines += [*project["dependencies"], *wanted["serve"]]
        lines.append("typer<0.29")  # as in the Dockerfiles: 0.29 brings pydantic
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder, "asked.in"), Path(folder, "pylock.toml")
        asked.write_text("\n".join(lines))
        options = "--quiet --universal --format pylock.toml --no-header --python-version 3.10"
        options += " --no-deps" if extra in TASKS else ""
        command = [sys.executable, "-m", "uv", "pip", "compile", *options.split(), asked, "-o", out]
        index = ["--default-index", "https://pypi.org/simple"]
        subprocess.run([*command, *index], check=True)
        return tomllib.loads(out.read_text("utf-8"))


def rows(lock: dict[str, Any]) -> list[str]:
    """A requirement with its marker and hashes for each package that Linux installs."""
    found = []
    for package in lock["packages"]:
        marker = re.sub(r" and sys_platform != 'win32'", "", package.get("marker", ""))
        marker = marker.replace("sys_platform != 'win32'", "")
        if "sys_platform" in marker:
            continue
        marker = re.sub(r"^python_full_version >= '3\.10'$", "", marker)
        hashes = [
            each["hashes"]["sha256"]
            for each in package.get("wheels", ())
            if _PYTHON.search(name := each.get("name") or each["url"].rpartition("/")[2])
            and _PLATFORM.search(name)
        ]
        if not hashes:
            raise SystemExit(f"{package['name']}: has no wheel for Linux")
        head = f"{package['name']}=={package['version']}" + (f" ; {marker}" if marker else "")
        found.append(" \\\n".join([head, *(f"    --hash=sha256:{h}" for h in sorted(hashes))]))
    return found


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for extra in sys.argv[1:] or (*EXTRAS, *TASKS):
        named = extra if extra in TASKS else f"{extra},serve"
        text = f"# deploykit[{named}]; written by scripts/lock_wheels.py\n"
        (FOLDER / f"{extra}.lock").write_text(text + "\n".join(rows(compiled(extra))) + "\n")


if __name__ == "__main__":
    main()
