"""`predict` goes on where a run was stopped, in bounded memory, or begins anew and says why."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.core.errors import BadInput, Unsupported
from deploykit.evaluation import predict as partial
from tests.support import onnx_zoo
from tests.support.fake_engine import FakeEngine

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

COUNT, BATCH = 300, 8
X = np.random.default_rng(0).standard_normal((COUNT, 4)).astype(np.float32)


class StoppedError(Exception):
    """What ends a run from outside."""


@pytest.fixture(name="model")
def model_fixture(tmp_path: Path) -> Path:
    return onnx_zoo.save(onnx_zoo.linear(), tmp_path / "m.onnx")


@pytest.fixture(name="data")
def data_fixture(tmp_path: Path) -> Path:
    np.savez(tmp_path / "d.npz", x=X)
    return tmp_path / "d.npz"


def stop_after(samples: int) -> Callable[[str, float], None]:
    def progress(text: str, _share: float) -> None:
        if "/" in text and int(text.partition("/")[0]) >= samples:
            raise StoppedError

    return progress


def run(
    model: Path, data: Path, stop: int | None = None, **options: Any
) -> tuple[dk.Predicted | None, list[str]]:
    """The result, None where it was stopped, and the notes."""
    notes: list[str] = []
    given = {"batch": BATCH, "device": "cpu", "on_note": notes.append} | options
    out = given.pop("out", data.parent / "out.npz")
    try:
        found = dk.predict(model, data, out, on_progress=stop_after(stop or 10**9), **given)
    except StoppedError:
        return None, notes
    return found, notes


def parts(data: Path) -> Path:
    return data.parent / "out.npz.parts"


def test_a_run_that_was_stopped_goes_on_and_gives_the_same_bytes(model: Path, data: Path) -> None:
    run(model, data, out=data.parent / "whole.npz")
    assert run(model, data, stop=100)[0] is None
    assert run(model, data, stop=200)[0] is None
    assert not (data.parent / "out.npz").exists()
    found, notes = run(model, data)
    assert found is not None
    assert (found.resumed, found.samples) == (200, COUNT)
    assert notes == [f"{found.path}: goes on after the 200 samples that an earlier run has done"]
    assert found.path.read_bytes() == (data.parent / "whole.npz").read_bytes()
    assert not parts(data).exists()


KILLED = """
import os, signal, sys
import deploykit as dk
from deploykit.evaluation import predict as partial

partial._EVERY_S = 0.0
def progress(text, share):
    if text.startswith("152/"):
        open(sys.argv[3] + ".parts/0.bin", "ab").write(b"half a row")
        os.kill(os.getpid(), signal.SIGKILL)
dk.predict(sys.argv[1], sys.argv[2], sys.argv[3], batch=8, device="cpu", on_progress=progress)
"""


def test_a_killed_run_goes_on_without_what_was_half_written(model: Path, data: Path) -> None:
    out = data.parent / "out.npz"
    words = [sys.executable, "-c", KILLED, str(model), str(data), str(out)]
    assert subprocess.run(words, timeout=120).returncode == -9
    found, _ = run(model, data)
    assert found is not None
    assert found.resumed == 152
    run(model, data, out=data.parent / "whole.npz")
    assert out.read_bytes() == (data.parent / "whole.npz").read_bytes()


def test_a_run_killed_before_its_file_was_written_runs_nothing_again(
    model: Path, data: Path
) -> None:
    run(model, data, stop=COUNT)
    found, _ = run(model, data)
    assert found is not None
    assert found.resumed == COUNT
    np.testing.assert_allclose(np.load(found.path)["y"], expected(model, X), rtol=1e-5)


def expected(model: Path, rows: np.ndarray) -> np.ndarray:
    with dk.load(model, "cpu") as engine:
        return engine({"x": rows})["y"]


def another_engine(model: Path, _data: Path) -> dict[str, Any]:
    graph = onnx.load(model)
    graph.producer_name = "another"
    onnx.save(graph, model)
    return {}


def other_beginning(_model: Path, data: Path) -> dict[str, Any]:
    np.savez(data, x=np.concatenate((X[:50], X[51:], X[:1])))
    return {}


def fewer(_model: Path, data: Path) -> dict[str, Any]:
    np.savez(data, x=X[:40])
    return {}


def damaged(_model: Path, data: Path) -> dict[str, Any]:
    with (parts(data) / "0.bin").open("r+b") as file:
        file.truncate(10)
    return {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (another_engine, "another engine"),
        (lambda *_: {"batch": 16}, "another batch"),
        (other_beginning, "the samples so far have changed"),
        (fewer, "the samples so far have changed"),
        (damaged, "its files are damaged"),
        (lambda *_: {"force": True}, None),
    ],
)
def test_what_changes_the_outputs_begins_anew_and_says_why(
    model: Path, data: Path, change: Callable[[Path, Path], dict[str, Any]], why: str | None
) -> None:
    run(model, data, stop=100)
    found, notes = run(model, data, **change(model, data))
    assert found is not None
    assert found.resumed == 0
    assert notes == ([] if why is None else [f"{parts(data)}: begun anew: {why}"])
    np.testing.assert_allclose(
        np.load(found.path)["y"], expected(model, np.load(data)["x"]), rtol=1e-5
    )


def test_more_samples_at_the_end_go_on(model: Path, data: Path) -> None:
    run(model, data, stop=104)
    np.savez(data, x=np.concatenate((X, X)))
    found, _ = run(model, data)
    assert found is not None
    assert (found.resumed, found.samples) == (104, 2 * COUNT)


def test_two_at_once_are_refused_and_the_first_goes_on(model: Path, data: Path) -> None:
    out = data.parent / "out.npz"
    axes = partial.SampleAxes(FakeEngine(), {"x": 0})
    refused = pytest.raises(BadInput, match="another process is writ")
    with partial.PartialOutputs(out, {}, axes), refused:
        run(model, data)
    assert run(model, data)[0] is not None


def test_a_run_killed_at_any_change_of_its_files_is_no_obstacle(tmp_path: Path) -> None:
    out, axes = tmp_path / "out.npz", partial.SampleAxes(FakeEngine(), {"x": 0})
    changes, status = 0, -1
    while status:
        changes += 1
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                die_at(changes, ".parts")
                for _ in range(2):  # what the first leaves is removed by the second
                    with partial.PartialOutputs(out, {}, axes, restart=True) as made:
                        made.append({"y": X[:8]}, 8, "")
                os._exit(0)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        with partial.PartialOutputs(out, {}, axes) as found:  # not refused
            found.finish()
        assert not out.with_name("out.npz.parts").exists()
    assert changes > 10


def die_at(count: int, where: str) -> None:
    """Kill this process at its change number `count` of files below `where`."""
    left = count

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in {"open", "os.remove", "os.rename", "os.mkdir"} and where in str(arguments[0]):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def test_a_folder_of_somebody_else_is_refused_and_stays(model: Path, data: Path) -> None:
    parts(data).mkdir()
    (parts(data) / "0.bin").write_text("a user's")
    with pytest.raises(BadInput, match="is not what deploykit wrote there"):
        run(model, data, force=True)
    assert (parts(data) / "0.bin").read_text() == "a user's"


FULL = """
import resource, signal, sys

sys.dont_write_bytecode = True  # the limit below would cut the files of modules
import deploykit as dk

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    dk.predict(sys.argv[1], sys.argv[2], sys.argv[3], batch=8, device="cpu")
except dk.BadInput as error:
    print(error.message)
"""


def test_a_disk_without_room_is_one_line_and_the_run_goes_on(model: Path, data: Path) -> None:
    out = data.parent / "out.npz"
    words = [sys.executable, "-c", FULL, str(model), str(data), str(out)]
    ended = subprocess.run(words, timeout=120, capture_output=True, text=True)
    assert ended.stdout.strip() == f"{out}: cannot be written: File too large"
    assert not out.exists()
    found, _ = run(model, data)
    assert found is not None
    np.testing.assert_allclose(np.load(out)["y"], expected(model, X), rtol=1e-5)


def peak_bytes(model: Path, data: Path) -> int:
    tracemalloc.start()
    try:
        run(model, data, batch=4096)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_memory_does_not_grow_with_the_samples(tmp_path: Path, save: Callable[..., None]) -> None:
    """The inputs of the larger run are 64 MB, as are its outputs; numpy writes 16 MB at a time."""
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    graph = onnx_zoo.make(nodes, {"x": ("N", 80)}, {"y": ("N", 80)}, {})
    model = onnx_zoo.save(graph, tmp_path / "m.onnx")
    found = []
    for count in (20_000, 200_000):
        save(tmp_path / "d.npz", x=np.zeros((count, 80), np.float32), labels=np.zeros(count))
        found.append(peak_bytes(model, tmp_path / "d.npz"))
    assert found[1] - found[0] < 20e6
    assert np.load(tmp_path / "out.npz")["y"].shape == (200_000, 80)


def with_output(node: onnx.NodeProto, shape: tuple[int | str, ...], kind: int) -> onnx.ModelProto:
    outputs = [helper.make_tensor_value_info("y", kind, list(shape))]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])]
    graph = helper.make_graph([node], "g", inputs, outputs)
    opsets = [helper.make_opsetid("", onnx_zoo.OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=onnx_zoo.IR_VERSION)


@pytest.mark.parametrize(
    ("node", "shape", "kind", "says"),
    [
        (
            helper.make_node("NonZero", ["x"], ["y"]),
            (2, "K"),
            TensorProto.INT64,
            r"^output 'y' is int64\[\d+\] for each of samples 8 to 15, and .* depends on the data",
        ),
        (
            helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0),
            (),
            TensorProto.FLOAT,
            "^output 'y' has no axis of samples",
        ),
    ],
)
def test_outputs_that_do_not_join_are_refused_in_one_line(
    data: Path, node: onnx.NodeProto, shape: tuple[int | str, ...], kind: int, says: str
) -> None:
    np.savez(data, x=np.concatenate((X[:8], np.zeros((8, 4), np.float32))))
    model = onnx_zoo.save(with_output(node, shape, kind), data.parent / "odd.onnx")
    with pytest.raises(Unsupported, match=says):
        run(model, data)
    assert not (data.parent / "out.npz").exists()


def test_an_output_of_any_number_of_rows_is_joined(data: Path) -> None:
    """As the boxes of a detector: [K,2] of each batch."""
    find = helper.make_node("NonZero", ["x"], ["places"])
    turn = helper.make_node("Transpose", ["places"], ["y"], perm=[1, 0])
    model = with_output(find, ("K", 2), TensorProto.INT64)
    model.graph.node.append(turn)
    found, _ = run(onnx_zoo.save(model, data.parent / "odd.onnx"), data)
    assert found is not None
    assert np.load(found.path)["y"].shape == (np.count_nonzero(X), 2)


def test_nan_is_counted_and_an_accuracy_of_it_fails_with_the_outputs_written(
    model: Path, data: Path
) -> None:
    x = X.copy()
    x[[17, 200], 2] = np.nan
    np.savez(data, x=x)
    _, notes = run(model, data)
    assert notes == ["output 'y' is NaN in 2 of 300 rows, first in 17"]
    np.savez(data, x=x, labels=np.zeros(COUNT, np.int64))
    with pytest.raises(dk.GateFailed, match="NaN or infinity for 2 samples"):
        run(model, data)
    assert np.isnan(np.load(data.parent / "out.npz")["y"][17]).all()
    assert not parts(data).exists()


def test_a_corrupt_image_is_named_and_the_run_goes_on_without_it(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    folder = tmp_path / "images"
    folder.mkdir()
    pixels = np.random.default_rng(1).integers(0, 256, (30, 4, 6, 3), np.uint8)
    for number, each in enumerate(pixels):
        image.fromarray(each).save(folder / f"{number:02}.png")
    bad = folder / "17.png"
    content = bad.read_bytes()
    bad.write_bytes(content[: len(content) // 2])
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    model = with_output(node, ("N", 4, 6, 3), TensorProto.FLOAT)
    taken = model.graph.input[0]
    taken.CopyFrom(helper.make_tensor_value_info("x", TensorProto.UINT8, ["N", 4, 6, 3]))
    path = onnx_zoo.save(model, tmp_path / "m.onnx")
    with pytest.raises(BadInput, match=r"17\.png: is not a readable image"):
        run(path, folder, batch=4)
    bad.unlink()
    found, notes = run(path, folder, batch=4)
    assert found is not None
    assert (found.samples, found.resumed) == (29, 16)
    assert len(notes) == 1
    np.testing.assert_array_equal(np.load(found.path)["y"], np.delete(pixels, 17, axis=0))


def test_a_constant_without_axes_does_not_refuse_the_other_outputs(data: Path) -> None:
    """As the scale of the logits of CLIP."""
    model = with_output(helper.make_node("Relu", ["x"], ["y"]), ("N", 4), TensorProto.FLOAT)
    model.graph.node.append(helper.make_node("Constant", [], ["scale"], value_float=2.5))
    model.graph.output.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, []))
    found, _ = run(onnx_zoo.save(model, data.parent / "odd.onnx"), data)
    assert found is not None
    with np.load(found.path) as arrays:
        assert arrays["y"].shape == X.shape
        assert arrays["scale"].tolist() == [2.5] * len(X)
