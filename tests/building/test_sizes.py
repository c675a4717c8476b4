"""Sizes and samples of the proof of a build for a CPU, for files that run at few sizes only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import deploykit as dk
from deploykit.building.builder import Shapes
from deploykit.core.profile import load_profile
from tests.support.installed import needs

needs("onnxruntime")
HEAD = '<ir_version: 8, opset_import: ["":17]> '
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def write(path: Path, text: str, **stored: np.ndarray) -> Path:
    model = parser.parse_model(HEAD + text)
    for name, array in stored.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path


@pytest.fixture
def audio(tmp_path: Path) -> Path:
    """A file that takes no fewer than 65 steps, as one for speech."""
    text = (
        'audio (float[N,T] x) => (float[N,L] y) { p = Pad<mode="reflect">(x, pads)'
        " u = Unsqueeze(p, ax) c = Conv(u, K) y = Squeeze(c, ax) }"
    )
    pads, ax = np.array([0, 64, 0, 64]), np.array([1])
    return write(tmp_path / "audio.onnx", text, pads=pads, ax=ax, K=normal(1, 1, 33))


def batches(made: dk.Made) -> list[int]:
    assert made.parity is not None
    assert made.parity.passed
    return [row.batch for row in made.parity.rows]


@pytest.mark.parametrize("profile", ["cpu", "cpu-openvino"])
def test_a_file_with_a_least_size_is_compared_at_sizes_that_run(audio: Path, profile: str) -> None:
    needs(load_profile(profile).runtime)
    assert {1, 2, 7, 32} <= set(batches(dk.build(audio, profile)))


@pytest.mark.parametrize(
    ("shapes", "compared"),
    [
        (Shapes(axes=["T=512"]), [1, 2, 7, 32]),
        (Shapes(axes=["T=100,512,600"], batch="1,3,7"), [3, 1, 7]),
        (Shapes(batch="4", axes=["T=70"]), [4]),
    ],
    ids=["an axis", "ranges", "one size"],
)
def test_named_sizes_are_those_of_the_comparison(
    audio: Path, shapes: Shapes, compared: list[int]
) -> None:
    assert batches(dk.build(audio, "cpu", shapes=shapes)) == compared


@pytest.mark.parametrize("options", [{}, {"precision": "int8", "calib": True}], ids=str)
def test_given_samples_are_what_is_compared(audio: Path, options: dict[str, Any]) -> None:
    np.savez(data := audio.with_name("d.npz"), x=normal(40, 512))
    if options:
        made = dk.build(audio, "cpu", precision="int8", calib=data)
    else:
        made = dk.build(audio, "cpu", data=data)
    assert batches(made)[:3] == [1, 2, 32]


def test_samples_on_another_axis_are_compared(tmp_path: Path) -> None:
    text = (
        "gru (float[S,N,5] x, float[2,N,8] h) => (float[S,2,N,8] y) "
        '{ y = GRU<hidden_size=8, direction="bidirectional">(x, W, R, B, , h) }'
    )
    weights = {"W": normal(2, 24, 5), "R": normal(2, 24, 8), "B": normal(2, 48)}
    path = write(tmp_path / "gru.onnx", text, **weights)
    np.savez(tmp_path / "d.npz", x=normal(7, 12, 5), h=normal(2, 12, 8))
    assert batches(dk.build(path, "cpu", data=tmp_path / "d.npz")) == [1, 2, 12]


@pytest.mark.parametrize(
    ("shapes", "options", "says"),
    [
        (Shapes(axes=["Q=5"]), {}, "no input has a dynamic axis 'Q'"),
        (Shapes(axes=["T"]), {}, "names no axis"),
        (Shapes(batch="0"), {}, "OPT must be 1 or more"),
        (Shapes(axes=["T=8"]), {}, r"no random inputs (of any size )?that w.+ tried run"),
        (Shapes(axes=["T=512"]), {"data": True}, "sizes of random inputs"),
        (Shapes(dla=0), {}, "has no such options"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    audio: Path, shapes: Shapes, options: dict[str, Any], says: str
) -> None:
    np.savez(data := audio.with_name("d.npz"), x=normal(40, 512))
    with pytest.raises(dk.BadInput, match=says):
        dk.build(audio, "cpu", shapes=shapes, **dict.fromkeys(options, data))
