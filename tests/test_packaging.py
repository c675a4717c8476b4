"""The wheel that users install: what is in it, and what works with and without extras."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from scripts.setup_venv import for_uv
from tests.support.onnx_zoo import mnist_like, save

ROOT = Path(__file__).resolve().parent.parent
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
    made = subprocess.run(
        [sys.executable, "-c", build, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    sdist = tmp_path / made.stdout.split()[-1]
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel, sdist],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_every_extra_holds_packages_and_the_base_holds_no_web_stack(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    needed = [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist")]
    base = {re.split(r"[<>=;\[ ]", each)[0] for each in needed if "extra ==" not in each}
    assert base <= {"numpy", "onnx", "rich", "typer", "tomli"}
    for line in lines:
        if line.startswith("Provides-Extra"):
            extra = line.split(": ")[1]
            assert any(f"extra == '{extra}'" in each for each in needed), extra


def test_the_wheel_has_the_dockerfiles_as_they_are_in_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in ("Dockerfile.x86", "Dockerfile.jetson", "Dockerfile.lock", ".dockerignore"):
            packed = archive.read(f"deploykit/_data/containers/{name}")
            assert packed == (ROOT / name).read_bytes(), name


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

    def pip(self, *words: str) -> str:
        command = [sys.executable, "-m", "pip", "--python", self.folder / "venv/bin/python", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=clean(), check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        # a copied script would begin with the path of the python that it was installed for
        script = [self.folder / "venv/bin/python", self.folder / "venv/bin/deploykit"]
        command = [*map(str, script), *map(str, words)]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, env=clean(), check=False
        )


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
    installed = Installed(tmp_path_factory.mktemp("light"), f"{wheel}[cpu]", bare)
    for name in ("model.onnx", "data.npz"):
        (installed.folder / name).write_bytes((bare.folder / name).read_bytes())
    return installed


def test_the_wheel_holds_the_package_the_profiles_and_the_recipes(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "deploykit").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    for kind in ("profiles/*.toml", "models/*.py"):
        found = list(ROOT.glob(kind))
        assert found
        for path in found:
            assert f"deploykit/_data/{path.relative_to(ROOT).as_posix()}" in names
    assert "deploykit/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "deploykit",
        next(iter(d for d in names if ".dist-info" in d)).split("/")[0],
    }


def test_the_metadata_names_license_python_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.10" in text
    extras = {
        line.split(": ")[1] for line in text.splitlines() if line.startswith("Provides-Extra")
    }
    assert extras == {
        "cpu",
        "gpu",
        "tensorboard",
        "tensorrt",
        "tensorrt-cu12",
        "tensorrt-cu13",
        "jetson",
        "trace",
        "export",
        "images",
        "openvino",
        "text",
        "timm",
        "huggingface",
        "serve",
        "train",
        "transfer",
        "quantize",
        "ray",
        "dev",
        "lint",
    }


@pytest.mark.parametrize("words", [("--help",), ("profiles", "h200")], ids=str)
def test_the_bare_install_shows_help_profiles_and_doctor(
    bare: Installed, words: tuple[str, ...]
) -> None:
    done = bare.run(*words)
    assert done.returncode == 0, done.stderr


def test_doctor_names_what_the_bare_install_lacks(bare: Installed) -> None:
    seen = json.loads(bare.run("doctor", "--json").stdout)
    checks = {check["command"]: check for check in seen["checks"]}
    assert checks["inspect, profiles, load"]["works"]
    assert "deploykit[cpu,serve]" in checks["serve"]["why"]
    assert not checks["export"]["works"]
    assert "deploykit[export,cpu]" in checks["export"]["why"]
    assert seen["providers"] == []


def test_the_bare_install_inspects(bare: Installed) -> None:
    done = bare.run("inspect", "model.onnx", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["precision"]["float32"] > 0


NEEDS = {
    "export": (("export", "m.pt"), "deploykit[export]"),
    "train": (("train", "mnist-cnn", "-o", "new.pt"), "deploykit[export,transfer]"),
    "quantize": (("quantize", "model.onnx", "--to", "fp16"), "deploykit[cpu]"),
    "build": (("build", "model.onnx", "--profile", "cpu"), "deploykit[cpu]"),
    "predict": (("predict", "model.onnx", "data.npz", "-o", "out.npz"), "deploykit[cpu]"),
    "bench": (("bench", "model.onnx"), "deploykit[cpu]"),
    "compare": (("compare", "model.onnx", "model.onnx"), "deploykit[cpu]"),
    "serve": (("serve", "model.onnx"), "deploykit[serve]"),
    "demo": (("demo",), "deploykit[export,cpu,train,serve]"),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_extra_is_exit_3_with_the_install_line(bare: Installed, name: str) -> None:
    words, extra = NEEDS[name]
    with zipfile.ZipFile(bare.folder / "m.pt", "w") as archive:
        archive.writestr("m/data.pkl", b"the name is what makes it a checkpoint")
    done = bare.run(*words)
    assert done.returncode == 3, done.stderr
    assert extra in done.stderr
    assert "Traceback" not in done.stderr
    assert not (bare.folder / "out.npz").exists()


def test_the_cpu_extra_quantizes_builds_predicts_and_measures_without_torch(
    light: Installed,
) -> None:
    for words in (
        ("quantize", "model.onnx", "--to", "int8", "--calib", "data.npz", "-o", "q.onnx"),
        ("build", "model.onnx", "--profile", "cpu", "-o", "built.onnx"),
        ("predict", "built.onnx", "data.npz", "-o", "out.npz"),
        ("compare", "model.onnx", "built.onnx"),
        ("bench", "model.onnx", "--batches", "1", "--seconds", "0.05"),
    ):
        done = light.run(*words)
        assert done.returncode == 0, (words, done.stderr)
    assert "torch" not in light.pip("list")
    with np.load(light.folder / "out.npz") as answers:
        assert [array.shape for array in answers.values()] == [(40, 10)]


def test_the_wheel_in_a_bundle_holds_the_same_files(wheel: Path, tmp_path: Path) -> None:
    from deploykit.deploying.wheels import own_wheel

    with zipfile.ZipFile(wheel) as built, zipfile.ZipFile(own_wheel(tmp_path)) as packed:
        assert set(packed.namelist()) == set(built.namelist())
        for name in built.namelist():
            if not name.endswith(("/WHEEL", "/RECORD", "/METADATA")):
                assert packed.read(name) == built.read(name), name
