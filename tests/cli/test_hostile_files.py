"""Malicious model files, given to the commands that open them.

Each is refused with exit 2, one `error:` line that names it, and nothing of it run or left behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.cli.command import Run
from tests.support.cli.refusals import Maker, refused
from tests.support.onnx_zoo import linear, save


def external(folder: Path, location: str, **more: object) -> Path:
    """`linear` with its weights in another file, said to be at `location`."""
    model = linear()
    tensor = model.graph.initializer[0]
    size = len(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": 0, "length": size, **more}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def weights_file(folder: Path, size: int = 48) -> str:
    (folder / "w.bin").write_bytes(bytes(size))
    return "w.bin"


def linked(folder: Path, link: Callable[[Path, Path], None]) -> Path:
    secret = folder.parent / f"{folder.name}-secret.bin"
    secret.write_bytes(bytes(48))
    link(secret, folder / "w.bin")
    return external(folder, "w.bin")


def dims(folder: Path, *sizes: int) -> Path:
    path = external(folder, weights_file(folder))
    model = onnx.load(path, load_external_data=False)
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend(sizes)
    path.write_bytes(model.SerializeToString())
    return path


def changed(folder: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    model = linear()
    change(model)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "Gemmm"


def domain(model: onnx.ModelProto) -> None:
    model.graph.node[0].domain = "their.own"
    model.opset_import.append(helper.make_opsetid("their.own", 1))


def new_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 999


def new_ir(model: onnx.ModelProto) -> None:
    model.ir_version = 99


ONNX: dict[str, Maker] = {
    "weights in the folder above": lambda f: external(f, "../secret.bin"),
    "weights through a symlink": lambda f: linked(f, lambda a, b: b.symlink_to(a)),
    "weights through a hard link": lambda f: linked(f, lambda a, b: os.link(a, b)),
    "weights in a FIFO": lambda f: (os.mkfifo(f / "w.bin"), external(f, "w.bin"))[1],
    "length of 10^15": lambda f: external(f, weights_file(f), length=10**15),
    "dims of 2^62": lambda f: dims(f, 1 << 62, 8),
    "dims of -4": lambda f: dims(f, -4),
    "an unknown operator": lambda f: changed(f, operator),
    "an unknown domain": lambda f: changed(f, domain),
    "opset 999": lambda f: changed(f, new_opset),
    "IR version 99": lambda f: changed(f, new_ir),
}
ONNX_COMMANDS = {
    "inspect": ("inspect", "FILE"),
    "quantize": ("quantize", "FILE", "--to", "int8", "--calib", "DATA", "-o", "OUT"),
    "build": ("build", "FILE", "--profile", "cpu", "-o", "OUT"),
    "compare": ("compare", "FILE", "GOOD"),
    "predict": ("predict", "FILE", "DATA", "-o", "OUT"),
}


@pytest.mark.parametrize("command", ONNX_COMMANDS)
@pytest.mark.parametrize("case", ONNX)
def test_a_hostile_onnx_file_is_exit_2(run: Run, tmp_path: Path, case: str, command: str) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    path = ONNX[case](folder)
    data = tmp_path / "x.npz"
    np.savez(data, x=np.random.default_rng(0).random((40, 4), dtype=np.float32))
    places = {
        "FILE": path,
        "DATA": data,
        "GOOD": save(linear(), tmp_path / "good.onnx"),
        "OUT": tmp_path / "out",
    }
    before = sorted(tmp_path.iterdir())
    arguments = [places.get(word, word) for word in ONNX_COMMANDS[command]]
    refused(run, *arguments, naming=path.name)
    assert sorted(tmp_path.iterdir()) == before
