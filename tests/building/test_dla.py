"""Builds for a Jetson's DLA with a TensorRT made of Python: what is refused, what is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploykit.building.tensorrt.build import build, check
from deploykit.building.tensorrt.options import AxisRange, Options
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.profile import load_profile
from tests.support.builders.tensorrt_fixtures import (  # noqa: F401
    Use,
    cache_fixture,
    out_fixture,
    use_fixture,
)
from tests.support.graphs.protos import to_half
from tests.support.onnx_zoo import linear, save

ONE = AxisRange(4, 4, 4)
ON_DLA = {"Name": "{ForeignNode[gemm...relu]}", "LayerType": "DLA"}
ON_GPU = {"Name": "{ForeignNode[a...b]}", "LayerType": "Myelin"}
COPY = {"Name": "x to nvm", "LayerType": "Reformat"}
LAYERS = json.dumps({"Layers": [COPY, ON_DLA, ON_GPU]})


def options(**more: object) -> Options:
    return Options(load_profile("jetson-orin-nx-16gb"), **{"batch": ONE, "dla": 1, **more})  # type: ignore[arg-type]


@pytest.fixture(name="half")
def half_fixture(tmp_path: Path) -> Path:
    return save(to_half(linear(), "fp16", {})[0], tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("version", "typing"),
    [("10.3.0", ("GPU_FALLBACK",)), ("11.4.1", ("STRONGLY_TYPED", "GPU_FALLBACK"))],
)
def test_layers_on_the_dla_are_counted_and_the_core_is_set(
    use: Use, half: Path, out: Path, version: str, typing: tuple[str, ...]
) -> None:
    """Before TensorRT 11 precision is a flag; FLOAT alone, as here, needs none."""
    does = use(version=version, dla_cores=2, layers=LAYERS)
    facts = build(half, out, options())
    config = does.seen["config"]
    assert (config.default_device_type, config.DLA_core) == ("DLA", 1)
    assert does.seen["runtime_dla"] == 1
    assert facts.flags_used == typing
    assert facts.built_on["dla"] == "1"
    assert "1 of 3 layers run on DLA core 1, the others on the GPU" in facts.notes


def test_an_engine_with_nothing_on_the_dla_is_refused(use: Use, half: Path, out: Path) -> None:
    use(version="10.3.0", dla_cores=2, layers=json.dumps({"Layers": [COPY, ON_GPU]}))
    with pytest.raises(Unsupported, match="none of its 2 layers runs on the DLA"):
        build(half, out, options())
    assert not out.exists()


def test_without_layers_to_read_a_note_reports_an_unknown_number(
    use: Use, half: Path, out: Path
) -> None:
    use(version="10.3.0", dla_cores=2)
    assert "not known" in build(half, out, options()).notes[-1]


@pytest.mark.parametrize("version", ["10.8.0", "10.13.3.9", "10.16.2", "11.0.0", "11.4.0.106"])
def test_a_tensorrt_without_dla_is_refused_with_the_reason(
    use: Use, half: Path, out: Path, version: str
) -> None:
    does = use(version=version, dla_cores=2)
    with pytest.raises(
        Unsupported, match=r"has no DLA: it exists up to 10\.7 .* and from 11\.4\.1"
    ):
        build(half, out, options())
    assert "strong" not in does.seen


@pytest.mark.parametrize(
    "more", [{"batch": AxisRange(1, 8, 32)}, {"axes": {"T": AxisRange(1, 2, 3)}}]
)
def test_sizes_that_vary_are_refused(
    use: Use, half: Path, out: Path, more: dict[str, object]
) -> None:
    use(version="10.3.0", dla_cores=2)
    with pytest.raises(BadInput, match="a DLA takes no dynamic sizes"):
        build(half, out, options(**more))


def test_a_float32_graph_is_refused(use: Use, out: Path, tmp_path: Path) -> None:
    use(version="10.3.0", dla_cores=2)
    with pytest.raises(Unsupported, match="FP16 and INT8 only, the graph is fp32"):
        build(save(linear(), tmp_path / "m.onnx"), out, options())


def test_a_dla_core_that_is_not_there_is_refused(use: Use, half: Path, out: Path) -> None:
    use(version="10.3.0", dla_cores=1)
    with pytest.raises(Unsupported, match="`dla` 1: TensorRT finds 1"):
        build(half, out, options())


def test_a_check_elsewhere_leaves_the_dla_out_and_says_so(use: Use, half: Path) -> None:
    use(dla_cores=0)
    found = check(half, options(dla=0))
    assert found.accepted
    assert "checked for the GPU alone" in found.notes[0]
