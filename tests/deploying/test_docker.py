"""The folder for one machine: what is in it, and that others' tools accept it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deploykit as dk
from deploykit.core.profile import load_profile, profile_names
from deploykit.deploying import docker
from deploykit.deploying.docker import TENSORRT, choose_image, container_file, dockerfile
from tests.support.bundles import proven_model

JETSON = "jetson-orin-nx-16gb"
yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime")
    return proven_model(tmp_path_factory.mktemp("model") / "tiny.onnx")


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bundle for a Jetson, a GPU in a server, and a CPU."""
    top = tmp_path_factory.mktemp("bundles")
    for name in (JETSON, "l4", "cpu"):
        dk.bundle(model, name, out=top / name)
    return {path.name: path for path in top.iterdir()}


def compose(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())
    return found


GPUS = {  # how each kind of target gets its GPU
    JETSON: {"runtime": "nvidia", "group_add": ["video"]},
    "l4": {"deploy": "nvidia"},
    "cpu": {},
}


@pytest.mark.parametrize("name", GPUS)
def test_the_container_has_its_gpu_and_no_rights_that_it_does_not_need(
    name: str, folders: dict[str, Path]
) -> None:
    document = compose(folders[name])
    server = document["services"]["server"]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    assert server["user"] == "10001:10001"
    assert all("127.0.0.1" in each for each in server["ports"])
    gpu = {key: server[key] for key in ("runtime", "group_add", "deploy") if key in server}
    if "group_add" in gpu:
        gpu["group_add"] = gpu["group_add"][:1]
    if "deploy" in gpu:
        gpu["deploy"] = gpu["deploy"]["resources"]["reservations"]["devices"][0]["driver"]
    assert gpu == GPUS[name]
    # a named volume is declared, and a path of the host is never made
    mounts = server["volumes"]
    named = [each.partition(":")[0] for each in mounts if isinstance(each, str)]
    assert named == list(document["volumes"]) == ["engines"]
    bound = [each for each in mounts if not isinstance(each, str)]
    for each in bound:
        assert (each["read_only"], each["bind"]["create_host_path"]) == (True, False)
    trees = {each["target"] for each in bound if "device-tree" in each["target"]}
    wanted = {f"/run/device-tree/{file}" for file in ("model", "compatible")}
    assert trees == (wanted if name == JETSON else set())
    for file in ("compose.yaml", "README.md", "smoke-test.sh", "deploykit-tiny.service"):
        assert not re.search(r"@[A-Z_]+@|@\?", (folders[name] / file).read_text())


def test_the_shell_script_has_no_finding(folders: dict[str, Path]) -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run([program, folders["cpu"] / "smoke-test.sh"], check=True)


def test_sha256sum_finds_every_file(folders: dict[str, Path]) -> None:
    listed = (folders["cpu"] / "SHA256SUMS").read_text().splitlines()
    there = {p.relative_to(folders["cpu"]).as_posix() for p in folders["cpu"].rglob("*")}
    assert {line.split("  ")[1] for line in listed} == {
        name for name in there if (folders["cpu"] / name).is_file() and name != "SHA256SUMS"
    }
    command = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    subprocess.run(command, cwd=folders["cpu"], check=True)


def test_the_software_bill_of_materials_is_valid_and_lists_what_the_lock_file_installs(
    folders: dict[str, Path],
) -> None:
    document = json.loads((folders[JETSON] / "sbom.cdx.json").read_text())
    listed = {(each["name"], each["version"]) for each in document["components"]}
    locked = docker.read_lock((folders[JETSON] / "requirements.lock").read_text())
    wanted = {(each.name, each.version) for each in locked if each.is_for("3.10")}
    assert wanted < listed
    assert ("numpy", "2.2.6") in wanted  # the last for Python 3.10, which JetPack 6 has
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    for folder in folders.values():
        assert validator.validate_str((folder / "sbom.cdx.json").read_text()) is None


def test_our_own_wheel_installs_and_runs(folders: dict[str, Path], tmp_path: Path) -> None:
    wheel, site = next((folders["cpu"] / "wheels").glob("*.whl")), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", site, wheel], check=True)
    code = (
        "import deploykit, sys; from deploykit.core.profile import load_profile as p; "
        "print(deploykit.__file__, p('l4').name)"
    )
    options = {"cwd": site, "capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.stdout.split() == [str(site / "deploykit" / "__init__.py"), "l4"]


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_has_an_image(name: str) -> None:
    profile = load_profile(name)
    for release in (*profile.container_base, None):
        image = choose_image(profile, release, "x86_64")
        assert dockerfile(image).endswith("FROM bundle\n")
        assert (image.dockerfile == "Dockerfile.jetson") == name.startswith("jetson")
        pinned = docker.read_lock(docker.lock_text(image))
        assert pinned
        for each in pinned:
            assert {len(digest) for digest in each.sha256} == {64}
            each.is_for("3.10")  # raises for a marker that it does not read


def test_an_image_pins_a_tensorrt_that_its_gpu_and_release_have() -> None:
    image = choose_image(load_profile("v100"), None, "x86_64")
    assert image.tensorrt == "10.4.0"  # the last one for it
    assert "ARG TENSORRT=10.4.0\n" in dockerfile(image)
    assert choose_image(load_profile("l4"), "cuda-12", "x86_64").lock == "tensorrt-cu12"
    assert f"\nARG TENSORRT={TENSORRT}\n" in container_file("Dockerfile.x86").read_text()
    with pytest.raises(dk.BadInput, match=r"jetpack-5\.1"):
        choose_image(load_profile(JETSON), "jetpack-5.1", "x86_64")


@pytest.mark.parametrize(
    ("marker", "installed"),
    [
        ("", "3.10 3.11 3.12"),
        ("python_full_version < '3.11'", "3.10"),
        ("python_full_version >= '3.12'", "3.12"),
        ("python_full_version == '3.11.*'", "3.11"),
        ("python_full_version >= '3.11' and python_full_version < '3.13'", "3.11 3.12"),
    ],
)
def test_a_marker_decides_by_the_targets_python(marker: str, installed: str) -> None:
    locked = docker.Locked("a", "1", marker, ())
    assert [each for each in ("3.10", "3.11", "3.12") if locked.is_for(each)] == installed.split()
