"""What may be loaded: every way in which a plan is wrong, before TensorRT sees a byte of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, DeploykitError, Unsupported
from deploykit.core.evidence import Evidence, WeightsFile
from deploykit.core.files import manifest_path
from deploykit.core.manifest import write_manifest
from deploykit.engines.tensorrt.compatibility import (
    Here,
    check_plan,
    differences,
    open_plan,
    rebuild,
)
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.plans import BUILT, CONTENT, HERE, described


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan and its manifest, both valid."""
    monkeypatch.chdir(tmp_path)
    path = Path("m.trt")
    path.write_bytes(CONTENT)
    write_manifest(path, described())
    return path


def test_plan_of_this_machine_is_read_whole(plan: Path) -> None:
    opened, manifest = open_plan(plan, HERE)
    assert (opened.content, opened.notes, opened.host_code) == (CONTENT, (), False)
    assert manifest == described()


def test_the_manifest_of_an_opened_plan_is_not_read_again(plan: Path) -> None:
    artefact = Artefact.open(plan)
    assert artefact.manifest == described()
    manifest_path(plan).unlink()  # reading it again would hash gigabytes again
    assert open_plan(artefact, HERE)[1] == described()


# damaged, another file, no manifest or one of something else


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: b"", "the file is empty"),
        (lambda content: content[: len(content) // 2], "SHA-256 differs"),
        (lambda content: content + b"\0", "SHA-256 differs"),
        (lambda c: c[:5000] + bytes([c[5000] ^ 1]) + c[5001:], "SHA-256 differs"),
        (lambda _: b"vtrt" + bytes(1000), "TensorRT for RTX"),
    ],
    ids=["empty", "half", "longer", "bit", "rtx"],
)
@pytest.mark.parametrize("trust", [False, True])
def test_damaged_plan_is_refused_trusted_or_not(
    plan: Path, change: Callable[[bytes], bytes], says: str, trust: bool
) -> None:
    plan.write_bytes(change(CONTENT))
    with pytest.raises((BadInput, Unsupported), match=says) as caught:
        open_plan(plan, HERE, trust)
    assert caught.value.exit_code == (3 if "RTX" in says else 2)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_onnx_file_by_another_name_is_named(tmp_path: Path, with_manifest: bool) -> None:
    path = save(linear(), tmp_path / "m.trt")
    if with_manifest:
        write_manifest(path, described())
    with pytest.raises(BadInput, match="is an ONNX file, a TensorRT engine is needed") as e:
        open_plan(path, HERE, trust=True)
    assert "build" in (e.value.hint or "")


def test_plan_without_manifest_needs_trust_and_comes_with_a_warning(plan: Path) -> None:
    manifest_path(plan).unlink()
    with pytest.raises(BadInput, match=r"m\.trt: has no manifest \(m\.trt\.json\)") as caught:
        open_plan(plan, HERE)
    assert "`trust`" in (caught.value.hint or "")
    opened, manifest = open_plan(plan, HERE, trust=True)
    assert (manifest, opened.content) == (None, CONTENT)
    assert "neither its origin" in opened.notes[0]
    assert not opened.host_code  # code of unknown origin is not run


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (described(b"another"), "SHA-256 differs"),
        (replace(described(), sha256=""), r"m\.trt\.json does not describe an engine"),
        (replace(described(), format="onnx"), r"m\.trt\.json does not describe an engine"),
        *(
            (replace(described(), evidence=Evidence(weights=WeightsFile(file, "00"))), "an engine")
            for file in ["../secret", "/etc/passwd", "a/../../b", "m.trt.data"]
        ),
    ],
)
def test_manifest_of_something_else_is_refused(plan: Path, manifest: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        check_plan(plan, manifest, HERE)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"manifest": 99}', "\x00\x01", json.dumps({"manifest": 1})]
)
def test_broken_manifest_is_bad_input(plan: Path, text: str) -> None:
    manifest_path(plan).write_text(text, encoding="utf-8")
    with pytest.raises(BadInput):
        open_plan(plan, HERE)


def test_a_hostile_manifest_gives_one_short_line_of_printable_characters(plan: Path) -> None:
    odd = {"tensorrt": "x.y", "compute_capability": "ninety", "cuda": "-1", "driver": "\x1b[2J"}
    for built in (odd, {"gpu": "\x1b[2J\nH100" + "x" * 500}):
        with pytest.raises(DeploykitError) as caught:
            check_plan(plan, described(**built), HERE)
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 300


# another TensorRT, GPU, driver or CPU: (built on, here, what differs; "" if it fits)

OLD_DRIVER = replace(HERE, driver="550.54.14", cuda="12.4")
SEVEN_FIVE, EIGHT_NINE = (replace(HERE, compute_capability=each) for each in ("7.5", "8.9"))
A10 = {"gpu": "NVIDIA A10", "compute_capability": "8.6", "sm_count": "72"}
CUDA_12, CUDA_13 = (replace(HERE, tensorrt_cuda=each).facts() for each in ("12", "13"))
X86, ARM = (replace(HERE, architecture=each) for each in ("x86_64", "aarch64"))


@pytest.mark.parametrize(
    ("built", "here", "says"),
    [
        ({"tensorrt": "10.3.0.26"}, HERE, "TensorRT 10.13.3.9 here, 10.3.0.26 there"),
        ({"tensorrt": "11.0.0.114"}, HERE, "TensorRT 10.13.3.9 here, 11.0.0.114 there"),
        ({"compute_capability": "8.7", "gpu": "Orin"}, HERE, r"9.0 here \(NVIDIA H200\), 8.7 "),
        ({"gpu": "NVIDIA H100 80GB HBM3"}, HERE, "NVIDIA H200 here, NVIDIA H100 80GB HBM3 there"),
        ({"sm_count": "16"}, HERE, "132 multiprocessors in use here, 16 there"),
        ({"cuda": "14.1"}, HERE, "driver 580.65.06 runs CUDA 13.0, the engine needs CUDA 14"),
        ({}, OLD_DRIVER, r"driver 550.54.14 runs CUDA 12.4.*driver 580 or later"),
        (
            {"tensorrt": "10.3.0", "compute_capability": "8.7", "cuda": "14.0"},
            HERE,
            r"TensorRT .*; compute capability .*; the driver",
        ),
        *(({"tensorrt": version}, HERE, "") for version in ("10.13.3", "10.13.3.9", "10.13")),
        ({}, replace(HERE, driver="610.10", cuda="13.4"), ""),
        (CUDA_12, replace(OLD_DRIVER, tensorrt_cuda="12"), ""),  # the CUDA of its TensorRT
        ({"cuda": ""}, OLD_DRIVER, ""),  # not known: TensorRT decides
        (CUDA_13, replace(OLD_DRIVER, tensorrt_cuda="12"), "needs CUDA 13: driver 580"),
        (X86.facts(), X86, ""),
        (X86.facts(), ARM, "aarch64 here, x86_64 there"),
        *(
            ({**A10, "hardware_compatible": level}, replace(HERE, compute_capability=here), says)
            for level, here, says in [
                *(("ampere-plus", each, "") for each in ("8.0", "9.0", "12.0")),
                ("ampere-plus", "7.5", "7.5, where the engine needs 8.0"),
                ("same-compute-capability", "8.6", ""),
                *((level, "8.9", "8.9 here") for level in ("same-compute-capability", "none", "")),
                *((level, "8.6", "H200 here, NVIDIA A10 there") for level in ("none", "")),
            ]
        ),
    ],
)
def test_plan_of_another_machine_says_what_differs(
    built: dict[str, str], here: Here, says: str
) -> None:
    found = "; ".join(differences({**BUILT, **built}, here))
    assert (re.search(says, found) is not None) if says else found == ""


@pytest.mark.parametrize(
    ("there", "here", "fits"),
    [
        ("10.3.0", HERE, True),
        ("10.13.3.9", HERE, True),
        ("10.16.0", HERE, False),
        ("11.0.0", HERE, False),
        ("9.3", HERE, False),
        *((n, replace(HERE, tensorrt="11.4.1"), n == "10.3.0") for n in ("10.3.0", "9.3", "12.0")),
    ],
)
def test_version_compatible_plan_runs_on_later_minors_and_from_10_on_11(
    there: str, here: Here, fits: bool
) -> None:
    built = {**BUILT, "tensorrt": there}
    assert (list(differences(built, here, version_compatible=True)) == []) is fits
    assert list(differences(built, here)) != [] or here.tensorrt == there


@pytest.mark.parametrize(
    ("built", "here", "words"),
    [
        (BUILT, replace(HERE, driver="580.20.01"), "driver 580.65.06; the older 580.20.01"),
        ({"profile": "h200"}, HERE, "tensorrt and gpu and compute_capability"),
    ],
)
def test_what_cannot_be_compared_is_a_note(
    plan: Path, built: dict[str, str], here: Here, words: str
) -> None:
    (note,) = check_plan(plan, replace(described(), built_on=built), here).notes
    assert words in note


@pytest.mark.parametrize(("core", "found"), [("1", 1), ("", None), ("x", None), ("-1", None)])
def test_the_dla_core_of_a_plan_is_read_from_its_manifest(
    plan: Path, core: str, found: int | None
) -> None:
    assert check_plan(plan, described(dla=core), HERE).dla == found


def test_only_a_version_compatible_plan_may_bring_code_along(plan: Path) -> None:
    assert check_plan(plan, described(version_compatible=True), HERE, trust=True).host_code
    assert not check_plan(plan, described(version_compatible=False), HERE, trust=True).host_code


# the command in the hint, which builds it again

QUANTIZED = ("ab" * 32, "cd" * 32)  # made from a model and from samples


@pytest.mark.parametrize(
    ("built", "made_from", "words"),
    [
        ({"dla": "1"}, (), "resnet.onnx --profile h200 --batch 1,8,32 --dla 1 -o m.trt"),
        ({"gpu": "Orin", "compute_capability": "8.7"}, (), "resnet.onnx --profile auto --batch"),
        ({"precision": "fp16"}, QUANTIZED, "h200 --precision fp16 --batch 1,8,32 -o m.trt"),
        (
            {"precision": "int8", "calib": "samples/calib.npz"},
            QUANTIZED,
            "h200 --precision int8 --batch 1,8,32 --calib calib.npz -o m.trt",
        ),
        ({"precision": "fp8"}, QUANTIZED, "fp8 --batch 1,8,32 --calib DATA -o m.trt"),
        ({"precision": "auto", "calib": "c"}, QUANTIZED, "auto --batch 1,8,32 --calib c -o m.trt"),
        ({"precision": "int8"}, (), "resnet.onnx --profile h200 --batch 1,8,32 -o m.trt"),
        (
            {
                "version_compatible": True,
                "hardware_compatible": "ampere-plus",
                "axes": "T=1,2,3 W=8",
            },
            (),
            "--hardware-compatible ampere-plus --axis T=1,2,3 --axis W=8 --version-compatible",
        ),
        *(
            ({"model": name}, (), f"build {name.rpartition('/')[2]} --profile")  # never a path
            for name in ("../../secret.onnx", "/etc/x.onnx", "a/b.onnx")
        ),
        (
            {"model": "a b;rm.onnx", "profile": "x y", "batch": "$(id)"},
            (),
            "build 'a b;rm.onnx' --profile 'x y' --batch '$(id)'",
        ),
        ({"model": ""}, (), "-o m.trt (MODEL.onnx: SHA-256 abababababab...)"),
    ],
)
def test_the_hint_builds_it_again(
    plan: Path, built: dict[str, Any], made_from: tuple[str, ...], words: str
) -> None:
    manifest = described(**{"tensorrt": "11.0.0", **built})
    manifest = replace(manifest, made_from=made_from or manifest.made_from)
    with pytest.raises(Unsupported) as caught:
        check_plan(plan, manifest, HERE, trust=True)
    assert (caught.value.exit_code, "\n" in caught.value.message) == (3, False)
    assert words in (caught.value.hint or "")
    assert caught.value.hint == f"build it here: {rebuild(plan, manifest, HERE)}"
