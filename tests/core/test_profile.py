from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from deploykit.core import profile
from deploykit.core.errors import BadInput, NotFound
from deploykit.core.jetpack import JETPACKS, release_numbers
from deploykit.core.profile import choose_profile, load_profile, profile_names

NAMES = [
    "cpu",
    "cpu-openvino",
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


def change(path: Path, old: str, new: str) -> str:
    assert MINE.count(old) == 1
    path.write_text(MINE.replace(old, new), encoding="utf-8")
    return str(path)


def test_published_names_are_the_shipped_ones() -> None:
    assert profile_names() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profile_says_where_its_figures_are_from(name: str) -> None:
    """No source is a site to which anyone uploads."""
    sites = r"scribd|huggingface|gist\.|hmc-tech|sysrqmts|store\.|mzph|learnaivisually|blogspot"
    profile = load_profile(name)
    assert profile.name == name
    assert profile.sources
    assert all(source.startswith(("https://", "http://")) for source in profile.sources)
    assert not re.search(sites, " ".join(profile.sources))


@pytest.mark.parametrize("name", GPUS)
def test_gpu_profile_has_what_a_build_and_a_roofline_need_in_base_units(name: str) -> None:
    """A figure in GB/s or TFLOPS would be off by 10^9 or 10^12."""
    profile = load_profile(name)
    assert (profile.runtime, profile.device) == ("tensorrt", "cuda")
    assert 3 << 30 <= (profile.memory_bytes or 0) <= 192 << 30
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


@pytest.mark.parametrize(
    ("name", "mib"), [("h200", 143771), ("t4", 15360), ("jetson-orin-nano-4gb", 3425)]
)
def test_memory_is_what_the_driver_reports(name: str, mib: int) -> None:
    assert load_profile(name).memory_bytes == mib << 20


@pytest.mark.parametrize("name", JETSONS)
def test_jetson_shares_its_memory_and_may_gate_its_sms(name: str) -> None:
    profile = load_profile(name)
    assert profile.unified_memory
    assert profile.architecture == "aarch64"
    for mode in profile.power_modes:
        assert (mode.sms or 1) <= (profile.sm_count or 0)
        digits = "".join(letter for letter in mode.name.partition("W")[0] if letter.isdigit())
        assert mode.watts == (float(digits) if digits else None)
    clocks = re.findall(r"x (\d+) MHz x", " ".join(profile.derived.values()))
    assert all((mode.gpu_mhz or 0) <= int(clocks[-1]) for mode in profile.power_modes)


@pytest.mark.parametrize("name", JETSONS)
def test_each_jetpack_of_a_module_has_a_container_image(name: str) -> None:
    """JetPack 6.0 and older are too old for the TensorRT that deploykit needs."""
    profile = load_profile(name)
    for row in JETPACKS:
        runs = profile.compute_capability in row.compute_capabilities
        runs = runs and release_numbers(row.tensorrt) >= (10, 3, 0)
        assert (profile.base_image(f"jetpack-{row.version}") is not None) == runs, row.version


@pytest.mark.parametrize(
    ("board", "release", "image"),
    [
        ("orin-nx-16gb", "", "l4t-tensorrt:r10.3.0"),
        ("orin-nx-16gb", "jetpack-6.2.1", "l4t-tensorrt:r10.3.0"),
        ("orin-nx-16gb", "jetpack-7.2.1", "cuda:13.2.1"),
        *(("orin-nx-16gb", other, None) for other in ("jetpack-8.0", "cuda-13", "jetpack-six")),
        ("orin-nx-16gb", "jetpack", None),
        ("thor-t5000", "jetpack-7.0", "13.0.1"),
        ("thor-t5000", "jetpack-7.1", "13.0.1"),
        ("thor-t5000", "jetpack-7.2", "13.2.1"),
        ("thor-t5000", "jetpack-7.9", "13.2.1"),
    ],
)
def test_the_container_image_is_found_by_the_hosts_release(
    board: str, release: str, image: str | None
) -> None:
    found = load_profile(f"jetson-{board}").base_image(release)
    assert found is None if image is None else image in (found or "")


@pytest.mark.parametrize("name", [name for name in GPUS if name not in JETSONS])
def test_a_server_has_an_image_for_each_cuda_major_that_drives_it(name: str) -> None:
    """CUDA 13 dropped Volta; GB10 came with it."""
    expected = {"v100": {"cuda-12"}, "gb10": {"cuda-13"}}.get(name, {"cuda-12", "cuda-13"})
    assert set(load_profile(name).container_base) == expected


def test_no_board_belongs_to_two_profiles() -> None:
    boards = [board for name in NAMES for board in load_profile(name).boards]
    assert len(boards) == len(set(boards))


def test_cpu_profile_leaves_the_figures_to_the_machine() -> None:
    profile = load_profile("cpu")
    assert (profile.runtime, profile.device) == ("onnxruntime", "cpu")
    assert profile.precisions == ("fp32", "fp16", "int8")
    assert profile.memory_bytes is None
    assert profile.peak_ops_per_s == {}


def test_power_mode_follows_an_at_sign_without_its_prefix_and_in_any_case() -> None:
    assert load_profile("jetson-orin-nx-16gb").power_mode is None
    assert load_profile("jetson-orin-nx-16gb@25W").power_mode == "25W"
    for mode in ("MODE_30W", "mode_30w", "30W"):
        assert load_profile(f"jetson-agx-orin-64gb@{mode}").power_mode == "MODE_30W"


def test_a_users_profile_is_a_file(mine: Path) -> None:
    profile = load_profile(str(mine))
    assert (profile.name, profile.summary) == ("mine", "My board")
    assert profile.peak_ops_per_s == {"fp16": 1e12}
    assert profile.sm_count is None
    assert not profile.unified_memory
    assert load_profile(f"{mine}@30W").power_mode == "MODE_30W"
    values = profile.to_dict()
    assert values["power_modes"][0] == {"name": "15W", "watts": 15.0, "gpu_mhz": None, "sms": None}


def test_an_at_sign_in_a_folder_name_is_not_a_power_mode(mine: Path) -> None:
    folder = mine.parent / "a@b"
    folder.mkdir()
    moved = mine.rename(folder / "mine.toml")
    assert load_profile(str(moved)).power_mode is None
    assert load_profile(f"{moved}@15W").power_mode == "15W"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory_bytes = 8", "memory_size = 8", r"mine\.toml: 'memory_size' is not a key"),
        ("memory_bytes = 8", "memory_bytes = -8", r"mine\.toml: 'memory_bytes' .* got -8"),
        ("8_000_000_000", "8e9", r"mine\.toml: 'memory_bytes' must be an integer"),
        ("8_000_000_000", "true", r"mine\.toml: 'memory_bytes' must be an integer"),
        ("8_000_000_000", '"8 GB"', r"mine\.toml: 'memory_bytes' must be an integer"),
        ("8_000_000_000", "9" * 30, r"mine\.toml: 'memory_bytes' is a number above 0"),
        (
            "fp16 = 1e12",
            "fp16 = 1\n[container_base]\nr36 = 'x'",
            r"mine\.toml: 'container_base\.r36'",
        ),
        (
            "fp16 = 1e12",
            "fp16 = 1\n[container_base]\ncuda-13 = 3",
            r".*cuda-13' must be a string",
        ),
        ("fp16 = 1e12", "fp16 = 1\n[derived]\nsm_count = 'x'", r"'derived' names 'sm_count'"),
        (
            "fp16 = 1e12",
            "fp16 = 1\n[derived]\nmemory_bytes = 1",
            r"'derived': 'memory_bytes' must be a string",
        ),
        ("fp16 = 1e12", "fp16 = 0", r"mine\.toml: 'peak_ops_per_s\.fp16' .* got 0"),
        ("fp16 = 1e12", "fp16 = nan", r"mine\.toml: 'peak_ops_per_s\.fp16' .* got nan"),
        ("fp16 = 1e12", "fp16 = inf", r"mine\.toml: 'peak_ops_per_s\.fp16' .* got inf"),
        ("fp16 = 1e12", "fp16 = 1e12\nfp17 = 1", r"mine\.toml: 'peak_ops_per_s\.fp17' is not"),
        ('"tensorrt"', '"tensorflow"', r"mine\.toml: 'runtime' holds 'tensorflow', not one of"),
        ('"cuda"', '"cpu"', r"mine\.toml: 'device' is 'cpu', but TensorRT needs 'cuda'"),
        ('"aarch64"', '"arm"', r"mine\.toml: 'architecture' holds 'arm'"),
        ('"fp16"]', '"half"]', r"mine\.toml: 'precisions' holds 'half'"),
        ('["fp32", "fp16"]', "[]", r"mine\.toml: 'precisions' is needed"),
        ('["fp32", "fp16"]', '"fp16"', r"mine\.toml: 'precisions' must be a list"),
        ('"8.7"', "8.7", r"mine\.toml: 'compute_capability' must be a string"),
        ('"8.7"', '"sm_87"', r"mine\.toml: 'compute_capability' .* got 'sm_87'"),
        ("watts = 15", "watts = -1", r"mine\.toml: 'power_modes\.watts' .* got -1"),
        (
            '{ name = "15W", watts',
            "{ watts",
            r"mine\.toml: 'power_modes'\[0\]: is not a complete PowerMode: .*'name'",
        ),
        ("watts = 30", "volts = 30", r"mine\.toml: 'power_modes\.volts' is not a key"),
        ('"memory_bytes",', '"sm_count",', r"mine\.toml: 'unverified' names 'sm_count'"),
        ("s.fp16", "s.int8", r"mine\.toml: 'unverified' names 'peak_ops_per_s\.int8'"),
        ('summary = "My board"', "", r"mine\.toml: is not a complete Profile: no .*'summary'"),
        ('summary = "My board"', "summary = [", r"mine\.toml: is not valid TOML"),
        ('summary = "My board"', "x = " + "[" * 5000, r"mine\.toml: is not valid TOML"),
    ],
)
def test_error_names_file_and_key(mine: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        load_profile(change(mine, old, new))


def test_a_file_that_is_not_a_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        load_profile(str(tmp_path / "nothing.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not a text file"):
        load_profile(str(tmp_path / "binary.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(BadInput, match="is a folder"):
        load_profile(str(tmp_path / "folder.toml"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h100", "did you mean h100-pcie, h100-sxm?"),
        ("H100", "did you mean h100-pcie, h100-sxm?"),
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


def test_a_profile_is_known_in_any_case_and_auto_is_one() -> None:
    assert load_profile("H100-SXM") == load_profile("h100-sxm")
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
