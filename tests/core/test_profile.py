from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from deploykit.core import profile
from deploykit.core.errors import BadInput, NotFound, Unsupported
from deploykit.core.machine import JETPACKS, Gpu, Machine, release_numbers, this_machine
from deploykit.core.precision import HARDWARE
from deploykit.core.profile import choose_profile, load_profile, profile_names, recognise, with_gpu

NAMES = profile_names()
LISTED = "deploykit profiles lists them; or a file: ./mine.toml"
GPUS = [name for name in NAMES if not name.startswith("cpu")]
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


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profile_says_where_its_figures_are_from(name: str) -> None:
    """No source is a site to which anyone uploads."""
    sites = r"scribd|huggingface|gist\.|hmc-tech|sysrqmts|store\.|mzph|learnaivisually|blogspot"
    profile = load_profile(name)
    assert len(NAMES) == 27
    assert profile.name == name
    assert profile.sources
    assert all(source.startswith(("https://", "http://")) for source in profile.sources)
    assert not re.search(sites, " ".join(profile.sources))


@pytest.mark.parametrize("name", GPUS)
def test_gpu_profile_has_what_a_build_and_a_roofline_need_in_base_units(name: str) -> None:
    """A figure in GB/s or TFLOPS would be off by 10^9 or 10^12; the driver reports the memory."""
    profile = load_profile(name)
    assert (profile.runtime, profile.device) == ("tensorrt", "cuda")
    assert 3 << 30 <= (profile.memory_bytes or 0) <= 192 << 30
    reported = {"h200": 143771, "t4": 15360, "jetson-orin-nano-4gb": 3425}
    assert name not in reported or profile.memory_bytes == reported[name] << 20
    assert 0 < (profile.workspace_bytes or 0) * 3 < (profile.memory_bytes or 0)
    assert 30e9 <= (profile.bandwidth_bytes_per_s or 0) <= 10e12
    assert all(0.5e12 <= peak <= 10e15 for peak in profile.peak_ops_per_s.values())
    assert profile.peak_ops_per_s
    assert profile.gpu_names


@pytest.mark.parametrize("name", GPUS)
def test_precisions_are_those_of_the_compute_capability_and_the_lower_never_slower(
    name: str,
) -> None:
    profile = load_profile(name)
    capability = tuple(map(int, str(profile.compute_capability).split(".")))
    since = {"int8": (7, 5), "bf16": (8, 0), "fp8": (8, 9), "fp4": (10, 0)}
    expected = {"fp32", "fp16"} | {each for each, first in since.items() if capability >= first}
    peaks = profile.peak_ops_per_s
    assert set(profile.precisions) == expected
    assert set(peaks) <= expected | {"tf32"}
    known = [peaks[key] for key in ("fp32", "tf32", "fp16", "fp8", "fp4") if key in peaks]
    assert known == sorted(known)
    assert peaks.get("fp16") == peaks.get("bf16", peaks.get("fp16"))
    assert peaks.get("int8", 1e18) >= peaks.get("fp16", 0)


OPERATIONS = {  # dense, per SM and clock: docs/profiles.md
    "8.7": {"fp32": 256, "tf32": 1024, "fp16": 2048, "bf16": 2048, "int8": 4096},
    "11.0": {"fp32": 256, "fp16": 8192, "bf16": 8192, "fp8": 16384, "fp4": 32768},
}
FORMULA = [
    (r"(\d+) SMs x (\d+) MHz x (\d+) operations", lambda sms, mhz, ops: sms * mhz * 1e6 * ops),
    (r"(\d+e12) / 2: the vendor's figure is sparse", lambda sparse: sparse / 2),
    (r"(\d+) MHz x 2 x (\d+) bits / 8", lambda mhz, bits: mhz * 1e6 * 2 * bits / 8),
    (r"(\d+) GiB less 1/8, as no report.*", lambda gib: gib * 2**30 * 7 / 8),
]


@pytest.mark.parametrize("name", [name for name in GPUS if load_profile(name).derived])
def test_a_derived_figure_is_what_its_formula_gives(name: str) -> None:
    profile = load_profile(name)
    for key, how in profile.derived.items():
        table, _, peak = key.partition(".")
        value = profile.peak_ops_per_s[peak] if peak else getattr(profile, table)
        found = [(re.fullmatch(pattern, how), result) for pattern, result in FORMULA]
        (computed,) = (result(*map(float, match.groups())) for match, result in found if match)
        assert value == pytest.approx(computed, rel=0.01), key
        if match := re.fullmatch(FORMULA[0][0], how):
            assert int(match[1]) == profile.sm_count
            assert int(match[3]) == OPERATIONS[str(profile.compute_capability)][peak]


@pytest.mark.parametrize("name", JETSONS)
def test_jetson_shares_its_memory_and_has_an_image_for_each_jetpack(name: str) -> None:
    profile = load_profile(name)
    assert profile.unified_memory
    assert profile.architecture == "aarch64"
    cores = {"jetson-agx-orin-32gb": 2, "jetson-agx-orin-64gb": 2, "jetson-orin-nx-16gb": 2}
    assert profile.dla_cores == (cores | {"jetson-orin-nx-8gb": 1}).get(name, 0)
    for mode in profile.power_modes:
        assert (mode.sms or 1) <= (profile.sm_count or 0)
        digits = "".join(letter for letter in mode.name.partition("W")[0] if letter.isdigit())
        assert mode.watts == (float(digits) if digits else None)
    clocks = re.findall(r"x (\d+) MHz x", " ".join(profile.derived.values()))
    assert all((mode.gpu_mhz or 0) <= int(clocks[-1]) for mode in profile.power_modes)
    for row in JETPACKS:  # JetPack 6.0 and older are too old for the TensorRT that is needed
        runs = profile.compute_capability in row.compute_capabilities
        runs = runs and release_numbers(row.tensorrt) >= (10, 3, 0)
        assert (profile.base_image(f"jetpack-{row.version}") is not None) == runs, row.version


def test_the_container_image_is_found_by_the_hosts_release() -> None:
    orin, thor = load_profile("jetson-orin-nx-16gb"), load_profile("jetson-thor-t5000")
    for board, release, image in (
        (orin, "", "l4t-tensorrt:r10.3.0"),
        (orin, "jetpack-6.2.1", "l4t-tensorrt:r10.3.0"),
        (orin, "jetpack-7.2.1", "cuda:13.2.1"),
        (thor, "jetpack-7.1", "13.0.1"),
        (thor, "jetpack-7.9", "13.2.1"),
    ):
        assert image in (board.base_image(release) or "")
    for release in ("jetpack-8.0", "cuda-13", "jetpack-six", "jetpack"):
        assert orin.base_image(release) is None
    assert load_profile("h200").base_image("jetpack-six") is None


@pytest.mark.parametrize("name", [name for name in GPUS if name not in JETSONS])
def test_a_server_has_an_image_for_each_cuda_major_that_drives_it(name: str) -> None:
    """CUDA 13 dropped Volta; GB10 came with it."""
    expected = {"v100": {"cuda-12"}, "gb10": {"cuda-13"}}.get(name, {"cuda-12", "cuda-13"})
    assert set(load_profile(name).container_base) == expected


def test_no_board_belongs_to_two_profiles_and_a_cpu_leaves_the_figures_to_the_machine() -> None:
    boards = [board for name in NAMES for board in load_profile(name).boards]
    assert len(boards) == len(set(boards))
    profile = load_profile("cpu")
    assert (profile.runtime, profile.device) == ("onnxruntime", "cpu")
    assert profile.precisions == ("fp32", "fp16", "int8")
    assert (profile.memory_bytes, profile.peak_ops_per_s) == (None, {})


def test_a_users_profile_is_a_file(mine: Path) -> None:
    profile = load_profile(str(mine))
    assert (profile.name, profile.summary) == ("mine", "My board")
    assert profile.peak_ops_per_s == {"fp16": 1e12}
    assert profile.sm_count is None
    assert not profile.unified_memory
    assert profile.power_mode is None
    for mode in ("MODE_30W", "mode_30w", "30W"):
        assert load_profile(f"{mine}@{mode}").power_mode == "MODE_30W"
    values = profile.to_dict()
    assert values["power_modes"][0] == {"name": "15W", "watts": 15.0, "gpu_mhz": None, "sms": None}
    folder = mine.parent / "a@b"  # is not a power mode
    folder.mkdir()
    moved = mine.rename(folder / "mine.toml")
    assert load_profile(str(moved)).power_mode is None
    assert load_profile(f"{moved}@15W").power_mode == "15W"


PEAK, NAMED = "fp16 = 1e12", 'summary = "My board"'


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory_bytes = 8", "memory_size = 8", "'memory_size' is not a key"),
        ("memory_bytes = 8", "memory_bytes = -8", "'memory_bytes' .* got -8"),
        ("8_000_000_000", "true", "'memory_bytes' must be an integer"),
        (PEAK, "fp16 = 1\n[container_base]\nr36 = 'x'", r"'container_base\.r36'"),
        (PEAK, "fp16 = nan", r"'peak_ops_per_s\.fp16' .* got nan"),
        (PEAK, "fp16 = 1e12\nfp17 = 1", r"'peak_ops_per_s\.fp17' is not"),
        ('"tensorrt"', '"tensorflow"', "'runtime' holds 'tensorflow', not one of"),
        ('"cuda"', '"cpu"', "'device' is 'cpu', but TensorRT needs 'cuda'"),
        ('["fp32", "fp16"]', "[]", "'precisions' is needed"),
        ('["fp32", "fp16"]', '"fp16"', "'precisions' must be a list"),
        ('"8.7"', "8.7", "'compute_capability' must be a string"),
        ('"8.7"', '"sm_87"', "'compute_capability' .* got 'sm_87'"),
        ("watts = 15", "watts = -1", r"'power_modes\.watts' .* got -1"),
        ('{ name = "15W", watts', "{ watts", r"'power_modes'\[0\]: is not a complete .*'name'"),
        ("watts = 30", "volts = 30", r"'power_modes\.volts' is not a key"),
        (NAMED, "", "is not a complete Profile: no .*'summary'"),
        (NAMED, "x = " + "[" * 5000, "is not valid TOML"),
        (NAMED, "\0", "is not valid TOML"),
    ],
)
def test_error_names_file_and_key(mine: Path, old: str, new: str, says: str) -> None:
    assert MINE.count(old) == 1
    mine.write_text(MINE.replace(old, new), encoding="utf-8")
    with pytest.raises(BadInput, match=rf"mine\.toml: .*{says}"):
        load_profile(str(mine))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h100", "did you mean h100-pcie, h100-sxm?"),
        ("h100-smx", "did you mean h100-sxm?"),
        ("Orin-Nano", "did you mean jetson-orin-nano-4gb, jetson-orin-nano-8gb?"),
        ("a100@15W", "did you mean a100-40gb, a100-80gb?"),
        *((name, LISTED) for name in ("", "vax", "../profiles/h200", "@")),
        ("jetson-orin-nano-8gb@99W", "one of: 15W, 25W, MAXN_SUPER, 7W"),
        ("h200@MAXN", "this target has no power modes"),
    ],
)
def test_an_unknown_profile_is_answered_with_those_that_may_be_meant(name: str, hint: str) -> None:
    with pytest.raises(NotFound, match=r"no profile|has no power mode") as caught:
        load_profile(name)
    assert caught.value.hint == hint


def test_a_profile_is_known_in_any_case_and_auto_is_one(tmp_path: Path) -> None:
    assert load_profile("H100-SXM") == load_profile("h100-sxm")
    with pytest.raises(NotFound):
        load_profile(str(tmp_path / "nothing.toml"))
    assert load_profile("auto") == choose_profile()[0]


def test_the_page_on_profiles_names_every_key() -> None:
    page = Path(__file__).parents[2] / "docs" / "profiles.md"
    documented = {
        name
        for row in page.read_text(encoding="utf-8").splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    given = {"name", "power_mode"}  # by the file's name and the at sign
    assert documented == {each.name for each in fields(profile.Profile)} - given


H100 = Gpu("NVIDIA H100 80GB HBM3", 80 << 30, "580", "9.0")
H200 = Gpu("NVIDIA H200", 1, "580", "9.0")
L4 = Gpu("NVIDIA L4", 1, "580", "8.9")


def machine(*gpus: Gpu, boards: tuple[str, ...] = (), board: str | None = None) -> Machine:
    return replace(this_machine(), gpus=gpus, board_ids=boards, board=board)


def be(monkeypatch: pytest.MonkeyPatch, here: Machine) -> None:
    """Be a machine with TensorRT."""
    monkeypatch.setattr(profile, "installed", lambda _name: True)
    monkeypatch.setattr(profile, "this_machine", lambda: here)


def test_auto_chooses_the_matching_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    nano = machine(boards=("nvidia,p3767-0005",), board="NVIDIA Jetson Orin Nano")
    thor = machine(Gpu("NVIDIA Thor", None, "580", "11.0"), boards=("nvidia,p3834-0008",))
    for here, name in ((nano, "jetson-orin-nano-8gb"), (thor, "jetson-thor-t5000")):
        be(monkeypatch, here)
        chosen, why = choose_profile()
        assert chosen.name == name
        assert why.startswith("this is a NVIDIA Jetson")
    monkeypatch.setattr(profile, "installed", lambda _name: False)
    assert choose_profile()[0].name == "cpu"
    assert "TensorRT is not installed" in choose_profile()[1]


def test_of_two_kinds_of_gpu_the_chosen_one_has_the_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be(monkeypatch, machine(L4, H200))
    assert [choose_profile(number)[0].name for number in (0, 1)] == ["l4", "h200"]
    cuda = (("", "NVIDIA H200"), ("", "NVIDIA L4"))  # the fastest first
    monkeypatch.setattr(profile, "_ask", lambda: cuda)
    assert [choose_profile(number)[0].name for number in (0, 1)] == ["h200", "l4"]


SLICE = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


@pytest.mark.parametrize(
    ("gpus", "visible", "cuda", "names"),
    [
        ([L4], None, [], ["NVIDIA L4", "NVIDIA L4"]),  # CUDA refuses the second
        ([L4], "NoDevFiles", [], [None, None]),
        ([L4, H100], "1", [], [None, None]),
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
    monkeypatch.setattr(profile, "_ask", lambda: tuple(("", name) for name in cuda))
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
    be(monkeypatch, here)
    found, why = choose_profile()
    assert (found.name, found.runtime, found.compute_capability) == ("auto", "tensorrt", capability)
    assert why == f"{name} is here, which no profile names"
    assert profile.fits(found, here)
    assert found.memory_bytes == (memory or here.memory_bytes)
    assert set(found.precisions) == set(precisions.split()) & set(HARDWARE)
    assert (found.tensorrt_min, found.peak_ops_per_s) == ("10.8" if "B300" in name else None, {})
    assert load_profile("auto") == found
    be(monkeypatch, machine(Gpu("Tesla P40", 24 << 30, "580.65.06", "6.1")))
    with pytest.raises(Unsupported, match=r"Tesla P40: compute capability 6\.1"):
        choose_profile()  # too old for TensorRT


@pytest.mark.parametrize(
    ("gpus", "boards", "l4t", "name", "why"),
    [
        ("NVIDIA H200", "", "", "h200", "this is a NVIDIA H200"),
        ("Orin (nvgpu)", "nvidia,p3767-0000", "36.4.3", "jetson-orin-nx-16gb", "is a NVIDIA"),
        ("", "nvidia,p3768-0000+p3767-0004", "36.4.3", "jetson-orin-nano-4gb", "is a NVIDIA"),
        (
            "NVIDIA Thor",
            "nvidia,p3834-0008 nvidia,tegra264",
            "38.2",
            "jetson-thor-t5000",
            "is a NVIDIA",
        ),
        ("NVIDIA Thor", "nvidia,p4071-0000+p3834-0000", "38.4", "jetson-thor-t4000", "is a NVIDIA"),
        ("NVIDIA Thor", "nvidia,p3834-0005", "38.4", None, "(nvidia,p3834-0005)"),
        ("NVIDIA Thor", "", "38.4.0", None, "the board is not known"),
        ("NVIDIA A10G", "", "", None, "no profile names NVIDIA A10G"),
        ("Orin", "acme,kit", "36.4.3", None, "no profile names board My kit (acme,kit)"),
        ("Orin", "", "36.4.3", None, "the board is not known: /proc/device-tree cannot be read"),
        ("", "", "", "cpu", "no NVIDIA GPU here"),
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
