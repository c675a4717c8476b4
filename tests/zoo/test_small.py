"""The small members of the zoo, from PyTorch to a judged file in each precision.

The large ones take minutes: `benchmarks/zoo.py` runs them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")

import deploykit as dk  # noqa: E402
from deploykit.core.errors import GateFailed  # noqa: E402
from tests.support.zoo import data  # noqa: E402
from tests.support.zoo.keeper import MAX_DROP, SMALL, Keeper  # noqa: E402
from tests.support.zoo.members import SEED_TEST, ZOO  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

LABELLED = tuple(name for name in SMALL if ZOO[name].labelled)
# Lost on purpose: every other pair must pass.
REFUSED = {("bad-int8", "int8")}
# Half the digits of float16's 11 bits, and of INT8's 8, are left after the deepest member.
LEAST_SQNR_DB = {"fp16": 45.0, "int8": 15.0}
WORD = {"fp16": "float16", "int8": "int8"}


@pytest.mark.parametrize("name", SMALL)
def test_an_export_computes_what_torch_does_at_every_batch(keeper: Keeper, name: str) -> None:
    made = keeper.exported(name)
    assert made.parity is not None
    assert made.parity.passed
    assert {1, 2, 7, 32} <= {row.batch for row in made.parity.rows}


@pytest.mark.parametrize("name", SMALL)
def test_an_export_keeps_names_types_and_dynamic_axes(keeper: Keeper, name: str) -> None:
    made = keeper.exported(name)
    assert tuple(str(spec) for spec in made.manifest.inputs) == ZOO[name].inputs
    assert all(spec.batched for spec in made.manifest.outputs)


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("detector", ("boxes", "scores")),
        ("bert-tiny", ("last_hidden_state", "pooler_output")),
    ],
)
def test_outputs_of_a_dict_or_dataclass_are_named_by_its_keys(
    keeper: Keeper, name: str, outputs: tuple[str, ...]
) -> None:
    assert tuple(spec.name for spec in keeper.exported(name).manifest.outputs) == outputs


@pytest.mark.parametrize("to", ["fp16", "int8"])
@pytest.mark.parametrize("name", SMALL)
def test_a_precision_passes_and_is_in_the_file(keeper: Keeper, name: str, to: str) -> None:
    if (name, to) in REFUSED:
        with pytest.raises(GateFailed):
            keeper.quantized(name, to)
        return
    made = keeper.quantized(name, to)
    assert made.manifest.precision[WORD[to]] >= 1
    feeds = dict(ZOO[name].sample(16, SEED_TEST))
    with dk.load(keeper.exported(name).path, "cpu") as a, dk.load(made.path, "cpu") as b:
        wanted, got = a(feeds), b(feeds)
    for output, values in wanted.items():
        assert sqnr_db(values, got[output]) >= LEAST_SQNR_DB[to]


@pytest.mark.parametrize("name", LABELLED)
def test_auto_finds_a_precision_that_passes(keeper: Keeper, name: str) -> None:
    made = keeper.quantized(name, "auto")
    assert made.drop is not None
    assert made.drop.drop.high <= MAX_DROP
    assert set(made.manifest.precision) - {"float32"}


def test_the_overflow_model_is_right_in_float32_and_wrong_in_plain_half(keeper: Keeper) -> None:
    assert accuracy("overflow", torch.float32) > 0.95
    assert accuracy("overflow", torch.float16) < 0.5


def test_fp16_keeps_the_overflowing_nodes_in_float32_and_names_them(keeper: Keeper) -> None:
    made = keeper.quantized("overflow", "fp16")
    (note,) = [note for note in made.notes if "float32" in note]
    assert "sum" in note
    assert "sqrt" in note
    assert made.manifest.precision["float32"] < sum(made.manifest.precision.values())


def test_bad_int8_loses_too_much_in_int8_and_its_file_is_rejected(
    keeper: Keeper, tmp_path: Path
) -> None:
    assert accuracy("bad-int8", torch.float32) > 0.95
    files, out = keeper.files("bad-int8"), tmp_path / "bad.onnx"
    with pytest.raises(GateFailed) as raised:
        dk.quantize(
            keeper.exported("bad-int8").path,
            "int8",
            out,
            calib=files.calib,
            data=files.data,
            max_drop=MAX_DROP,
        )
    assert raised.value.result.drop.drop.low > 0
    assert (tmp_path / "bad.rejected.onnx").is_file()
    assert not out.exists()
    assert "bad.rejected.onnx" in raised.value.message


def test_auto_keeps_only_the_sensitive_node_of_bad_int8_in_float32(
    keeper: Keeper, tmp_path: Path
) -> None:
    """For a target without FP8, whose scales would do as well as widening."""
    files = keeper.files("bad-int8")
    made = dk.quantize(
        keeper.exported("bad-int8").path,
        "auto",
        tmp_path / "auto.onnx",
        calib=files.calib,
        data=files.data,
        max_drop=MAX_DROP,
        profile="jetson-orin-nano-8gb",
    )
    assert made.manifest.precision["int8"] == 4  # of five Conv and Gemm
    (note,) = [note for note in made.notes if "kept in float32 by the search" in note]
    assert note.endswith("node_linear_1")  # dense2, the second Linear


def test_the_same_seed_makes_the_same_weights() -> None:
    first, second = (ZOO["encoder-masked"].build().state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", sorted({"encoder", "lstm", "masked-ids", "resnet18"} & {*SMALL}))
def test_random_weights_answer_differently_to_different_inputs(keeper: Keeper, name: str) -> None:
    made = keeper.exported(name)
    with dk.load(made.path, "cpu") as engine:
        (logits,) = engine(dict(ZOO[name].sample(32, SEED_TEST))).values()
    assert len(set(logits.argmax(1).tolist())) >= 5
    assert 1.0 < logits.std(0).mean() < 10.0


def accuracy(name: str, dtype: torch.dtype) -> float:
    """Top-1 of the module itself on its test split, computed in `dtype`."""
    member = ZOO[name]
    if member.missing:
        pytest.skip(f"{name}: {member.missing}")
    assert member.labelled is not None
    _, test = member.labelled()
    assert len(test.labels) >= data.DIGITS_TRAIN
    module = member.build().to(dtype)
    with torch.inference_mode():
        logits = module(torch.from_numpy(test.x).to(dtype))
    return float((logits.argmax(1).numpy() == test.labels).mean())


def sqnr_db(wanted: np.ndarray, got: np.ndarray) -> float:
    """Signal to quantization noise in decibels; infinite when equal."""
    noise = float(np.sum((wanted.astype(np.float64) - got) ** 2))
    signal = float(np.sum(wanted.astype(np.float64) ** 2))
    return 10 * float(np.log10(signal / noise)) if noise else float("inf")
