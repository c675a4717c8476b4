"""What the builder that is here makes of a model, what it refuses, and our words for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import onnx
import pytest

from deploykit.building.builder import AxisRange
from deploykit.building.tensorrt import build, check, check_build, module
from deploykit.core.errors import BadInput, Unsupported
from deploykit.engines.tensorrt.compatibility import logger
from deploykit.engines.tensorrt.engine import LogErrors
from tests.support.builders.nvidia_cases import ask, checked, needs, options
from tests.support.graphs.protos import to_half
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import (
    conv_relu,
    int64_ids,
    linear,
    mnist_like,
    save,
    two_inputs,
)

if TYPE_CHECKING:
    from deploykit.engines.cuda.driver import CudaDevice

pytestmark = [ask, needs]
Model = onnx.ModelProto


@pytest.mark.parametrize("graph", [linear, conv_relu, two_inputs, int64_ids, mnist_like])
def test_a_good_file_is_accepted_and_nothing_is_written(
    graph: Callable[[], Model], tmp_path: Path
) -> None:
    path = save(graph(), tmp_path / "m.onnx")
    found = check_build(path, "l4")
    assert found.accepted, found.problems
    assert (found.layers > 0, found.plan_bytes > 0, found.problems) == (True, True, ())
    assert "not proven" in found.notes[-1]
    assert [each.name for each in tmp_path.iterdir()] == ["m.onnx"]


def test_a_named_axis_is_found_in_the_file(tmp_path: Path) -> None:
    model = parse("(float[N,T,4] x) => (float[N,T,4] y)", "y = Relu(x)")
    assert checked(model, tmp_path, axes={"T": AxisRange(2, 24, 32)}).accepted


# types


def _unary() -> list[str]:
    """ONNX's operators of one input, which may be float32, and without attributes to set."""
    return sorted(
        schema.name
        for schema in onnx.defs.get_all_schemas()
        if schema.domain == ""
        and not schema.deprecated
        and schema.min_input == schema.max_input == schema.min_output == schema.max_output == 1
        and "tensor(float)" in schema.inputs[0].types
        and not any(each.required for each in schema.attributes.values())
        and onnx.defs.has(schema.name, 18)
    )


@pytest.mark.parametrize("operator", _unary())
def test_what_the_parser_takes_in_float32_it_takes_as_we_cast_it(
    operator: str, tmp_path: Path
) -> None:
    """Asked by operator and type: its documents list some with a type that it refuses."""
    nodes = f"[relu] r = Relu(x) [own] o = {operator}(r) [cast] y = Cast <to = 1> (o)"
    model = parse("(float[N,4,6,6] x) => (float[N,C,H,W] y)", nodes)
    try:
        onnx.checker.check_model(model, full_check=True)
        model = onnx.shape_inference.infer_shapes(model)
        del model.graph.output[0].type.tensor_type.shape.dim[:]
        halves = [to_half(model, to)[0] for to in ("fp16", "bf16")]
        taken = checked(model, tmp_path).accepted
    except (BadInput, onnx.shape_inference.InferenceError) as exc:  # no floats, or another rank
        pytest.skip(f"{operator}: {exc}")
    if not taken:
        pytest.skip(f"{operator} is refused in float32")
    assert [checked(half, tmp_path).accepted for half in halves] == [True, True]


# progress


def test_ctrl_c_in_the_middle_of_a_build_ends_it(tmp_path: Path) -> None:
    reported: list[str] = []

    def interrupts(text: str, share: float) -> None:
        reported.append(text)
        if len(reported) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    path = save(mnist_like(), tmp_path / "m.onnx")
    with pytest.raises(KeyboardInterrupt):
        check_build(path, "l4", on_progress=interrupts)
    assert len(reported) == 5
    assert signal.getsignal(signal.SIGINT) is handler


# what is refused


ENDS = "(float[N,4] x) => (float[] y)"
FOREIGN = parse(ENDS, "[m] y = acme.Magic(x)")
FOREIGN.opset_import.add(domain="acme", version=1)
PAIR = "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)"
STORED = "[bias_dq] f = DequantizeLinear(w, s, z) y = Add(x, f)"


def quantized(zero: np.generic, nodes: str) -> Model:
    """A pair on x with zero point `zero`, or four ones of its type dequantized and added to x."""
    return parse(ENDS, nodes, s=np.float32(0.1), z=zero, w=np.ones(4, zero.dtype))


INT8 = "(int8[N,4] x) => (int8[] y)"
INTEGERS = {"s": np.float32(0.1), "z": np.int8(0), "w": np.ones((4, 4), np.int8)}


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (parse(ENDS, "d = Det(x) y = Unique(x)"), ["Det 'd'", "Unique 'y'"]),
        (FOREIGN, ["Magic 'm': Plugin not found"]),
        (
            parse("(string[N,4] x) => (string[] y)", "y = Identity(x)"),
            ["Failed to convert ONNX date type"],
        ),
        (
            parse(INT8, "[qmm] y = QLinearMatMul(x, s, z, w, s, z, s, z)", **INTEGERS),
            ["QLinearMatMul 'qmm' is not supported"],
        ),
        (quantized(np.int32(0), STORED), ["'bias_dq': bias_dq: input has type Int32"]),
        (quantized(np.int8(3), PAIR), ["'q': Non-zero zero point"]),
        (quantized(np.uint8(128), STORED), ["unsupported input type of UINT8"]),
    ],
    ids=["two", "domain", "text", "QOperator", "int32 bias", "asymmetric", "uint8"],
)
def test_each_refusal_of_the_parser_is_explained(
    graph: Model, words: list[str], tmp_path: Path
) -> None:
    found = checked(graph, tmp_path)
    assert not found.accepted
    assert len(found.problems) >= len(words)  # all in one pass
    assert all(word in text for word, text in zip(words, found.problems, strict=False))


def test_types_that_disagree_are_bad_input(tmp_path: Path) -> None:
    mixed = parse(ENDS, "h = Cast <to = 10> (x) [div] y = Div(h, x)")
    with pytest.raises(BadInput, match=r"Div 'div': .* of types Half and Float"):
        checked(mixed, tmp_path)


def test_external_weights_are_read_and_missing_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save_model(linear(), path, save_as_external_data=True, size_threshold=0, location="m.data")
    assert check(path, options()).accepted
    (tmp_path / "m.data").unlink()
    with pytest.raises(BadInput, match=r"m\.data"):
        check(path, options())


def test_a_build_after_a_failed_one_reports_its_own_reason(tmp_path: Path) -> None:
    found = checked(linear(), tmp_path, workspace_bytes=1024)
    assert "workspace limit" in found.problems[0]
    assert "Plugin" in checked(FOREIGN, tmp_path).problems[0]
    assert checked(linear(), tmp_path).accepted


def test_a_refused_plan_has_its_own_reason_on_each_of_several_threads() -> None:
    """The library logs a refusal on the thread that calls it."""
    nv, together = module(), threading.Barrier(2)
    runtime = nv.Runtime(logger(nv))

    def reason(content: bytes) -> str:
        together.wait(20)
        log_errors = LogErrors(nv, Path("m.trt"), cast("CudaDevice", None))
        with pytest.raises(Unsupported) as caught:
            log_errors.call("load", runtime.deserialize_cuda_engine, content)
        return caught.value.message

    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            damaged, empty = threads.map(reason, [b"ftrt" + bytes(100), b""])
            assert "incompatible serialization" in damaged
            assert "incompatible serialization" not in empty


def test_a_plan_of_rtx_is_never_kept_and_needs_the_lean_runtime_elsewhere(tmp_path: Path) -> None:
    if checked(linear(), tmp_path).flavour != "rtx":
        pytest.skip("the library here is TensorRT itself")
    out = tmp_path / "m.trt"
    out.write_bytes(b"previous")
    with pytest.raises(Unsupported, match="not written: the installed library is TensorRT for RTX"):
        build(save(linear(), tmp_path / "m.onnx"), out, options())
    assert out.read_bytes() == b"previous"
    found = checked(linear(), tmp_path, version_compatible=True)
    assert "libnvinfer_lean" in found.problems[0]
