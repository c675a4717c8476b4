"""Malicious data, and paths that are not files, given to the commands that open them.

Each is refused with exit 2, one `error:` line that names it, and nothing of it run or left behind.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.cli.command import Run
from tests.support.cli.damage import Bomb, damaged
from tests.support.cli.refusals import Maker, refused
from tests.support.onnx_zoo import mnist_like, save

# Data


def archive(folder: Path, content: bytes, name: str = "image.npy") -> Path:
    path = folder / "data.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr(name, content)
    return path


def npy(shape: tuple[int, ...], data: bytes = b"", dtype: str = "<f4") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    padded = text.ljust(118 - 1) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded.encode() + data


def objects(folder: Path, marker: Path) -> Path:
    path = folder / "data.npz"
    np.savez(path, image=np.array([Bomb(marker)], dtype=object))
    return path


def bomb(folder: Path) -> Path:
    """An archive of some MB that says that it unpacks to 4 GB of zeros, 25 times over."""
    path = folder / "data.npz"
    header = npy((1 << 30,))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for number in range(25):
            with target.open(f"a{number}.npy", "w", force_zip64=True) as member:
                member.write(header)
                member.write(bytes(1 << 20))
    return path


NPZ: dict[str, Maker] = {
    "an object array": lambda f: objects(f, f / "ran"),
    "a header of 10^12 values": lambda f: archive(f, npy((10**12,), bytes(72))),
    "sizes that overflow": lambda f: archive(f, npy((1 << 62, 8), bytes(72))),
    "a negative size": lambda f: archive(f, npy((-1,), bytes(72))),
    "an archive that unpacks without end": bomb,
    "no arrays": lambda f: archive(f, b"hello", "readme.txt"),
    "a truncated archive": lambda f: damaged(
        "half", f, archive(f, npy((2,), bytes(8)).ljust(4000, b"x"))
    ),
}


@pytest.mark.parametrize("case", NPZ)
def test_a_hostile_npz_is_exit_2(run: Run, model: Path, tmp_path: Path, case: str) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    path = NPZ[case](folder)
    out = tmp_path / "out.onnx"
    refused(run, "quantize", model, "--to", "int8", "--calib", path, "-o", out, naming=path.name)
    assert not (folder / "ran").exists()
    assert not out.exists()


def grey(folder: Path, name: str, side: int = 28, level: int = 90) -> None:
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(len(name)).integers(0, level + 1, (side, side), dtype=np.uint8)
    image.fromarray(noise).save(folder / name)


def images(folder: Path, count: int = 9, **more: int) -> Path:
    for number in range(count):
        grey(folder, f"{number}{'x' * number}.png", **more)
    return folder


def with_file(folder: Path, name: str, content: bytes) -> Path:
    images(folder)
    (folder / name).write_bytes(content)
    return folder


def odd_size(folder: Path) -> Path:
    images(folder)
    grey(folder, "zz-odd.png", side=30)
    return folder


def declared(folder: Path, side: int) -> Path:
    """A PNG whose header says `side` x `side`, and little else."""
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"\x78\x9c\x03\x00")
    return with_file(folder, "zz-huge.png", content)


FOLDERS: dict[str, tuple[Maker, str]] = {
    "empty": (lambda f: f, "given"),
    "all zeros": (lambda f: images(f, level=0), "same"),
    "a web page as image": (lambda f: with_file(f, "zz.jpg", b"<html>404</html>"), "zz.jpg"),
    "a program as image": (lambda f: with_file(f, "zz.png", b"\x7fELF" + bytes(99)), "zz.png"),
    "a truncated image": (
        lambda f: with_file(f, "zz.png", b"\x89PNG\r\n\x1a\n" + bytes(20)),
        "zz.png",
    ),
    "an image of another size": (odd_size, "zz-odd.png"),
    "65535 x 65535 pixels": (lambda f: declared(f, 65535), "zz-huge.png"),
    "13000 x 13000 pixels": (lambda f: declared(f, 13000), "zz-huge.png"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_bad_calibration_folder_is_exit_2(run: Run, tmp_path: Path, case: str) -> None:
    pytest.importorskip("PIL")
    folder = tmp_path / "given"
    folder.mkdir()
    make, naming = FOLDERS[case]
    make(folder)
    model, out = save(bytes_model(), tmp_path / "bytes.onnx"), tmp_path / "out.onnx"
    refused(run, "quantize", model, "--to", "int8", "--calib", folder, "-o", out, naming=naming)
    assert not out.exists()


def bytes_model() -> onnx.ModelProto:
    """`mnist_like` taking uint8 images, channels last."""
    model = mnist_like()
    image = model.graph.input[0]
    image.name = "pixels"
    image.type.tensor_type.elem_type = TensorProto.UINT8
    sizes = image.type.tensor_type.shape.dim
    sizes[1].dim_value, sizes[2].dim_value, sizes[3].dim_value = 28, 28, 1
    cast = helper.make_node("Cast", ["pixels"], ["floats"], name="cast", to=TensorProto.FLOAT)
    turn = helper.make_node("Transpose", ["floats"], ["image"], name="turn", perm=[0, 3, 1, 2])
    model.graph.node.insert(0, turn)
    model.graph.node.insert(0, cast)
    return model


def test_a_good_folder_of_images_calibrates(run: Run, tmp_path: Path) -> None:
    """The refusals above are not refusals of all folders."""
    pytest.importorskip("PIL")
    folder = tmp_path / "given"
    folder.mkdir()
    images(folder, level=255)
    model, out = save(bytes_model(), tmp_path / "bytes.onnx"), tmp_path / "out.onnx"
    ran = run("quantize", model, "--to", "int8", "--calib", folder, "-o", out)
    assert ran.code == 0, ran.err
    assert "samples: a few hundred" in ran.out


def test_data_with_nan_name_the_sample(run: Run, model: Path, tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((20, 1, 28, 28), dtype=np.float32)
    images[7, 0, 3, 3] = np.nan
    path = tmp_path / "nan.npz"
    np.savez(path, image=images)
    err = refused(
        *(run, "quantize", model, "--to", "int8", "--calib", path, "-o", tmp_path / "o.onnx"),
        naming=path.name,
    )
    assert "sample 7" in err
