"""Two builds of an engine: equal, or different in what, told from their manifests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import deploykit as dk
from deploykit.api.compare_builds import LEFT, READ, compare_builds
from deploykit.cli import tables
from deploykit.core.artefact import Manifest
from tests.support.runtimes.gpu_machine import LAYERS, gpu_machine, plan

LAYER = {"name": "conv1", "precision": "float16", "tactic": "sm89_fprop"}
ONE = Manifest(
    format="tensorrt",
    inputs=(),
    outputs=(),
    sha256="aa",
    made_from=("source", "typed"),
    built_on={"gpu": "NVIDIA L4", "driver": "580", READ: "t1", LEFT: "t1"},
    checks={"layers": [LAYER, {**LAYER, "name": "conv2"}]},
)
OTHER_BYTES = replace(ONE, sha256="bb")


def test_the_same_bytes_are_the_same_build() -> None:
    found = compare_builds(ONE, replace(ONE, checks={}))
    assert (found.equal, found.same_bytes) == (True, True)
    assert found.text == "the same engine, byte for byte"


def test_other_bytes_of_the_same_kernels_are_equal() -> None:
    found = compare_builds(ONE, OTHER_BYTES)
    assert (found.equal, found.same_bytes, found.same_times) == (True, False, True)
    assert found.differences == ()
    assert found.text == "the same layers and kernels"


def test_another_kernel_or_precision_is_named() -> None:
    layers = [{**LAYER, "tactic": "sm89_other"}, {**LAYER, "name": "conv2", "precision": "float32"}]
    found = compare_builds(ONE, replace(OTHER_BYTES, checks={"layers": layers}))
    assert found.equal is False
    assert found.differences == (
        "layer 'conv1': float16 sm89_fprop, float16 sm89_other",
        "layer 'conv2': float16 sm89_fprop, float32 sm89_fprop",
    )


def test_layers_of_one_alone_are_counted_and_named() -> None:
    found = compare_builds(ONE, replace(OTHER_BYTES, checks={"layers": [LAYER]}))
    assert found.differences == ("1 layers in one of them only: 'conv2'",)


def test_builds_that_had_to_time_kernels_are_said_to_have_done_so() -> None:
    first = {**ONE.built_on, READ: "t0"}
    found = compare_builds(replace(OTHER_BYTES, built_on=first), ONE)
    assert not found.same_times
    assert "not timed from one and the same timing cache" in found.text
    without = {key: text for key, text in ONE.built_on.items() if key not in (READ, LEFT)}
    two = replace(ONE, built_on=without), replace(OTHER_BYTES, built_on=without)
    assert not compare_builds(*two).same_times


def test_what_they_were_built_on_is_compared() -> None:
    other = {**ONE.built_on, "driver": "590", "level": "5"}
    found = compare_builds(ONE, replace(OTHER_BYTES, built_on=other))
    assert found.differences == ("driver: 580, 590", "level: not known, 5")
    assert found.equal is True


def test_another_graph_is_another_build() -> None:
    found = compare_builds(ONE, replace(OTHER_BYTES, made_from=("source", "other")))
    assert found.equal is False
    assert "built from different graphs" in found.text


def test_unknown_layers_leave_it_open() -> None:
    found = compare_builds(ONE, replace(OTHER_BYTES, checks={"layers": None}))
    assert found.equal is None
    assert "not known" in found.text


def test_compare_tells_of_two_engines_whether_they_are_one_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affine_onnx: Path
) -> None:
    """The batches fit both, and "cpu", which is the default, is no place for an engine."""
    folder = tmp_path / "machine"
    folder.mkdir()
    with gpu_machine(folder, monkeypatch, content=plan((1, 4, 8), layers=LAYERS)):
        first = dk.build(affine_onnx, "l4", out=tmp_path / "a.trt").path
        second = dk.build(affine_onnx, "l4", out=tmp_path / "b.trt").path
        found = dk.compare(first, second)
        against = dk.compare(affine_onnx, first)
        alone = dk.compare(first)
    assert found.parity.passed
    assert found.builds is not None
    assert found.builds.same_bytes
    assert "the same engine, byte for byte" in tables.compared(found)
    assert found.to_dict()["builds"]["equal"] is True
    assert against.parity.passed
    assert against.builds is None
    assert max(row.batch for row in against.parity.rows) == 8
    assert alone.parity.passed
