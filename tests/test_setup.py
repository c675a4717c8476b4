"""How the venv's torch is chosen: by real pip, in a small index of its own, without the network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import setup_venv


def test_versions_come_from_the_index_alone_and_old_ones_are_left_out(tmp_path: Path) -> None:
    """Of wheels that are names only: pip reads the versions off them."""
    (tmp_path / "torch").mkdir()
    names = [f"torch-{v}-py3-none-any.whl" for v in ("2.9.0+cpu", "2.13.0+cpu", "2.12.1+cpu")]
    links = "".join(f'<a href="{name.replace("+", "%2B")}">{name}</a>' for name in names)
    page = f"<!DOCTYPE html><html><body>{links}</body></html>"
    (tmp_path / "torch/index.html").write_text(page)
    found = setup_venv.versions_of_torch(Path(sys.executable), tmp_path.as_uri())
    assert sorted(found, key=setup_venv.release) == ["2.12.1+cpu", "2.13.0+cpu"]


def test_torchvision_matches_the_version_and_if_possible_the_build_of_torch() -> None:
    versions = ["0.29.0", "0.28.2", "0.28.1+cpu", "0.28.0+cpu", "0.25.0"]
    matching = {"2.13.0+cpu": "0.28.1+cpu", "2.13.1": "0.28.2", "2.10.0+cu128": "0.25.0"}
    for torch, torchvision in (matching | dict.fromkeys(("2.11.0", "3.13.0", ""))).items():
        assert setup_venv.matching_torchvision(versions, torch) == torchvision


LISTED = """\
global.extra-index-url='file:///a/simple https://b/simple'
install.no-index='true'
:env:.cert='/etc/ca.crt'
:env:.find-links='/mine'
"""


def test_uv_gets_the_places_that_pip_is_configured_for() -> None:
    options, variables = setup_venv.for_uv(LISTED)
    assert options[:2] == ["--index-strategy", "unsafe-best-match"]
    places = {*zip(options[2::2], options[3::2], strict=False)}
    extra = {("--extra-index-url", url) for url in ("file:///a/simple", "https://b/simple")}
    assert places == extra | {("--find-links", "/mine")}
    assert options[-1] == "--no-index"
    assert variables["SSL_CERT_FILE"] == "/etc/ca.crt"


@pytest.mark.parametrize(
    ("driver", "jetson", "extras"),
    [
        ("580.65.06", False, ("gpu", "tensorrt-cu13")),  # a cloud L4, an H200
        ("550.54.15", False, ("cpu", "tensorrt-cu12")),
        ("470.57.02", False, ("cpu", "")),
        ("", False, ("cpu", "")),
        ("540.4.0", True, ("cpu", "jetson")),  # JetPack 6.2 on Orin
        ("580.00", True, ("cpu", "jetson")),  # JetPack 7 on Thor
    ],
)
def test_the_extras_follow_from_the_driver(
    driver: str, jetson: bool, extras: tuple[str, str]
) -> None:
    """onnxruntime-gpu of PyPI is linked to CUDA 13, and has no kernels for a Jetson."""
    assert setup_venv.gpu_extras(driver, jetson) == extras


@pytest.mark.parametrize(("onnxruntime", "runtime"), [("", ["cpu"]), ("1.23.0", [])])
def test_nothing_hides_what_jetpack_and_nvidia_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, onnxruntime: str, runtime: list[str]
) -> None:
    """With uv 0.13, which does not see the system's packages, torch would come twice."""
    assert not setup_venv.is_jetson(tmp_path)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 4.3")
    assert setup_venv.is_jetson(tmp_path)
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append([str(word) for word in command])
        return subprocess.CompletedProcess(command, 0, "", "")

    there = {"torch": "2.10.0", "torchvision": "0.25.0", "onnxruntime-gpu": onnxruntime}
    venv = tmp_path / "venv"
    monkeypatch.setattr(setup_venv.subprocess, "run", run)
    monkeypatch.setattr(setup_venv, "is_jetson", lambda: True)
    monkeypatch.setattr(setup_venv, "version_in", lambda _, name: there.get(name, ""))
    monkeypatch.setattr(sys, "argv", ["setup_venv.py", "--venv", str(venv), "--dev", "--gpu"])
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: 0)
    assert setup_venv.main() == 0
    assert any("--system-site-packages" in command for command in commands)
    assert not any("uv" in command or command[0].endswith("uv") for command in commands)
    (wanted,) = (command[-1] for command in commands if "--editable" in command)
    extras = wanted.partition("[")[2].rstrip("]").split(",")
    assert extras == [*runtime, "serve", "export", "train", "quantize", "dev", "jetson"]
