"""Plugin libraries that an engine was built with: found again, and loaded before the engine."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import deploykit as dk
from deploykit.building.builder import Shapes
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, NotFound, Unsupported
from deploykit.core.files import sha256
from deploykit.core.manifest import write_manifest
from deploykit.engines.tensorrt.compatibility import Here, rebuild
from deploykit.engines.tensorrt.plugins import load_plugins, recorded_plugins
from scripts.nvidia import fetch
from tests.support.runtimes.fake_tensorrt import FakeTensorRt
from tests.support.runtimes.gpu_machine import gpu_machine


@pytest.fixture(name="library")
def library_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "lib my.so"
    path.write_bytes(b"code")
    return path


def compile_library(path: Path, code: str) -> None:
    try:
        fetch.library(path, code)
    except fetch.Unobtainable as exc:
        pytest.skip(str(exc))


def test_a_library_next_to_the_plan_comes_first(library: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    copy = tmp_path / "sub" / library.name
    copy.write_bytes(b"code")
    recorded = {str(library): sha256(library)}
    assert recorded_plugins(tmp_path / "sub" / "m.trt", recorded) == [copy]
    copy.unlink()
    assert recorded_plugins(tmp_path / "sub" / "m.trt", recorded) == [library]


def test_a_missing_or_changed_library_is_refused(library: Path, tmp_path: Path) -> None:
    recorded = {str(library): sha256(library)}
    library.write_bytes(b"other code")
    with pytest.raises(BadInput, match=r"lib my\.so: is not the plugin library that m\.trt"):
        recorded_plugins(tmp_path / "m.trt", recorded)
    library.unlink()
    with pytest.raises(NotFound, match=r"m\.trt: needs the plugin library 'lib my\.so'"):
        recorded_plugins(tmp_path / "m.trt", recorded)


@pytest.mark.parametrize(
    "name", ["a" * 5000, "", "a\0.so", "/"], ids=["long", "empty", "nul", "root"]
)
def test_a_name_that_is_no_files_is_a_missing_library(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound, match=r"m\.trt: needs the plugin library") as caught:
        recorded_plugins(tmp_path / "m.trt", {name: "0" * 64})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("itself", [False, True])
def test_a_library_that_registers_itself_is_not_registered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, itself: bool
) -> None:
    """As TensorRT's own macro does when the library is loaded: a second time is an error."""
    library = tmp_path / f"lib{itself}.so"
    compile_library(library, "int getCreators(void) { return 1; }")
    nv = FakeTensorRt()
    real = ctypes.CDLL

    def load(path: str) -> ctypes.CDLL:
        nv.does.seen.setdefault("creators", []).extend(["own"] * itself)
        return real(path)

    monkeypatch.setattr("deploykit.engines.tensorrt.plugins.ctypes.CDLL", load)
    load_plugins(nv, [library])
    assert nv.does.seen.get("libraries", []) == ([] if itself else [str(library)])


@pytest.mark.parametrize(
    ("content", "answer", "reason"),
    [
        (None, None, "no such plugin library"),
        (b"text", None, "cannot be loaded: .*(file too short|invalid ELF header)"),
        ("int getCreators(void) { return 1; }", None, "cannot be loaded: TensorRT refused it"),
        ("int getCreators(void) { return 2; }", RuntimeError("no"), "cannot be loaded: no"),
    ],
    ids=["missing", "text", "refused", "raised"],
)
def test_a_library_that_does_not_load_is_named_with_the_reason(
    tmp_path: Path, content: str | bytes | None, answer: Exception | None, reason: str
) -> None:
    library = tmp_path / "libown.so"
    if isinstance(content, bytes):
        library.write_bytes(content)
    elif content is not None:
        compile_library(library, content)

    def load(_path: str) -> None:
        if answer is not None:
            raise answer

    nv = SimpleNamespace(get_plugin_registry=lambda: SimpleNamespace(load_library=load))
    with pytest.raises((NotFound, Unsupported), match=rf"libown\.so: {reason}"):
        load_plugins(nv, [library])


def test_an_engine_built_with_a_plugin_loads_it_again(
    affine_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libown.so"
    compile_library(library, "int here(void) { return 1; }")
    with gpu_machine(tmp_path, monkeypatch):
        made = dk.build(affine_onnx, "l4", shapes=Shapes(plugins=(library,)))
        manifest = Artefact(made.path).manifest
        assert manifest is not None
        assert manifest.plugins == {str(library): sha256(library)}
        here = Here("10.13.3.9", "NVIDIA L4", "8.9", 58, "580.65.06", "13.0")
        assert f"--plugin {library}" in rebuild(made.path, manifest, here)
        other = replace(manifest.evidence.build, plugins={str(library): "0" * 64})
        write_manifest(
            made.path, replace(manifest, evidence=replace(manifest.evidence, build=other))
        )
        with pytest.raises(BadInput, match="is not the plugin library"):
            dk.load(made.path, trust=True)
