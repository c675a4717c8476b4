from __future__ import annotations

import json
import math
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core import artefact as artefacts
from deploykit.core.artefact import Artefact, Manifest, load_manifest, sniff, write_manifest
from deploykit.core.errors import BadInput, NotFound, Unsupported
from deploykit.core.evidence import (
    Evaluation,
    Evidence,
    GoldenSamples,
    Interval,
    Layer,
    Parity,
    ParityRow,
    PrecisionReadBack,
)
from deploykit.core.files import manifest_path, sha256
from deploykit.core.runtime import BY_FORMAT
from deploykit.core.tensors import parse_spec
from scripts.manifest_schema import SCHEMA, schema

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


def test_a_manifest_is_read_back_unchanged_and_an_artefact_needs_none(artefact: Path) -> None:
    assert Artefact(artefact).manifest is None
    manifest = replace(MANIFEST, sha256=sha256(artefact))
    write_manifest(artefact, manifest)
    assert Artefact(artefact).manifest == manifest
    artefact.unlink()
    with pytest.raises(NotFound, match=r"model\.onnx: no such file"):
        _ = Artefact(artefact).manifest


def test_changed_artefact_is_noticed(artefact: Path) -> None:
    write_manifest(artefact, replace(MANIFEST, sha256=sha256(artefact)))
    content = bytearray(artefact.read_bytes())
    content[50] ^= 1
    artefact.write_bytes(content)
    with pytest.raises(BadInput, match=r"model\.onnx: .*SHA-256 differs") as caught:
        _ = Artefact(artefact).manifest
    assert "model.onnx.json" in str(caught.value.hint)


DAMAGED = (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"{}", b'{"manifest": 3}')
ODD_SIZE = [{"name": "outputs", "dtype": "int8", "shape": [-1]}]
WRONG: tuple[tuple[str, object], ...] = (
    *(("format", 1), ("inputs", {}), ("inputs", ["x"]), ("inputs", [{"name": "x"}])),
    *(("outputs", None), ("precision", {"float32": "three"}), ("sha256", None)),
    *(("outputs", [{"name": "outputs", "dtype": "x", "shape": []}]), ("outputs", ODD_SIZE)),
    *(("made_from", "ab"), ("made_from", [1]), ("made_with", {"torch": 2}), ("evidence", 1)),
)


@pytest.mark.parametrize("damage", [*DAMAGED, *WRONG, "pipe"], ids=lambda damage: repr(damage)[:40])
def test_damaged_manifest_is_named(artefact: Path, damage: bytes | tuple[str, object]) -> None:
    path, what = manifest_path(artefact), ""
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    elif damage == "pipe":  # reading it would wait for ever
        os.mkfifo(path)
        what = "is not a regular file"
    else:
        key, value = damage
        path.write_text(json.dumps({**MANIFEST.to_dict(), key: value}))
        what = f".*{key}"
    with pytest.raises(BadInput, match=rf"model\.onnx\.json: {what}"):
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
        (pickle.dumps({"a": 1}, protocol=2), "torch"),  # from before the zip format
        ((9).to_bytes(8, "little") + b'{"w": {}}' + bytes(50), "safetensors"),
    ],
    ids=["plan", "plan-2", "onnx", "legacy-torch", "safetensors"],
)
def test_the_format_is_read_from_the_content(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "file.jpg"  # the name says nothing
    path.write_bytes(content)
    assert sniff(path) == kind
    assert kind != "torch" or artefacts.torch_kind(path) == "pickle"


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        (("model/data.pkl", "model/data/0"), "pickle"),
        (("model/data.pkl", "model/constants.pkl"), "TorchScript"),
        (("m/archive_format", "m/models/model.json"), "torch.export"),
        (("serialized_exported_program.json",), "torch.export"),
        (("m/archive_format", "m/data.pkl", "m/constants.pkl"), "torch.export"),
    ],
)
def test_the_kind_of_a_torch_file_is_read_from_its_members(
    tmp_path: Path, members: tuple[str, ...], kind: str
) -> None:
    zipped(tmp_path / "f", *members)
    assert (sniff(tmp_path / "f"), artefacts.torch_kind(tmp_path / "f")) == ("torch", kind)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<!DOCTYPE html><html>404", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n", "git lfs pull"),
        *((content, "not a model file") for content in (b"\x08", b"\x80", b"P", bytes(1000))),
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
        Artefact.open(path)


def test_zip_files_that_are_damaged_or_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    content = zipped(path, "model/data.pkl", "model/data/0")
    later = bytearray(content)
    later[later.index(b"PK\x01\x02") + 6] = 99  # the version needed to read it
    cut = [content[:keep] for keep in (30, len(content) // 2, len(content) - 1)]
    for damaged, says in [
        *((each, "truncated or damaged PyTorch file") for each in cut),
        (later, ""),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=f"f: .*{says}"):
            sniff(path)
    np.savez(tmp_path / "data.npz", x=np.zeros(3))
    zipped(tmp_path / "book.zip", "chapter.txt")
    path.write_bytes(b"vtrt" + bytes(50))
    with pytest.raises(Unsupported, match="TensorRT for RTX"):
        sniff(path)
    for name, says in (
        ("data.npz", r"holds NumPy arrays \(\.npz\), a model is needed"),
        ("book.zip", "not one that PyTorch wrote"),
    ):
        with pytest.raises(BadInput, match=says):
            sniff(tmp_path / name)


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


def test_an_artefact_can_be_used_as_a_path_and_is_opened_anew_if_its_file_was_replaced(
    artefact: Path,
) -> None:
    opened = Artefact.open(artefact)
    assert (Path(opened), str(opened)) == (artefact, str(artefact))
    before = opened.sha256
    artefact.write_bytes(b"\x08\x0a" + bytes(200))
    assert Artefact.open(opened).sha256 == sha256(artefact) != before


def test_a_model_in_the_wrong_place_is_answered_with_the_command_that_takes_it() -> None:
    assert all(artefacts.wrong_format("m", name, "another").hint for name in BY_FORMAT)
    error = artefacts.wrong_format("m", "torch", "another")
    assert error.message == "m: is a PyTorch file, another is needed"
    assert "deploykit export" in str(error.hint)


ROW = ParityRow("y", 2, 20, 1e-4, 1e-3, 1e-5, 80.0, 1.0, True, 1e-4)
EQUAL = ParityRow("y", 1, 10, 0.0, 0.0, 0.0, math.inf, None, True, 0.0)
PARITY = Parity("a.onnx", "b.onnx", (ROW, EQUAL), 1e-3)


def manifest(evidence: Evidence) -> Manifest:
    specs = (parse_spec("x:float32[N,3]"),)
    return Manifest(format="onnx", inputs=specs, outputs=specs, evidence=evidence)


def test_evidence_is_read_back_unchanged_with_infinite_values(tmp_path: Path) -> None:
    accuracy = Evaluation(PARITY, None, Interval(0.9, 0.8, 1.0), 40, True, "fine", None, 15.0)
    nested = Evidence(accuracy=accuracy, notes=("a note",))
    written = manifest(Evidence(parity=PARITY, source_graph=nested))
    write_manifest(tmp_path / "model", written)
    assert load_manifest(tmp_path / "model") == written
    document = json.loads((tmp_path / "model.json").read_text())
    assert document["manifest"] == 2
    parity = document["evidence"]["parity"]
    assert (parity["passed"], parity["rows"][1]["sqnr_db"]) == (True, None)
    assert parity["why"] == "against a.onnx: output 'y' at batch 2: error 0.0001 is within 0.001"


def test_an_engine_is_verified_once_it_was_read_back_and_ran_and_nothing_failed() -> None:
    layer = Layer("conv + relu", "CaskConvolution", "int8", ("conv", "relu"))
    read_back = PrecisionReadBack((layer,), seen=0.9, wider_share=0.1)
    over = Parity("a", "b", (ROW,), 1e-6)
    assert Evidence(parity=PARITY, precision=read_back).verified
    assert not Evidence(parity=PARITY).verified
    assert not Evidence(precision=read_back).verified
    assert not Evidence(parity=PARITY, precision=PrecisionReadBack(None)).verified
    for unknown in (
        replace(read_back, seen=0.89),
        PrecisionReadBack((replace(layer, precision=None),)),
    ):
        assert not Evidence(parity=PARITY, precision=unknown).verified
        assert "not known" in unknown.why
    wider = replace(read_back, wider=("'conv' was requested in int8 and runs in float32",))
    assert Evidence(parity=PARITY, precision=wider).verified
    wider = replace(wider, wider_share=0.11)
    assert Evidence(parity=PARITY, precision=wider).wrong == (
        "'conv' was requested in int8 and runs in float32 "
        "(11.0% of the operations run wider than asked)"
    )
    assert Evidence(parity=PARITY, precision=replace(wider, allow_wider=True)).verified
    assert Evidence(parity=over, precision=read_back).wrong == over.why


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"manifest": 1}, r"model\.json: is not a deploykit manifest of version 2"),
        ({"evidence": {"parity": 3}}, "'parity' must be an object"),
        ({"evidence": {"parity": {"a": "x"}}}, "'parity': is not a complete Parity"),
        ({"evidence": {"notes": "x"}}, "'notes' must be a list"),
        ({"evidence": {"golden": {"file": 1}}}, "'file' must be a string"),
        ({"evidence": {"preflight": {"problems": [None]}}}, r"'problems'\[0\] must be an object"),
        ({"evidence": {"build": {"version_compatible": "yes"}}}, "must be true or false"),
        ({"evidence": {"training": {"samples": True}}}, "'samples' must be an integer"),
    ],
    ids=str,
)
def test_another_version_and_damaged_evidence_are_named(
    tmp_path: Path, changed: dict[str, Any], what: str
) -> None:
    document = {**manifest(Evidence()).to_dict(), **changed}
    (tmp_path / "model.json").write_text(json.dumps(document))
    with pytest.raises(BadInput, match=what):
        load_manifest(tmp_path / "model")


def test_the_published_schema_is_that_of_the_classes_and_refuses_other_documents() -> None:
    """Write it anew with: python scripts/manifest_schema.py"""
    assert json.loads(SCHEMA.read_text()) == schema()
    import jsonschema  # takes a second

    whole = manifest(Evidence(parity=PARITY)).to_dict()
    jsonschema.validate(whole, schema())
    for broken in ({**whole, "manifest": 1}, {**whole, "evidence": {"parity": {"passed": "yes"}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema())
