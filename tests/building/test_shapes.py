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
    ["", "1,8", "1,2,3,4", "a", "1,,3", "-1,2,3", "1.5", "8,4,2", "1,9,8", "0,0,0", "9" * 11],
)
def test_an_invalid_range_is_bad_input_naming_the_option(text: str) -> None:
    with pytest.raises(BadInput, match="`batch`"):
        parse_batch(text)


def test_sizes_beyond_32_bits_are_bad_input() -> None:
    with pytest.raises(BadInput, match="at most 2147483647"):
        parse_batch("1,1,2147483648")


def test_an_axis_is_read_with_its_name() -> None:
    assert parse_axis("T=16,128,512") == ("T", AxisRange(16, 128, 512))


@pytest.mark.parametrize("text", ["16,128,512", "=1,2,3", "T", "T=", "T=5,4,3"])
def test_an_axis_without_name_or_range_is_bad_input(text: str) -> None:
    with pytest.raises(BadInput, match="`axes`"):
        parse_axis(text)


def test_the_batch_and_named_axes_become_three_shapes() -> None:
    inputs = [parse_spec("ids:int64[N,T]"), parse_spec("image:float32[N,3,H,224]")]
    axes = {"T": AxisRange(1, 16, 64), "H": AxisRange(224, 224, 448)}
    assert ranges(inputs, BATCH, axes) == {
        "ids": ((1, 1), (8, 16), (32, 64)),
        "image": ((1, 3, 224, 224), (8, 3, 224, 224), (32, 3, 448, 224)),
    }


def test_axis_0_is_the_batch_whatever_its_name() -> None:
    inputs = [parse_spec("x:float32[batch,4]"), parse_spec("mask:bool[4,batch]")]
    found = ranges(inputs, BATCH, {})
    assert found["x"] == ((1, 4), (8, 4), (32, 4))
    assert found["mask"] == ((4, 1), (4, 8), (4, 32))


def test_axis_0_takes_a_range_of_its_own_if_it_is_given_one() -> None:
    inputs = [parse_spec("points:float32[P,3]"), parse_spec("x:float32[N,4]")]
    found = ranges(inputs, BATCH, {"P": AxisRange(1, 500, 1000)})
    assert found["points"][2] == (1000, 3)
    assert found["x"][2] == (32, 4)


def test_a_scalar_input_has_empty_shapes() -> None:
    assert ranges([parse_spec("s:float32[]")], AxisRange(1, 1, 1), {}) == {"s": ((), (), ())}


def test_an_axis_without_a_range_names_input_axis_and_option() -> None:
    with pytest.raises(BadInput, match="input 'ids': axis 1, 'T'") as caught:
        ranges([parse_spec("ids:int64[N,T]")], BATCH, {})
    assert caught.value.hint == "give it one: `axes` T=MIN,OPT,MAX"


def test_an_unknown_axis_is_bad_input_listing_those_there_are() -> None:
    with pytest.raises(BadInput, match="`axes`: no input has a dynamic axis 'W'") as caught:
        ranges([parse_spec("x:float32[N,T,4]")], BATCH, {"W": BATCH})
    assert caught.value.hint == "dynamic axes: T"


def test_the_batch_is_not_an_axis_option() -> None:
    with pytest.raises(BadInput, match="`axes`: N is the batch") as caught:
        ranges([parse_spec("x:float32[N,4]")], BATCH, {"N": AxisRange(1, 2, 3)})
    assert caught.value.hint == "write it as `batch` 1,2,3"


def test_a_fixed_batch_cannot_be_given_a_range() -> None:
    with pytest.raises(BadInput, match="axis 0 of input 'x' is fixed at 4") as caught:
        ranges([parse_spec("x:float32[4,3]")], BATCH, {})
    assert "`batch` 4" in (caught.value.hint or "")


@pytest.mark.parametrize("size", [1, 4], ids=["nothing asked", "the same size"])
def test_a_fixed_batch_takes_its_own_size_or_none(size: int) -> None:
    found = ranges([parse_spec("x:float32[4,3]")], AxisRange(size, size, size), {})
    assert found == {"x": ((4, 3), (4, 3), (4, 3))}


def test_a_batch_that_sets_nothing_is_bad_input() -> None:
    points = {"P": AxisRange(1, 500, 1000)}
    with pytest.raises(BadInput, match="`batch` 1,8,32: no input has a batch"):
        ranges([parse_spec("points:float32[P,3]")], BATCH, points)
    assert ranges([parse_spec("points:float32[P,3]")], AxisRange(1, 1, 1), points)


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
