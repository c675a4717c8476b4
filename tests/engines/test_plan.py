"""What may be loaded: every way in which a plan is wrong, before TensorRT sees a byte of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deploykit.core.errors import BadInput, DeploykitError, Unsupported
from deploykit.core.evidence import Evidence, WeightsFile
from deploykit.core.files import manifest_path
from deploykit.core.manifest import write_manifest
from deploykit.engines.tensorrt.compatibility import check_plan, differences, open_plan
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.plans import BUILT, CONTENT, HERE, described


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan and its manifest, both valid."""
    path = tmp_path / "m.trt"
    path.write_bytes(CONTENT)
    write_manifest(path, described())
    return path


# what fits


def test_plan_of_this_machine_is_read_whole(plan: Path) -> None:
    opened, manifest = open_plan(plan, HERE)
    assert opened.content == CONTENT
    assert opened.notes == ()
    assert not opened.host_code
    assert manifest == described()


# G10: cut, flipped, another file


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: b"", "the file is empty"),
        (lambda content: content[: len(content) // 2], "SHA-256 differs"),
        (lambda content: content[:-1], "SHA-256 differs"),
        (lambda content: content + b"\0", "SHA-256 differs"),
        (
            lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
            "SHA-256 differs",
        ),
    ],
    ids=["empty", "half", "last-byte", "longer", "bit"],
)
def test_damaged_plan_is_bad_input(plan: Path, change: Callable[[bytes], bytes], says: str) -> None:
    plan.write_bytes(change(CONTENT))
    with pytest.raises(BadInput, match=says) as caught:
        open_plan(plan, HERE)
    assert caught.value.exit_code == 2
    with pytest.raises(BadInput, match=says):
        open_plan(plan, HERE, trust=True)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_onnx_file_by_another_name_is_named(tmp_path: Path, with_manifest: bool) -> None:
    path = save(linear(), tmp_path / "m.trt")
    if with_manifest:
        write_manifest(path, described())
    with pytest.raises(BadInput, match="not a TensorRT engine; its format is onnx") as e:
        open_plan(path, HERE, trust=True)
    assert f"deploykit build {path}" in (e.value.hint or "")


def test_rtx_plan_is_unsupported_with_an_explanation(tmp_path: Path) -> None:
    path = tmp_path / "m.trt"
    path.write_bytes(b"vtrt" + bytes(1000))
    with pytest.raises(Unsupported, match="TensorRT for RTX") as caught:
        open_plan(path, HERE, trust=True)
    assert caught.value.exit_code == 3


# G11: another TensorRT, another GPU, an older driver


@pytest.mark.parametrize(
    ("built", "says"),
    [
        ({"tensorrt": "10.3.0.26"}, "TensorRT 10.13.3.9 here, 10.3.0.26 there"),
        ({"tensorrt": "11.0.0.114"}, "TensorRT 10.13.3.9 here, 11.0.0.114 there"),
        ({"compute_capability": "8.7", "gpu": "Orin"}, r"9.0 here \(NVIDIA H200\), 8.7 there"),
        ({"gpu": "NVIDIA H100 80GB HBM3"}, "NVIDIA H200 here, NVIDIA H100 80GB HBM3 there"),
        ({"sm_count": "16"}, "132 multiprocessors in use here, 16 there"),
        ({"cuda": "14.1"}, "driver 580.65.06 runs CUDA 13.0, the engine needs CUDA 14"),
    ],
)
def test_plan_of_another_machine_says_what_differs(
    plan: Path, built: dict[str, str], says: str
) -> None:
    with pytest.raises(Unsupported, match=says) as caught:
        check_plan(plan, described(**built), HERE)
    assert caught.value.exit_code == 3
    assert "\n" not in caught.value.message


def test_older_driver_than_needed_names_the_one_that_is(plan: Path) -> None:
    old = replace(HERE, driver="550.54.14", cuda="12.4")
    with pytest.raises(Unsupported, match=r"driver 550.54.14 runs CUDA 12.4.*driver 580 or later"):
        check_plan(plan, described(), old)


def test_all_differences_are_in_one_message(plan: Path) -> None:
    with pytest.raises(Unsupported, match=r"TensorRT .*; compute capability .*; the driver"):
        check_plan(plan, described(tensorrt="10.3.0", compute_capability="8.7", cuda="14.0"), HERE)


@pytest.mark.parametrize("there", ["10.13.3", "10.13.3.9", "10.13"])
def test_shorter_version_of_the_same_tensorrt_fits(there: str) -> None:
    assert list(differences({**BUILT, "tensorrt": there}, HERE)) == []


def test_slightly_older_driver_is_a_note(plan: Path) -> None:
    older = replace(HERE, driver="580.20.01")
    (note,) = check_plan(plan, described(), older).notes
    assert "driver 580.65.06" in note
    assert "580.20.01" in note


def test_newer_driver_is_fine(plan: Path) -> None:
    newer = replace(HERE, driver="610.10", cuda="13.4")
    assert check_plan(plan, described(), newer).notes == ()


def test_manifest_that_does_not_say_what_it_was_built_on_is_a_note(plan: Path) -> None:
    bare = replace(described(), built_on={"profile": "h200"})
    (note,) = check_plan(plan, bare, HERE).notes
    assert "tensorrt and gpu and compute_capability" in note


# what widens it


@pytest.mark.parametrize(
    ("there", "fits"),
    [("10.3.0", True), ("10.13.3.9", True), ("10.16.0", False), ("11.0.0", False), ("9.3", False)],
)
def test_version_compatible_plan_runs_on_the_same_or_later_minor(there: str, fits: bool) -> None:
    built = {**BUILT, "tensorrt": there}
    assert (list(differences(built, HERE, version_compatible=True)) == []) is fits


@pytest.mark.parametrize(("there", "fits"), [("10.3.0", True), ("9.3.0", False), ("12.0.0", False)])
def test_a_version_compatible_plan_crosses_from_10_to_11_and_nowhere_else(
    there: str, fits: bool
) -> None:
    built, here = {**BUILT, "tensorrt": there}, replace(HERE, tensorrt="11.4.1")
    assert (list(differences(built, here, version_compatible=True)) == []) is fits
    assert list(differences(built, here)) != []


def test_a_plan_needs_the_cuda_of_its_tensorrt_not_that_of_the_driver_that_built_it() -> None:
    """Built with TensorRT for CUDA 12 under driver 580: it runs under driver 550, too."""
    built = {**BUILT, **replace(HERE, tensorrt_cuda="12").facts()}
    assert built["cuda"] == "12"
    older = replace(HERE, driver="550.54.15", cuda="12.4", tensorrt_cuda="12")
    assert list(differences(built, older)) == []
    newer = {**BUILT, **replace(HERE, tensorrt_cuda="13").facts()}
    assert "needs CUDA 13: driver 580" in next(differences(newer, older))


@pytest.mark.parametrize(("core", "found"), [("1", 1), ("", None), ("x", None), ("-1", None)])
def test_the_dla_core_of_a_plan_is_read_from_its_manifest(
    plan: Path, core: str, found: int | None
) -> None:
    assert check_plan(plan, described(dla=core), HERE).dla == found


def test_a_plan_of_another_cpu_architecture_is_refused() -> None:
    built = {**BUILT, **replace(HERE, architecture="x86_64").facts()}
    assert list(differences(built, replace(HERE, architecture="x86_64"))) == []
    assert list(differences(built, replace(HERE, architecture="aarch64"))) == [
        "aarch64 here, x86_64 there"
    ]


def test_only_a_version_compatible_plan_may_bring_code_along(plan: Path) -> None:
    assert check_plan(plan, described(version_compatible=True), HERE, trust=True).host_code
    assert not check_plan(plan, described(version_compatible=False), HERE, trust=True).host_code


@pytest.mark.parametrize(
    ("level", "here", "fits"),
    [
        ("ampere-plus", "9.0", True),
        ("ampere-plus", "8.0", True),
        ("ampere-plus", "12.0", True),
        ("ampere-plus", "7.5", False),
        ("same-compute-capability", "8.6", True),
        ("same-compute-capability", "8.9", False),
        ("none", "8.6", False),
        ("", "8.6", False),
    ],
)
def test_hardware_compatible_plan_runs_on_other_gpus(level: str, here: str, fits: bool) -> None:
    built = {**BUILT, "gpu": "NVIDIA A10", "compute_capability": "8.6", "sm_count": "72"}
    other = replace(HERE, compute_capability=here)
    assert (list(differences({**built, "hardware_compatible": level}, other)) == []) is fits


# G12: no manifest, another one, a path out of the folder


def test_plan_without_manifest_is_refused_with_the_way_to_trust_it(plan: Path) -> None:
    manifest_path(plan).unlink()
    with pytest.raises(BadInput, match=r"m\.trt: has no manifest \(m\.trt\.json\)") as caught:
        open_plan(plan, HERE)
    assert caught.value.exit_code == 2
    assert "`trust`" in (caught.value.hint or "")


def test_trusted_plan_without_manifest_comes_with_a_warning(plan: Path) -> None:
    manifest_path(plan).unlink()
    opened, manifest = open_plan(plan, HERE, trust=True)
    assert manifest is None
    assert opened.content == CONTENT
    assert "neither its origin" in opened.notes[0]
    assert not opened.host_code  # code of unknown origin is not run


def test_manifest_of_another_plan_is_refused(plan: Path) -> None:
    write_manifest(plan, described(b"another"))
    with pytest.raises(BadInput, match="SHA-256 differs"):
        open_plan(plan, HERE)


def test_manifest_without_a_hash_describes_nothing(plan: Path) -> None:
    write_manifest(plan, replace(described(), sha256=""))
    with pytest.raises(BadInput, match=r"m\.trt\.json has no SHA-256"):
        open_plan(plan, HERE)


def test_manifest_of_another_kind_of_file_is_refused(plan: Path) -> None:
    with pytest.raises(BadInput, match="describes a file of the format onnx"):
        check_plan(plan, replace(described(), format="onnx"), HERE)


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a/../../b", "m.trt.data"])
def test_path_in_a_manifest_is_not_followed(plan: Path, file: str) -> None:
    manifest = replace(described(), evidence=Evidence(weights=WeightsFile(file, "00")))
    write_manifest(plan, manifest)
    with pytest.raises(BadInput):
        open_plan(plan, HERE)
    with pytest.raises(BadInput, match="which an engine does not have"):
        check_plan(plan, manifest, HERE)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"manifest": 99}', "\x00\x01", json.dumps({"manifest": 1})]
)
def test_broken_manifest_is_bad_input(plan: Path, text: str) -> None:
    manifest_path(plan).write_text(text, encoding="utf-8")
    with pytest.raises(BadInput):
        open_plan(plan, HERE)


def test_control_characters_in_a_manifest_do_not_reach_the_terminal(plan: Path) -> None:
    with pytest.raises(Unsupported) as caught:
        check_plan(plan, described(gpu="\x1b[2J\nH100" + "x" * 500), HERE)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300


def test_a_manifest_with_invalid_versions_raises_only_deploykit_errors(plan: Path) -> None:
    odd = {"tensorrt": "x.y", "compute_capability": "ninety", "cuda": "-1", "driver": "\x1b[2J"}
    try:
        check_plan(plan, described(**odd), HERE)
    except DeploykitError as exc:
        assert "compute capability" in exc.message  # noqa: PT017 - it need not be raised
