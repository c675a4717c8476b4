"""Keep TensorRT's timing cache, its measurements of kernels, between builds.

Two builds that start from one cache choose the same kernels, unless one meets a kernel that was not
timed before.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.builders.tensorrt.errors import NO_DRIVER
from deploykit.builders.tensorrt.memory import mib
from deploykit.builders.tensorrt.module import collect_log, maybe
from deploykit.core.errors import BadInput, DeploykitError, os_reason
from deploykit.core.files import atomic_write, cache_folder, make_folder, open_readable
from deploykit.core.machine import Machine

if TYPE_CHECKING:
    import tensorrt as trt

SUFFIX = ".cache"
_MOST_BYTES = 256 << 20  # timings of some 10^5 kernels take a few MiB


def cache_path(tensorrt: str, here: Machine) -> Path | None:
    """The cache file of this TensorRT, GPU and driver; None where there is no GPU."""
    gpu = here.gpus[0] if here.gpus else None
    name = gpu.name if gpu else here.board  # an older Jetson has no nvidia-smi
    driver = gpu.driver if gpu else here.l4t
    if name is None or driver is None:
        return None
    parts = (tensorrt, name, driver, here.power_mode or "")
    file = "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts if part)
    return cache_folder() / "timing" / f"{file}{SUFFIX}"


def use_cache(nv: Any, config: trt.IBuilderConfig, path: Path) -> tuple[bool, str, tuple[str, ...]]:
    """Set the cache at `path` on `config`, an empty one if there is no file.

    Returns whether to write the cache back after the build, the SHA-256 of the cache in use (empty
    without one) and notes. A refused file is replaced where its name ends with .cache, unless only
    the driver is missing. Raises BadInput when the file cannot be read.
    """
    content = _read(path)
    with collect_log(nv) as lines:
        cache = maybe(config.create_timing_cache(content))
        taken = cache is not None and config.set_timing_cache(cache, False)
        if not taken and content:
            config.set_timing_cache(config.create_timing_cache(b""), False)
    if not content or (taken and not mentions_cache(lines.errors + lines.warnings)):
        return True, hashlib.sha256(content).hexdigest() if content else "", ()
    if any(NO_DRIVER in line for line in lines.errors):
        return (
            False,
            "",
            (f"{path}: the timing cache is not used: this machine has no NVIDIA driver",),
        )
    ours = path.suffix == SUFFIX
    kept = "" if ours else f", and the file stays as it is: its name does not end with {SUFFIX}"
    note = (
        f"{path}: TensorRT refused the timing cache (damaged, or from another TensorRT or GPU); "
        f"the build starts with an empty one{kept}"
    )
    return ours, "", (note,)


def _read(path: Path) -> bytes:
    """The file's bytes, none where there is no file or an empty one. Raises BadInput."""
    try:
        info = path.stat() if path.exists() else None
    except OSError as exc:
        raise BadInput(f"{path}: the timing cache cannot be read: {os_reason(exc)}") from exc
    if info is None or (stat.S_ISREG(info.st_mode) and not info.st_size):
        return b""
    with open_readable(path) as handle:
        content = handle.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise BadInput(f"{path}: is above {mib(_MOST_BYTES)}, and no timing cache")
    return content


def mentions_cache(log: Sequence[str]) -> bool:
    """Whether the log complains about the timing cache, which TensorRT reports nowhere else."""
    return any("timing cache" in line.lower() for line in log)


def keep_cache(config: trt.IBuilderConfig, path: Path) -> tuple[str, tuple[str, ...]]:
    """Write the timings of the build to `path`; returns their SHA-256 and notes.

    A cache that cannot be written becomes a note, not an error.
    """
    cache = maybe(config.get_timing_cache())
    if cache is None:
        return "", ()
    content = bytes(memoryview(cache.serialize()))
    digest = hashlib.sha256(content).hexdigest()
    try:
        make_folder(path.parent)
        with atomic_write(path) as tmp:
            tmp.write_bytes(content)
    except DeploykitError as exc:
        return digest, (f"the timing cache was not written: {exc.message}",)
    return digest, ()
