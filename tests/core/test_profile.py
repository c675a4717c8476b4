from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deploykit.core import profile
from deploykit.core.errors import BadInput, NotFound, Unsupported
from deploykit.core.machine import Gpu, Machine, this_machine
from deploykit.core.precision import HARDWARE
from deploykit.core.profile import choose_profile, fits, load_profile, profile_names

NAMES = [
    "cpu",
    "t4",
    "v100",
    "a10",
    "a30",
    "a100-40gb",
    "a100-80gb",
    "l4",
    "l40s",
    "rtx-a6000",
    "rtx-4090",
    "rtx-5090",
    "h100-pcie",
    "h100-sxm",
    "h200",
    "gh200",
    "b200",
    "gb10",
    "jetson-orin-nano-4gb",
    "jetson-orin-nano-8gb",
    "jetson-orin-nx-8gb",
    "jetson-orin-nx-16gb",
    "jetson-agx-orin-32gb",
    "jetson-agx-orin-64gb",
    "jetson-thor-t4000",
    "jetson-thor-t5000",
]
GPUS = [name for name in NAMES if name != "cpu"]
JETSONS = [name for name in NAMES if name.startswith("jetson")]

MINE = """\
summary = "My board"
runtime = "tensorrt"
device = "cuda"
architecture = "aarch64"
precisions = ["fp32", "fp16"]
compute_capability = "8.7"
memory_bytes = 8_000_000_000
power_modes = [
  { name = "15W", watts = 15 },
  { name = "MODE_30W", watts = 30 },
]
unverified = ["memory_bytes", "peak_ops_per_s.fp16"]

[peak_ops_per_s]
fp16 = 1e12
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINE, encoding="utf-8")
    return path


def change(path: Path, old: str, new: str) -> str:
    assert MINE.count(old) == 1
    path.write_text(MINE.replace(old, new), encoding="utf-8")
    return str(path)


def test_published_names_are_the_shipped_ones() -> None:
    assert profile_names() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profile_says_where_its_figures_are_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.sources
    assert all(source.startswith(("https://", "http://")) for source in profile.sources)


@pytest.mark.parametrize("name", GPUS)
def test_gpu_profile_has_what_a_build_and_a_roofline_need(name: str) -> None:
    profile = load_profile(name)
    assert (profile.runtime, profile.device) == ("tensorrt", "cuda")
    assert profile.memory_bytes is not None
    assert profile.workspace_bytes is not None
    assert profile.workspace_bytes * 3 < profile.memory_bytes
    assert profile.bandwidth_bytes_per_s is not None
    assert profile.compute_capability is not None
    assert profile.peak_ops_per_s
    assert profile.gpu_names


@pytest.mark.parametrize("name", GPUS)
def test_precisions_are_those_of_the_compute_capability(name: str) -> None:
    profile = load_profile(name)
    capability = tuple(map(int, str(profile.compute_capability).split(".")))
    expected = {"fp32", "fp16"}
    expected |= {"int8"} if capability >= (7, 5) else set()
    expected |= {"bf16"} if capability >= (8, 0) else set()
    expected |= {"fp8"} if capability >= (8, 9) else set()
    expected |= {"fp4"} if capability >= (10, 0) else set()
    assert set(profile.precisions) == expected
    assert set(profile.peak_ops_per_s) <= expected | {"tf32"}


@pytest.mark.parametrize("name", GPUS)
def test_figures_are_in_base_units(name: str) -> None:
    """A figure in GB/s or TFLOPS would be off by 10^9 or 10^12."""
    profile = load_profile(name)
    assert 4e9 <= (profile.memory_bytes or 0) <= 200e9
    assert 30e9 <= (profile.bandwidth_bytes_per_s or 0) <= 10e12
    assert all(0.5e12 <= peak <= 10e15 for peak in profile.peak_ops_per_s.values())


@pytest.mark.parametrize("name", GPUS)
def test_lower_precision_is_never_slower(name: str) -> None:
    peaks = load_profile(name).peak_ops_per_s
    known = [peaks[key] for key in ("fp32", "tf32", "fp16", "fp8", "fp4") if key in peaks]
    assert known == sorted(known)
    assert peaks.get("fp16") == peaks.get("bf16", peaks.get("fp16"))
    assert peaks.get("int8", 1e18) >= peaks.get("fp16", 0)


@pytest.mark.parametrize("name", JETSONS)
def test_jetson_shares_its_memory_and_may_gate_its_sms(name: str) -> None:
    profile = load_profile(name)
    assert profile.unified_memory
    assert profile.architecture == "aarch64"
    for mode in profile.power_modes:
        assert (mode.sms or 1) <= (profile.sm_count or 0)
        digits = "".join(letter for letter in mode.name.partition("W")[0] if letter.isdigit())
        assert mode.watts == (float(digits) if digits else None)


def test_no_board_belongs_to_two_profiles() -> None:
    boards = [board for name in NAMES for board in load_profile(name).boards]
    assert len(boards) == len(set(boards))


def test_cpu_profile_leaves_the_figures_to_the_machine() -> None:
    profile = load_profile("cpu")
    assert (profile.runtime, profile.device) == ("onnxruntime", "cpu")
    assert profile.precisions == ("fp32", "fp16", "int8")
    assert profile.memory_bytes is None
    assert profile.peak_ops_per_s == {}


def test_power_mode_follows_an_at_sign() -> None:
    assert load_profile("jetson-orin-nx-16gb").power_mode is None
    assert load_profile("jetson-orin-nx-16gb@25W").power_mode == "25W"


@pytest.mark.parametrize("mode", ["MODE_30W", "mode_30w", "30W"])
def test_power_mode_may_leave_out_its_prefix_and_case(mode: str) -> None:
    assert load_profile(f"jetson-agx-orin-64gb@{mode}").power_mode == "MODE_30W"


def test_unknown_power_mode_lists_the_known() -> None:
    with pytest.raises(NotFound, match="'jetson-orin-nano-8gb' has no power mode '99W'") as caught:
        load_profile("jetson-orin-nano-8gb@99W")
    assert caught.value.hint == "one of: 15W, 25W, MAXN_SUPER, 7W"
    with pytest.raises(NotFound) as caught:
        load_profile("h200@MAXN")
    assert caught.value.hint == "this target has no power modes"


@pytest.mark.parametrize("name", ["h2000", "", "../profiles/h200", "H200X", "cpu@", "@"])
def test_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(NotFound) as caught:
        load_profile(name)
    assert caught.value.hint is not None


def test_a_users_profile_is_a_file(mine: Path) -> None:
    profile = load_profile(str(mine))
    assert (profile.name, profile.summary) == ("mine", "My board")
    assert profile.peak_ops_per_s == {"fp16": 1e12}
    assert profile.sm_count is None
    assert not profile.unified_memory
    assert load_profile(f"{mine}@30W").power_mode == "MODE_30W"


def test_an_at_sign_in_a_folder_name_is_not_a_power_mode(mine: Path) -> None:
    folder = mine.parent / "a@b"
    folder.mkdir()
    moved = mine.rename(folder / "mine.toml")
    assert load_profile(str(moved)).power_mode is None
    assert load_profile(f"{moved}@15W").power_mode == "15W"


def test_a_profile_as_a_dictionary_is_plain_data(mine: Path) -> None:
    values = load_profile(str(mine)).to_dict()
    assert values["power_modes"][0] == {"name": "15W", "watts": 15.0, "gpu_mhz": None, "sms": None}
    assert values["precisions"] == ["fp32", "fp16"]
    assert values["peak_ops_per_s"] == {"fp16": 1e12}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory_bytes = 8", "memory_size = 8", r"mine\.toml:7: 'memory_size' is not a key"),
        ("memory_bytes = 8", "memory_bytes = -8", r"mine\.toml:7: 'memory_bytes' .* got -8"),
        ("8_000_000_000", "8e9", r"mine\.toml:7: 'memory_bytes' is an integer"),
        ("8_000_000_000", "true", r"mine\.toml:7: 'memory_bytes' is an integer"),
        ("8_000_000_000", '"8 GB"', r"mine\.toml:7: 'memory_bytes' is an integer"),
        ("8_000_000_000", "9" * 30, r"mine\.toml:7: 'memory_bytes' is an integer"),
        ("fp16 = 1e12", "fp16 = 0", r"mine\.toml:15: 'peak_ops_per_s\.fp16' .* got 0"),
        ("fp16 = 1e12", "fp16 = nan", r"mine\.toml:15: 'peak_ops_per_s\.fp16' .* got nan"),
        ("fp16 = 1e12", "fp16 = inf", r"mine\.toml:15: 'peak_ops_per_s\.fp16' .* got inf"),
        ("fp16 = 1e12", "fp16 = 1e12\nfp17 = 1", r"mine\.toml:16: 'peak_ops_per_s\.fp17' is not"),
        ('"tensorrt"', '"tensorflow"', r"mine\.toml:2: 'runtime' is 'tensorflow', not one of"),
        ('"cuda"', '"cpu"', r"mine\.toml:3: 'device' is 'cpu', but TensorRT needs 'cuda'"),
        ('"aarch64"', '"arm"', r"mine\.toml:4: 'architecture' is 'arm'"),
        ('"fp16"]', '"half"]', r"mine\.toml:5: 'precisions' holds 'half'"),
        ('["fp32", "fp16"]', "[]", r"mine\.toml:5: 'precisions' is needed"),
        ('["fp32", "fp16"]', '"fp16"', r"mine\.toml:5: 'precisions' is a list"),
        ('"8.7"', "8.7", r"mine\.toml:6: 'compute_capability' is needed, and is a string"),
        ('"8.7"', '"sm_87"', r"mine\.toml:6: 'compute_capability' .* got 'sm_87'"),
        ("watts = 15", "watts = -1", r"mine\.toml:8: 'power_modes\[0\]\.watts' .* got -1"),
        ('{ name = "15W", watts', "{ watts", r"mine\.toml:8: 'power_modes\[0\]\.name' is needed"),
        ("watts = 30", "volts = 30", r"mine\.toml:8: 'power_modes\[1\]\.volts' is not a key"),
        ('"memory_bytes",', '"sm_count",', r"mine\.toml:12: 'unverified' names 'sm_count'"),
        ("s.fp16", "s.int8", r"mine\.toml:12: 'unverified' names 'peak_ops_per_s\.int8'"),
        ('summary = "My board"', "", r"mine\.toml: 'summary' is needed"),
        ('summary = "My board"', "summary = [", r"mine\.toml: is not valid TOML"),
        ('summary = "My board"', "x = " + "[" * 5000, r"mine\.toml: is not valid TOML"),
    ],
)
def test_error_names_file_line_and_key(mine: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        load_profile(change(mine, old, new))


def test_line_is_that_of_the_whole_key(mine: Path) -> None:
    """Line 7 begins with the same letters."""
    old = "memory_bytes = 8_000_000_000\n"
    with pytest.raises(BadInput, match=r"mine\.toml:8: 'memory' is not a key"):
        load_profile(change(mine, old, f"{old}memory = 1\n"))


def test_a_file_that_is_not_a_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        load_profile(str(tmp_path / "nothing.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not a text file"):
        load_profile(str(tmp_path / "binary.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(BadInput, match="is a folder"):
        load_profile(str(tmp_path / "folder.toml"))


# which profile a machine is

ORIN = Gpu("Orin (nvgpu)", None, "540.4.0", "8.7")


def machine(*gpus: Gpu, boards: tuple[str, ...] = (), board: str | None = None) -> Machine:
    return replace(this_machine(), gpus=gpus, board_ids=boards, board=board)


def test_a_jetson_is_recognised_by_its_board_with_and_without_nvidia_smi() -> None:
    for gpus in ((ORIN,), ()):
        nano = machine(*gpus, boards=("nvidia,p3767-0005", "nvidia,tegra234"))
        fitting = [name for name in NAMES if fits(load_profile(name), nano)]
        assert fitting == ["jetson-orin-nano-8gb"]


def test_an_unknown_board_is_not_matched_by_the_name_of_its_gpu() -> None:
    unknown = machine(ORIN, boards=("acme,orin-carrier",))
    assert not any(fits(load_profile(name), unknown) for name in NAMES)


def test_any_of_several_gpus_may_be_the_target() -> None:
    two = machine(Gpu("NVIDIA L4", 1, "580", "8.9"), Gpu("NVIDIA H200", 1, "580", "9.0"))
    assert [name for name in NAMES if fits(load_profile(name), two)] == ["l4", "h200"]


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


def test_dla_cores_are_those_of_the_module() -> None:
    cores = {name: load_profile(name).dla_cores for name in NAMES}
    assert {name: count for name, count in cores.items() if count} == {
        "jetson-agx-orin-32gb": 2,
        "jetson-agx-orin-64gb": 2,
        "jetson-orin-nx-16gb": 2,
        "jetson-orin-nx-8gb": 1,
    }


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h100", "did you mean h100-pcie, h100-sxm?"),
        ("H100", "did you mean h100-pcie, h100-sxm?"),
        ("h100-smx", "did you mean h100-sxm?"),
        ("Orin-Nano", "did you mean jetson-orin-nano-4gb, jetson-orin-nano-8gb?"),
        ("a100@15W", "did you mean a100-40gb, a100-80gb?"),
        ("", "deploykit profiles lists them; or a file: ./mine.toml"),
        ("vax", "deploykit profiles lists them; or a file: ./mine.toml"),
    ],
)
def test_an_unknown_profile_is_answered_with_those_that_may_be_meant(name: str, hint: str) -> None:
    with pytest.raises(NotFound, match="no profile") as caught:
        load_profile(name)
    assert caught.value.hint == hint


def test_a_profile_is_known_in_any_case_and_auto_is_one() -> None:
    assert load_profile("H100-SXM") == load_profile("h100-sxm")
    assert load_profile("auto") == choose_profile()[0]
