from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from deploykit.building.tensorrt.build import activation_bytes, weight_bytes, workspace_that_fits
from deploykit.building.tensorrt.options import AxisRange, parse_axis, parse_batch, ranges
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.memory import BuildMemory
from deploykit.core.tensors import parse_spec
from tests.support.onnx_zoo import linear

BATCH = AxisRange(1, 8, 32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1,8,32", (1, 8, 32)), ("4", (4, 4, 4)), (" 1 , 2,3 ", (1, 2, 3)), ("0,1,2", (0, 1, 2))],
)
def test_a_range_of_sizes_is_read(text: str, expected: tuple[int, int, int]) -> None:
    assert parse_batch(text) == AxisRange(*expected)


@pytest.mark.parametrize(
    "text",
    # the last one is too large for TensorRT's offsets of 32 bits
    [
        *[
            "",
            "1,8",
            "1,2,3,4",
            "a",
            "1,,3",
            "-1,2,3",
            "1.5",
            "8,4,2",
            "1,9,8",
            "0,0,0",
            "99999999999",
            "1,1,2147483648",
        ]
    ],
)
def test_an_invalid_range_is_bad_input_naming_the_option(text: str) -> None:
    with pytest.raises(BadInput, match="`batch`"):
        parse_batch(text)


def test_an_axis_is_read_with_its_name() -> None:
    assert parse_axis("T=16,128,512") == ("T", AxisRange(16, 128, 512))


@pytest.mark.parametrize("text", ["16,128,512", "=1,2,3", "T", "T=", "T=5,4,3"])
def test_an_axis_without_name_or_range_is_bad_input(text: str) -> None:
    with pytest.raises(BadInput, match="`axes`"):
        parse_axis(text)


AXES = {"T": AxisRange(1, 16, 64), "H": AxisRange(224, 224, 448), "P": AxisRange(1, 500, 1000)}
FIXED = ((4, 3), (4, 3), (4, 3))


@pytest.mark.parametrize(
    ("specs", "batch", "axes", "shapes"),
    [
        ("ids:int64[N,T]", "1,8,32", "T", [((1, 1), (8, 16), (32, 64))]),
        ("x:float32[N,3,H,9]", "2", "H", [((2, 3, 224, 9), (2, 3, 224, 9), (2, 3, 448, 9))]),
        # axis 0 is the batch whatever its name, also where it is elsewhere in another input
        (
            "x:float32[b,4] m:bool[4,b]",
            "1,2,3",
            "",
            [((1, 4), (2, 4), (3, 4)), ((4, 1), (4, 2), (4, 3))],
        ),
        (
            "p:float32[P,3] x:float32[N,4]",
            "1,2,3",
            "P",
            [((1, 3), (500, 3), (1000, 3)), ((1, 4), (2, 4), (3, 4))],
        ),
        ("s:float32[]", "1", "", [((), (), ())]),
        ("x:float32[4,3]", "1", "", [FIXED]),
        ("x:float32[4,3]", "4", "", [FIXED]),
        ("p:float32[P,3]", "1", "P", [((1, 3), (500, 3), (1000, 3))]),
    ],
)
def test_the_batch_and_named_axes_become_three_shapes(
    specs: str, batch: str, axes: str, shapes: list[object]
) -> None:
    inputs = [parse_spec(spec) for spec in specs.split()]
    found = ranges(inputs, parse_batch(batch), {name: AXES[name] for name in axes})
    assert list(found.values()) == shapes


@pytest.mark.parametrize(
    ("spec", "axes", "says", "hint"),
    [
        ("ids:int64[N,T]", {}, "input 'ids': axis 1, 'T'", "give it one: `axes` T=MIN,OPT,MAX"),
        ("x:float32[N,T,4]", {"W": BATCH}, "no input has a dynamic axis 'W'", "dynamic axes: T"),
        ("x:float32[N,4]", {"N": BATCH}, "`axes`: N is the batch", "write it as `batch` 1,8,32"),
        ("x:float32[4,3]", {}, "axis 0 of input 'x' is fixed at 4", "`batch` 4"),
        ("p:float32[P,3]", {"P": AXES["P"]}, "`batch` 1,8,32: no input has a batch", "leave"),
    ],
)
def test_sizes_that_fit_no_input_are_refused(
    spec: str, axes: dict[str, AxisRange], says: str, hint: str
) -> None:
    with pytest.raises(BadInput, match=says) as caught:
        ranges([parse_spec(spec)], BATCH, axes)
    assert hint in str(caught.value.hint)


# memory


def test_activations_are_two_of_the_largest_tensor() -> None:
    shapes = [(-1, 10), (-1, 3, -1), (7,), ()]
    assert activation_bytes(shapes, batch=8, others=50) == 2 * 4 * (8 * 3 * 50)


def test_external_weights_count(tmp_path: Path) -> None:
    path, data = tmp_path / "m.onnx", tmp_path / "w.bin"
    onnx.save_model(linear(), path, save_as_external_data=True, size_threshold=0, location="w.bin")
    assert weight_bytes(path) == path.stat().st_size + data.stat().st_size


def test_the_workspace_gives_way_before_a_build_is_refused() -> None:
    need = BuildMemory(weights=100 << 20, workspace=200 << 20, activations=50 << 20)
    assert workspace_that_fits(need, need.total, "m.onnx") == 200 << 20
    assert workspace_that_fits(need, None, "m.onnx") == 200 << 20
    assert workspace_that_fits(need, 250 << 20, "m.onnx") == 100 << 20
    assert workspace_that_fits(need, 214 << 20, "m.onnx") == 64 << 20
    with pytest.raises(Unsupported, match=r"m\.onnx: .* 100 MiB .* 50 MiB .* 213 MiB are free"):
        workspace_that_fits(need, 213 << 20, "m.onnx")
