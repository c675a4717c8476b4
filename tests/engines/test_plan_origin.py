"""Whose code an engine may bring along: only that of this user's own builds, or with `trust`."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import deploykit as dk
from deploykit.building.builder import Shapes
from deploykit.cli.main import main
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.manifest import Manifest, write_manifest
from deploykit.engines.tensorrt.compatibility import (
    built_here,
    check_plan,
    list_path,
    open_plan,
    record_build,
)
from scripts.nvidia import fetch
from tests.support.runtimes.fake_tensorrt import Behaviour
from tests.support.runtimes.gpu_machine import gpu_machine
from tests.support.runtimes.plans import CONTENT, HERE, described

DIGEST = hashlib.sha256(CONTENT).hexdigest()
PLUGIN = "cd" * 32
CODE = described(version_compatible=True)
REFUSED = "was not built by you on this machine"


def with_plugins(manifest: Manifest, plugins: dict[str, str]) -> Manifest:
    assert manifest.evidence.build is not None
    build = replace(manifest.evidence.build, plugins=plugins)
    return replace(manifest, evidence=replace(manifest.evidence, build=build))


NEEDS_PLUGIN = with_plugins(described(), {"libown.so": PLUGIN})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "m.trt"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Behaviour]:
    with gpu_machine(tmp_path, monkeypatch) as found:
        yield found


@pytest.mark.parametrize(
    ("manifest", "says"),
    [(CODE, "contains host code"), (NEEDS_PLUGIN, "brings plugin libraries")],
    ids=["host-code", "plugin"],
)
def test_a_manifest_does_not_vouch_for_the_code_of_its_engine(
    plan: Path, manifest: Manifest, says: str
) -> None:
    write_manifest(plan, manifest)
    with pytest.raises(BadInput, match=f"{says}, and {REFUSED}") as caught:
        open_plan(plan, HERE)
    assert caught.value.exit_code == 2
    assert "`trust`" in (caught.value.hint or "")
    assert "\n" not in caught.value.message
    assert open_plan(plan, HERE, trust=True)[1] == manifest


@pytest.mark.parametrize("manifest", [CODE, NEEDS_PLUGIN], ids=["host-code", "plugin"])
def test_a_recorded_build_needs_no_trust(plan: Path, manifest: Manifest, cache: Path) -> None:
    assert record_build(manifest)
    assert check_plan(plan, manifest, HERE).host_code is manifest.version_compatible
    assert list_path().parent == cache
    assert list_path().stat().st_mode & 0o777 == 0o600


def test_an_engine_without_code_needs_no_record(plan: Path) -> None:
    assert record_build(described())
    assert not list_path().exists()
    assert not check_plan(plan, described(), HERE).host_code


def test_an_own_plan_does_not_vouch_for_a_library_that_was_added(plan: Path) -> None:
    record_build(CODE)
    added = with_plugins(CODE, {"libevil.so": PLUGIN})
    with pytest.raises(BadInput, match=REFUSED):
        check_plan(plan, added, HERE)


def test_a_strangers_plan_may_not_use_an_own_library(plan: Path) -> None:
    record_build(replace(NEEDS_PLUGIN, sha256="00" * 32))
    with pytest.raises(BadInput, match=REFUSED):
        check_plan(plan, NEEDS_PLUGIN, HERE)


def test_builds_are_added_to_the_list() -> None:
    other = replace(CODE, sha256="11" * 32)
    assert record_build(CODE)
    assert record_build(other)
    assert record_build(CODE)
    assert sorted(list_path().read_text(encoding="ascii").split()) == sorted(["11" * 32, DIGEST])


def test_a_line_that_was_cut_does_not_spoil_the_next(cache: Path) -> None:
    cache.mkdir()
    list_path().touch(0o600)
    list_path().write_text("ab12", encoding="ascii")
    assert record_build(CODE)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_list_that_others_can_write_proves_nothing(mode: int) -> None:
    record_build(CODE)
    list_path().chmod(mode)
    assert not built_here(CODE)
    assert not record_build(CODE)


def test_a_link_to_another_list_proves_nothing(cache: Path, tmp_path: Path) -> None:
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(f"{DIGEST}  m.trt\n", encoding="ascii")
    cache.mkdir()
    list_path().symlink_to(sums)
    assert not built_here(CODE)
    assert not record_build(CODE)


@pytest.mark.parametrize("content", [b"\xff\xfe", None], ids=["bytes", "fifo"])
def test_what_is_no_list_proves_nothing(cache: Path, content: bytes | None) -> None:
    cache.mkdir()
    if content is None:
        os.mkfifo(list_path(), 0o600)
    else:
        list_path().touch(0o600)
        list_path().write_bytes(content)
    assert not built_here(CODE)
    assert not record_build(CODE)


def test_build_records_an_engine_with_code_so_that_it_opens(
    affine_onnx: Path, gpu: Behaviour
) -> None:
    made = dk.build(affine_onnx, "l4", shapes=Shapes(version_compatible=True))
    assert made.manifest.version_compatible
    assert made.manifest.evidence.verified
    dk.load(made.path).close()
    shutil.rmtree(list_path().parent)  # as on another machine
    with pytest.raises(BadInput, match=REFUSED):
        dk.load(made.path)
    dk.load(made.path, trust=True).close()


def test_build_without_a_place_for_the_record_notes_that_trust_is_needed(
    affine_onnx: Path, gpu: Behaviour, cache: Path
) -> None:
    cache.write_text("a file, not a folder", encoding="utf-8")
    made = dk.build(affine_onnx, "l4", shapes=Shapes(version_compatible=True))
    assert made.manifest.evidence.verified
    assert any(note.endswith("opening it needs --trust") for note in made.notes)
    plain = dk.build(affine_onnx, "l4", out=affine_onnx.with_name("plain.trt"))
    assert not any("--trust" in note for note in plain.notes)
    dk.load(plain.path).close()


def test_a_strangers_library_next_to_a_plan_is_not_loaded(
    affine_onnx: Path, tmp_path: Path, gpu: Behaviour
) -> None:
    mark, library = tmp_path / "ran", tmp_path / "libevil.so"
    code = (
        "#include <stdio.h>\n"
        "__attribute__((constructor)) static void run(void)\n"
        f'{{ FILE *file = fopen("{mark}", "w"); if (file) fclose(file); }}\n'
    )
    try:
        fetch.library(library, code)
    except fetch.Unobtainable as exc:
        pytest.skip(str(exc))
    made = dk.build(affine_onnx, "l4")
    manifest = Artefact(made.path).manifest
    assert manifest is not None
    stranger = with_plugins(
        manifest, {library.name: hashlib.sha256(library.read_bytes()).hexdigest()}
    )
    write_manifest(made.path, stranger)
    with pytest.raises(BadInput, match=REFUSED):
        dk.load(made.path)
    assert not mark.exists()
    dk.load(made.path, trust=True).close()
    assert mark.exists()


def test_the_refusal_is_one_line_with_a_hint_that_names_the_option(
    affine_onnx: Path,
    gpu: Behaviour,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = dk.build(affine_onnx, "l4", shapes=Shapes(version_compatible=True))
    list_path().unlink()
    words = ["deploykit", "bench", made.path, "--quick", "-o", affine_onnx.with_name("report")]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error.endswith(f"contains host code, and {REFUSED}")
    assert hint.endswith("build it here, or open your own with --trust")
