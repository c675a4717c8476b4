"""`quantize` as a user calls it, and the search of `auto`, on a made-up network and a real one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

import deploykit as dk
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import noise_share
from deploykit.quantization.job import share_outputs
from deploykit.quantization.search import Level, MeasuredCost, Search, Verdict, rank
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import mnist_like, overflow, save


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "model.onnx")


def write(path: Path, images: np.ndarray, model: Path | None = None) -> Path:
    """Images, labelled with what `model` answers where one is given."""
    arrays = {"image": images}
    if model is not None:
        with dk.load(model, "cpu") as engine:
            arrays["labels"] = engine(arrays)["logits"].argmax(1)
    np.savez(path, **arrays)
    return path


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, 1, 28, 28), dtype=np.float32)


@pytest.fixture
def calib(tmp_path: Path) -> Path:
    return write(tmp_path / "calib.npz", images(120))


@pytest.fixture
def data(tmp_path: Path, model: Path) -> Path:
    return write(tmp_path / "test.npz", images(400, 1), model)


@pytest.mark.parametrize(
    ("to", "rest", "holds"),
    [
        ("fp16", "fp32", {"float16"}),
        ("bf16", "fp32", {"bfloat16"}),
        ("int8", "fp32", {"int8", "float32"}),
        ("int8", "fp16", {"int8", "float16"}),
        ("fp8", "fp32", {"float8", "float32"}),
        ("fp8", "fp16", {"float8", "float16"}),
    ],
)
def test_each_precision_is_in_the_file_and_the_outputs_stay_close(
    model: Path, calib: Path, to: str, rest: str, holds: set[str]
) -> None:
    made = dk.quantize(model, to, calib=calib, other_nodes=rest)
    assert set(made.manifest.precision) == holds
    assert made.evaluation.passed
    assert made.evaluation.sqnr_db > 20
    record = Artefact(made.path).manifest.evidence.quantize
    assert (record.to, record.other_nodes) == (to, rest)


@pytest.mark.parametrize(
    ("to", "most_bytes"), [("int8-weight-only", 140_000), ("int4-weight-only", 80_000)]
)
def test_weight_only_precisions_need_no_data(tmp_path: Path, to: str, most_bytes: int) -> None:
    weights = np.random.default_rng(0).standard_normal((256, 512)) / 16
    large = parse("(float[N,256] x) => (float[N,512] y)", "y = MatMul(x, W)", W=weights)
    path = save(large, tmp_path / "large.onnx")
    made = dk.quantize(path, to)
    assert made.path.stat().st_size < most_bytes < path.stat().st_size / 3
    assert made.evaluation.sqnr_db > 15


def test_a_drop_is_measured_on_labelled_data(model: Path, calib: Path, data: Path) -> None:
    made = dk.quantize(model, "int8", calib=calib, data=data, max_drop=0.5)
    assert made.drop.n == 400
    assert made.evaluation.max_drop == 0.5
    assert made.manifest.evidence.accuracy.drop.n == 400
    mix = dk.inspect(made.path).details["mix"]
    assert mix["shares"]["flops"]["int8"] > 0.9
    assert mix["shares"]["weights"]["int8"] > 0.9
    assert mix["unknown"] == []
    with np.load(f"{made.path}.golden.npz") as arrays:  # the golden samples are of the data
        np.testing.assert_array_equal(arrays["inputs/image"], images(400, 1)[:4])
    replayed = dk.compare(made.path)
    assert replayed.parity.passed
    assert 0 < replayed.parity.worst.error <= replayed.parity.max_error < 0.2


def test_fp16_that_overflows_fails_as_on_a_gpu(tmp_path: Path) -> None:
    """Without calibration nothing warns of the overflow; ONNX Runtime's CPU would hide it."""
    path, big = save(overflow(), tmp_path / "overflow.onnx"), tmp_path / "big.npz"
    np.savez(big, x=np.full((40, 4), 9.0, np.float32) * np.arange(1, 41, dtype=np.float32)[:, None])
    with pytest.raises(dk.GateFailed, match=r"first node .* 'scale_up' .* in 'product'") as caught:
        dk.quantize(path, "fp16", data=big)
    assert "`calib`" in caught.value.hint
    kept = dk.quantize(path, "fp16", calib=big)
    assert any("kept in float32" in note and "scale_up" in note for note in kept.notes)


def test_metrics_or_perplexity_decide(model: Path, calib: Path, data: Path, tmp_path: Path) -> None:
    metric = tmp_path / "metric.py"
    lines = ("def margin(outputs, labels):", "return outputs['logits'][range(len(labels)), labels]")
    metric.write_text("\n    ".join(lines))
    options = {"metric": f"{metric}:margin", "max_drop": 0.5}
    made = dk.quantize(model, "int8", calib=calib, data=data, **options)
    assert (made.drop.metric, made.drop.unit) == (f"{metric}:margin", "")
    assert abs(made.drop.drop.value) < 0.1
    made = dk.quantize(model, "fp16", calib=calib, data=data, metric="perplexity")
    assert made.drop.unit == "%"
    assert abs(made.drop.drop.value) < 0.01


def test_test_samples_that_also_calibrated_are_reported(model: Path, calib: Path) -> None:
    made = dk.quantize(model, "int8", calib=calib, data=calib)
    assert any("120 of the 120 samples" in note and "looks too good" in note for note in made.notes)


@pytest.mark.parametrize("runtime", ["tensorrt", "onnxruntime"])
def test_auto_keeps_what_passes_and_logs_its_steps(
    model: Path, calib: Path, data: Path, runtime: str, tmp_path: Path
) -> None:
    options = {"calib": calib, "data": data, "max_drop": 0.5, "runtime": runtime}
    made = dk.quantize(model, "auto", tmp_path / "auto.onnx", **options)
    assert made.search.steps
    assert all(step.why for step in made.search.steps)
    assert made.manifest.evidence.search.steps[0].precision.startswith("int8")
    where = "predicted for l4" if runtime == "tensorrt" else "measured on this machine"
    assert any(where in note for note in made.notes)


@pytest.mark.parametrize(("seconds", "precision"), [(0.5, "int8"), (0.99, "float32")])
def test_auto_weighs_a_candidate_against_float32_next_to_it(
    model: Path,
    calib: Path,
    data: Path,
    seconds: float,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed(call: partial[object], number: int) -> float:
        assert number == 1
        return 1.0 if call.func.path == model else seconds  # type: ignore[attr-defined]

    monkeypatch.setattr("deploykit.quantization.search.timeit", timed)
    options = {"calib": calib, "data": data, "max_drop": 0.5, "runtime": "onnxruntime"}
    search = dk.quantize(model, "auto", **options).search
    assert search.precision == precision
    assert search.steps[0].cost_s == seconds


def test_auto_refuses_too_few_samples_at_once(model: Path, calib: Path, tmp_path: Path) -> None:
    few = write(tmp_path / "few.npz", images(50, 2), model)
    with pytest.raises(dk.BadInput, match=r"50 samples cannot show .* 276 are needed"):
        dk.quantize(model, "auto", calib=calib, data=few, max_drop=0.01)


def test_ctrl_c_in_auto_keeps_the_best_so_far(model: Path, calib: Path, tmp_path: Path) -> None:
    def interrupt(step: str, _share: float) -> None:
        if "passes" in step:
            raise KeyboardInterrupt

    out = tmp_path / "auto.onnx"
    made = dk.quantize(model, "auto", out, calib=calib, on_progress=interrupt)
    assert made.search.stopped == "interrupted"
    assert len(made.search.steps) == 1
    assert made.manifest.precision["int8"] > 0
    assert out.is_file()
    assert any("interrupted" in note for note in made.notes)


def test_auto_without_a_profile_tries_what_every_target_runs(model: Path, calib: Path) -> None:
    said: list[str] = []
    made = dk.quantize(model, "auto", calib=calib, on_progress=lambda what, _: said.append(what))
    assert {step.precision.partition("+")[0] for step in made.search.steps} <= {"int8", "fp16"}
    announced = "no `profile` was named: tried what every target runs (fp32, fp16, int8)"
    for texts in (said, made.notes):
        assert any(announced in text for text in texts)


def test_auto_keeps_only_the_node_in_float32_that_int8_ruins(tmp_path: Path) -> None:
    """One input of `guilty` is 5000 times the others, and its weights small."""
    random, width = np.random.default_rng(0), 128
    weights = {f"w{n}": random.standard_normal((width, width)) / np.sqrt(width) for n in range(6)}
    weights["boost"] = np.where(np.arange(width) == 5, 5e3, 1)
    weights["w1"][5] /= 5e3
    body = "a = MatMul(x, w0) b = Mul(a, boost) guilty = MatMul(b, w1) c = MatMul(guilty, w2) "
    body += "d = MatMul(c, w3) e = MatMul(d, w4) y = MatMul(e, w5)"
    model = parse(f"(float[N,{width}] x) => (float[N,{width}] y)", body, **weights)
    np.savez(tmp_path / "c.npz", x=random.standard_normal((64, width)).astype(np.float32))
    path = save(model, tmp_path / "m.onnx")
    search = dk.quantize(path, "auto", calib=tmp_path / "c.npz", profile="t4").search
    assert not search.steps[0].passed
    assert (search.precision, search.float32_nodes) == ("int8+fp16", ("guilty",))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"to": "fp8", "profile": "t4"}, "`profile` t4 does not run fp8"),
        ({"to": "fp12"}, "`to` 'fp12' is unknown"),
        ({"to": "int8-dynamic", "runtime": "tensorrt"}, "runs only on onnxruntime, not on tensorr"),
        ({"to": "fp16", "other_nodes": "fp16"}, "`other_nodes` fp16"),
        ({"to": "int8", "other_nodes": "fp16", "runtime": "onnxruntime"}, "`other_nodes` fp16"),
        ({"to": "int8", "other_nodes": "fp64"}, "`other_nodes` 'fp64'"),
        ({"to": "int8", "max_drop": float("nan")}, "`max_drop` must be"),
        *(
            ({"to": to, "calib": None}, f"`calib` is missing: {to} needs calibration data")
            for to in ("int8", "fp8", "auto")
        ),
        ({"to": "fp16", "metric": "f1", "data": "calib.npz"}, "'f1' is not a metric"),
        ({"to": "fp16", "out": "model.onnx"}, "is an input of this command"),
    ],
    ids=str,
)
def test_bad_options_are_refused(
    model: Path, calib: Path, options: dict[str, object], reason: str
) -> None:
    before = sorted(model.parent.iterdir())
    paths = {name: calib.with_name(str(options[name])) for name in options.keys() & {"data", "out"}}
    with pytest.raises(dk.BadInput, match=reason):
        dk.quantize(model, **{"calib": calib, **options, **paths})  # type: ignore[arg-type]
    assert sorted(model.parent.iterdir()) == before


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_models_without_half_are_refused(to: str, model: Path, calib: Path, tmp_path: Path) -> None:
    integers = dk.build(model, profile="cpu", precision="int8", calib=calib, max_drop=1.0).path
    with pytest.raises(dk.BadInput, match=r"no node of it would compute in b?float16"):
        dk.quantize(integers, to, out=tmp_path / "half.onnx")
    assert not (tmp_path / "half.onnx").exists()


def test_low_argmax_agreement_is_a_warning(tmp_path: Path) -> None:
    """Two outputs so close that rounding decides between them."""
    random = np.random.default_rng(0)
    twins = random.standard_normal((64, 1)) + random.standard_normal((64, 2)) * 3e-3
    graph = parse("(float[N,64] x) => (float[N,2] y)", "y = MatMul(x, W)", W=twins)
    path, data = save(graph, tmp_path / "twins.onnx"), tmp_path / "x.npz"
    np.savez(data, x=random.standard_normal((200, 64)).astype(np.float32))
    made = dk.quantize(path, "int8", calib=data)
    assert made.evaluation.agreement.value < 0.9
    assert any("change their answer" in note for note in made.notes)


def test_a_build_that_fails_parity_is_kept_as_rejected(model: Path, tmp_path: Path) -> None:
    """A float16 graph, computed in float32 by ONNX Runtime's CPU, is not equal to the last bit."""
    half, out = dk.quantize(model, "fp16").path, tmp_path / "built.onnx"
    out.write_bytes(b"the one before")
    with pytest.raises(dk.GateFailed, match=r"built\.onnx .*is above 1e-12; .*rejected") as caught:
        dk.build(half, "cpu", out=out, max_error=1e-12, force=True)
    assert out.read_bytes() == b"the one before"
    assert caught.value.result.path == tmp_path / "built.rejected.onnx"
    assert not Artefact(caught.value.result.path).manifest.evidence.parity.passed
    assert not list(tmp_path.glob(".*"))


def test_a_graph_whose_pairs_were_moved_passes_the_gate_only_with_labelled_data(
    model: Path, data: Path, tmp_path: Path
) -> None:
    for_tensorrt = dk.quantize(model, "int8", tmp_path / "q.onnx", calib=data).path
    unchecked = dk.build(for_tensorrt, "cpu", out=tmp_path / "unchecked.onnx")
    assert unchecked.evaluation is None
    assert any("accuracy of this graph was not checked" in note for note in unchecked.notes)
    notes = Artefact(unchecked.path).manifest.evidence.notes
    assert any("not checked" in note for note in notes)
    checked = dk.build(for_tensorrt, "cpu", out=tmp_path / "c.onnx", data=data, max_drop=0.5)
    assert checked.drop.n == 400
    assert not any("not checked" in note for note in checked.notes)
    with pytest.raises(dk.GateFailed, match=r"g\.onnx: drop .*; the file is kept as") as caught:
        dk.build(for_tensorrt, "cpu", out=tmp_path / "g.onnx", data=data, max_drop=1e-6)
    assert caught.value.result.path == tmp_path / "g.rejected.onnx"
    assert not (tmp_path / "g.onnx").exists()


def test_a_build_in_int8_is_gated_on_its_own_file(model: Path, data: Path, tmp_path: Path) -> None:
    options = {"precision": "int8", "calib": data, "data": data}
    made = dk.build(model, "cpu", out=tmp_path / "b.onnx", max_drop=0.5, **options)
    assert made.evaluation.parity.b == "b.onnx"
    arrays = np.load(data)
    with dk.load(made.path, "cpu") as engine:
        answers = engine({"image": arrays["image"]})["logits"].argmax(1)
    assert made.drop.candidate.value == pytest.approx((answers == arrays["labels"]).mean())
    with pytest.raises(dk.GateFailed, match="the upper end of the drop"):
        dk.build(model, "cpu", out=tmp_path / "g.onnx", max_drop=1e-6, **options)
    assert (tmp_path / "g.rejected.onnx").is_file()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("y = Sigmoid(x)", {"y"}),
        ("s = Sigmoid(x) y = Flatten(s)", {"y"}),
        ("s = Sigmoid(x) y = Mul(s, x)", set()),
        ("y = Softmax(x)", set()),  # its values add up to 1: their noise always says something
    ],
)
def test_outputs_of_a_sigmoid_are_those_that_may_find_nothing(body: str, found: set[str]) -> None:
    assert share_outputs(Graph(parse("(float[N,4] x) => (float[N,4] y)", body))) == found


RANDOM = np.random.default_rng(0)
W = RANDOM.standard_normal((8, 8)) / 3
UNUSUAL = {
    "empty weights": "a = MatMul(x, W) b = MatMul(x, none) y = Concat<axis = 1>(a, b)",
    "one matrix for three products": "a = MatMul(x, W) b = Gemm<transB = 1>(a, W) y = MatMul(b, W)",
    "an operator of unknown type": (
        "a = ai.onnx.ml.Scaler<offset = [0.0], scale = [1.0]>(x) y = MatMul(a, W)"
    ),
}


def unusual(folder: Path, body: str, kind: str = "float32") -> tuple[Path, Path]:
    name, array = kind.removesuffix("32"), np.dtype(kind).type
    constants = {"W": W.astype(array), "none": np.zeros((8, 0), array), "one": array(1)}
    model = parse(f"({name}[N,8] x) => ({name}[N,8] y)", body, 17, **constants)
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    np.savez(folder / "c.npz", x=(RANDOM.standard_normal((16, 8)) * 3).astype(array))
    return save(model, folder / "m.onnx"), folder / "c.npz"


@pytest.mark.parametrize("runtime", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("graph", UNUSUAL)
def test_what_can_be_quantized_is(tmp_path: Path, graph: str, runtime: str) -> None:
    model, calib = unusual(tmp_path, UNUSUAL[graph])
    made = dk.quantize(model, "int8", calib=calib, runtime=runtime)
    assert made.manifest.precision["int8"] >= (3 if "one" in graph else 1)
    assert made.evaluation.sqnr_db > 25


def test_auto_keeps_float32_where_nothing_is_computed(tmp_path: Path) -> None:
    model, calib = unusual(tmp_path, "y = Identity(x)")
    made = dk.quantize(model, "auto", calib=calib, profile="l4")
    assert made.search.precision == "float32"


@pytest.mark.parametrize("to", ["int8", "fp16", "auto"])
@pytest.mark.parametrize(
    ("body", "kind"), [("y = Add(x, one)", "int64"), ("y = MatMul(x, W)", "float16")]
)
def test_a_model_without_float32_is_refused(tmp_path: Path, body: str, kind: str, to: str) -> None:
    model, calib = unusual(tmp_path, body, kind)
    with pytest.raises(dk.BadInput, match=r"m\.onnx: has no float32 tensor: nothing to quantize"):
        dk.quantize(model, to, calib=calib)


@pytest.mark.parametrize("to", ["fp16", "int8", "int8-dynamic", "auto"])
def test_an_output_that_is_no_tensor_is_refused_by_its_name(tmp_path: Path, to: str) -> None:
    head = "(float[N,8] x) => (float[N,8] y, seq(float[N,1]) parts)"
    model = parse(head, "y = Relu(x) parts = SplitToSequence<axis = 1>(y)")
    path = save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "c.npz", x=RANDOM.random((16, 8), np.float32))
    assert dk.inspect(path).outputs[1].dtype == "seq(float32)"
    with pytest.raises(dk.Unsupported, match=r"m\.onnx: 'parts' is a seq\(float32\)"):
        dk.quantize(path, to, calib=tmp_path / "c.npz")


def test_an_empty_cache_gives_no_range_and_no_error_elsewhere(tmp_path: Path) -> None:
    """The first step of a decoder."""
    model = parse(
        "(float[N,1,8] x, float[N,P,8] past) => (float[N,1,8] y, float[N,Q,8] present)",
        """k = MatMul(x, W) present = Concat<axis = 1>(past, k)
           t = Transpose<perm = [0, 2, 1]>(present) s = MatMul(x, t) y = MatMul(s, present)""",
        W=W,
    )
    path, data = save(model, tmp_path / "m.onnx"), tmp_path / "d.npz"
    x = RANDOM.standard_normal((16, 1, 8)).astype(np.float32)
    np.savez(data, x=x, past=np.zeros((16, 0, 8), np.float32))
    assert dk.compare(path, path, data=data).parity.passed
    assert dk.quantize(path, "fp16", data=data).evaluation.passed
    with pytest.raises(dk.BadInput, match="input 'past' is empty in all samples") as caught:
        dk.quantize(path, "int8", calib=data)
    assert "later steps" in caught.value.hint


Made = tuple[str, frozenset[str]]  # precision, nodes kept in float32
LIMIT = 1.0  # the sensitivity that passes
NARROW_S = {"int8": 0.002, "fp8": 0.002, "fp16": 0.005, "bf16": 0.005}  # of a node; float32: 10 ms


@dataclass
class Network:
    """A candidate takes 10 s, ranking a node 1 s. `bad`: sensitivities above 0, by precision."""

    nodes: int
    bad: Mapping[str, Mapping[int, float]]
    narrow_s: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""
    now: float = 0.0
    evaluated: list[Made] = field(default_factory=list)
    ranked: list[str] = field(default_factory=list)

    def make(self, level: Level, float32_nodes: frozenset[str]) -> Made:
        if level.precision == self.refused:
            raise BadInput("nothing to quantize")
        return level.precision, float32_nodes

    def sensitivity(self, level: Level, name: str) -> float:
        self.now += 1
        self.ranked.append(name)
        return self.bad[level.precision].get(int(name[1:]), 0.0)

    def saving_s(self, _level: Level, _name: str) -> float:
        return 0.008

    def cost_s(self, made: Made) -> float:
        narrow_s = {**NARROW_S, **self.narrow_s}[made[0]]
        return 0.01 * len(made[1]) + narrow_s * (self.nodes - len(made[1]))

    def evaluate(self, made: Made) -> Verdict:
        self.now += 10
        self.evaluated.append(made)
        drop = sum(bad for number, bad in self.bad[made[0]].items() if f"n{number}" not in made[1])
        return Verdict(drop <= LIMIT, drop, f"drop {drop:.2f}")

    def search(self, seconds: float = math.inf, float32_s: float | None = None) -> Search:
        names = tuple(f"n{number}" for number in range(self.nodes))
        levels = [Level(name, 8 if "8" in name else 16, names) for name in self.bad]
        float32_s = 0.01 * self.nodes if float32_s is None else float32_s
        outcome = Search(self, levels, float32_s, seconds, lambda: self.now)
        outcome.run()
        return outcome


@pytest.mark.parametrize(
    ("rounds", "note"),
    [
        ([0.80, 0.81, 0.79, 0.80], ""),
        ([0.80, 1.60, 0.40, 0.80], "within the spread of the measurements"),
        ([0.97, 0.97, 0.96, 0.97], "5% less is asked for"),
    ],
)
def test_a_measured_gain_counts_if_it_is_more_than_chance(
    rounds: list[float], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(10, {"int8": {}})
    costs = [MeasuredCost(0.1), MeasuredCost(0.1)]
    costs[0].rounds, costs[1].rounds = rounds, [1.0] * len(rounds)
    monkeypatch.setattr(network, "cost_s", lambda _: costs[0])
    outcome = network.search(float32_s=costs[1])
    assert (outcome.best is not None) == (not note)
    assert note in "".join(outcome.notes)


def kept(outcome: Search) -> tuple[str, int]:
    record = outcome.record
    assert record.passed is (outcome.best is not None)
    return record.precision, len(record.float32_nodes)


def fails(count: int = 1) -> dict[int, float]:
    return dict.fromkeys(range(count), 9.0)


@pytest.mark.parametrize("guilty", [*range(1, 20), 39])
def test_the_fewest_that_pass_are_kept_in_float32(guilty: int) -> None:
    network = Network(64, {"int8": dict.fromkeys(range(guilty), 1.1)})
    assert kept(network.search()) == ("int8", guilty)
    assert len(network.evaluated) <= 1 + 2 * math.ceil(math.log2(64))


FEW = "INT8 fails with {} kept in float32"
DEAR = "INT8 is not worth it here"
RESULTS = {  # what is seen -> network, what is kept, and how the first note begins
    "beyond-repair": (
        Network(4, {"int8": fails(4), "fp16": {}}),
        *(("fp16", 0), f"{FEW.format('1 of 4 node(s)')}; with 2 it is not"),
    ),
    "repaired-too-dear": (  # with 8 of 20 nodes in float32, INT8 takes 104 ms, FP16 100 ms
        Network(20, {"int8": fails(8), "fp16": {}}),
        *(("fp16", 0), f"{FEW.format('6 of 20 node(s)')}; with 7 it is not worth it: 96 ms "),
    ),
    "repaired-cheaper": (Network(20, {"int8": fails(6), "fp16": {}}), ("int8", 6), ""),
    "saves-too-little": (
        Network(10, {"int8": {}, "fp16": {}}, {"int8": 0.0049}),
        *(("fp16", 0), f"{DEAR}: 49 ms against 50 ms in FP16; 5% less is asked for"),
    ),
    "saves-too-little-but-the-wider-fails": (
        *(Network(10, {"int8": {}, "fp16": fails()}, {"int8": 0.0049}), ("int8", 0), ""),
    ),
    "nothing-saves": (
        Network(10, {"fp16": {}}, {"fp16": 0.0099}),
        *(("float32", 0), "FP16 is not worth it here: 99 ms against 100 ms in FLOAT32"),
    ),
    "nothing-passes": (
        *(Network(3, {"int8": fails(3)}), ("float32", 0), FEW.format("2 of 3 node(s)")),
    ),
    "no-cheaper-than-what-passes": (
        Network(10, {"int8": fails(), "fp16": {}}, {"int8": 0.005}),
        *(("fp16", 0), f"{DEAR}: 50 ms against 50 ms in FP16"),
    ),
    "as-many-bits-is-no-reason": (Network(1, {"int8": {}, "fp8": {}}), ("int8", 0), ""),
    "first-of-two-wider": (
        Network(1, {"int8": {0: 0.1}, "fp16": {}, "bf16": {}}, {"int8": 0.005}),
        *(("fp16", 0), DEAR),
    ),
}


@pytest.mark.parametrize(("network", "result", "note"), RESULTS.values(), ids=RESULTS)
def test_what_is_kept_is_the_cheaper(network: Network, result: tuple[str, int], note: str) -> None:
    outcome = network.search()
    assert kept(outcome) == result
    assert (outcome.record.notes or ("",))[0].startswith(note)
    assert bool(outcome.record.notes) == bool(note)
    if result[0] == "float32":
        tried = note.startswith("INT8 fails")
        why = "no narrower precision passed" if tried else "what passed is not worth it"
        assert outcome.record.why == f"float32 stays: {why}"


def test_a_model_that_is_too_dear_is_not_evaluated_nor_a_level_ranked() -> None:
    network = Network(20, {"int8": fails(8), "fp16": {}})
    network.search()
    assert all(len(float32_nodes) <= 6 for _, float32_nodes in network.evaluated)  # 7 cost 96 ms
    network = Network(10, {"int8": fails(), "fp16": {}}, {"int8": 0.005})
    network.search()
    assert not network.ranked
    network = Network(4, {"int8": {}, "fp16": {}})
    assert (kept(network.search()), network.evaluated) == (("int8", 0), [("int8", frozenset())])


def test_a_level_that_cannot_be_made_is_a_step_that_says_why() -> None:
    outcome = Network(4, {"int8": {}, "fp16": {}}, refused="int8").search()
    assert [(s.precision, s.passed, s.why) for s in outcome.record.steps] == [
        ("int8", False, "nothing to quantize"),
        ("fp16", True, "drop 0.00"),
    ]
    outcome = Network(0, {"int8": {0: 9.0}}).search()  # without nodes it is tried as it is
    assert (outcome.best, len(outcome.record.steps)) == (None, 1)


def test_the_time_budget_keeps_what_had_passed() -> None:
    network = Network(100, {"int8": fails(30), "fp16": {}})
    outcome = network.search(35)  # both as they are, 5 s of ranking, one candidate
    assert (kept(outcome), outcome.record.stopped) == (("fp16", 0), "time budget")
    assert 0 < len(network.ranked) < 100
    assert outcome.record.why.endswith("(the time budget ran out)")
    record = Network(8, {"int8": fails(), "fp16": {}}).search(10).record
    why = "no narrower precision passed (the time budget ran out)"
    assert record.why == f"float32 stays: {why}"


@pytest.mark.parametrize("nodes", [3, 40, 100])
def test_no_budget_is_overrun_but_by_the_first_candidate(nodes: int) -> None:
    for budget_s in range(1, 150, 3):
        network = Network(nodes, {"int8": fails(nodes // 3), "fp16": fails()})
        network.search(budget_s)
        assert network.now <= max(budget_s, 10.0)


def test_what_there_was_no_time_for_is_named_in_a_note() -> None:
    network = Network(100, {"int8": fails(30)})
    outcome = network.search(110)
    assert len(network.ranked) == 50
    assert outcome.record.notes[0] == "INT8: no time to rank 50 node(s)"
    network = Network(3, {"fp8": fails(), "int8": fails(), "fp16": {}})
    assert network.search(15).record.notes == ("not tried, for lack of time: int8, fp16",)


def test_ctrl_c_while_ranking_keeps_the_wider_level_that_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network(4, {"int8": fails(), "fp16": {}})

    def interrupted(level: Level, name: str) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(network, "sensitivity", interrupted)
    record = network.search().record
    assert (record.precision, record.stopped) == ("fp16", "interrupted")


def test_nodes_with_most_sensitivity_per_saving_come_first() -> None:
    sensitivity = {"cheap": 2.0, "dear": 3.0, "free": 0.1, "unknown": math.nan}
    saving = {"cheap": 0.001, "dear": 0.004, "free": 0.0, "unknown": 1.0}
    order = rank(["late", "dear", "cheap", "free", "unknown"], sensitivity, saving.__getitem__)
    assert order == ["unknown", "free", "cheap", "dear", "late"]


SIGNAL = np.array([3.0, 4.0], np.float32)
MASK = np.array([1.0, -np.inf], np.float32)


@pytest.mark.parametrize(
    ("wanted", "got", "share"),
    [
        ([SIGNAL], [np.array([3.0, 4.5], np.float32)], 0.01),
        ([SIGNAL, SIGNAL], [SIGNAL, SIGNAL], 0.0),
        ([MASK], [MASK], 0.0),
        ([np.ones(2)], [np.array([1.0, np.inf])], math.inf),
        ([np.array([1, 2, 3, 4])], [np.array([1, 2, 3, 5])], 0.25),
        ([np.ones((3, 4)), SIGNAL], [np.ones((2, 4)), SIGNAL], 1.0),  # another number of boxes
        ([np.arange(3)], [np.arange(2)], 1.0),
    ],
    ids=["share", "equal", "mask", "overflow", "integers", "boxes", "integers-of-boxes"],
)
def test_noise_is_a_share(wanted: list[np.ndarray], got: list[np.ndarray], share: float) -> None:
    assert noise_share(wanted, got) == pytest.approx(share)
