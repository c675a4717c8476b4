"""Arrays as the samples of a model, their batches, and random feeds."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.engines.data.examples import Example
from deploykit.engines.data.samples import Samples, random_feeds, read_npz, read_samples, write_npz
from tests.support.runtimes.data_files import B, X, rows

FIXED, CHW = TensorSpec("x", "float32", (1, 3)), parse_spec("x:float32[N,3,8,9]")
ANY, HWC = parse_spec("x:float32[N,3,H,W]"), parse_spec("x:uint8[N,8,9,3]")


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    return tmp_path / "data.npz"


def test_only_array_serves_the_only_input_whatever_its_name(npz: Path) -> None:
    write_npz(npz, {"arr_0": rows(2), "labels": np.array([1, 0])})
    samples = read_samples(npz, (X,))
    np.testing.assert_array_equal(samples.inputs["x"], rows(2))
    assert samples.labels is not None
    assert samples.labels.tolist() == [1, 0]


def test_arrays_that_are_not_inputs_are_ignored(npz: Path) -> None:
    write_npz(npz, {"x": rows(2), "other": rows(5)})
    assert set(read_samples(npz, (X,)).inputs) == {"x"}


@pytest.mark.parametrize(
    ("inputs", "arrays", "message", "hint"),
    [
        (
            [X, B],
            {"x": rows(2), "c": rows(2)},
            r"data\.npz: no array 'b'",
            "x:float32[N,3], b:int6",
        ),
        ([X], {"x": rows(2)[:, :2]}, r"'x' is float32\[N,3\], got float32\[2,2\]", ""),
        ([X], {"x": rows(2).astype("f8")}, r"got float64\[2,3\]", "x.astype('float32')"),
        ([X], {"x": np.float32(1)}, r"got float32\[\]", ""),
        ([X], {"x": rows(1)[0]}, r"one sample without its batch axis, which x\[None\] adds", ""),
        ([FIXED], {"x": rows(2)[:, :2]}, r"'x' is float32\[N,3\], got float32\[2,2\]", ""),
        ([X, B], {"x": rows(3), "b": np.zeros(2, np.int64)}, r"have \[2, 3\] samples", ""),
        ([X], {"x": rows(0)}, "samples", ""),
        ([X], {"x": rows(3), "labels": np.zeros(4)}, "3 samples but labels of shape", ""),
        ([X], {"x": rows(3), "labels": np.zeros(())}, "3 samples but labels of shape", ""),
        ([X], {"x": rows(3), "labels": np.zeros((1, 3))}, "3 samples but labels of shape", ""),
        ([CHW], {"x": np.zeros((2, 8, 9, 3), "f4")}, "looks like NHWC", "(0, 3, 1, 2)"),
        ([ANY], {"x": np.zeros((2, 8, 9, 3), "u1")}, "looks like NHWC", "(0, 3, 1, 2)"),
        ([HWC], {"x": np.zeros((2, 3, 8, 9), "u1")}, "looks like NCHW", "(0, 2, 3, 1)"),
        ([CHW], {"x": np.zeros((2, 3, 8, 9), "u1")}, "got uint8", "`preprocess`"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_with_what_they_look_like(
    npz: Path, inputs: list[TensorSpec], arrays: dict[str, np.ndarray], message: str, hint: str
) -> None:
    write_npz(npz, arrays)
    with pytest.raises(BadInput, match=message) as caught:
        read_samples(npz, tuple(inputs))
    assert hint in str(caught.value.hint)


def test_model_of_a_fixed_batch_takes_any_number_of_samples(npz: Path) -> None:
    write_npz(npz, {"x": rows(5)})
    samples = read_samples(npz, (FIXED,))
    assert (len(samples), samples.labels) == (5, None)
    with pytest.raises(BadInput, match="5 samples do not fill the model's fixed batch of 8"):
        samples.batching(4, [TensorSpec("x", "float32", (8, 3))])


def test_arrays_of_other_byte_order_are_converted(npz: Path) -> None:
    write_npz(npz, {"x": rows(2).astype(">f4")})
    array = read_samples(npz, (X,)).inputs["x"]
    assert array.dtype.isnative
    np.testing.assert_array_equal(array, rows(2))


@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (9, [7])])
def test_batches_cover_all_samples_in_order(size: int, sizes: list[int]) -> None:
    samples = Samples({"x": rows(7), "b": np.arange(7)}, None, "data.npz")
    batches = list(samples.batches(size))
    assert [len(batch["x"]) for batch in batches] == sizes
    np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches]), rows(7))
    np.testing.assert_array_equal(np.concatenate([batch["b"] for batch in batches]), np.arange(7))


def test_the_first_samples_keep_their_labels() -> None:
    samples = Samples({"x": rows(7)}, np.arange(7), "d").first(3)
    assert len(samples) == 3
    assert samples.labels is not None
    assert samples.labels.tolist() == [0, 1, 2]
    assert Samples({"x": rows(7)}, None, "d").first(3).labels is None


@pytest.mark.parametrize(
    ("batches", "expected"), [(("N", "N"), (4, 7)), (("N", 3), (3, 6)), ((1, 1), (1, 7))], ids=str
)
def test_a_fixed_batch_decides_the_batch_size(
    batches: tuple[int | str, ...], expected: tuple[int, int]
) -> None:
    specs = [TensorSpec("x", "float32", (batch, 3)) for batch in batches]
    assert Samples({"x": rows(7)}, None, "d").batching(4, specs) == expected


def test_random_uint8_values_cover_the_pixel_range() -> None:
    pixels = random_feeds((parse_spec("i:uint8[N,8,8,3]"),), {"N": 50})["i"]
    assert (pixels.min(), pixels.max()) == (0, 255)


SPECS = tuple(
    parse_spec(text)
    for text in ("f:float32[N,T]", "h:float16[N]", "i:int64[N,2]", "q:int8[N]", "m:bool[N]")
)


def test_random_feeds_fit_their_specs() -> None:
    feeds = random_feeds(SPECS, {"N": 5, "T": 3})
    assert {name: (array.dtype.name, array.shape) for name, array in feeds.items()} == {
        "f": ("float32", (5, 3)),
        "h": ("float16", (5,)),
        "i": ("int64", (5, 2)),
        "q": ("int8", (5,)),
        "m": ("bool", (5,)),
    }


@pytest.mark.parametrize(
    ("specs", "name"),
    [
        ("x:float32[N,T,4] lengths:int64[N]", "lengths"),
        ("x:float32[T,N,4] src_lens:int32[N]", "src_lens"),
        ("x:int64[N,T] y:int64[N,U] x_len:int64[N]", "x_len"),
    ],
)
def test_random_lengths_are_those_that_rows_can_have(specs: str, name: str) -> None:
    parsed = tuple(map(parse_spec, specs.split()))
    found = random_feeds(parsed, {"N": 50, "T": 5, "U": 7})[name]
    assert set(found.tolist()) == {1, 2, 3, 4, 5}
    assert found[-1] == 5
    assert set(random_feeds((TensorSpec(name, "int64", ("N",)),), {"N": 90})[name]) == {*range(10)}


def test_random_feeds_depend_on_the_seed_alone() -> None:
    first, again, other = (random_feeds(SPECS, {"N": 50}, seed) for seed in (1, 1, 2))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name])


@pytest.mark.parametrize("name", ["keep", "src_key_padding_mask"])
def test_random_booleans_hide_no_whole_row(name: str) -> None:
    specs = (parse_spec(f"{name}:bool[N,T]"),)
    for length in (2, 3, 33):
        values = random_feeds(specs, {"N": 50, "T": length})[name]
        assert values.any(1).all()
        assert not values.all(1).any()
    alone = random_feeds(specs, {"N": 5, "T": 1})[name]
    assert (alone == (name == "keep")).all()


@pytest.mark.parametrize("width", [1, 2])
def test_random_flags_differ_from_row_to_row(width: int) -> None:
    flags = random_feeds((parse_spec(f"flags:bool[N,{width}]"),), {"N": 50})["flags"]
    assert len(np.unique(flags, axis=0)) == 2**width


def test_random_integers_are_valid_ids() -> None:
    ids = random_feeds((parse_spec("i:int64[N]"),), {"N": 1000})["i"]
    assert ids.min() == 0
    assert ids.max() == 9


def test_random_masks_are_zeros_and_ones_and_hide_no_whole_row() -> None:
    specs = (parse_spec("attention_mask:int64[N,T]"), parse_spec("Mask:bool[N,T]"))
    feeds = random_feeds(specs, {"N": 64, "T": 3})
    assert set(np.unique(feeds["attention_mask"])) == {0, 1}
    for mask in feeds.values():
        assert mask.any(axis=1).all()
        assert not mask.all()


def test_an_example_is_permuted_and_repeated_along_its_batch_alone() -> None:
    """The layers of a state, [2,N], stay in their order."""
    specs = [parse_spec("state:int64[2,N]"), parse_spec("x:float32[N,3]")]
    example = Example({"state": np.array([[1, 2, 3], [10, 20, 30]]), "x": rows(3)})
    for seed in range(9):
        found = example.feeds(specs, {"N": 6}, seed)["state"]
        assert sorted(found[0]) == [1, 1, 2, 2, 3, 3]
        assert (found[1] == 10 * found[0]).all()


def torch_archive() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("m/data.pkl", b"")
    return content.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"1,2,3\n4,5,6\n"),
        ("a.png", b"\x89PNG\r\n\x1a\n" + bytes(99)),
        ("m.onnx", b"\x08\x08\x12\x07pytorch"),
        ("m.npz", torch_archive()),
    ],
)
def test_another_file_is_refused_with_what_data_is(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        BadInput, match=f"{name}: is not a readable .npz file|no array 'x'"
    ) as caught:
        read_samples(tmp_path / name, (X,))
    assert caught.value.hint


def test_data_that_memory_has_no_room_for_are_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 2), np.float32))

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 4.0 GiB for an array with shape (4,)")

    monkeypatch.setattr("numpy.lib.format.read_array", fail)
    with pytest.raises(Unsupported, match=r"d\.npz: does not fit into memory: 4\.0 GiB") as caught:
        read_npz(tmp_path / "d.npz")
    assert caught.value.exit_code == 3
