from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deploykit.core import artefact as artefacts
from deploykit.core.artefact import Artefact, sniff, torch_kind, wrong_format
from deploykit.core.errors import BadInput, NotFound, Unsupported
from deploykit.core.evidence import Evidence, GoldenSamples
from deploykit.core.files import manifest_path, sha256
from deploykit.core.manifest import Manifest, write_manifest
from deploykit.core.tensors import parse_spec

MANIFEST = Manifest(
    format="onnx",
    inputs=(parse_spec("x:float32[N,3]"), parse_spec("ids:int64[N,T]")),
    outputs=(parse_spec("y:float32[N,10]"),),
    precision={"float16": 52, "float32": 3},
    made_from=("ab" * 32,),
    made_with={"deploykit": "0.1.0", "torch": "2.10.0"},
    built_on={"profile": "cpu"},
    evidence=Evidence(notes=("a note",), golden=GoldenSamples("g.npz", "00", "torch", 1e-3)),
)


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x0a" + bytes(100))
    return path


def test_a_manifest_is_next_to_its_artefact() -> None:
    assert manifest_path(Path("a/model.onnx")) == Path("a/model.onnx.json")


def test_a_manifest_is_read_back_unchanged(artefact: Path) -> None:
    manifest = replace(MANIFEST, sha256=sha256(artefact))
    write_manifest(artefact, manifest)
    assert Artefact(artefact).manifest == manifest


def test_an_artefact_needs_no_manifest(artefact: Path) -> None:
    assert Artefact(artefact).manifest is None


def test_changed_artefact_is_noticed(artefact: Path) -> None:
    write_manifest(artefact, replace(MANIFEST, sha256=sha256(artefact)))
    content = bytearray(artefact.read_bytes())
    content[50] ^= 1
    artefact.write_bytes(content)
    with pytest.raises(BadInput, match=r"model\.onnx: .*SHA-256 differs") as caught:
        _ = Artefact(artefact).manifest
    assert caught.value.hint is not None
    assert "model.onnx.json" in caught.value.hint


def test_manifest_of_a_missing_artefact_is_not_found(artefact: Path) -> None:
    write_manifest(artefact, replace(MANIFEST, sha256=sha256(artefact)))
    artefact.unlink()
    with pytest.raises(NotFound, match=r"model\.onnx: no such file"):
        _ = Artefact(artefact).manifest


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"null",
        b'"x"',
        b"{}",
        b'{"manifest": 3}',
        b'{"manifest": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_damaged_manifest_is_named(artefact: Path, content: bytes) -> None:
    manifest_path(artefact).write_bytes(content)
    with pytest.raises(BadInput, match=r"model\.onnx\.json: "):
        _ = Artefact(artefact).manifest


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 1),
        ("inputs", {}),
        ("inputs", ["x"]),
        ("inputs", [{"name": "x"}]),
        ("outputs", None),
        ("precision", {"float32": "three"}),
        ("sha256", None),
        ("made_from", "ab"),
        ("made_from", [1]),
        ("made_with", {"torch": 2}),
        ("built_on", []),
        ("evidence", 1),
    ],
)
def test_manifest_of_wrong_types_is_named(artefact: Path, key: str, value: object) -> None:
    manifest_path(artefact).write_text(json.dumps({**MANIFEST.to_dict(), key: value}))
    with pytest.raises(BadInput, match=rf"model\.onnx\.json: .*({key}|a tensor needs)"):
        _ = Artefact(artefact).manifest


def test_pipe_in_place_of_a_manifest_is_refused(artefact: Path) -> None:
    """Reading it would wait for ever."""
    os.mkfifo(manifest_path(artefact))
    with pytest.raises(BadInput, match="not a regular file"):
        _ = Artefact(artefact).manifest


def zipped(path: Path, *names: str) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"content")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"ftrt" + bytes(50), "tensorrt"),
        (b"ptrt" + bytes(50), "tensorrt"),
        (b"\x08\x0a\x12\x07pytorch", "onnx"),
        (pickle.dumps({"a": 1}, protocol=2), "torch"),
        ((9).to_bytes(8, "little") + b'{"w": {}}' + bytes(50), "safetensors"),
    ],
    ids=["plan", "plan-2", "onnx", "legacy-torch", "safetensors"],
)
def test_the_format_is_read_from_the_content(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "file.jpg"  # the name says nothing
    path.write_bytes(content)
    assert sniff(path) == kind


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        (("model/data.pkl", "model/data/0"), "pickle"),
        (("model/data.pkl", "model/constants.pkl"), "TorchScript"),
        (("m/archive_format", "m/models/model.json"), "torch.export"),
        (("serialized_exported_program.json",), "torch.export"),
        (("m/archive_format", "m/data.pkl", "m/constants.pkl"), "torch.export"),
    ],
    ids=["checkpoint", "torchscript", "pt2", "older-pt2", "both"],
)
def test_the_kind_of_a_torch_file_is_read_from_its_members(
    tmp_path: Path, members: tuple[str, ...], kind: str
) -> None:
    zipped(tmp_path / "f", *members)
    assert (sniff(tmp_path / "f"), torch_kind(tmp_path / "f")) == ("torch", kind)


def test_a_torch_file_from_before_the_zip_format_is_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    assert torch_kind(tmp_path / "f") == "pickle"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<!DOCTYPE html><html>404", "is a web page"),
        (b"\n  <html lang='en'>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n", "git lfs pull"),
        (b"\x08", "not a model file"),
        (b"\x80", "not a model file"),
        (b"P", "not a model file"),
        (bytes(1000), "not a model file"),
        (b"name: weights\n", "not a model file"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "damaged .safetensors file"),
        (b"PK\x03\x04" + bytes(40), "truncated or damaged PyTorch file"),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else None,
)
def test_other_files_are_refused_with_what_they_are(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=rf"model\.pt: .*{says}"):
        sniff(path)


def test_random_bytes_raise_bad_input_and_nothing_else(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    path = tmp_path / "noise"
    for head in (b"", b"PK\x03\x04", b"\x80", b"\x08", b"ftr"):
        for size in (1, 7, 30, 4000):
            path.write_bytes(head + random.bytes(size))
            try:
                kind = sniff(path)
            except BadInput:
                continue
            assert kind in ("onnx", "torch", "safetensors", "tensorrt")


def test_truncated_zip_is_refused(tmp_path: Path) -> None:
    content = zipped(tmp_path / "f", "model/data.pkl", "model/data/0")
    for keep in (30, len(content) // 2, len(content) - 1):
        (tmp_path / "f").write_bytes(content[:keep])
        with pytest.raises(BadInput, match="truncated or damaged PyTorch file"):
            sniff(tmp_path / "f")


def test_zip_of_a_later_format_is_refused(tmp_path: Path) -> None:
    content = bytearray(zipped(tmp_path / "f", "model/data.pkl"))
    content[content.index(b"PK\x01\x02") + 6] = 99  # the version needed to read it
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(BadInput, match=r"f: "):
        sniff(tmp_path / "f")


def test_other_zip_files_are_refused_with_what_they_hold(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros(3))
    with pytest.raises(BadInput, match=r"holds NumPy arrays \(\.npz\), a model is needed"):
        sniff(tmp_path / "data.npz")
    zipped(tmp_path / "book.zip", "chapter.txt")
    with pytest.raises(BadInput, match="not one that PyTorch wrote"):
        sniff(tmp_path / "book.zip")


def test_engine_of_tensorrt_for_rtx_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"vtrt" + bytes(50))
    with pytest.raises(Unsupported, match="TensorRT for RTX"):
        sniff(tmp_path / "f")


def test_an_artefact_is_sniffed_and_hashed_once(
    artefact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(artefact, replace(MANIFEST, sha256=sha256(artefact)))
    read: list[Path] = []
    for name in ("sniff", "sha256"):
        original = getattr(artefacts, name)

        def counting(path: Path, original: Callable[[Path], str] = original) -> str:
            read.append(path)
            return original(path)

        monkeypatch.setattr(artefacts, name, counting)
    opened = Artefact.open(str(artefact))
    for _ in range(2):
        again = Artefact.open(opened)
        assert (again.format, again.manifest is not None, len(again.sha256)) == ("onnx", True, 64)
    assert again is opened
    assert read == [artefact, artefact]


def test_an_artefact_whose_file_was_replaced_is_opened_anew(artefact: Path) -> None:
    opened = Artefact.open(artefact)
    before = opened.sha256
    artefact.write_bytes(b"\x08\x0a" + bytes(200))
    assert Artefact.open(opened).sha256 == sha256(artefact) != before


def test_an_artefact_of_no_known_format_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    text = tmp_path / "model.onnx"
    text.write_text("not a model")
    with pytest.raises(BadInput, match="not a model file"):
        Artefact.open(text)
    with pytest.raises(NotFound, match="no such file"):
        Artefact.open(tmp_path / "absent.onnx")


def test_an_artefact_can_be_used_as_a_path(artefact: Path) -> None:
    opened = Artefact.open(artefact)
    assert Path(opened) == artefact
    assert str(opened) == str(artefact)


@pytest.mark.parametrize(
    ("found", "what", "command"),
    [
        ("onnx", "an ONNX file", "quantize"),
        ("torch", "a PyTorch file", "deploykit export"),
        ("safetensors", "a .safetensors file", "deploykit export"),
        ("tensorrt", "a TensorRT engine", "serve"),
    ],
)
def test_a_model_in_the_wrong_place_is_answered_with_the_command_that_takes_it(
    found: str, what: str, command: str
) -> None:
    error = wrong_format("m", found, "another")
    assert error.message == f"m: is {what}, another is needed"
    assert command in str(error.hint)


def test_every_format_of_the_table_has_a_command_that_takes_it() -> None:
    from deploykit.core.runtime import BY_FORMAT

    assert all(wrong_format("m", name, "another").hint for name in BY_FORMAT)
