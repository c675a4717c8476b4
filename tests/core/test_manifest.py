"""The manifest: what it holds comes back, old versions are read, and its JSON Schema is true."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploykit.core.errors import BadInput
from deploykit.core.evidence import (
    Evaluation,
    Evidence,
    Interval,
    Layer,
    Parity,
    ParityRow,
    PrecisionReadBack,
)
from deploykit.core.manifest import Manifest, load_manifest, write_manifest
from deploykit.core.tensors import parse_spec
from scripts.manifest_schema import SCHEMA, schema

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
