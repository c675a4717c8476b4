"""The wheel that users install: what is in it, and what works with and without extras."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.files import read_toml
from deploykit.deploying.docker import own_wheel
from scripts.setup_venv import for_uv
from tests.support.cli.command import Run, one_process
from tests.support.onnx_zoo import mnist_like, save

ROOT = Path(__file__).resolve().parent.parent
DATA = Path("deploykit/_data")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # without isolation: hatchling is installed here, and a test needs no second download of it
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, ROOT], check=True)
    return next(folder.glob("deploykit-*.whl"))


def test_the_index_accepts_the_wheel_and_the_sdist(wheel: Path, tmp_path: Path) -> None:
    build = "from hatchling.build import build_sdist; print(build_sdist(__import__('sys').argv[1]))"
    command = [sys.executable, "-c", build, tmp_path]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    command = [sys.executable, "-m", "twine", "check", "--strict", wheel]
    command.append(tmp_path / made.stdout.split()[-1])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_wheel_holds_the_package_its_data_and_extras_with_packages(wheel: Path) -> None:
    files = [
        *((path, path.relative_to(ROOT)) for path in (ROOT / "deploykit").rglob("*.py")),
        *((path, DATA / path.relative_to(ROOT)) for path in ROOT.glob("profiles/*.toml")),
        *((path, DATA / path.relative_to(ROOT)) for path in ROOT.glob("models/*.py")),
    ]
    for name in ("Dockerfile.x86", "Dockerfile.jetson", "Dockerfile.lock", ".dockerignore"):
        files.append((ROOT / name, DATA / "containers" / name))
    with zipfile.ZipFile(wheel) as archive:
        for path, packed in files:
            assert archive.read(packed.as_posix()) == path.read_bytes(), path
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names} - {"deploykit"}
        assert info.endswith(".dist-info")
        lines = archive.read(f"{info}/METADATA").decode().splitlines()
    assert "deploykit/py.typed" in names
    assert {"License-Expression: Apache-2.0", "Requires-Python: >=3.10"} <= set(lines)
    needed = [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist")]
    base = {re.split(r"[<>=;\[ ]", each)[0] for each in needed if "extra ==" not in each}
    assert base <= {"numpy", "onnx", "rich", "typer", "tomli"}
    extras = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra")}
    assert extras == set(read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"])
    for extra in extras:
        assert any(f"extra == '{extra}'" in each for each in needed), extra


def clean() -> dict[str, str]:
    """The environment without what would let the checkout or this venv shine through."""
    return {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    }


def install(python: Path, requirement: str) -> None:
    pip = [sys.executable, "-m", "pip"]
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False)
    options, variables = for_uv(listed.stdout)
    uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--python", python, *options]
    commands = [uv] if uv[0].is_file() else []
    commands.append([*pip, "--python", python, "install", "--no-compile"])
    for command in commands:
        done = subprocess.run(
            [*command, "--quiet", requirement],
            capture_output=True,
            text=True,
            env={**clean(), **variables},
            check=False,
        )
        if done.returncode == 0:
            return
    raise AssertionError(done.stderr)


class Installed:
    """deploykit in a venv of its own, run from a folder that is not the checkout.

    uv installs into it, in a third of pip's time; where it cannot be had, our own pip.
    """

    def __init__(self, folder: Path, requirement: str, base: Installed | None = None) -> None:
        self.folder = folder
        if base is None:
            command = [sys.executable, "-m", "venv", "--without-pip", folder / "venv"]
            subprocess.run(command, check=True)
        else:
            copy = ["cp", "--archive", base.folder / "venv", folder / "venv"]
            subprocess.run(copy, check=True)
        install(self.folder / "venv/bin/python", requirement)

    def commands(self) -> AbstractContextManager[Run]:
        """Run command lines here, in one process of the venv."""
        python = self.folder / "venv/bin/python"
        return one_process(python=python, cwd=self.folder, env=clean())

    def pip(self, *words: str) -> str:
        command = [sys.executable, "-m", "pip", "--python", self.folder / "venv/bin/python", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=clean(), check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel with its base dependencies and no extra."""
    installed = Installed(tmp_path_factory.mktemp("bare"), str(wheel))
    save(mnist_like(), installed.folder / "model.onnx")
    images = np.random.default_rng(0).random((40, 1, 28, 28), dtype=np.float32)
    np.savez(installed.folder / "data.npz", image=images)
    return installed


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory, bare: Installed) -> Installed:
    """The light runtime: the wheel with [cpu]."""
    folder = tmp_path_factory.mktemp("light")
    for name in ("model.onnx", "data.npz"):
        shutil.copy(bare.folder / name, folder)
    return Installed(folder, f"{wheel}[cpu]", bare)


NEEDS = {  # the command -> the extra that brings what it lacks
    "export m.pt": "export",
    "train mnist-cnn -o new.pt": "export,transfer",
    "quantize model.onnx --to fp16": "cpu",
    "build model.onnx --profile cpu": "cpu",
    "predict model.onnx data.npz -o out.npz": "cpu",
    "bench model.onnx": "cpu",
    "compare model.onnx model.onnx": "cpu",
    "serve model.onnx": "serve",
    "demo": "export,cpu,train,serve",
}


def test_the_bare_install_says_what_each_command_lacks_and_inspects(bare: Installed) -> None:
    with zipfile.ZipFile(bare.folder / "m.pt", "w") as archive:
        archive.writestr("m/data.pkl", b"the name is what makes it a checkpoint")
    # a copied script would begin with the path of the python that it was installed for
    script = [bare.folder / "venv/bin/python", bare.folder / "venv/bin/deploykit", "--help"]
    shown = subprocess.run(script, cwd=bare.folder, capture_output=True, env=clean(), check=True)
    assert b"quantize" in shown.stdout
    with bare.commands() as run:
        for line, extra in NEEDS.items():
            ran = run(*line.split())
            assert (ran.code, f"deploykit[{extra}]" in ran.err) == (3, True), ran
            ran.error()
        assert not (bare.folder / "out.npz").exists()
        ran = run("inspect", "model.onnx", "--json")
        assert ran.code == 0, ran.err
        assert json.loads(ran.out)["precision"]["float32"] > 0
        assert run("profiles", "h200").code == 0
        seen = json.loads(run("doctor", "--json").out)
    checks = {check["command"]: check for check in seen["checks"]}
    assert checks["inspect, profiles, load"]["works"]
    assert "deploykit[cpu,serve]" in checks["serve"]["why"]
    assert not checks["export"]["works"]
    assert "deploykit[export,cpu]" in checks["export"]["why"]
    assert seen["providers"] == []


def test_the_cpu_extra_quantizes_builds_predicts_and_measures_without_torch(
    light: Installed,
) -> None:
    with light.commands() as run:
        for line in (
            "quantize model.onnx --to int8 --calib data.npz -o q.onnx",
            "build model.onnx --profile cpu -o built.onnx",
            "predict built.onnx data.npz -o out.npz",
            "compare model.onnx built.onnx",
            "bench model.onnx --batches 1 --seconds 0.05",
        ):
            ran = run(*line.split())
            assert ran.code == 0, (line, ran.err)
    assert "torch" not in light.pip("list")
    with np.load(light.folder / "out.npz") as answers:
        assert [array.shape for array in answers.values()] == [(40, 10)]


def test_the_wheel_in_a_bundle_holds_the_same_files(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as built, zipfile.ZipFile(own_wheel(tmp_path)) as packed:
        assert set(packed.namelist()) == set(built.namelist())
        for name in built.namelist():
            if not name.endswith(("/WHEEL", "/RECORD", "/METADATA")):
                assert packed.read(name) == built.read(name), name
