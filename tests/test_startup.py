"""What a bare start imports, and what type checkers see of `import deploykit as dk`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import deploykit
from deploykit.core.extras import install_command
from deploykit.core.files import read_toml
from tests.support.cli.command import one_process
from tests.support.stand_in import StandIn

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {
    *("numpy", "torch", "onnx", "onnxruntime", "sklearn", "starlette", "google", "hpack"),
    *("httptools", "rich", "email"),  # the last by importlib.metadata
}
LIST = """
import contextlib, io, sys
from deploykit.cli.main import main
sys.argv = ["deploykit", "--help"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as page:
    main()
assert "quantize" in page.getvalue()
loaded = {name.rpartition(".")[2] for name in sys.modules if name.startswith("deploykit.cli.")}
assert loaded.isdisjoint(("make", "prove", "serve", "machine")), loaded
"""


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    program = (
        f"{code}\nimport sys, json; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_list_of_commands_imports_nothing_heavy_and_no_command() -> None:
    assert not modules_after(LIST) & HEAVY


def test_importing_the_package_imports_nothing_else_and_every_public_name_is_there() -> None:
    assert not modules_after("import deploykit") & (HEAVY | {"typer"})
    modules_after("import deploykit\nfor name in deploykit._PUBLIC: getattr(deploykit, name)")
    with pytest.raises(AttributeError, match="nothing"):
        deploykit.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_the_objects_that_are_loaded_at_run_time() -> None:
    seen = {}
    for node in ast.walk(ast.parse(Path(str(deploykit.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("deploykit."):
            for alias in node.names:
                seen[alias.asname or alias.name] = f"{node.module}:{alias.name}"
    assert seen == deploykit._PUBLIC
    assert sorted(deploykit.__all__) == sorted(deploykit._PUBLIC)
    assert set(deploykit.__all__) <= set(dir(deploykit))


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


def test_what_needs_no_extra_works_without_it_and_the_rest_names_it(
    affine_onnx: Path, tmp_path: Path
) -> None:
    """Of [serve], protobuf is there, which onnx needs."""
    half, engine = tmp_path / "half.onnx", tmp_path / "engine.onnx"
    with one_process(BLOCKED.format(names=SERVE)) as run, StandIn().running() as url:
        for words in (
            ("-c", "import deploykit.serving.serve"),
            ("inspect", affine_onnx),
            ("quantize", affine_onnx, "--to", "fp16", "--out", half),
            ("build", affine_onnx, "--profile", "cpu", "--out", engine),
            ("load", url, "--concurrency", "1", "--duration", "0.1"),
        ):
            ran = run(*words)
            assert ran.code == 0, ran.err
        assert "closed loop, 1 connections, 0.1" in ran.out
        ran = run("serve", "--engine", affine_onnx)
    assert (half.exists(), engine.exists(), ran.code) == (True, True, 3)
    assert "is not installed" in ran.error()
    assert install_command("serve") in ran.err


def test_train_and_demo_name_all_that_they_lack_before_they_begin(tmp_path: Path) -> None:
    with one_process(BLOCKED.format(names=(*SERVE, *TRAIN))) as run:
        train = run("train", "mnist-cnn", "-o", tmp_path / "model.pt")
        demo = run("demo", "-o", tmp_path / "out")
    assert (train.code, demo.code) == (3, 3)
    assert f"hint: {install_command('export,transfer')}\n" in train.err
    brought = resolved("export", *CLOUD) | resolved("transfer", *CLOUD)
    assert {"torch", "scikit-learn", "torchvision", "pillow", "onnxscript"} <= brought
    assert demo.err == (
        "error: torch, scikit-learn, httptools are not installed\n"
        f"hint: {install_command('export,train,serve')}\n"
    )
    assert not (tmp_path / "out").exists()


def resolved(extra: str, machine: str, python: str) -> set[str]:
    """The packages of `extra` on such a machine, by the markers of `pyproject.toml`."""
    optional = read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
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


def test_the_extras_of_a_jetson_and_of_a_gpu_are_what_exists_and_runs_there() -> None:
    """The jetson extra replaces nothing of JetPack."""
    for machine, package in ((ORIN, ""), (THOR, "-gpu"), (CLOUD, "-gpu")):
        # there is no wheel of onnxruntime-gpu for Python 3.10 on aarch64 (PyPI, 2026-11)
        assert resolved("gpu", *machine) == {f"onnxruntime{package}", "nvidia-ml-py"}
    for machine in (ORIN, THOR):
        assert resolved("jetson", *machine) == {"cuda-bindings", "nvidia-ml-py"}
    assert "tensorrt-cu13" in resolved("tensorrt", *CLOUD)
    assert "tensorrt-cu12" in resolved("tensorrt-cu12", *CLOUD)
