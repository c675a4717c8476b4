"""NVIDIA's real ONNX parser and builder on a machine without a GPU, from PyPI alone.

    python -m tests.nvidia.rig .rig && PYTHONPATH=.rig/site python -c "import tensorrt"

In: a folder. Out: FOLDER/site with the modules `tensorrt_bindings` (NVIDIA's wheel), `tensorrt`
(`bridge.py`) and the library of TensorRT for RTX that an ONNX Runtime wheel brings. Loading,
running and inspecting a plan needs an NVIDIA driver, and a plan made here is an RTX one: it proves
that a file parses, that its types agree and that it builds, nothing of speed. Does nothing where
the folder is up to date; where it cannot be made it prints the reason and exits 0.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.nvidia import fetch

BINDINGS = "11.4.0.106"
EP = "0.5.0"  # ONNX Runtime's plug-in for TensorRT for RTX: it holds library and parser
BRIDGE = Path(__file__).with_name("bridge.py")
# Of the wheel, what is not needed: 77 of 308 MB.
_UNUSED = (
    "libtensorrt_plugins.so",
    "libtensorrt_shim.so",
    "libonnxruntime_providers_*.so",
    "libcudart.so.*",
)
_NO_PLUGINS = (
    "int initLibNvInferPlugins(void *log, const char *space) { (void)log; (void)space; return 1; }"
)

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
        bindings = f"tensorrt-cu13-bindings=={BINDINGS}"
        fetch.install(work, bindings, f"onnxruntime-ep-nv-tensorrt-rtx-cu13=={EP}")
        _join(work)
        _check(work)
    return site


def _stamp() -> str:
    sources = b"".join(path.read_bytes() for path in (Path(__file__), BRIDGE))
    digest = hashlib.sha256(sources).hexdigest()
    return f"{BINDINGS} {EP} {sys.version_info[:2]} {digest}\n"


def _join(site: Path) -> None:
    """Libraries of the names that the bindings ask for, each of which loads TensorRT for RTX's.

    The bindings look for them in their own folder first (RPATH $ORIGIN).
    """
    own, rtx = site / "tensorrt_bindings", site / "onnxruntime_ep_nv_tensorrt_rtx"
    for pattern in _UNUSED:
        for path in rtx.glob(pattern):
            path.unlink()
    major = BINDINGS.partition(".")[0]
    for ours, theirs in (("nvinfer", "tensorrt_rtx"), ("nvonnxparser", "tensorrt_onnxparser_rtx")):
        found = sorted(rtx.glob(f"lib{theirs}.so.*"))
        if not found:
            raise fetch.Unobtainable(f"the wheel {EP} holds no lib{theirs}")
        short = rtx / f"lib{theirs}.so.{found[0].name.split('.so.')[1].partition('.')[0]}"
        short.symlink_to(found[0].name)  # the name it gives itself, by which the loader looks
        fetch.library(own / f"lib{ours}.so.{major}", "", needs=short)
    fetch.library(own / f"libnvinfer_plugin.so.{major}", _NO_PLUGINS)
    (site / "tensorrt").mkdir()
    shutil.copyfile(BRIDGE, site / "tensorrt" / "__init__.py")


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
