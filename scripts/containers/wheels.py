"""Whether pip finds wheels for aarch64 where nothing of it can be run: JetPack's Pythons.

uv resolves for the Python and the platform, markers and Requires-Python included, which pip checks
for the Python that it runs on; pip then looks for each file. Wheels for glibc 2.28 and older run
on every JetPack from 6 on. Nothing is installed.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.containers import rig

CASES = [
    (python, extras)
    for python in ("3.10", "3.12", "3.13")  # JetPack 6, JetPack 7, Debian 13
    for extras in ("cpu,serve", "jetson,serve")
]
PLATFORMS = (
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_26",
    "manylinux_2_17",
    "manylinux2014",
)


def resolve_all() -> Iterator[tuple[str, str, str, bool]]:
    """Python, extras, what was found, whether all was."""
    for python, extras in CASES:
        yield (python, extras, *resolve(python, extras))


def resolve(python: str, extras: str) -> tuple[str, bool]:
    """What was found as one line, and whether every package has a wheel."""
    uv = rig.tool("uv")
    chosen = [word for name in extras.split(",") for word in ("--extra", name)]
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        folder = Path(name)
        pins = folder / "pins.txt"
        platform = ["--python-version", python, "--python-platform", "aarch64-manylinux_2_28"]
        command = [uv, "pip", "compile", *platform, "--only-binary", ":all:", *chosen]
        command += ["--no-annotate", "--no-header", "--output-file", pins, "pyproject.toml"]
        done = subprocess.run(command, cwd=rig.ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip()[-400:], False
        words = ["--dry-run", "--quiet", "--report", folder / "report.json", "--no-deps"]
        words += [
            "--ignore-requires-python",
            "--ignore-installed",
            "--only-binary=:all:",
            "--implementation",
            "cp",
        ]
        words += ["--python-version", python, "--target", folder / "none", "--requirement", pins]
        for each in PLATFORMS:
            words += ["--platform", f"{each}_aarch64"]
        pip = rig.tool("pip")
        done = subprocess.run([pip, "install", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip().splitlines()[-1], False
        found = json.loads((folder / "report.json").read_text())["install"]
    names = {each["metadata"]["name"]: each["metadata"]["version"] for each in found}
    shown = ", ".join(
        f"{key} {names[key]}" for key in ("numpy", "onnx", "onnxruntime") if key in names
    )
    return f"{len(found)} wheels: {shown}", True
