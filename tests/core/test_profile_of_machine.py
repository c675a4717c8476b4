"""Which profile a machine is, and what a GPU without one gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploykit.core import cuda_order, profile
from deploykit.core.cuda_order import with_gpu
from deploykit.core.errors import Unsupported
from deploykit.core.machine import Gpu, Machine, this_machine
from deploykit.core.precision import HARDWARE
from deploykit.core.profile import choose_profile, fits, load_profile, profile_names, recognise

ORIN = Gpu("Orin (nvgpu)", None, "540.4.0", "8.7")


def machine(*gpus: Gpu, boards: tuple[str, ...] = (), board: str | None = None) -> Machine:
    return replace(this_machine(), gpus=gpus, board_ids=boards, board=board)


def test_a_jetson_is_recognised_by_its_board_with_and_without_nvidia_smi() -> None:
    for gpus in ((ORIN,), ()):
        nano = machine(*gpus, boards=("nvidia,p3767-0005", "nvidia,tegra234"))
        fitting = [name for name in profile_names() if fits(load_profile(name), nano)]
        assert fitting == ["jetson-orin-nano-8gb"]


def test_an_unknown_board_is_not_matched_by_the_name_of_its_gpu() -> None:
    unknown = machine(ORIN, boards=("acme,orin-carrier",))
    assert not any(fits(load_profile(name), unknown) for name in profile_names())


def test_any_of_several_gpus_may_be_the_target() -> None:
    two = machine(Gpu("NVIDIA L4", 1, "580", "8.9"), Gpu("NVIDIA H200", 1, "580", "9.0"))
    assert [name for name in profile_names() if fits(load_profile(name), two)] == ["h200", "l4"]


def test_a_profile_without_names_matches_no_machine() -> None:
    assert not fits(load_profile("cpu"), machine())


def test_auto_chooses_the_matching_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "installed", lambda _name: True)
    nano = machine(boards=("nvidia,p3767-0005",), board="NVIDIA Jetson Orin Nano")
    thor = machine(Gpu("NVIDIA Thor", None, "580", "11.0"), boards=("nvidia,p3834-0008",))
    for here, name in ((nano, "jetson-orin-nano-8gb"), (thor, "jetson-thor-t5000")):
        monkeypatch.setattr(profile, "this_machine", lambda here=here: here)
        chosen, why = choose_profile()
        assert chosen.name == name
        assert why.startswith("this is a NVIDIA Jetson")
    monkeypatch.setattr(profile, "installed", lambda _name: False)
    assert choose_profile()[0].name == "cpu"
    assert "TensorRT is not installed" in choose_profile()[1]


def test_of_two_kinds_of_gpu_the_chosen_one_has_the_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = machine(Gpu("NVIDIA L4", 1, "580", "8.9"), Gpu("NVIDIA H200", 1, "580", "9.0"))
    monkeypatch.setattr(profile, "installed", lambda _name: True)
    monkeypatch.setattr(profile, "this_machine", lambda: two)
    assert [choose_profile(number)[0].name for number in (0, 1)] == ["l4", "h200"]
    cuda = (("", "NVIDIA H200"), ("", "NVIDIA L4"))  # the fastest first
    monkeypatch.setattr(cuda_order, "_answer", lambda *_: cuda)
    assert [choose_profile(number)[0].name for number in (0, 1)] == ["h200", "l4"]


H100 = Gpu("NVIDIA H100 80GB HBM3", 80 << 30, "580", "9.0")
L4 = Gpu("NVIDIA L4", 1, "580", "8.9")
SLICE = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


@pytest.mark.parametrize(
    ("gpus", "visible", "cuda", "names"),
    [
        ([L4], None, [], ["NVIDIA L4", "NVIDIA L4"]),  # CUDA refuses the second
        ([L4], "", [], [None, None]),
        ([L4], "-1", [], [None, None]),
        ([L4], "NoDevFiles", [], [None, None]),
        ([L4], "GPU-bb", [], ["NVIDIA L4", "NVIDIA L4"]),  # nobody can say which it is
        ([L4, H100], "1", [], [H100.name, None]),
        ([L4, H100], "", [], [None, None]),
        ([L4, H100], "MIG-8b3c", [SLICE], [SLICE, None]),
        ([H100], "MIG-8b3c", [SLICE], [SLICE, None]),
        ([L4, H100], None, [H100.name, L4.name], [H100.name, "NVIDIA L4"]),
        ([L4, H100], None, [H100.name], [H100.name, None]),
    ],
)
def test_a_gpu_that_cuda_hides_is_not_this_machines(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[Gpu],
    visible: str | None,
    cuda: list[str],
    names: list[str | None],
) -> None:
    monkeypatch.setattr(cuda_order, "_answer", lambda *_: tuple(("", name) for name in cuda))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = [with_gpu(machine(*gpus), number).gpus for number in (0, 1)]
    assert [each[0].name if each else None for each in found] == names
    memory = {each[0].memory_bytes for each in found if each and each[0].name == SLICE}
    assert memory <= {10 << 30}


@pytest.mark.parametrize(
    ("name", "memory", "capability", "precisions"),
    [
        ("NVIDIA A10G", 23028 << 20, "8.6", "fp32 fp16 bf16 int8"),
        ("NVIDIA L40", 46068 << 20, "8.9", "fp32 fp16 bf16 fp8 int8"),
        ("NVIDIA H200 NVL", 143771 << 20, "9.0", "fp32 fp16 bf16 fp8 int8"),
        ("NVIDIA RTX 6000 Ada Generation", 49140 << 20, "8.9", "fp32 fp16 bf16 fp8 int8"),
        ("NVIDIA B300 SXM6 AC", 275040 << 20, "10.3", "fp32 fp16 bf16 fp8 fp4 int8"),
        ("NVIDIA of tomorrow", None, None, "fp32 fp16 int8"),
    ],
)
def test_a_gpu_that_no_profile_names_gets_one_of_what_its_driver_reports(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    memory: int | None,
    capability: str | None,
    precisions: str,
) -> None:
    here = machine(Gpu(name, memory, "580.65.06", capability))
    monkeypatch.setattr(profile, "installed", lambda _name: True)
    monkeypatch.setattr(profile, "this_machine", lambda: here)
    found, why = choose_profile()
    assert (found.name, found.runtime, found.compute_capability) == ("auto", "tensorrt", capability)
    assert why == f"{name} is here, which no profile names"
    assert fits(found, here)
    assert found.memory_bytes == (memory or here.memory_bytes)
    assert set(found.precisions) == set(precisions.split()) & set(HARDWARE)
    assert (found.tensorrt_min, found.peak_ops_per_s) == ("10.8" if "B300" in name else None, {})
    assert load_profile("auto") == found


def test_a_gpu_too_old_for_tensorrt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(Gpu("Tesla P40", 24 << 30, "580.65.06", "6.1"))
    monkeypatch.setattr(profile, "installed", lambda _name: True)
    monkeypatch.setattr(profile, "this_machine", lambda: here)
    with pytest.raises(Unsupported, match=r"Tesla P40: compute capability 6\.1"):
        choose_profile()


@pytest.mark.parametrize(
    ("gpus", "boards", "l4t", "name", "why"),
    [
        ("NVIDIA H200", "", "", "h200", "the driver names the GPU NVIDIA H200"),
        ("Orin (nvgpu)", "nvidia,p3767-0000", "36.4.3", "jetson-orin-nx-16gb", "p3767-0000"),
        ("", "nvidia,p3768-0000+p3767-0004", "36.4.3", "jetson-orin-nano-4gb", "p3767-0004"),
        ("NVIDIA Thor", "nvidia,p3834-0008 nvidia,tegra264", "38.2", "jetson-thor-t5000", "p3834"),
        ("NVIDIA Thor", "nvidia,p4071-0000+p3834-0000", "38.4", "jetson-thor-t4000", "p3834-0000"),
        ("NVIDIA Thor", "nvidia,p3834-0005", "38.4", None, "(nvidia,p3834-0005)"),
        ("NVIDIA Thor", "", "38.4.0", None, "the board is not known"),
        ("NVIDIA A10G", "", "", None, "no profile names NVIDIA A10G"),
        (
            "Orin",
            "nvidia,p3701-0000",
            "36.4.3",
            None,
            "no profile names board My kit (nvidia,p3701",
        ),
        ("Orin", "acme,kit", "36.4.3", None, "no profile names board My kit (acme,kit)"),
        ("Orin", "", "36.4.3", None, "the board is not known: /proc/device-tree cannot be read"),
        ("", "", "", "cpu", "no NVIDIA GPU here"),
        ("", "raspberrypi,4-model-b", "", "cpu", "no NVIDIA GPU here"),
    ],
)
def test_a_machine_is_recognised_by_its_board_or_gpu_whatever_is_installed(
    gpus: str, boards: str, l4t: str, name: str | None, why: str
) -> None:
    found = [Gpu(gpus, None, "580.65.06", None)] if gpus else []
    here = machine(*found, boards=tuple(boards.split()), board="My kit" if boards else None)
    known, reason = recognise(replace(here, l4t=l4t or None))
    assert (known.name if known else None) == name
    assert why in reason


def test_dla_cores_are_those_of_the_module() -> None:
    cores = {name: load_profile(name).dla_cores for name in profile_names()}
    assert {name: count for name, count in cores.items() if count} == {
        "jetson-agx-orin-32gb": 2,
        "jetson-agx-orin-64gb": 2,
        "jetson-orin-nx-16gb": 2,
        "jetson-orin-nx-8gb": 1,
    }
