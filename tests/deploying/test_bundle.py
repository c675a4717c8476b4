"""`deploykit bundle`: what is refused, what is written, the same each time, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import deploykit as dk
from deploykit.core.errors import BadInput, GateFailed
from deploykit.deploying import STARTED, WRITERS
from deploykit.deploying.folder import is_bundle_tar, read_bundle, staged_folder, verify
from tests.support.bundles import boot, proven_model
from tests.support.onnx_zoo import conv_relu, linear, make, mnist_like, save

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime")
    return proven_model(tmp_path_factory.mktemp("model") / "tiny.onnx")


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_bundle_passes_its_own_check_and_the_same_inputs_give_the_same_bytes(
    model: Path, tmp_path: Path
) -> None:
    made = dk.bundle(model, "cpu", out=tmp_path / "out")
    assert verify(tmp_path / "out") == made.bundle == read_bundle(tmp_path / "out")
    assert dk.compare(tmp_path / "out" / made.bundle.model).parity.passed
    for folder in "ab":
        (tmp_path / folder).mkdir()
        dk.bundle(model, "cpu", out=tmp_path / folder / "out.tar")
    assert content(tmp_path / "a") == content(tmp_path / "b")


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in INT8 for each runtime, accepted, and one that was not."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("int8")
    model = save(mnist_like(), folder / "m.onnx")
    images = np.random.default_rng(0).random((40, 1, 28, 28), np.float32)
    with dk.load(model) as engine:
        labels = engine({"image": images})["logits"].argmax(1)
    np.savez(folder / "data.npz", image=images, labels=labels)
    data = {"calib": folder / "data.npz", "data": folder / "data.npz"}
    found = {}
    for name, options in {
        "tensorrt": {"runtime": "tensorrt"},
        "onnxruntime": {"runtime": "onnxruntime"},
        "half": {"other_nodes": "fp16"},
    }.items():
        found[name] = folder / f"{name}.onnx"
        dk.quantize(model, "int8", max_drop=0.9, out=found[name], **options, **data)
    with pytest.raises(GateFailed):
        dk.quantize(model, "int8", max_drop=1e-9, out=folder / "no.onnx", **data)
    return found | {"rejected": folder / "no.rejected.onnx"}


def test_an_accepted_int8_model_is_bundled_and_starts(
    int8: dict[str, Path], tmp_path: Path
) -> None:
    """Its gate is its accuracy, and not the bound of float32 on the same parity."""
    evidence = dk.Artefact.open(int8["tensorrt"]).manifest.evidence
    assert (evidence.wrong, evidence.parity.passed) == ("", False)
    dk.bundle(int8["tensorrt"], "cpu", out=tmp_path / "out")
    assert boot(tmp_path / "out", tmp_path / "cache").source == "build"


@pytest.mark.parametrize("to", WRITERS)
def test_what_failed_its_gate_or_no_device_can_place_is_not_bundled(
    int8: dict[str, Path], tmp_path: Path, to: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(GateFailed, match="did not pass its gate"):
        dk.bundle(int8["rejected"], "l4", out=out, to=to)
    with pytest.raises(BadInput, match="it computes in float16 between") as caught:
        dk.bundle(int8["half"], "cpu", out=out, to=to)
    assert "m.onnx --profile cpu --precision int8" in str(caught.value.hint)
    assert not out.exists()


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("to", WRITERS)
def test_a_server_that_gets_the_file_as_it_is_gets_pairs_that_are_placed_for_it(
    int8: dict[str, Path], tmp_path: Path, to: str, foreign: bool
) -> None:
    """`foreign`: no manifest says where the pairs are."""
    source, samples = int8["tensorrt"], int8["tensorrt"].with_name("data.npz")
    if foreign:
        source = Path(shutil.copy(source, tmp_path))
    else:
        dk.bundle(int8["onnxruntime"], "cpu", out=tmp_path / "placed", to=to)
    if to in STARTED:  # `boot` builds, and so places them
        dk.bundle(source, "cpu", out=tmp_path / "out", to=to, samples=samples)
        return
    with pytest.raises(BadInput, match=r"would run \d of its \d INT8 nodes in integers") as caught:
        dk.bundle(source, "cpu", out=tmp_path / "out", to=to, samples=samples)
    assert f"deploykit build {source} --profile cpu" in str(caught.value.hint)
    dk.build(source, "cpu", out=tmp_path / "built.onnx")
    dk.bundle(tmp_path / "built.onnx", "cpu", out=tmp_path / "out", to=to, samples=samples)


@pytest.mark.parametrize("to", WRITERS)
@pytest.mark.parametrize("samples", [False, True])
def test_a_file_that_the_kinds_own_server_does_not_open_is_not_bundled(
    tmp_path: Path, to: str, samples: bool
) -> None:
    """ONNX has no convolution in bfloat16 before opset 22, and TensorRT takes one."""
    save(conv_relu(), tmp_path / "m.onnx")
    x = np.random.default_rng(0).random((32, 1, 8, 8), np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    data = tmp_path / "data.npz"
    made = dk.quantize(tmp_path / "m.onnx", "bf16", calib=data)
    out, given = tmp_path / "out", data if samples else None
    if to in STARTED:
        dk.bundle(made.path, "l4", out=out, to=to, samples=given)
        return
    with pytest.raises(BadInput, match=f"with `to` {to} it is ONNX Runtime that serves it"):
        dk.bundle(made.path, "l4", out=out, to=to, samples=given)


@pytest.mark.parametrize(
    ("profile", "to", "words"),
    [
        ("l4", "ray", "computes INT8 nodes on a GPU in float32"),
        ("jetson-orin-nx-16gb", "ray", "no kernels for a Jetson"),
        ("l4", "triton", ""),
        ("l4", "docker", ""),
    ],
)
def test_what_onnxruntime_alone_does_on_a_gpu_is_noted(
    int8: dict[str, Path], tmp_path: Path, profile: str, to: str, words: str
) -> None:
    notes = " ".join(dk.bundle(int8["tensorrt"], profile, out=tmp_path / "out", to=to).notes)
    assert (words in notes) if words else not notes


def test_a_model_of_another_tool_gets_a_manifest_and_golden_samples(tmp_path: Path) -> None:
    model = save(linear(), tmp_path / "-my model (2).onnx")
    made = dk.bundle(model, "cpu", out=tmp_path / "out")
    assert made.bundle.name == "my-model-2"  # one that a server takes
    assert "on random inputs" in made.notes[0]
    assert dk.compare(tmp_path / "out" / made.bundle.model).parity.passed
    assert {path.name for path in tmp_path.iterdir()} == {"out", model.name}


def test_samples_that_are_given_take_the_place_of_recorded_ones(
    model: Path, tmp_path: Path
) -> None:
    given = np.full((9, 4), 0.25, np.float32)
    np.savez(tmp_path / "real.npz", x=given)
    made = dk.bundle(model, "cpu", out=tmp_path / "out", samples=tmp_path / "real.npz")
    kept = Path(f"{tmp_path / 'out' / made.bundle.model}.golden.npz")
    with np.load(kept) as arrays:
        assert (arrays["inputs/x"] == given[:4]).all()


def test_a_dynamic_axis_needs_its_sizes_for_tensorrt(tmp_path: Path) -> None:
    shape, node = ("N", "T", 4), helper.make_node("Relu", ["x"], ["y"])
    path = proven_model(tmp_path / "m.onnx", make([node], {"x": shape}, {"y": shape}, {}))
    with pytest.raises(dk.BadInput, match="'T', is dynamic and has no range"):
        dk.bundle(path, "l4", out=tmp_path / "out")
    made = dk.bundle(path, "l4", out=tmp_path / "out", axes=["T=1,8,16"])
    assert made.bundle.axes == ("T=1,8,16",)
    with pytest.raises(dk.BadInput, match="`axes` has no effect"):
        dk.bundle(path, "cpu", out=tmp_path / "out", axes=["T=1,8,16"])


def test_a_changed_bundle_is_replaced_only_with_force(model: Path, tmp_path: Path) -> None:
    dk.bundle(model, "cpu", out=tmp_path / "out")
    dk.bundle(model, "cpu", out=tmp_path / "out")  # nobody changed it
    (tmp_path / "out" / "notes").touch()
    with pytest.raises(dk.BadInput, match="notes: is not a file of this bundle"):
        dk.bundle(model, "cpu", out=tmp_path / "out")
    dk.bundle(model, "cpu", out=tmp_path / "out", force=True)
    verify(tmp_path / "out")


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "INT8 without samples": ("int8.onnx", "l4", {}, "random inputs say too little of int8"),
    "a profile of one's own": ("m.onnx", "mine.toml", {}, "knows only deploykit's own profiles"),
    "an engine": ("m.trt", "l4", {}, "belongs to the device that built it"),
    "a precision": ("bf16.onnx", "t4", {}, "bf16, which profile 't4' lacks"),
    "wheels for a cluster": ("m.onnx", "cpu", {"to": "triton", "wheels": True}, "has no effect"),
    "a release for one": ("m.onnx", "cpu", {"to": "triton", "release": "cuda-12"}, "has no effect"),
    "another folder": ("m.onnx", "cpu", {"out": "mine", "force": True}, "no bundle"),
    "its own folder": ("m.onnx", "cpu", {"out": ".", "force": True}, "is an input"),
    **{
        name: ("m.onnx", "cpu", {"name": name}, "`name`")
        for name in ("../x", "a b", "-x", "", "$(id)", "x" * 64, "é")
    },
}


@pytest.fixture(scope="module")
def inputs(int8: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `REFUSED` names."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("m.onnx", "bf16.onnx"):
        proven_model(folder / name)
    shutil.copyfile(int8["tensorrt"], folder / "int8.onnx")
    (folder / "m.trt").write_bytes(b"ftrt" + bytes(64))
    manifest = folder / "bf16.onnx.json"
    manifest.write_text(manifest.read_text().replace('"float32":', '"bfloat16":'))
    shutil.copyfile(ROOT / "profiles" / "l4.toml", folder / "mine.toml")
    (folder / "mine").mkdir()
    (folder / "mine" / "file").touch()
    return folder


@pytest.mark.parametrize(("file", "profile", "options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_bundled_is_one_line(
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    profile: str,
    options: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(inputs)
    with pytest.raises(dk.BadInput) as caught:
        dk.bundle(file, profile, **{"out": "out", **options})
    assert words in caught.value.message
    assert not (inputs / "out").exists()


def test_weights_in_a_second_file_are_copied_under_the_new_name(tmp_path: Path) -> None:
    path = proven_model(tmp_path / "m.onnx", external=True)
    made = dk.bundle(path, "cpu", out=tmp_path / "out", name="other")
    assert (tmp_path / "out" / "model" / "other.onnx.data").is_file()
    assert dk.compare(tmp_path / "out" / made.bundle.model).parity.passed
    manifest = path.with_name("m.onnx.json")
    document = json.loads(manifest.read_text())
    document["evidence"]["weights"] = None
    manifest.write_text(json.dumps(document))
    with pytest.raises(dk.BadInput, match=r"weights in m\.onnx\.data, which its manifest does not"):
        dk.bundle(path, "cpu", out=tmp_path / "out")


def test_the_time_of_the_files_is_the_one_that_was_given(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    dk.bundle(model, "cpu", out=tmp_path / "out")
    assert {path.stat().st_mtime for path in (tmp_path / "out").rglob("*")} == {1_700_000_000}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(dk.BadInput, match="SOURCE_DATE_EPOCH 'yesterday'"):
        dk.bundle(model, "cpu", out=tmp_path / "again")


# -- The folder: every byte is covered, and it is written whole or not at all


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("made")
    dk.bundle(model, "cpu", out=top / "out.tar")
    return top / "out"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "out"))


def edit(**changes: object) -> Callable[[Path], None]:
    """Set these keys of bundle.json; None removes one, and `files` is added to."""

    def change(folder: Path) -> None:
        document = json.loads((folder / "bundle.json").read_text())
        files = changes.pop("files", {})
        document.update(changes)
        if files is None:
            del document["files"]
        else:
            document["files"].update(dict.fromkeys(files, document["files"]["README.md"]))  # type: ignore[call-overload]
        (folder / "bundle.json").write_text(json.dumps(document))

    return change


def text(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "bundle.json").write_text(content)


OUTSIDE = "names a file outside the bundle"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / "README.md").unlink(), "README.md: is missing"),
    "truncated": (lambda f: os.truncate(f / "README.md", 10), "README.md: has 10 bytes"),
    "added below": (lambda f: (f / "model" / "x").touch(), "model/x: is not a file of this bundle"),
    "link": (lambda f: (f / "a").symlink_to("/etc"), "a: is a link or no regular file"),
    "pipe": (lambda f: os.mkfifo(f / "a"), "a: is a link or no regular file"),
    "nowhere": (shutil.rmtree, "out: no such folder"),
    "no bundle.json": (lambda f: (f / "bundle.json").unlink(), "is no bundle: it has no"),
    "no sums": (lambda f: (f / "SHA256SUMS").unlink(), "SHA256SUMS: is missing"),
    "not JSON": (text("{"), "bundle.json: is not valid JSON"),
    "deep": (text("[" * 99_999), "is not valid JSON"),
    "no version": (text("{}"), "is not that of a bundle"),
    "huge": (lambda f: os.truncate(f / "bundle.json", 1 << 30), "is larger than any bundle"),
    "not text": (lambda f: (f / "bundle.json").write_bytes(b"\xff\xfe"), "is not a text file"),
    "version": (edit(bundle=2, deploykit="9.1.0"), "reads version 1"),
    "no files": (edit(files=None), "not a complete"),
    "another model": (edit(model="../x"), "bundle.json"),
    "no name": (edit(name=""), "bundle.json"),
    **{
        name: (edit(files=[name]), OUTSIDE)
        for name in ("../x", "/etc/passwd", "a/../b", "a//b", "./a", "a\\b", "a\nb", "")
    },
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_one_clear_line(
    damage: Callable[[Path], object], message: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(dk.BadInput) as found:
        verify(folder)
    assert message in found.value.message
    if message == "reads version 1":
        assert found.value.hint == "install deploykit '9.1.0'"


@pytest.mark.parametrize("place", ["is_dir", "read_bytes"])
def test_what_this_user_may_not_read_is_one_clear_line(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, place, refuse)  # root, who may run this, may read everything
    with pytest.raises(dk.BadInput, match="cannot be read: Permission denied"):
        verify(folder)


def test_the_tar_holds_the_folder_and_no_trace_of_its_writer(made: Path, tmp_path: Path) -> None:
    with tarfile.open(f"{made}.tar") as archive:
        members = archive.getmembers()
    subprocess.run(["tar", "-xf", f"{made}.tar", "-C", str(tmp_path)], check=True)
    assert {(m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, "", "")}
    assert {m.mode for m in members} == {0o755, 0o644}
    assert {m.mtime for m in members} == {315_532_800}
    assert [m.name for m in members] == sorted(m.name for m in members)
    verify(tmp_path / "out")
    assert is_bundle_tar(Path(f"{made}.tar"))
    assert not is_bundle_tar(made / "README.md")


def test_a_failure_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()

    def fail() -> None:
        with staged_folder(out) as folder:
            (folder / "new").touch()
            raise dk.BadInput("no")

    with pytest.raises(dk.BadInput, match="no"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "old").exists()


def test_what_a_killed_run_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib; from deploykit.deploying.folder import staged_folder as s\n"
        "with s(pathlib.Path(sys.argv[1])) as f: (f / 'x').touch(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "out"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with staged_folder(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_leaves_the_folder_of_another_run_alone(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out") as first:
        (first / "x").touch()
        with staged_folder(tmp_path / "out") as second:
            (second / "y").touch()
        assert (first / "x").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_is_replaced_where_the_system_cannot_exchange_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())  # macOS, an older glibc
    for name in ("old", "new"):
        with staged_folder(tmp_path / "out") as folder:
            (folder / name).touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
