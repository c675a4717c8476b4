"""NVIDIA's real ONNX parser and builder on a machine without a GPU, from PyPI alone.

    python -m scripts.nvidia.rig .rig && PYTHONPATH=.rig/site python -c "import tensorrt"

In: a folder. Out: FOLDER/site with NVIDIA's wheels of TensorRT for RTX, bindings and library of one
version (95 MB to download), and the module `tensorrt` (`bridge.py`) on top. Loading, running and
inspecting a plan needs an NVIDIA driver, and a plan made here is an RTX one: it proves that a file
parses, that its types agree and that it builds, nothing of speed. Does nothing where the folder is
up to date; where it cannot be made it prints the reason and exits 0.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.nvidia import fetch

VERSION = "1.7.1.116"
BRIDGE = Path(__file__).with_name("bridge.py")

CHECK = """
import tensorrt as trt
logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
x = network.add_input("x", trt.float32, (1, 8))
network.mark_output(network.add_unary(x, trt.UnaryOperation.NEG).get_output(0))
plan = builder.build_serialized_network(network, builder.create_builder_config())
print(memoryview(plan).nbytes)
"""


def setup(folder: Path) -> Path:
    """Make `folder`/site unless it is up to date. Raises Unobtainable where that cannot be."""
    site = folder.resolve() / "site"
    stamp = _stamp()
    if fetch.made_with(site) == stamp:
        return site
    fetch.check_machine()
    with fetch.whole(site, stamp) as work:
        names = ("bindings", "libs")
        fetch.install(work, *(f"tensorrt-rtx-cu13-{name}=={VERSION}" for name in names))
        (work / "tensorrt").mkdir()
        shutil.copyfile(BRIDGE, work / "tensorrt" / "__init__.py")
        _check(work)
    return site


def _stamp() -> str:
    sources = b"".join(path.read_bytes() for path in (Path(__file__), BRIDGE))
    digest = hashlib.sha256(sources).hexdigest()
    return f"{VERSION} {sys.version_info[:2]} {digest}\n"


def _check(site: Path) -> None:
    """Build a network of one layer in a process of its own: what does not fit together crashes."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0 or not int(done.stdout or 0):
        last = (done.stderr.strip().splitlines() or ["no plan"])[-1]
        raise fetch.Unobtainable(f"does not work here (exit {done.returncode}): {last}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        sys.stdout.write(f"PYTHONPATH={setup(folder)}\n")
    except fetch.Unobtainable as exc:
        sys.stdout.write(f"skipped: NVIDIA's parser and builder: {exc}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
