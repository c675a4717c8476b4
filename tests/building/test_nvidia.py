"""What the builder that is here makes of a model, TensorRT or TensorRT for RTX.

What it refuses is in test_nvidia_refusals.py; the words for it, which need no TensorRT, are in
test_nvidia_words.py.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.building.tensorrt import module
from deploykit.building.tensorrt.build import (
    build,
    check,
    element_types,
    keep_cache,
    precision_flags,
    use_cache,
)
from deploykit.building.tensorrt.options import AxisRange
from deploykit.core.errors import BadInput, Unsupported
from deploykit.engines.tensorrt.log import logger, recorder
from deploykit.quantization.calibrate import Range
from tests.support.builders.nvidia_cases import INT8, ask, checked, needs, options, raw
from tests.support.graphs.data import calibration
from tests.support.graphs.protos import to_half, to_pairs
from tests.support.onnx_zoo import (
    conv_relu,
    int64_ids,
    linear,
    make,
    mnist_like,
    save,
    two_inputs,
)


@ask
@needs
@pytest.mark.parametrize("graph", [linear, conv_relu, two_inputs, int64_ids, mnist_like])
def test_a_good_file_is_accepted(graph: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    found = checked(graph(), tmp_path)
    assert found.accepted, found.problems
    assert (found.layers > 0, found.plan_bytes > 0, found.problems) == (True, True, ())
    assert "not proven" in found.notes[-1]


@ask
@needs
@pytest.mark.parametrize("words", [("?", "?"), ("None", "None"), ("-1", "unknown")], ids=str)
def test_axes_of_unknown_size_have_a_range_each(tmp_path: Path, words: tuple[str, str]) -> None:
    """TensorRT takes axes of one name for axes of one size."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["y"], "flat"),
    ]
    model = make(nodes, {"x": ("N", 3, *words)}, {"y": ("N", 3)}, {})
    axes = {"x_2": AxisRange(48, 48, 48), "x_3": AxisRange(100, 192, 320)}
    assert checked(model, tmp_path, axes=axes).accepted


def _typed(kinds: list[int]) -> onnx.ModelProto:
    """Casts of x through each of `kinds` and back; int8 by a symmetric Q/DQ pair."""
    nodes, last = [], "x"
    for number, kind in enumerate(kinds):
        if kind == INT8:
            pair = [("QuantizeLinear", f"q{number}"), ("DequantizeLinear", f"d{number}")]
        else:
            pair = [("Cast", f"c{number}"), ("Cast", f"b{number}")]
        for to, (operator, name) in zip((kind, TensorProto.FLOAT), pair, strict=True):
            cast = operator == "Cast"
            given = [last] if cast else [last, "s", "z"]
            node = helper.make_node(operator, given, [name], name=name)
            node.attribute.extend([helper.make_attribute("to", to)] if cast else [])
            nodes.append(node)
            last = name
    nodes.append(helper.make_node("Relu", [last], ["y"], name="relu"))
    return raw(nodes, {"s": np.array(0.1, np.float32), "z": np.array(0, np.int8)})


@ask
@needs
@pytest.mark.parametrize(
    ("kinds", "flags"),
    [
        ([], ()),
        ([TensorProto.FLOAT16], ("FP16",)),
        ([TensorProto.BFLOAT16], ("BF16",)),
        ([INT8, TensorProto.FLOAT16], ("FP16", "INT8")),
    ],
    ids=["fp32", "fp16", "bf16", "int8 and fp16"],
)
def test_the_types_of_a_parsed_network_give_the_older_flags(
    kinds: list[int], flags: tuple[str, ...], tmp_path: Path
) -> None:
    nv = module.module()
    builder = module.start(nv)
    network = builder.create_network(1 << int(nv.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = nv.OnnxParser(network, module.logger(nv))
    assert parser.parse_from_file(str(save(_typed(kinds), tmp_path / "m.onnx")))
    assert precision_flags(element_types(network)) == flags


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


@ask
@needs
@pytest.mark.parametrize("operator", _unary())
def test_what_the_parser_takes_in_float32_it_takes_as_we_cast_it(
    operator: str, tmp_path: Path
) -> None:
    """Asked by operator and type: its documents list some with a type that it refuses."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node(operator, ["r"], ["o"], name="own"),
        helper.make_node("Cast", ["o"], ["y"], name="cast", to=TensorProto.FLOAT),
    ]
    try:
        model = make(nodes, {"x": ("N", 4, 6, 6)}, {"y": ("N", "C", "H", "W")}, {})
        model = onnx.shape_inference.infer_shapes(model)
        del model.graph.output[0].type.tensor_type.shape.dim[:]
        halves = [to_half(model, to)[0] for to in ("fp16", "bf16")]
        taken = checked(model, tmp_path).accepted
    except (BadInput, onnx.shape_inference.InferenceError) as exc:  # no floats, or another rank
        pytest.skip(f"{operator}: {exc}")
    if not taken:
        pytest.skip(f"{operator} is refused in float32")
    assert [checked(half, tmp_path).accepted for half in halves] == [True, True]


def _sequence() -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="relu")]
    return make(nodes, {"x": ("N", "T", 4)}, {"y": ("N", "T", 4)}, {})


@ask
@needs
def test_a_named_axis_is_found_in_the_file(tmp_path: Path) -> None:
    assert checked(_sequence(), tmp_path, axes={"T": AxisRange(2, 24, 32)}).accepted
    with pytest.raises(BadInput, match="input 'x': axis 1, 'T'"):
        checked(_sequence(), tmp_path)


@ask
@needs
def test_an_empty_batch_may_be_in_the_range(tmp_path: Path) -> None:
    assert checked(linear(), tmp_path, batch=AxisRange(0, 1, 2)).accepted


@ask
@needs
def test_options_of_the_builder_are_taken(tmp_path: Path) -> None:
    found = checked(linear(), tmp_path, hardware_compatible="ampere-plus")
    assert found.accepted, found.problems


@ask
@needs
def test_progress_is_reported_and_never_falls(tmp_path: Path) -> None:
    reported: list[tuple[str, float]] = []
    path = save(mnist_like(), tmp_path / "m.onnx")
    check(path, options(), lambda text, share: reported.append((text, share)))
    shares = [share for _, share in reported]
    assert reported[0] == ("parsing", 0.0)
    assert len(reported) > 10
    assert shares == sorted(shares)
    assert 0.5 < shares[-1] <= 1.0


@ask
@needs
def test_an_error_in_on_progress_is_not_swallowed(tmp_path: Path) -> None:
    def fails(text: str, share: float) -> None:
        if text != "parsing":
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        check(save(mnist_like(), tmp_path / "m.onnx"), options(), fails)


@ask
@needs
def test_ctrl_c_in_the_middle_of_a_build_ends_it(tmp_path: Path) -> None:
    reported: list[str] = []

    def interrupts(text: str, share: float) -> None:
        reported.append(text)
        if len(reported) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the main thread looks up from time to time

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        check(save(mnist_like(), tmp_path / "m.onnx"), options(), interrupts)
    assert len(reported) < 20
    assert signal.getsignal(signal.SIGINT) is handler


# what needs the library of TensorRT for RTX


@pytest.fixture
def rtx(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt") is None:
        pytest.skip("tensorrt is not installed")
    if checked(linear(), tmp_path).flavour != "rtx":
        pytest.skip("the library here is TensorRT itself")


@ask
@pytest.mark.usefixtures("rtx")
def test_a_plan_of_rtx_is_never_kept_as_trt(tmp_path: Path) -> None:
    out = tmp_path / "m.trt"
    out.write_bytes(b"previous")
    with pytest.raises(Unsupported, match="not written: the installed library is TensorRT for RTX"):
        build(save(linear(), tmp_path / "m.onnx"), out, options())
    assert out.read_bytes() == b"previous"


@ask
@pytest.mark.usefixtures("rtx")
def test_a_version_compatible_plan_needs_the_lean_runtime(tmp_path: Path) -> None:
    found = checked(linear(), tmp_path, version_compatible=True)
    assert "lean runtime, which is not installed" in found.problems[0]


@ask
@needs
@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
def test_a_timing_cache_is_made_and_garbage_tolerated(tmp_path: Path) -> None:
    nv, file = module.module(), tmp_path / "t.cache"
    builder = module.start(nv)
    digests = set()
    for content in (b"", b"garbage" * 30):
        file.write_bytes(content)
        config = builder.create_builder_config()
        _, _, notes = use_cache(nv, config, file)
        assert any("timing cache" in note for note in notes) == bool(content)
        digests.add(keep_cache(config, file))
    ((digest, _),) = digests
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()


@ask
@needs
@pytest.mark.parametrize("group", [1, 2])
def test_a_transposed_convolution_in_int8_is_accepted_with_a_scale_per_output(
    group: int, tmp_path: Path
) -> None:
    """Its 8 inputs and 4 outputs tell the axes apart: a scale for each of axis 0 is refused."""
    weights = {"W": np.ones((8, 4 // group, 2, 2), np.float32)}
    node = helper.make_node("ConvTranspose", ["x", "W"], ["y"], strides=[2, 2], group=group)
    model = make([node], {"x": ("N", 8, 4, 4)}, {"y": ("N", 4, 8, 8)}, weights)
    int8 = to_pairs(model, calibration(dict.fromkeys("xy", Range(-1, 1))))
    assert checked(int8, tmp_path).problems == ()
    axes = [a for n in int8.graph.node for a in n.attribute if a.name == "axis"]
    assert len(axes) == (group == 1)
    for axis in axes:
        axis.i = 0
        (problem,) = checked(int8, tmp_path).problems
        assert "scales is not equal to the number of output channels" in str(problem)


@ask
@needs
def test_an_object_with_a_recorder_reports_there_and_not_to_the_logger() -> None:
    """Seen on TensorRT for RTX 1.7.1 with the bindings of 11.4; what our stand-in does, too."""
    nv = module.module()
    log, own = logger(nv), recorder(nv)()
    log.errors.clear()
    runtime = nv.Runtime(log)
    runtime.error_recorder = own
    assert runtime.deserialize_cuda_engine(b"ftrt" + bytes(100)) is None
    assert own.num_errors() > 0
    assert "incompatible serialization" in own.get_error_desc(0)
    assert list(log.errors) == []
