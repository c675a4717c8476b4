"""What works without the packages of the extra [serve], and how the rest says what is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploykit.core.extras import install_command, install_hint
from deploykit.core.files import read_toml
from tests.support.stand_in import StandIn

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

SERVE = ("uvloop", "httptools", "hpack", "orjson", "prometheus_client")
TRAIN = ("torch", "sklearn", "torchvision")
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def without_serve(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python where nothing of [serve] is installed, but for protobuf, which onnx needs."""
    return without(SERVE, code, *arguments)


def without(
    names: Sequence[str], code: str, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run Python where the packages `names` are not installed."""
    blocked = BLOCKED.format(names=names)
    command = [sys.executable, "-c", blocked + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


COMMAND = "from deploykit.cli.main import main; sys.exit(main())"


def test_the_api_is_imported_without_the_serve_extra() -> None:
    done = without_serve("import deploykit.serving.serve")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_model_is_inspected_quantized_and_built_without_the_serve_extra(
    affine_onnx: Path, tmp_path: Path
) -> None:
    half, engine = tmp_path / "half.onnx", tmp_path / "engine.onnx"
    for command in (
        ["inspect", affine_onnx],
        ["quantize", affine_onnx, "--to", "fp16", "--out", half],
        ["build", affine_onnx, "--profile", "cpu", "--out", engine],
    ):
        done = without_serve(COMMAND, *command)
        assert done.returncode == 0, done.stderr
    assert half.exists()
    assert engine.exists()


def test_what_needs_the_serve_extra_names_it(affine_onnx: Path) -> None:
    done = without_serve(COMMAND, "serve", "--engine", affine_onnx)
    assert done.returncode == 3, done.stderr
    assert "is not installed" in done.stderr
    assert install_command("serve") in done.stderr
    assert "Traceback" not in done.stderr


def test_training_without_torch_names_one_command_that_brings_all_it_needs(tmp_path: Path) -> None:
    done = without(TRAIN, COMMAND, "train", "mnist-cnn", "-o", tmp_path / "model.pt")
    assert done.returncode == 3, done.stderr
    assert f"hint: {install_command('export,transfer')}\n" in done.stderr
    brought = resolved("export", *CLOUD) | resolved("transfer", *CLOUD)
    assert {"torch", "scikit-learn", "torchvision", "pillow", "onnxscript"} <= brought


def test_the_demo_names_all_that_it_lacks_before_it_begins(tmp_path: Path) -> None:
    done = without((*SERVE, *TRAIN), COMMAND, "demo", "-o", tmp_path / "out")
    assert done.returncode == 3, done.stderr
    assert done.stderr == (
        "error: torch, scikit-learn, httptools are not installed\n"
        f"hint: {install_command('export,train,serve')}\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_server_elsewhere_is_loaded_without_the_serve_extra() -> None:
    with StandIn().running() as url:
        done = without_serve(COMMAND, "load", url, "--concurrency", "1", "--duration", "0.1")
    assert done.returncode == 0, done.stderr
    assert "closed loop, 1 connections, 0.1" in done.stdout


def resolved(extra: str, machine: str, python: str) -> set[str]:
    """The packages of `extra` on such a machine, by the markers of `pyproject.toml`."""
    optional = read_toml(PYPROJECT)["project"]["optional-dependencies"]
    here = {"platform_machine": machine, "python_version": python, "sys_platform": "linux"}
    found = set()
    for requirement in map(Requirement, optional[extra]):
        if requirement.marker is None or requirement.marker.evaluate(here):
            nested = requirement.name == "deploykit"
            for name in requirement.extras if nested else ():
                found |= resolved(name, machine, python)
            found |= set() if nested else {requirement.name}
    return found


ORIN, THOR, CLOUD = ("aarch64", "3.10"), ("aarch64", "3.12"), ("x86_64", "3.12")


@pytest.mark.parametrize(
    ("machine", "package"),
    [(ORIN, "onnxruntime"), (THOR, "onnxruntime-gpu"), (CLOUD, "onnxruntime-gpu")],
)
def test_the_gpu_extra_names_wheels_that_exist(machine: tuple[str, str], package: str) -> None:
    """There is no wheel of onnxruntime-gpu for Python 3.10 on aarch64 (PyPI, 2026-11)."""
    assert resolved("gpu", *machine) == {package, "nvidia-ml-py"}


@pytest.mark.parametrize("machine", [ORIN, THOR])
def test_the_jetson_extra_replaces_nothing_of_jetpack(machine: tuple[str, str]) -> None:
    assert resolved("jetson", *machine) == {"cuda-bindings", "nvidia-ml-py"}


def test_tensorrt_comes_for_cuda_12_and_13() -> None:
    assert "tensorrt-cu13" in resolved("tensorrt", *CLOUD)
    assert "tensorrt-cu12" in resolved("tensorrt-cu12", *CLOUD)


def test_the_hint_for_tensorrt_names_each_way_to_get_it() -> None:
    hint = install_hint("tensorrt")
    assert hint.startswith(install_command("tensorrt"))
    for extra in ("tensorrt-cu12", "jetson"):
        assert f"[{extra}]" in hint
