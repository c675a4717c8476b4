"""Check that this machine is what a bundle is for, and name all that its engine depends on."""

from __future__ import annotations

import hashlib
from pathlib import Path

from deploykit import __version__
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.jetpack import JETPACKS, find_jetpack, release_numbers
from deploykit.core.machine import Machine
from deploykit.core.profile import Profile, fits, load_profile, profile_names
from deploykit.core.runtime import RUNTIMES
from deploykit.deploying.slots import EngineKey
from deploykit.engines.engine import check_device
from deploykit.engines.tensorrt.compatibility import LEAST_DRIVERS, Here
from deploykit.evaluation.bundle_folder import Bundle
from deploykit.evaluation.host import first_jetpack, in_range, range_text

_FIRST = "make a bundle for this machine: deploykit bundle MODEL --profile {}"


def gpu_number(device: str) -> int:
    """The number of the GPU that "auto", "cuda" or "cuda:N" names. Raises BadInput for a CPU."""

    check_device(device)
    if device == "cpu":
        raise BadInput("`device` cpu: this bundle's engine runs on a GPU")
    return int(device.partition(":")[2] or 0)


def read_gpu(number: int) -> Here:
    """The GPU and its TensorRT. Raises MissingExtra without TensorRT, Unsupported without a GPU."""
    from deploykit.engines.cuda.driver import CudaDevice
    from deploykit.engines.tensorrt.open import here

    return here(CudaDevice(number))


def check_machine(bundle: Bundle, profile: Profile, machine: Machine) -> list[str]:
    """Compare processor, board, JetPack and power mode; the differences that are no error.

    Raises Unsupported, the most basic difference first.
    """
    if profile.architecture not in ("any", machine.architecture):
        raise Unsupported(
            f"bundle '{bundle.name}' is for {profile.name}, whose processor is "
            f"{profile.architecture}; this machine's is {machine.architecture}",
            hint=_FIRST.format("NAME"),
        )
    if profile.boards:
        return [*_check_board(bundle, profile, machine), *_check_jetpack(profile, machine)]
    if machine.gpus and profile.gpu_names and not fits(profile, machine):
        raise _other_machine(bundle, profile, machine, machine.gpus[0].name)
    return []


def _check_board(bundle: Bundle, profile: Profile, machine: Machine) -> list[str]:
    notes = []
    if not machine.board_ids:
        notes.append("the board is not known: /proc/device-tree is not readable here")
    elif not fits(profile, machine):
        what = machine.board or machine.board_ids[0]
        raise _other_machine(bundle, profile, machine, what)
    wanted, mode = profile.power_mode, machine.power_mode
    if wanted and mode and mode != wanted:
        notes.append(
            f"the power mode is {mode}, the bundle was planned for {wanted}: sudo nvpmodel -m"
        )
    return notes


def _other_machine(bundle: Bundle, profile: Profile, machine: Machine, what: str) -> Unsupported:
    known = (each for each in map(load_profile, profile_names()) if fits(each, machine))
    found = next(known, None)
    return Unsupported(
        f"bundle '{bundle.name}' is for {profile.name}, this machine is {what}"
        + ("" if found else ", which no profile names"),
        hint=_FIRST.format(found.name if found else "auto"),
    )


def _check_jetpack(profile: Profile, machine: Machine) -> list[str]:
    """The board's release must bring a TensorRT that the profile takes."""
    if machine.l4t is None:
        return ["the JetPack release is not known: /etc/nv_tegra_release is not readable here"]
    release = find_jetpack(machine.l4t)
    if release is None:
        first, last = JETPACKS[0], JETPACKS[-1]
        if release_numbers(machine.l4t) < release_numbers(first.l4t):
            raise Unsupported(
                f"L4T {machine.l4t} is older than JetPack {first.version}, the first that "
                "deploykit knows",
                hint=_cure(profile),
            )
        return [f"L4T {machine.l4t} is newer than JetPack {last.version}, the last one known"]
    what = f"JetPack {release.version} (L4T {machine.l4t})"
    if profile.compute_capability not in release.compute_capabilities:
        raise Unsupported(f"{what} is not for {profile.summary}", hint=_cure(profile))
    _check_range(profile, release.tensorrt, f"{what} brings TensorRT {release.tensorrt}")
    return []


def check_gpu(profile: Profile, machine: Machine, gpu: Here) -> None:
    """Compare TensorRT and the driver. Raises Unsupported."""
    _check_range(profile, gpu.tensorrt, f"TensorRT {gpu.tensorrt} is here")
    made_for = [each for each in JETPACKS if _same(each.tensorrt, gpu.tensorrt)]
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


def _same(a: str, b: str) -> bool:
    """Whether two versions agree as far as both go: a package says 10.3.0, another 10.3.0.26."""
    return all(x == y for x, y in zip(a.split("."), b.split("."), strict=False))


def _check_range(profile: Profile, version: str, what: str) -> None:
    if not in_range(profile, version):
        needed = range_text(profile)
        raise Unsupported(f"{what}; {profile.name} needs {needed}", hint=_cure(profile))


def _cure(profile: Profile) -> str:
    first = first_jetpack(profile) if profile.boards else None
    if first is not None:
        return f"install JetPack {first.version} or later"
    return f"install TensorRT {range_text(profile)}"


def engine_key(bundle: Bundle, profile: Profile, machine: Machine, gpu: Here | None) -> EngineKey:
    """All that the engine of `bundle` depends on here. `gpu`: None for a profile without one."""

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
