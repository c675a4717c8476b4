"""INT8 pairs written for TensorRT, by us or by another tool, and then placed for ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.building.onnxruntime import build
from deploykit.core.errors import BadInput
from deploykit.engines.engine import load
from deploykit.graph.graph import Graph
from deploykit.quantization import qdq
from deploykit.quantization.half_precision import to_half
from deploykit.quantization.moving import move_foreign_pairs, move_pairs
from tests.support.graphs.data import feeds, samples, sqnr_db
from tests.support.graphs.protos import calibrate, summarise, to_proto
from tests.support.graphs.qdq_graphs import ZOO, Make, optimised, quality_db, run, stored
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import mnist_like, save

RUNTIMES = ("tensorrt", "onnxruntime")
MOST_LOST_DB = 3.0  # of signal to noise by the move: half a bit
OPERATORS = ["Conv", "Gemm", "MatMul"]


def written(make: Make, tmp_path: Path, **options: object) -> dict[str, Graph]:
    model = make()
    path = save(model, tmp_path / "float.onnx")
    found = calibrate(path, samples(model, 64))
    source = Graph.open(path)
    return {name: qdq.to_pairs(source, found, runtime=name, **options) for name in RUNTIMES}


@pytest.mark.parametrize("make", ZOO)
def test_moved_pairs_give_what_was_written_for_that_runtime(make: Make, tmp_path: Path) -> None:
    graphs = written(make, tmp_path)
    moved = move_pairs(graphs["tensorrt"], "onnxruntime")
    inputs = feeds(make(), 16)
    got = run(to_proto(moved), inputs, tmp_path / "moved.onnx")
    wanted = run(to_proto(graphs["onnxruntime"]), inputs, tmp_path / "wanted.onnx")
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert moved.summary.operators == graphs["onnxruntime"].summary.operators


def test_onnx_runtime_runs_moved_pairs_of_a_file_in_integers(tmp_path: Path) -> None:
    written(mnist_like, tmp_path)["tensorrt"].save(tmp_path / "typed.onnx")
    before = Graph.open(tmp_path / "typed.onnx")
    moved = move_pairs(before, "onnxruntime")
    integers = []
    for name, graph in (("before", before), ("moved", moved.save(tmp_path / "moved.onnx"))):
        build(graph.path, tmp_path / f"{name}.built.onnx")
        integers.append(Graph.open(tmp_path / f"{name}.built.onnx").precision.get("int8", 0))
    assert integers[0] == 0
    assert integers[1] >= 3


def test_nodes_in_float32_stay_there(tmp_path: Path) -> None:
    graphs = written(mnist_like, tmp_path, keep_float32=("conv2",))
    moved = move_pairs(graphs["tensorrt"], "onnxruntime")
    assert moved.precision == graphs["onnxruntime"].precision


def test_a_graph_without_ranges_or_with_half_nodes_is_not_moved(tmp_path: Path) -> None:
    graph = written(mnist_like, tmp_path)["tensorrt"]
    assert move_pairs(to_half(graph)[0], "onnxruntime") is None
    del graph.model.metadata_props[:]
    assert move_pairs(graph, "onnxruntime") is None


# Pairs of another tool are placed by their own scales


def written_by_onnxruntime(
    model: onnx.ModelProto, tmp_path: Path, activation_type: str = "QInt8", **options: object
) -> Graph:
    """By quantize_static, with the options that TensorRT's parser accepts."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    inputs = feeds(model, 32)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        left = iter([inputs])

        def get_next(self) -> Mapping[str, np.ndarray] | None:
            return next(self.left, None)

    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        quantization.quantize_static(
            save(model, tmp_path / "float.onnx"),
            tmp_path / "foreign.onnx",
            Reader(),
            per_channel=True,
            activation_type=quantization.QuantType[activation_type],
            weight_type=quantization.QuantType.QInt8,
            op_types_to_quantize=OPERATORS,
            extra_options={
                "ActivationSymmetric": True,
                "QuantizeBias": False,
                "OpTypesToExcludeOutputQuantization": OPERATORS,
                **options,
            },
        )
    logging.disable(logging.NOTSET)
    return Graph.open(tmp_path / "foreign.onnx")


def moved_graph(foreign: Graph) -> onnx.ModelProto:
    moved = move_foreign_pairs(foreign, "onnxruntime")
    return to_proto(moved[0])


def blocks(activation: str = "{1} = Relu({0})", *, join: str = "Add") -> onnx.ModelProto:
    """Conv, activation, then two of ResNet's blocks, or of a YOLO's with SiLU or Concat."""
    random = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {"least": np.array(0.0), "most": np.array(1.0)}
    lines: list[str] = []

    def conv(name: str, source: str, channels: int = 8) -> str:
        kernel = 1 if channels == 16 or name == "y" else 3
        weights[f"w_{name}"] = random.standard_normal((8, channels, kernel, kernel)) / 6
        pads = ", ".join([str(kernel // 2)] * 4)
        lines.append(f"{name} = Conv<pads = [{pads}]>({source}, w_{name})")
        return name

    def act(source: str) -> str:
        lines.append(activation.format(source, f"{source}_act"))
        return f"{source}_act"

    last = act(conv("stem", "x", 3))
    for block in "ab":
        body = conv(f"{block}2", act(conv(f"{block}1", last)))
        if join == "Add":
            lines.append(f"{block}_sum = Add({body}, {last})")
            last = act(f"{block}_sum")
        else:
            parts = act(body)
            if join == "Split":  # cut in two and swapped
                lines.append(f"{block}_0, {block}_1 = Split<axis = 1, num_outputs = 2>({parts})")
                parts = f"{block}_1, {block}_0"
            lines.append(f"{block}_cat = Concat<axis = 1>({parts}, {last})")
            last = act(conv(f"{block}3", f"{block}_cat", 16))
    conv("y", last)
    return parse("(float[N,3,8,8] x) => (float[N,8,8,8] y)", "\n".join(lines), **weights)


SILU = "{0}_gate = Sigmoid({0}) {1} = Mul({0}, {0}_gate)"
CASES: dict[str, Callable[[], onnx.ModelProto]] = {
    "sequence": mnist_like,
    "residual": blocks,
    "silu": lambda: blocks(SILU),
    "split": lambda: blocks(join="Split"),
    "clip": lambda: blocks("{1} = Clip({0}, least, most)"),
    "silu concat": lambda: blocks(SILU, join="Concat"),
}


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_runs_a_foreign_file_in_integers_once_moved(case: str, tmp_path: Path) -> None:
    model = CASES[case]()
    foreign = written_by_onnxruntime(model, tmp_path)
    before = optimised(to_proto(foreign), tmp_path)
    assert not [kind for kind in before if kind.startswith("QLinear")], before
    moved = moved_graph(foreign)
    onnx.checker.check_model(moved, full_check=True)
    done = optimised(moved, tmp_path)
    convs = sum(node.op_type == "Conv" for node in model.graph.node)
    # all but the last: what it writes is a result or, in float, what a head of float reads
    assert done.count("QLinearConv") >= convs - 1, done
    assert not {"Add", "Concat", "Mul", "Sigmoid"} & set(done), done
    inputs = feeds(model, 32, seed=1)
    there_db = quality_db(model, to_proto(foreign), inputs, tmp_path)
    assert quality_db(model, moved, inputs, tmp_path) > there_db - MOST_LOST_DB


def test_weights_that_pass_through_a_pair_are_taken_as_int8(tmp_path: Path) -> None:
    foreign = written_by_onnxruntime(blocks(), tmp_path, AddQDQPairToWeight=True)
    assert stored(to_proto(foreign))["w_stem"].dtype == np.float32
    moved = moved_graph(foreign)
    assert optimised(moved, tmp_path).count("QLinearConv") == 5
    assert quality_db(blocks(), moved, feeds(blocks(), 32, seed=1), tmp_path) > 20


def by_hand(
    *, transposed: bool = False, uint8: bool = False, ends: bool = False
) -> onnx.ModelProto:
    """Two MatMuls; their weights transposed, or unsigned and shifted; the result through a pair."""
    random = np.random.default_rng(1)
    kind, shift = (np.uint8, 128) if uint8 else (np.int8, 0)
    weights: dict[str, np.ndarray] = {"s": np.array(0.05), "z": np.array(0, np.int8)}
    body, last = "", "x"
    for layer, out in (("a", "ma"), ("b", "mb" if ends else "y")):
        weights |= {
            f"w{layer}": (random.integers(-100, 100, (4, 4)) + shift).astype(kind),
            f"s{layer}": random.uniform(0.005, 0.02, 4),
            f"z{layer}": np.full(4, shift, kind),
        }
        weight = f"t{layer}" if transposed else f"d{layer}"
        body += f"""q{layer} = QuantizeLinear({last}, s, z)
                    x{layer} = DequantizeLinear(q{layer}, s, z)
                    d{layer} = DequantizeLinear<axis = {int(not transposed)}>
                        (w{layer}, s{layer}, z{layer})
                    {f"{weight} = Transpose<perm = [1, 0]>(d{layer})" if transposed else ""}
                    {out} = MatMul(x{layer}, {weight}) """
        last = out
    body += "qy = QuantizeLinear(mb, s, z) y = DequantizeLinear(qy, s, z)" if ends else ""
    return parse("(float[N,4] x) => (float[N,4] y)", body, **weights)


@pytest.mark.parametrize("options", [{}, {"transposed": True}, {"uint8": True}, {"ends": True}])
def test_weights_are_read_as_the_pairs_mean_them(options: dict[str, bool], tmp_path: Path) -> None:
    source = by_hand(**options)
    moved = moved_graph(Graph(source))
    assert summarise(moved).precision.get("int8") == 2
    least = 12 if options.get("ends") else 20  # the steps of the last pair, which is gone
    assert quality_db(source, moved, feeds(source, 64), tmp_path) > least


def test_a_tensor_that_others_read_is_not_clipped_to_what_one_reader_needs(tmp_path: Path) -> None:
    """Before a Relu less than 0 is nothing, but the second output shows it."""
    model = blocks()
    model.graph.output.append(helper.make_tensor_value_info("a_sum", 1, ["N", 8, 8, 8]))
    moved = moved_graph(written_by_onnxruntime(model, tmp_path))
    answers = []
    for graph in (model, moved):
        with load(save(graph, tmp_path / "b.onnx"), "cpu") as engine:
            answers.append(engine(feeds(model, 8))["a_sum"])
    assert sqnr_db(*answers) > 35


@pytest.mark.parametrize("why", ["integers", "computed", "half", "none"])
def test_what_is_not_pairs_in_float32_is_left(why: str) -> None:
    model = by_hand()
    if why == "integers":
        model.graph.node.append(helper.make_node("Cast", ["qa"], ["n"], to=TensorProto.INT32))
        model.graph.output.append(helper.make_tensor_value_info("n", TensorProto.INT32, ["N", 4]))
    elif why == "computed":
        model.graph.node.insert(0, helper.make_node("Abs", ["s"], ["s_abs"]))
        model.graph.node[1].input[1] = model.graph.node[2].input[1] = "s_abs"
    elif why == "none":
        model = mnist_like()
    graph = to_half(Graph(model))[0] if why == "half" else Graph(model)
    assert move_foreign_pairs(graph, "onnxruntime") is None


# A build for a CPU of such files


def foreign(tmp_path: Path, *kinds: str, activation_type: str = "QInt8") -> tuple[Path, Path]:
    """The file and calibration data of the nodes named, each a 1x1 Conv, a product or otherwise."""
    random, lines, weights = np.random.default_rng(0), [], dict[str, np.ndarray]()
    for n, kind in enumerate(kinds):
        if kind in OPERATORS:
            shape = (4, 4, 1, 1) if kind == "Conv" else (8, 8)
            weights[f"w{n}"] = random.standard_normal(shape) / 2
        read = f"t{n}, w{n}" if kind in OPERATORS else f"t{n}"
        lines.append(f"t{n + 1} = {kind}({read})")
    head = f"(float[N,4,8,8] t0) => (float[N,4,8,8] t{len(kinds)})"
    model = parse(head, " ".join(lines), **weights)
    there = written_by_onnxruntime(model, tmp_path, activation_type=activation_type)
    np.savez(tmp_path / "calib.npz", **feeds(model, 32, seed=1))
    return there.save(tmp_path / "q.onnx").path, tmp_path / "calib.npz"


def kernels(path: Path) -> int:
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    return sum(kind.startswith("QLinearConv") or "MatMul" in kind for kind in kinds)


def test_a_file_that_runs_in_part_is_placed_for_the_cpu_too(tmp_path: Path) -> None:
    """Its MatMuls have kernels where they are, and more than half run; its Conv has none."""
    path, _ = foreign(tmp_path, "Conv", "Relu", "MatMul", "Tanh", "MatMul", "Tanh", "MatMul")
    made = dk.build(path, "cpu", out=tmp_path / "b.onnx")
    kinds = [node.op_type for node in onnx.load(made.path).graph.node]
    assert "QLinearConv" in kinds, kinds
    assert any("were placed for the CPU" in note for note in made.notes)
    assert not any("data give it" in note for note in made.notes)


def test_a_file_that_gains_nothing_stays_as_it_is(tmp_path: Path) -> None:
    """Its MatMuls run, and its Conv writes a result: that runs in float wherever the pairs are."""
    path, _ = foreign(tmp_path, "MatMul", "Tanh", "MatMul", "Tanh", "Conv")
    made = dk.build(path, "cpu", out=tmp_path / "b.onnx")
    assert not any("placed" in note or "not checked" in note for note in made.notes), made.notes
    assert made.manifest.evidence.parity is not None


def test_a_range_that_does_not_follow_is_asked_for_and_found_in_data(tmp_path: Path) -> None:
    path, calib = foreign(tmp_path, "Conv", "Relu", "Conv", "Tanh", "Conv", "Sigmoid")
    made = dk.build(path, "cpu", out=tmp_path / "b.onnx")
    (note,) = (note for note in made.notes if "data give it" in note)
    assert f"deploykit build {path} --profile cpu --calib FILE.npz" in note
    assert "2 tensors that INT8 needs" in note
    measured = dk.build(path, "cpu", calib=calib, out=tmp_path / "c.onnx")
    assert kernels(measured.path) > kernels(made.path)
    evidence = measured.manifest.evidence
    assert (evidence.calibration.samples, evidence.calibration.method) == (32, "mixed")
    assert any("those of the calibration data" in note for note in evidence.notes)
    assert not any("data give it" in note for note in measured.notes)
    with pytest.raises(BadInput, match="no INT8 pairs to place") as caught:
        dk.build(measured.path, "cpu", calib=calib, out=tmp_path / "d.onnx")
    assert caught.value.hint == "leave it out"


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_a_graph_of_16_bits_is_refused_with_what_helps(tmp_path: Path, domain: str) -> None:
    path, _ = foreign(tmp_path, "Conv", "Relu", "Conv", activation_type="QUInt16")
    model = onnx.load(path)
    for node in model.graph.node:  # the domain depends on the version of ONNX Runtime's quantizer
        if "eLinear" in node.op_type or "QuantizeLinear" in node.op_type:
            node.domain = domain
    del model.opset_import[:]
    model.opset_import.extend(
        [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    )
    onnx.save(model, path)
    assert dk.inspect(path).precision["int16"] == 2
    with pytest.raises(BadInput, match="INT16 nodes in integers: it has no kernels") as caught:
        dk.build(path, "cpu", out=tmp_path / "b.onnx")
    assert "--precision int8 --calib" in str(caught.value.hint)


def test_calibration_data_that_cannot_help_are_refused(tmp_path: Path) -> None:
    source = save(mnist_like(), tmp_path / "m.onnx")
    np.savez(tmp_path / "calib.npz", **feeds(mnist_like(), 16))
    with pytest.raises(BadInput, match=r"m\.onnx: `calib` has no effect") as caught:
        dk.build(source, "cpu", calib=tmp_path / "calib.npz", out=tmp_path / "b.onnx")
    assert caught.value.hint == "`precision` int8 quantizes it"
    path, calib = foreign(tmp_path, "Conv", "Relu", "Conv")
    model = onnx.load(path)
    out = next(node for node in model.graph.node if node.op_type == "QuantizeLinear").output[0]
    model.graph.node.append(helper.make_node("Cast", [out], ["n"], to=TensorProto.INT32))
    shape = ["N", None, None, None]
    model.graph.output.append(helper.make_tensor_value_info("n", TensorProto.INT32, shape))
    with pytest.raises(BadInput, match="`calib` cannot help") as caught:
        dk.build(save(model, path), "cpu", calib=calib, out=tmp_path / "b.onnx")
    assert "deploykit build FLOAT32.onnx --profile cpu --precision int8" in str(caught.value.hint)
