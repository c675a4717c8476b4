"""The rig itself: what our code relies on of the library and the bindings in it."""

from __future__ import annotations

from typing import Any

import pytest

trt = pytest.importorskip("tensorrt", reason="tensorrt is not installed", exc_type=ImportError)
if not getattr(trt, "IS_RTX_RIG", False):
    pytest.skip("this is TensorRT itself, not the rig", allow_module_level=True)

pytestmark = pytest.mark.nvidia


class _Log(trt.ILogger):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.lines: list[str] = []

    def log(self, severity: Any, msg: str) -> None:
        self.lines.append(f"{severity} {msg}")


_LOG = _Log()  # alive to the end: TensorRT may have kept it


@pytest.fixture
def network() -> Any:
    """One layer, y = -x on float32[1,8]; its builder stays alive with it."""
    builder = trt.Builder(_LOG)
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    x = network.add_input("x", trt.float32, (1, 8))
    network.mark_output(network.add_unary(x, trt.UnaryOperation.NEG).get_output(0))
    return network


def test_bindings_and_library_are_of_one_version_and_make_a_plan_of_rtx(network: Any) -> None:
    """Those of TensorRT 11.4 call other methods of this library than the ones named."""
    network.name = "negative"
    given = network.get_input(0)
    assert (network.name, network.num_inputs, network.num_layers) == ("negative", 1, 1)
    assert network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert (given.name, tuple(given.shape), given.dtype) == ("x", (1, 8), trt.float32)
    given.set_dimension_name(0, "batch")
    assert given.get_dimension_name(0) == "batch"
    assert (given.is_network_input, given.is_shape_tensor) == (True, False)
    builder = network.builder
    plan = builder.build_serialized_network(network, builder.create_builder_config())
    assert bytes(memoryview(plan)[:4]) == b"vtrt"


def test_a_second_logger_in_a_process_gives_a_warning(network: Any) -> None:
    """Which of the two then hears what is TensorRT's affair: ours is one for the whole module."""
    second = _Log()
    trt.Builder(second)
    heard = [*_LOG.lines, *second.lines]
    assert any("differs from one already registered" in line for line in heard)
