"""Open a `.trt` plan with TensorRT, after a check against its manifest and this machine."""

from __future__ import annotations

import contextlib
import functools
import mmap
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.core.artefact import ArtefactLike
from deploykit.core.errors import Unsupported
from deploykit.core.extras import require
from deploykit.core.machine import file_text
from deploykit.engines.tensorrt.compatibility import (
    Here,
    check_version,
    load_plugins,
    open_plan,
    place_of,
    recorded_plugins,
)
from deploykit.engines.tensorrt.engine import TensorRtEngine

if TYPE_CHECKING:
    from deploykit.engines.cuda.driver import CudaDevice

trt = require("tensorrt")
_MAPS = Path("/proc/self/maps")  # of this process, which has loaded TensorRT
_CUDART = re.compile(rb"libcudart\.so\.(\d{2})\b")  # a leading \b would take 30 x the time


def open_engine(
    source: ArtefactLike,
    device: str = "auto",
    threads: int | None = None,  # noqa: ARG001 - a GPU engine uses no CPU threads
    trust: bool = False,
    *,
    slots: int = 2,
    graphs: Sequence[int] = (),
) -> TensorRtEngine:
    """Open a plan on "cuda:N" ("auto" and "cuda": the first GPU).

    `trust`: also open a plan without a manifest, or with code from elsewhere. `slots`, `graphs`:
    see `Pipeline`. Raises BadInput for a plan that is damaged, not described or not trusted,
    Unsupported for a plan of another machine, or without a GPU.
    """
    path = Path(source)
    if device == "cpu":
        raise Unsupported(
            f"{path}: a TensorRT engine runs on a GPU only",
            hint="deploykit build MODEL.onnx --profile cpu makes a file for the CPU",
        )
    check_version(str(trt.__version__))
    from deploykit.engines.cuda.driver import CudaDevice  # after TensorRT's check

    driver = CudaDevice(int(device.partition(":")[2] or 0))
    machine = here(driver)
    plan, manifest = open_plan(source, machine, trust)
    load_plugins(trt, recorded_plugins(path, manifest.plugins if manifest else {}))
    engine = TensorRtEngine(trt, driver, path, plan, manifest, slots=slots, graphs=graphs)
    engine.place = place_of(machine.facts())
    return engine


def here(driver: CudaDevice) -> Here:
    version, major = str(trt.__version__), tensorrt_cuda()
    return Here(version, **driver.describe(), tensorrt_cuda=major, architecture=platform.machine())


@functools.cache
def tensorrt_cuda() -> str:
    """Return the CUDA major of TensorRT; empty if it is not known.

    pip's packages have it in their names. A library of another origin, as of a .deb or of an image,
    names the libcudart that it loads.
    """
    found = set()
    for major in ("12", "13"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(f"tensorrt-cu{major}-bindings")
            found.add(major)
    if not found:
        for path in set(re.findall(r"(?m)/\S*/libnvinfer\.so\.[\d.]+$", file_text(_MAPS))):
            with contextlib.suppress(OSError, ValueError), Path(path).open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                found |= {each.decode() for each in _CUDART.findall(content)}
    return found.pop() if len(found) == 1 else ""
