"""Check that this machine fits a bundle, and make the key of all that its engine depends on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from operator import eq
from pathlib import Path

from deploykit import __version__
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.json_value import Record
from deploykit.core.machine import JETPACKS, Machine, find_jetpack, release_numbers
from deploykit.core.profile import Profile, fits, load_profile, profile_names
from deploykit.core.runtime import RUNTIMES
from deploykit.deploying.folder import Bundle
from deploykit.engines.engine import check_device
from deploykit.engines.tensorrt.compatibility import LEAST_DRIVERS, Here, read_machine
from deploykit.evaluation.doctor import (
    first_jetpack,
    in_range,
    jetpack_fits,
    profile_differences,
    range_text,
)

_DIGITS = 16  # hex digits of the digest in a folder's name
_ALIKE = ("name", "runtime", "architecture", "compute_capability", "gpu", "sm_count")
_FIRST = "make a bundle for this machine: deploykit bundle MODEL --profile {}"


@dataclass(frozen=True)
class EngineKey(Record):
    """All that an engine depends on. A field is empty or 0 if absent, as the GPU on profile `cpu`.

    `model_sha256` covers the ONNX file with its weights, manifest and golden samples. `batch`:
    "smallest,usual,largest", then ";T=16,128,512" for other axes. `runtime` has the full version,
    "tensorrt 10.3.0".
    """

    name: str
    model_sha256: str
    profile: str
    batch: str
    runtime: str
    architecture: str
    compute_capability: str = ""
    gpu: str = ""
    sm_count: int = 0
    driver: str = ""
    l4t: str = ""
    power_mode: str = ""
    deploykit: str = ""

    @property
    def digest(self) -> str:
        """Hash of all fields, part of the name of the slot's folder."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]

    def changes(self, other: EngineKey) -> str:
        """Describe the differences: "driver 535.1 -> 580.2, power_mode 15W -> 25W"; no hashes."""
        before, now = self.to_dict(), other.to_dict()
        return ", ".join(
            field if field == "model_sha256" else f"{field} {before[field]} -> {value}"
            for field, value in now.items()
            if before[field] != value
        )

    def may_replace(self, other: EngineKey) -> bool:
        """Return whether an engine of this key is a valid substitute for one of `other`."""
        return all(getattr(self, field) == getattr(other, field) for field in _ALIKE)


def gpu_number(device: str) -> int:
    """Return the number of the GPU that "auto", "cuda" or "cuda:N" names; BadInput for a CPU."""
    check_device(device)
    if device == "cpu":
        raise BadInput("`device` cpu: the engine runs on a GPU")
    return int(device.partition(":")[2] or 0)


def read_gpu(number: int, _on_progress: object = None) -> Here:
    """Read GPU and TensorRT. Raises MissingExtra without TensorRT, Unsupported without a GPU."""
    from deploykit.engines.cuda.driver import CudaDevice

    return read_machine(CudaDevice(number))


def check_machine(bundle: Bundle, profile: Profile, machine: Machine) -> list[str]:
    """Compare processor, board or GPU, else raise Unsupported; other differences are notes."""
    if profile.architecture not in ("any", machine.architecture):
        raise Unsupported(
            f"bundle '{bundle.name}' is for {profile.name}, whose processor is "
            f"{profile.architecture}; this machine's is {machine.architecture}",
            hint=_FIRST.format("NAME"),
        )
    notes = list(profile_differences(profile, machine))
    known = machine.board_ids if profile.boards else profile.gpu_names and machine.gpus
    if known and not fits(profile, machine):
        what = (machine.board or machine.board_ids[0]) if profile.boards else machine.gpus[0].name
        own = [each.name for each in map(load_profile, profile_names()) if fits(each, machine)]
        unknown = "" if own else ", which no profile names"
        raise Unsupported(
            f"bundle '{bundle.name}' is for {profile.name}, this machine is {what}{unknown}",
            hint=_FIRST.format((*own, "auto")[0]),
        )
    release = find_jetpack(machine.l4t) if profile.boards and machine.l4t else None
    if release and not jetpack_fits(profile, release):
        raise Unsupported(notes[0])
    if profile.boards and not known:
        notes.insert(0, "the board is not known: /proc/device-tree is not readable here")
    wanted, mode = profile.power_mode, machine.power_mode
    if wanted and mode and mode != wanted:
        notes.append(f"the power mode is {mode}, the bundle was planned for {wanted}")
    return notes


def check_gpu(profile: Profile, machine: Machine, gpu: Here) -> None:
    """Compare TensorRT and the driver. Raises Unsupported."""
    if not in_range(profile, gpu.tensorrt):
        versions = range_text(profile)
        first = first_jetpack(profile) if profile.boards else None
        raise Unsupported(
            f"TensorRT {gpu.tensorrt} is here; {profile.name} needs {versions}",
            hint="install "
            + (f"JetPack {first.version} or later" if first else f"TensorRT {versions}"),
        )
    version = gpu.tensorrt.split(".")  # 10.3.0 agrees with 10.3.0.26
    made_for = [row for row in JETPACKS if all(map(eq, row.tensorrt.split("."), version))]
    majors = {release_numbers(each.l4t)[0] for each in made_for}
    board = release_numbers(machine.l4t or "")
    if profile.boards and board and majors and board[0] not in majors:
        raise Unsupported(
            f"TensorRT {gpu.tensorrt} here is that of JetPack {made_for[0].version}, but the board "
            f"runs L4T {machine.l4t}",
            hint="build the image for the board's JetPack release",
        )
    driver, needed = release_numbers(gpu.cuda), release_numbers(gpu.tensorrt_cuda)
    if driver and needed and driver[0] < needed[0]:
        least = LEAST_DRIVERS.get(needed[0])
        raise Unsupported(
            f"driver {gpu.driver} runs CUDA {gpu.cuda}, TensorRT here is made for CUDA {needed[0]}",
            hint=f"install driver {least} or later" if least else None,
        )


def engine_key(bundle: Bundle, profile: Profile, machine: Machine, gpu: Here | None) -> EngineKey:
    """Return all that the engine of `bundle` depends on; `gpu` is None without a GPU."""
    folder = str(Path(bundle.model).parent)
    parts = {p: e.sha256 for p, e in bundle.files.items() if str(Path(p).parent) == folder}
    model = hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()
    packages = [machine.packages.get(name) for name in RUNTIMES[profile.runtime].packages]
    version = gpu.tensorrt if gpu else next(filter(None, packages), "")
    return EngineKey(
        name=bundle.name,
        model_sha256=model,
        profile=bundle.profile,
        batch=";".join((",".join(map(str, bundle.batch)), *bundle.axes)),
        runtime=f"{profile.runtime} {version}",
        architecture=machine.architecture,
        compute_capability=gpu.compute_capability if gpu else "",
        gpu=gpu.gpu if gpu else "",
        sm_count=gpu.sm_count if gpu else 0,
        driver=gpu.driver if gpu else "",
        l4t=machine.l4t or "",
        power_mode=machine.power_mode or "",
        deploykit=__version__,
    )
