"""How a device starts: whether it is what a bundle was made for, and what its cache holds."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

import deploykit as dk
from deploykit.core.machine import Gpu, Machine, this_machine
from deploykit.core.profile import load_profile
from deploykit.deploying.boot import MAX_TRIES, CacheState, decide
from deploykit.deploying.device import (
    EngineKey,
    check_gpu,
    check_machine,
    engine_key,
    gpu_number,
)
from deploykit.deploying.folder import Bundle, FileEntry
from deploykit.engines.tensorrt.compatibility import Here

NANO, NX = "jetson-orin-nano-8gb@15W", "jetson-orin-nx-16gb"
ORIN = Here("10.3.0", "Orin", "8.7", 8, "540.4.0", "12.6")
L4 = Here("11.1.0", "NVIDIA L4", "8.9", 58, "580.65.06", "13.0", "13")


def bundle(profile: str) -> Bundle:
    found = load_profile(profile)
    about = {name: getattr(found, name) for name in ("runtime", "architecture")}
    about |= {"tensorrt_min": found.tensorrt_min, "tensorrt_max": found.tensorrt_max}
    files = {"model/m.onnx": FileEntry("0" * 64, 1), "README.md": FileEntry("1" * 64, 1)}
    about |= {"bundle": 1, "kind": "docker", "name": "m", "profile": profile, "axes": ()}
    about |= {"model": "model/m.onnx", "batch": (1, 8, 32), "deploykit": "0.1.0", "files": files}
    return Bundle(**about)  # type: ignore[arg-type]


def jetson(profile: str, **changes: object) -> Machine:
    """A board that `profile` describes, with JetPack 6.2."""
    found = load_profile(profile)
    there = {
        "architecture": "aarch64",
        "board": "NVIDIA Jetson",
        "board_ids": (f"nvidia,{found.boards[0]}",),
        "l4t": "36.4.3",
        "power_mode": found.power_mode,
        "gpus": (),
    }
    return replace(this_machine(), **{**there, **changes})


def notes(profile: str, machine: Machine) -> list[str]:
    return check_machine(bundle(profile), load_profile(profile), machine)


T4 = {"architecture": "x86_64", "board_ids": (), "gpus": (Gpu("Tesla T4", 1, "580", "7.5"),)}


@pytest.mark.parametrize(
    ("profile", "changes", "says", "cure"),
    [
        (NANO, {"architecture": "x86_64"}, "whose processor is aarch64; this machine's is", ""),
        (NX, {}, "is for jetson-orin-nx-16gb, this machine is NVIDIA Jetson", "orin-nano-8gb"),
        (NANO, {"board_ids": ("acme,p1",)}, "NVIDIA Jetson, which no profile names", "auto"),
        (
            NANO,
            {"l4t": "35.4.1"},
            "JetPack 5.1.2 .L4T 35.4.1, TensorRT 8.5.2. is not for",
            "6.1 or",
        ),
        (
            NANO,
            {"l4t": "38.2.0"},
            "JetPack 7.0 .L4T 38.2.0, .* is not for NVIDIA Jetson Orin",
            "6.1",
        ),
        ("l4", T4, "is for l4, this machine is Tesla T4", "--profile t4"),
    ],
    ids=["architecture", "board", "unknown board", "old", "of other modules", "another GPU"],
)
def test_another_machine_is_refused_with_its_cure(
    profile: str, changes: dict[str, object], says: str, cure: str
) -> None:
    with pytest.raises(dk.Unsupported, match=says) as caught:
        notes(profile, jetson(NANO, **changes))
    assert cure in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    ("profile", "changes", "says"),
    [
        (NANO, {}, ""),
        ("cpu", {}, ""),  # of any processor
        (NANO, {"power_mode": "7W"}, "the power mode is 7W, the bundle was planned for 15W"),
        (NANO, {"board_ids": ()}, "the board is not known"),
        (NANO, {"l4t": None}, "the JetPack release is not known"),
        (NANO, {"l4t": "32.7.4"}, "L4T 32.7.4 belongs to no JetPack"),
        (NANO, {"l4t": "41.0.0"}, "L4T 41.0.0 belongs to no JetPack"),
    ],
)
def test_what_cannot_be_known_or_may_differ_is_a_note(
    profile: str, changes: dict[str, object], says: str
) -> None:
    found = notes(profile, jetson(NANO, **changes))
    assert len(found) == bool(says)
    assert says in " ".join(found)


@pytest.mark.parametrize(
    ("profile", "l4t", "gpu", "says"),
    [
        (NANO, "36.4.3", replace(ORIN, tensorrt="8.6.2"), "TensorRT 8.6.2 is here; .* needs 10.3"),
        (NANO, "39.2.0", ORIN, "10.3.0 here is that of JetPack 6.1, but the board runs L4T 39.2.0"),
        ("v100", None, L4, "TensorRT 11.1.0 is here; v100 needs 10.3 to 10.4"),
        ("l4", None, replace(L4, cuda="12.4"), "runs CUDA 12.4, TensorRT here is made for CUDA 13"),
    ],
    ids=["TensorRT too old", "image of another JetPack", "TensorRT too new", "driver"],
)
def test_a_tensorrt_or_driver_that_does_not_fit_is_refused(
    profile: str, l4t: str | None, gpu: Here, says: str
) -> None:
    check_gpu(load_profile(NANO), jetson(NANO), ORIN)
    check_gpu(load_profile("l4"), this_machine(), L4)
    with pytest.raises(dk.Unsupported, match=says) as caught:
        check_gpu(load_profile(profile), replace(this_machine(), l4t=l4t), gpu)
    assert caught.value.hint


def test_the_key_names_everything_that_an_engine_depends_on() -> None:
    key = engine_key(bundle(NANO), load_profile(NANO), jetson(NANO), ORIN).to_dict()
    digest = key.pop("model_sha256")
    assert len(str(digest)) == 64
    for path in ("model/m.onnx", "model/m.onnx.golden.npz", "README.md"):
        files = {**bundle(NANO).files, path: FileEntry("2" * 64, 1)}
        changed = replace(bundle(NANO), files=files)
        again = engine_key(changed, load_profile(NANO), jetson(NANO), ORIN)
        assert (again.model_sha256 == digest) is (path == "README.md")
    assert key.pop("deploykit") == dk.__version__
    assert key == {
        "name": "m",
        "profile": NANO,
        "batch": "1,8,32",
        "runtime": "tensorrt 10.3.0",
        "architecture": "aarch64",
        "compute_capability": "8.7",
        "gpu": "Orin",
        "sm_count": 8,
        "driver": "540.4.0",
        "l4t": "36.4.3",
        "power_mode": "15W",
    }


def test_the_gpu_is_the_one_of_the_device_option() -> None:
    assert [gpu_number(device) for device in ("auto", "cuda", "cuda:3")] == [0, 0, 3]
    for device in ("cpu", "cuda:x", "gpu", ""):
        with pytest.raises(dk.BadInput, match="`device`"):
            gpu_number(device)


# -- What is done, by what the cache holds

KEY = EngineKey("m", "0" * 64, "cpu", "1,8,32", "tensorrt 10.3.0", "aarch64", sm_count=8)
OTHER = replace(KEY, driver="540.5.0")
A, B = f"a-{KEY.digest}", f"b-{OTHER.digest}"
FAILED = CacheState("m", A, OTHER.digest, MAX_TRIES, "no memory")  # the build of OTHER


@pytest.mark.parametrize("field", [each.name for each in fields(EngineKey)])
def test_any_difference_builds_and_an_engine_of_another_device_never_replaces_one(
    field: str,
) -> None:
    value: object = 4 if field == "sm_count" else "other"
    wanted = replace(KEY, **{field: value})
    step = decide(CacheState("m", A), wanted, {A: KEY})
    assert (step.source, field in step.why) == ("build", True)
    alike = ("name", "runtime", "architecture", "gpu", "sm_count", "compute_capability")
    foreign = field in alike
    assert wanted.may_replace(KEY) is not foreign
    assert foreign or step.slot == f"b-{wanted.digest}"
    fallback = decide(FAILED, OTHER, {A: wanted}).source
    assert fallback == "build" if foreign else fallback == "previous"


def test_interrupted_builds_are_tried_a_few_times() -> None:
    state = CacheState("m", A)
    for _ in range(MAX_TRIES):
        assert decide(state, OTHER, {A: KEY}).source == "build"
        state = state.begin("m", OTHER.digest)
    step = decide(state, OTHER, {A: KEY})
    assert (step.source, step.slot) == ("previous", A)
    assert "begun 3 times" in step.why
    assert state.begin("m", replace(KEY, deploykit="9").digest).tries == 1
    ready, both = replace(state, active=B), {A: KEY, B: OTHER}
    assert decide(ready, OTHER, both).source == "previous"  # it never became ready
    assert decide(ready.confirm(), OTHER, both).slot == B
