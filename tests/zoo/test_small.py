"""The small members of the zoo, from PyTorch to a judged file in each precision.

The large ones take minutes: `benchmarks/zoo.py` runs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")

import deploykit as dk  # noqa: E402
from deploykit.core.errors import GateFailed  # noqa: E402
from tests.support.zoo.keeper import MAX_DROP, SMALL, Keeper  # noqa: E402
from tests.support.zoo.members import SEED_TEST, ZOO  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

LABELLED = tuple(name for name in SMALL if ZOO[name].labelled)
OUTPUTS = {
    "detector": ("boxes", "scores"),  # of a dict or a dataclass
    "bert-tiny": ("last_hidden_state", "pooler_output"),
}
# Lost on purpose: every other pair must pass.
REFUSED = {("bad-int8", "int8")}
# Half the digits of float16's 11 bits, and of INT8's 8, are left after the deepest member.
LEAST_SQNR_DB = {"fp16": 45.0, "int8": 15.0}
WORD = {"fp16": "float16", "int8": "int8"}


@pytest.mark.parametrize("name", SMALL)
def test_an_export_computes_what_torch_does_at_every_batch(keeper: Keeper, name: str) -> None:
    made: Any = keeper.exported(name)
    assert made.parity.passed
    assert {1, 2, 7, 32} <= {row.batch for row in made.parity.rows}
    assert tuple(str(spec) for spec in made.manifest.inputs) == ZOO[name].inputs
    assert all(spec.batched for spec in made.manifest.outputs)
    names = tuple(spec.name for spec in made.manifest.outputs)
    assert names == OUTPUTS.get(name, names)


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
        noise = np.sum((values.astype(np.float64) - got[output]) ** 2)
        least = 10 ** (LEAST_SQNR_DB[to] / 10)
        assert noise * least <= np.sum(values.astype(np.float64) ** 2)


@pytest.mark.parametrize("name", LABELLED)
def test_auto_finds_a_precision_that_passes(keeper: Keeper, name: str) -> None:
    made: Any = keeper.quantized(name, "auto")
    assert made.drop.drop.high <= MAX_DROP
    assert set(made.manifest.precision) - {"float32"}


def test_fp16_keeps_the_overflowing_nodes_in_float32_and_names_them(keeper: Keeper) -> None:
    assert accuracy("overflow", torch.float32) > 0.95
    assert accuracy("overflow", torch.float16) < 0.5
    made = keeper.quantized("overflow", "fp16")
    (note,) = [note for note in made.notes if "float32" in note]
    assert "sum" in note
    assert "sqrt" in note
    assert made.manifest.precision["float32"] < sum(made.manifest.precision.values())


def test_bad_int8_loses_too_much_and_auto_keeps_its_sensitive_node_in_float32(
    keeper: Keeper, tmp_path: Path
) -> None:
    """For a target without FP8, whose scales would do as well."""
    assert accuracy("bad-int8", torch.float32) > 0.95
    source, files = keeper.exported("bad-int8").path, keeper.files("bad-int8")
    given = {"calib": files.calib, "data": files.data, "max_drop": MAX_DROP}
    with pytest.raises(GateFailed, match=r"bad\.rejected\.onnx") as raised:
        dk.quantize(source, "int8", tmp_path / "bad.onnx", **given)
    assert raised.value.result.drop.drop.low > 0
    assert (tmp_path / "bad.rejected.onnx").is_file()
    assert not (tmp_path / "bad.onnx").exists()
    out = tmp_path / "auto.onnx"
    made = dk.quantize(source, "auto", out, profile="jetson-orin-nano-8gb", **given)
    assert made.manifest.precision["int8"] == 4  # of five Conv and Gemm
    (note,) = [note for note in made.notes if "kept in float32 by the search" in note]
    assert note.endswith("node_linear_1")  # dense2, the second Linear


def accuracy(name: str, dtype: torch.dtype) -> float:
    """Top-1 of the module itself on its test split, computed in `dtype`."""
    member = ZOO[name]
    if member.missing:
        pytest.skip(f"{name}: {member.missing}")
    assert member.labelled is not None
    _, test = member.labelled()
    module = member.build().to(dtype)
    with torch.inference_mode():
        logits = module(torch.from_numpy(test.x).to(dtype))
    return float((logits.argmax(1).numpy() == test.labels).mean())
