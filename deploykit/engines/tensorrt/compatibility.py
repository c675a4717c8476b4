"""Decide whether this machine may load a TensorRT plan, before TensorRT reads a byte of it.

TensorRT crashes on some damaged plans and accepts others: only a plan that its manifest describes
is loaded. A plan can contain code or need plugins: `built_here` decides whether to trust these. An
error names each difference and the command that builds the plan again. At the end: the plugins and
the log of TensorRT, one for all builds and engines of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from deploykit.core.artefact import Artefact, ArtefactLike, Manifest, wrong_format
from deploykit.core.errors import (
    BadInput,
    DeploykitError,
    NotFound,
    Unsupported,
    first_line,
    os_reason,
    quote,
)
from deploykit.core.extras import install_command, require
from deploykit.core.files import cache_folder, make_folder, manifest_path, sha256
from deploykit.core.machine import version_numbers
from deploykit.core.precision import CALIBRATED

if TYPE_CHECKING:
    from deploykit.engines.cuda.driver import CudaDevice

# Opening a version compatible plan, which contains host code, or a plugin, which is a library, runs
# code. The manifest next to it proves nothing, as the plan's author wrote it too. So `build` adds
# their SHA-256 to a list in the user's cache folder. A signature in the manifest would need a
# secret in the same folder, and a new signature whenever evidence is added to the manifest.

# A link could lead to any list of hashes that the user has.
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def built_here(manifest: Manifest) -> bool:
    """Return whether opening the engine runs no code, or only code that `record_build` recorded."""
    digests = _digests_of_code(manifest)
    return not digests or digests <= _read()


def record_build(manifest: Manifest) -> bool:
    """Record an engine that was just built, and its plugins. Returns `built_here` afterwards.

    The result is False if the list cannot be written, or if others can write to it.
    """
    if built_here(manifest):
        return True
    lines = "\n".join(["", *sorted(_digests_of_code(manifest)), ""])  # it ends a cut line
    try:
        path = list_path()
        make_folder(path.parent)
        flags = _FLAGS | os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
            file.write(lines)
    except (OSError, RuntimeError, DeploykitError):  # RuntimeError: no home folder
        return False
    return built_here(manifest)


def list_path() -> Path:
    """Return the path of the list of this user's builds here: one SHA-256 per line."""
    return cache_folder() / "built-here.sha256"


def _digests_of_code(manifest: Manifest) -> set[str]:
    """Return the SHA-256 of the plan and its plugins; none if opening them runs no code."""
    if not (manifest.version_compatible or manifest.plugins):
        return set()
    return {manifest.sha256.lower(), *manifest.plugins.values()}


def _read() -> set[str]:
    """Return the recorded digests; none if another user owns or could have written the file."""
    try:
        with os.fdopen(os.open(list_path(), _FLAGS), encoding="ascii") as file:
            info = os.fstat(file.fileno())
            own = info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            return set(file.read().split()) if own else set()
    except (OSError, RuntimeError, ValueError):
        return set()


# This is a key of `Manifest.built_on`, in addition to those of `Here.facts`.
HARDWARE_COMPATIBLE = "hardware_compatible"  # "ampere-plus" or "same-compute-capability"
_OLDEST = (10, 0)  # the first version with this API; tested from 10.3
_NO = ("", "no", "false", "none")
_CROSSED = {(10, 11)}  # NVIDIA's support matrix of 11.4.1, "version compatibility"
# CUDA major -> its oldest driver branch. Source: CUDA Compatibility, "Minor Version Compatibility"
LEAST_DRIVERS: Mapping[int, int] = {12: 525, 13: 580}


@dataclass(frozen=True)
class Here:
    """The facts of this machine that a plan depends on. Empty strings and 0 are not compared."""

    tensorrt: str  # "10.13.3.9"
    gpu: str  # "NVIDIA H200"
    compute_capability: str  # "9.0"
    sm_count: int  # the usable ones: a power mode or a MIG slice has fewer
    driver: str  # "580.65.06"
    cuda: str  # "13.0", the newest CUDA that this driver runs
    tensorrt_cuda: str = ""  # "12", the CUDA that TensorRT was built for
    architecture: str = ""  # "aarch64", the CPU's

    def facts(self) -> dict[str, str]:
        """Return the `built_on` of a manifest, whose `cuda` is that of the plan's kernels.

        The newest CUDA of this driver says nothing of them: where TensorRT's is not known, none is
        recorded, and TensorRT decides.
        """
        facts = {key: str(value) for key, value in vars(self).items() if value}
        facts["cuda"] = facts.pop("tensorrt_cuda", "")
        return {key: value for key, value in facts.items() if value}


def read_machine(driver: CudaDevice) -> Here:
    """Return the facts of the GPU and of the installed TensorRT. Raises MissingExtra."""
    version, major = str(require("tensorrt").__version__), tensorrt_cuda()
    return Here(version, **driver.describe(), tensorrt_cuda=major, architecture=platform.machine())


def tensorrt_cuda() -> str:
    """Return the CUDA major in the name of pip's TensorRT; "" if that is not of pip, or both are.

    Then no CUDA is recorded or compared: TensorRT decides.
    """
    found = []
    for major in ("12", "13"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(f"tensorrt-cu{major}-bindings")
            found.append(major)
    return found[0] if len(found) == 1 else ""


def place_of(built: Mapping[str, str]) -> str:
    """Return the GPU and the TensorRT in a `built_on` or `Here.facts`; empty if one is missing."""
    names = [built.get(key, "") for key in ("gpu", "compute_capability", "tensorrt")]
    return "{} ({}), TensorRT {}".format(*names) if all(names) else ""


@dataclass(frozen=True)
class PlanFile:
    """The bytes of a plan that may be loaded; `notes` are warnings, one sentence each."""

    path: Path
    content: bytes
    manifest: Manifest | None
    notes: tuple[str, ...]
    host_code: bool = False  # a version compatible plan contains its own runtime
    dla: int | None = None  # the DLA core that some of its layers run on


def open_plan(source: ArtefactLike, here: Here, trust: bool = False) -> PlanFile:
    """Return the plan, as `check_plan` does. An Artefact is not hashed again."""
    artefact = Artefact.open(source)
    if artefact.format != "tensorrt":
        raise wrong_format(artefact, artefact.format, "a TensorRT engine")
    return check_plan(artefact.path, artefact.manifest, here, trust)


def check_plan(path: Path, manifest: Manifest | None, here: Here, trust: bool = False) -> PlanFile:
    """Return the plan at `path`, if `manifest` describes it and this machine can run it.

    `trust`: load also a plan without a manifest, with a note, and one with code from elsewhere.
    Raises BadInput for a file that is damaged, not described or not a plan, or whose code is not
    trusted, Unsupported for a plan of another TensorRT, GPU or driver.
    """
    try:
        content = path.read_bytes()  # read once: the hashed bytes are loaded
    except OSError as exc:
        raise BadInput(f"{path}: cannot be read: {os_reason(exc)}") from exc
    name = manifest_path(path).name
    if manifest is None and trust:
        note = f"{path}: loaded without a manifest: neither its origin nor its GPU was checked"
        return PlanFile(path, content, None, (note,))
    if manifest is None:
        raise BadInput(
            f"{path}: has no manifest ({name}), so its origin and target are unknown",
            hint="an engine can run code: build it here, or open your own with `trust`",
        )
    weights = manifest.evidence.weights is not None  # which no engine has in another file
    if manifest.format != "tensorrt" or weights or not manifest.sha256:
        raise BadInput(f"{path}: {name} does not describe an engine", hint="build it again")
    if hashlib.sha256(content).hexdigest() != manifest.sha256.lower():
        raise BadInput(
            f"{path}: is not the file that {name} describes (SHA-256 differs): truncated, "
            "damaged or changed",
            hint="copy it again, or build it again",
        )
    printable = {  # for a terminal
        key: "".join(c for c in text if c.isprintable())[:80]
        for key, text in manifest.built_on.items()
    }
    manifest = replace(manifest, built_on=printable)
    wrong = tuple(differences(manifest.built_on, here, manifest.version_compatible))
    if wrong:
        raise Unsupported(
            f"{path}: was not built for this machine: {'; '.join(wrong)}",
            hint=f"build it here: {rebuild(path, manifest, here)}",
        )
    if not trust and not built_here(manifest):
        code = "brings plugin libraries" if manifest.plugins else "contains host code"
        raise BadInput(
            f"{path}: {code}, and was not built by you on this machine",
            hint="an engine can run code: build it here, or open your own with `trust`",
        )
    core, notes = manifest.built_on.get("dla", ""), tuple(_notes(path, manifest, here))
    dla = int(core) if re.fullmatch("[0-9]", core) else None
    return PlanFile(path, content, manifest, notes, manifest.version_compatible, dla)


def differences(
    built: Mapping[str, str], here: Here, version_compatible: bool = False
) -> Iterator[str]:
    """Yield each reason, as a clause, why a plan with this `built_on` cannot run here."""
    version = built.get("tensorrt", "")
    there, now = version_numbers(version), version_numbers(here.tensorrt)
    known = min(len(there), len(now))  # a Jetson's package says 10.3.0, PyPI's 10.3.0.26
    there, now = there[:known], now[:known]
    crosses = there[:1] == now[:1] or there[:1] + now[:1] in _CROSSED
    later = version_compatible and crosses and there < now
    if there != now and not later:
        yield f"TensorRT {here.tensorrt} here, {version} there"
    cpu = built.get("architecture", "")
    if cpu and here.architecture and cpu != here.architecture:
        yield f"{here.architecture} here, {cpu} there"
    level = built.get(HARDWARE_COMPATIBLE, "").lower()
    capability = built.get("compute_capability", "")
    same = not (capability and here.compute_capability) or capability == here.compute_capability
    if level not in _NO and level != "same-compute-capability":  # it needs Ampere or later
        if version_numbers(here.compute_capability) < (8, 0) and here.compute_capability:
            yield f"compute capability {here.compute_capability}, the engine needs 8.0 or later"
    elif not same:
        yield (
            f"compute capability {here.compute_capability} here ({here.gpu}), {capability} there "
            f"({built.get('gpu', 'unknown GPU')})"
        )
    elif level in _NO:  # GPUs of one compute capability differ in memory and multiprocessors
        gpu, count = built.get("gpu", ""), built.get("sm_count", "")
        if gpu and here.gpu and gpu != here.gpu:
            yield f"{here.gpu} here, {gpu} there"
        elif count and here.sm_count and count != str(here.sm_count):
            yield f"{here.sm_count} multiprocessors in use here, {count} there (a power mode, MIG)"
    needed, runs = version_numbers(built.get("cuda", "")), version_numbers(here.cuda)
    if needed and runs and runs[0] < needed[0]:
        branch = LEAST_DRIVERS.get(needed[0])
        yield (
            f"the driver{f' {here.driver}' if here.driver else ''} runs CUDA {here.cuda}, the "
            f"engine needs CUDA {needed[0]}{f': driver {branch} or later' if branch else ''}"
        )


def _notes(path: Path, manifest: Manifest, here: Here) -> Iterator[str]:
    built = manifest.built_on
    missing = [key for key in ("tensorrt", "gpu", "compute_capability") if not built.get(key)]
    if missing:
        yield f"{path}: its manifest does not name its {' and '.join(missing)}"
    driver = built.get("driver", "")
    if driver and here.driver and version_numbers(here.driver) < version_numbers(driver):
        yield f"{path}: was built with driver {driver}; the older {here.driver} here is not tested"


def rebuild(path: Path, manifest: Manifest, here: Here) -> str:
    """Return the command that builds the plan for this machine, at its sizes and precision.

    A plan made from two files was quantized during the build, so the precision is an option.
    """
    built = manifest.built_on

    def name(key: str, default: str) -> str:  # without its folder, as no path there is trusted
        return shlex.quote(PurePosixPath(built.get(key, "")).name or default)

    other = built.get("gpu") not in (None, here.gpu)
    precision = built.get("precision", "") if len(manifest.made_from) > 1 else ""
    options = [
        ("--profile", "auto" if other else built.get("profile", "auto")),
        ("--precision", precision),
        ("--batch", built.get("batch", "")),
        *(("--axis", axis) for axis in built.get("axes", "").split()),
        ("-o", str(path)),
    ]
    words = [f"{option} {shlex.quote(value)}" for option, value in options if value]
    if precision in (*CALIBRATED, "auto"):
        words.append(f"--calib {name('calib', 'DATA')}")
    return " ".join(["deploykit build", name("model", "MODEL.onnx"), *words])


def check_version(version: str) -> None:
    """Raise Unsupported for a TensorRT before 10."""
    if version_numbers(version) < _OLDEST:
        raise Unsupported(
            f"TensorRT {version} is installed, 10.3 or later is needed: before 10 a network has no "
            "types of its own, so the precision that was verified would be lost",
            hint="JetPack 6.1 brings TensorRT 10.3; elsewhere: " + install_command("tensorrt"),
        )


# Plugins are registered before TensorRT parses a graph or loads a plan that needs them.

_CREATORS = ("getCreators", "getPluginCreators")  # a library without them registers itself
_loaded: dict[Path, ctypes.CDLL] = {}


def load_plugins(nv: Any, libraries: Iterable[Path] = ()) -> None:
    """Register NVIDIA's own plugins, then those of `libraries`, each once per process.

    Loading a library runs its code. Raises Unsupported if one does not load.
    """
    try:
        nv.init_libnvinfer_plugins(logger(nv), "")
    except (RuntimeError, TypeError, ValueError) as exc:
        raise Unsupported(f"NVIDIA's own plugins do not load: {first_line(exc)}") from exc
    for library in libraries:
        path = library.resolve()
        if path in _loaded:
            continue
        registry = nv.get_plugin_registry()
        before = len(getattr(registry, "all_creators", ()))
        try:
            found = ctypes.CDLL(str(path))
            itself = len(getattr(registry, "all_creators", ())) > before  # twice is an error
            wanted = not itself and any(hasattr(found, name) for name in _CREATORS)
            if wanted and registry.load_library(str(path)) is None:
                raise RuntimeError("TensorRT refused it")
        except (OSError, RuntimeError) as exc:
            raise Unsupported(f"{library}: cannot be loaded: {first_line(exc)}") from exc
        _loaded[path] = found  # keep it loaded: running plans use its code


def recorded_plugins(plan: Path, recorded: Mapping[str, str]) -> list[Path]:
    """Return the libraries that a plan needs, next to it or where they were at the build.

    `recorded`: path -> SHA-256. Raises NotFound for a missing one, BadInput for another file.
    """
    found = []
    for name, digest in recorded.items():
        places = (plan.parent / Path(name).name, Path(name))
        path = next(filter(os.path.isfile, places), None)  # a name may be impossible
        if path is None:
            raise NotFound(
                f"{plan}: needs the plugin library {quote(Path(name).name)}",
                hint=f"put it next to {plan.name}, or build the engine again",
            )
        if sha256(path) != digest:
            raise BadInput(
                f"{path}: is not the plugin library that {plan.name} was built with (SHA-256 "
                "differs)",
                hint="copy it again, or build the engine again",
            )
        found.append(path)
    return found


# TensorRT gives its errors only in its log. It keeps the first logger of a process and ignores any
# other, so that one serves all engines: it keeps the lines of each thread, as engines of several
# threads fail apart from each other.

_logger = logging.getLogger(__name__)
_KEPT = 50  # lines


@dataclass
class LogLines:
    """Errors and warnings that TensorRT logged, oldest first."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@functools.cache
def logger(nv: Any) -> Any:
    """Return the process's ILogger for `nv`; every line also goes to `logging`, at level debug.

    A build sets `sink` to collect its lines, also from TensorRT's own threads; otherwise error
    lines stay in `errors` of the thread that they came from.
    """
    base: Any = nv.ILogger
    severity: Any = base.Severity

    class Log(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.sink: LogLines | None = None
            self._of_thread = threading.local()

        @property
        def errors(self) -> deque[str]:
            lines: deque[str] = vars(self._of_thread).setdefault("errors", deque(maxlen=_KEPT))
            return lines

        def log(self, level: Any, text: str) -> None:
            if level in (severity.INTERNAL_ERROR, severity.ERROR):
                (self.errors if self.sink is None else self.sink.errors).append(text)
            elif level == severity.WARNING and self.sink is not None:
                self.sink.warnings.append(text)
            _logger.debug("%s: %s", level, text)

    return Log()
