"""Artefacts of several files: external weights move, are hashed and rejected with their model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Evidence
from deploykit.core.tensors import parse_spec
from deploykit.evaluation.artefacts import Made, keep, onnx_manifest, reject, stage
from deploykit.evaluation.feeds import parity_sizes
from deploykit.graph.graph import Graph
from tests.support.graphs.protos import save_graph
from tests.support.onnx_zoo import linear, make

X = np.ones((1, 256), np.float32)


def large(value: float) -> bytes:
    from onnx import helper

    weights = {"W": np.full((256, 8), value, np.float32)}
    node = helper.make_node("MatMul", ["x", "W"], ["y"], name="large")
    return make([node], {"x": ("N", 256)}, {"y": ("N", 8)}, weights)


def write(out: Path, value: float, *, good: bool = True) -> Made:
    with stage(out) as tmp:
        save_graph(large(value), tmp, limit_bytes=1024)
        assert tmp.with_name(f"{tmp.name}.data").is_file()
        made = Made(out, onnx_manifest(Graph.open(tmp), (), tools=("onnx",), evidence=Evidence()))
        return keep(tmp, made) if good else reject(tmp, made)


def answer(path: Path) -> float:
    with dk.load(path, "cpu") as engine:
        return float(engine({"x": X})["y"][0, 0])


def test_external_weights_move_with_their_model(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    write(out, 1.0)
    assert answer(out) == 256.0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "m.onnx",
        "m.onnx.data",
        "m.onnx.json",
    ]


def test_a_rejected_model_does_not_replace_the_accepted_models_weights(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    write(out, 1.0)
    rejected = write(out, 2.0, good=False)
    assert rejected.path.name == "m.rejected.onnx"
    assert answer(out) == 256.0
    assert answer(rejected.path) == 512.0
    for path in (out, rejected.path):
        assert Artefact(path).manifest is not None


def test_changed_external_weights_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    write(out, 1.0)
    data = tmp_path / "m.onnx.data"
    data.write_bytes(data.read_bytes()[:-1] + b"\x01")
    with pytest.raises(dk.BadInput, match=r"m\.onnx\.data: is not the file"):
        dk.inspect(out)


def test_a_model_in_one_file_removes_the_previous_models_weights(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    write(out, 1.0)
    with stage(out) as tmp:
        save_graph(linear(), tmp)
        keep(
            tmp, Made(out, onnx_manifest(Graph.open(tmp), (), tools=("onnx",), evidence=Evidence()))
        )
    assert not (tmp_path / "m.onnx.data").exists()


def test_parity_sizes_cover_batches_lengths_and_image_sizes() -> None:
    specs = [parse_spec("ids:int64[N,T]"), parse_spec("image:float32[N,3,H,64]")]
    sizes = parity_sizes(specs)
    assert [each["N"] for each in sizes] == [1, 2, 7, 32]
    assert len({each["T"] for each in sizes}) == 4
    assert all(each["H"] >= 64 for each in sizes)
    assert parity_sizes([parse_spec("x:float32[2,3]")]) == [{}]


def test_parity_sizes_stay_within_limits() -> None:
    sizes = parity_sizes([parse_spec("x:float32[N,3]")], {"N": (2, 8)})
    assert [each["N"] for each in sizes] == [2, 7, 8]


def test_an_error_names_no_file_of_the_folder_that_is_gone(tmp_path: Path) -> None:
    def fail() -> None:
        with stage(tmp_path / "m.onnx") as staged:
            part = staged.parent / ".auto.x" / "3.onnx"
            raise BadInput(f"{part}: is bad, {staged} too", hint=f"see {part} of {tmp_path}")

    with pytest.raises(BadInput, match=r"^m\.onnx: is bad, m\.onnx too$") as caught:
        fail()
    assert caught.value.message == str(caught.value)
    assert caught.value.hint == f"see m.onnx of {tmp_path}"
