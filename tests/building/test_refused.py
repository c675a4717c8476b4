"""What a target, a TensorRT or a file cannot give is refused before TensorRT builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

import deploykit as dk
from deploykit.building.tensorrt.build import build
from deploykit.building.tensorrt.options import AxisRange
from deploykit.core.errors import BadInput, DeploykitError, NotFound, Unsupported
from tests.support.graphs.protos import to_half
from tests.support.onnx_zoo import linear, mnist_like, save
from tests.support.runtimes.fake_tensorrt import Use, options

ONE = AxisRange(4, 4, 4)
DLA: dict[str, Any] = {"profile": "jetson-orin-nx-16gb", "dla": 1, "batch": ONE}
NO_DLA = r"has no DLA: it exists up to 10\.7 .* and from 11\.4\.1"
OLD: dict[str, Any] = {"version": "10.3.0", "dla_cores": 2}

# options, what the TensorRT is like, the error and its first words
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "a level that it lacks": (
        {"hardware_compatible": "same-compute-capability"},
        {"version": "10.3.0"},
        Unsupported,
        "needs a newer TensorRT.*SAME_COMPUTE_CAPABILITY",
    ),
    "an unknown level": (
        {"hardware_compatible": "everything"},
        {},
        BadInput,
        "`hardware_compatible`: unknown level 'everything",
    ),
    "a level on a Jetson": (
        {"profile": "jetson-orin-nano-8gb", "hardware_compatible": "ampere-plus"},
        {},
        Unsupported,
        "profile jetson-orin-nano-8gb is a Jetson",
    ),
    "an older GPU": (
        {"profile": "t4", "hardware_compatible": "ampere-plus"},
        {},
        Unsupported,
        r"profile t4 has compute capability 7\.5, 8\.0",
    ),
    "memory": (
        {"free_bytes": 10 << 20},
        {},
        Unsupported,
        "64 MiB of workspace, but only 10 MiB are free",
    ),
    "no DLA": ({"dla": 0}, OLD, Unsupported, "profile l4 has no DLA"),
    "a second DLA": (
        {"profile": "jetson-orin-nx-8gb", "dla": 1},
        OLD,
        Unsupported,
        "has 1 DLA core, counted from 0",
    ),
    "DLA -1": (
        {"profile": "jetson-agx-orin-64gb", "dla": -1},
        OLD,
        Unsupported,
        "has 2 DLA cores",
    ),
    "DLA in 10.8": (DLA, {**OLD, "version": "10.8.0"}, Unsupported, NO_DLA),
    "DLA in 11.4.0": (DLA, {**OLD, "version": "11.4.0.106"}, Unsupported, NO_DLA),
    "a DLA core that is not there": (
        DLA,
        {**OLD, "dla_cores": 1},
        Unsupported,
        "`dla` 1: TensorRT finds 1",
    ),
    "batches on a DLA": (
        {**DLA, "batch": AxisRange(1, 8, 32)},
        OLD,
        BadInput,
        "a DLA takes no dynamic sizes",
    ),
    "lengths on a DLA": (
        {**DLA, "axes": {"T": AxisRange(1, 2, 3)}},
        OLD,
        BadInput,
        "a DLA takes no dynamic sizes",
    ),
    "TensorRT 8": (
        {},
        {"version": "8.6.2"},
        Unsupported,
        r"TensorRT 8\.6\.2 is installed.*no types",
    ),
    "no driver": ({}, {"driver": False}, Unsupported, "cannot start: no NVIDIA driver"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_cannot_be_had_are_refused_with_the_reason(
    use: Use, tmp_path: Path, out: Path, case: str
) -> None:
    given, behaviour, error, words = REFUSED[case]
    does = use(**behaviour)
    half = save(to_half(linear(), "fp16", {})[0], tmp_path / "half.onnx")
    with pytest.raises(error, match=words):
        build(half, out, options(**given))
    assert "strong" not in does.seen
    assert not out.exists()


def test_a_float32_graph_is_refused_on_a_dla(use: Use, model: Path, out: Path) -> None:
    use(**OLD)
    with pytest.raises(Unsupported, match="FP16 and INT8 only, the graph is fp32"):
        build(model, out, options(**DLA))


def outside(folder: Path) -> Path:
    graph = linear()
    for tensor in graph.graph.initializer:
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../secret")
    return save(graph, folder / "evil.onnx")


def a_plan(folder: Path) -> Path:
    (folder / "other.onnx").write_bytes(b"ftrt" + bytes(100))
    return folder / "other.onnx"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (outside, BadInput, "outside the model's folder"),
        (a_plan, BadInput, "expected an ONNX file, got a tensorrt file"),
        (lambda folder: folder / "none.onnx", NotFound, r"none\.onnx"),
    ],
    ids=["weights elsewhere", "a plan", "missing"],
)
def test_a_file_that_cannot_be_read_is_refused(
    use: Use, tmp_path: Path, out: Path, make: Any, error: type[Exception], words: str
) -> None:
    does = use()
    with pytest.raises(error, match=words):
        build(make(tmp_path), out, options())
    assert "strong" not in does.seen


@pytest.mark.parametrize(
    ("profile", "option", "message"),
    [
        ("l4", {"device": -1}, "must be the number of a GPU, got -1"),
        ("l4", {"plugins": (Path("nope.so"),)}, "no such plugin library"),
        ("l4", {"batch": "8,1,2"}, "batch"),
        ("jetson-orin-nano-8gb", {"dla": 0}, "has no DLA"),
    ],
)
def test_wrong_options_are_named_before_the_missing_gpu(
    tmp_path: Path, profile: str, option: dict[str, Any], message: str
) -> None:
    source = save(mnist_like(), tmp_path / "m.onnx")
    with pytest.raises(DeploykitError, match=message):
        dk.build(source, profile, shapes=dk.Shapes(**option))
