"""`predict`: labels, resuming where a run was stopped, bounded memory, and names as answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import deploykit as dk
from deploykit.core.errors import BadInput, GateFailed, MissingExtra, Unsupported
from deploykit.core.extras import installed
from deploykit.core.tensors import TensorSpec
from deploykit.engines.data.samples import find_source
from deploykit.evaluation.golden import prove_batch
from deploykit.evaluation.predict import PartialOutputs, sample_axis
from tests.support import onnx_zoo, string_labels
from tests.support.fake_engine import FakeEngine
from tests.support.graphs.small import parse

COUNT, BATCH = 300, 8
X = np.random.default_rng(0).standard_normal((COUNT, 4)).astype(np.float32)
CLASSES = np.arange(COUNT) % 3


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


def run(model: Path, data: Path, stop: int | None = None, **options: Any) -> Any:
    """The result, None where it was stopped, and the notes."""
    notes: list[str] = []
    given = {"batch": BATCH, "device": "cpu", "on_note": notes.append} | options
    out = given.pop("out", data.parent / "out.npz")
    try:
        found = dk.predict(model, data, out, on_progress=stop_after(stop or 10**9), **given)
    except StoppedError:
        return None, notes
    return found, notes


def answers(model: Path, rows: np.ndarray) -> np.ndarray:
    with dk.load(model, "cpu") as engine:
        return engine({"x": rows})["y"]


def parts(data: Path) -> Path:
    return data.parent / "out.npz.parts"


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        (
            {"labels": np.array(["cat", "dog", "owl"] * 100)},
            "labels are <U3[300]; top-1",
        ),
        ({"label": CLASSES, "y": X}, "without 'label', 'y'"),
    ],
)
def test_labels_that_are_not_classes_leave_the_predictions_and_a_note(
    model: Path, data: Path, arrays: dict[str, np.ndarray], why: str
) -> None:
    np.savez(data, x=X, **arrays)
    found, _ = run(model, data)
    assert (found.accuracy, found.samples) == (None, COUNT)
    assert why in found.note
    assert ("named 'labels'" in found.note) is ("labels" not in arrays)
    assert found.path.exists()


def test_ray_that_is_missing_and_other_clusters_are_refused(model: Path, data: Path) -> None:
    with pytest.raises(BadInput, match="`on` 'slurm': is neither local nor ray"):
        run(model, data, on="slurm")
    if installed("ray"):
        pytest.skip("Ray is installed")
    with pytest.raises(MissingExtra, match="ray is not installed") as caught:
        run(model, data, on="ray")
    assert "[ray]" in caught.value.hint


def test_a_run_that_was_stopped_goes_on_and_gives_the_same_bytes(model: Path, data: Path) -> None:
    run(model, data, out=data.parent / "whole.npz")
    assert run(model, data, stop=100)[0] is None
    assert run(model, data, stop=200)[0] is None
    assert not (data.parent / "out.npz").exists()
    with (parts(data) / "0.bin").open("ab") as file:
        file.write(b"half a row")  # a killed run leaves this
    found, notes = run(model, data)
    assert (found.resumed, found.samples) == (200, COUNT)
    assert notes == [f"{found.path}: goes on after the 200 samples that an earlier run has done"]
    assert found.path.read_bytes() == (data.parent / "whole.npz").read_bytes()
    assert not parts(data).exists()
    found.path.unlink()
    run(model, data, stop=COUNT)  # before its file was written: nothing runs again, on Ray either
    found, _ = run(model, data, on="ray")
    assert found.resumed == COUNT
    np.testing.assert_allclose(np.load(found.path)["y"], answers(model, X), rtol=1e-5)


def another_engine(model: Path, _data: Path) -> None:
    graph = onnx.load(model)
    graph.producer_name = "another"
    onnx.save(graph, model)


def damaged(_model: Path, data: Path) -> None:
    with (parts(data) / "0.bin").open("r+b") as file:
        file.truncate(10)


def edited(_model: Path, data: Path) -> None:
    state = json.loads((parts(data) / "state.json").read_text())
    (parts(data) / "state.json").write_text(json.dumps({**state, "outputs": {"y": 5}}))


OTHERS = np.concatenate((X[:50], X[51:], X[:1]))


@pytest.mark.parametrize(
    ("change", "options", "why"),
    [
        (another_engine, {}, "engine"),
        (None, {"batch": 16}, "batch"),
        (lambda _, data: np.savez(data, x=OTHERS), {}, "samples"),
        (lambda _, data: np.savez(data, x=X[:40]), {}, "samples"),
        (damaged, {}, "its files"),
        (edited, {}, "its state"),
        (None, {"force": True}, None),
    ],
)
def test_what_changes_the_outputs_begins_anew_and_says_why(
    model: Path,
    data: Path,
    change: Callable[[Path, Path], object] | None,
    options: dict[str, Any],
    why: str | None,
) -> None:
    run(model, data, stop=100)
    if change:
        change(model, data)
    found, notes = run(model, data, **options)
    assert found.resumed == 0
    assert notes == ([] if why is None else [f"{parts(data)}: begun anew: {why} changed"])
    wanted = answers(model, np.load(data)["x"])
    np.testing.assert_allclose(np.load(found.path)["y"], wanted, rtol=1e-5)


def test_two_at_once_are_refused_and_the_first_goes_on(model: Path, data: Path) -> None:
    refused = pytest.raises(BadInput, match="another process is writ")
    with opened(data), refused:
        run(model, data)
    assert run(model, data)[0] is not None


def opened(data: Path, **options: Any) -> AbstractContextManager[PartialOutputs]:
    engine = FakeEngine()
    source = find_source(data, (TensorSpec("x", "float32", ("N", 4)),))
    return PartialOutputs(data.parent / "out.npz", {}, source, engine).opened(**options)


def test_a_run_killed_at_any_change_of_its_files_is_no_obstacle(data: Path) -> None:
    changes, status = 0, -1
    while status:
        changes += 1
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                die_at(changes, ".parts")
                for _ in range(2):  # what the first leaves is removed by the second
                    with opened(data, restart=True) as made:
                        made.append({"y": X[:8]}, 8)
                os._exit(0)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        with opened(data) as found:  # not refused
            found.finish()
        assert not parts(data).exists()
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


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_memory_does_not_grow_with_the_samples(tmp_path: Path, save: Callable[..., None]) -> None:
    """The inputs of the larger run are 64 MB, as are its outputs; numpy writes 16 MB at a time."""
    model = write("(float[N,80] x) => (float[N,80] y)", "y = Relu(x)", tmp_path)
    peaks = []
    for count in (20_000, 200_000):
        save(tmp_path / "d.npz", x=np.zeros((count, 80), np.float32), labels=np.zeros(count))
        tracemalloc.start()
        try:
            run(model, tmp_path / "d.npz", batch=4096)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 20e6
    assert np.load(tmp_path / "out.npz")["y"].shape == (200_000, 80)


def test_the_samples_lie_along_the_named_axis_of_an_output() -> None:
    inputs = (TensorSpec("x", "float32", ("batch", 4)),)
    shape = ("T", "batch", 8)
    engine: Any = SimpleNamespace(inputs=inputs, outputs=(TensorSpec("y", "float32", shape),))
    assert sample_axis(engine, {"x": 0}, "y", (2, 2, 8), 2) == 1  # T may be as long as the batch
    assert sample_axis(engine, {"x": 0}, "z", (3, 2, 8), 2) == 0  # nothing is known of it


def write(head: str, body: str, folder: Path) -> Path:
    return onnx_zoo.save(parse(head, body), folder / "odd.onnx")


@pytest.mark.parametrize(
    ("out", "body", "says"),
    [
        (
            *("int64[2,K] y", "y = NonZero(x)"),
            r"^output 'y' is int64\[\d+\] for each of samples 8 to 15, and .* depends on the data",
        ),
        (*("float y", "y = ReduceSum<keepdims = 0>(x)"), "^output 'y' has no axis of samples"),
    ],
)
def test_outputs_that_do_not_join_are_refused(data: Path, out: str, body: str, says: str) -> None:
    np.savez(data, x=np.concatenate((X[:8], np.zeros((8, 4), np.float32))))
    with pytest.raises(Unsupported, match=says):
        run(write(f"(float[N,4] x) => ({out})", body, data.parent), data)
    assert not (data.parent / "out.npz").exists()


def test_an_output_of_any_number_of_rows_or_of_no_axes_is_joined(data: Path) -> None:
    """As the boxes of a detector: [K,2] of each batch; and the scale of the logits of CLIP."""
    head = "(float[N,4] x) => (int64[K,2] y, float scale)"
    body = "p = NonZero(x) y = Transpose(p) scale = Constant<value_float = 2.5>()"
    found, _ = run(write(head, body, data.parent), data)
    with np.load(found.path) as arrays:
        assert arrays["y"].shape == (np.count_nonzero(X), 2)
        assert arrays["scale"].tolist() == [2.5] * COUNT


def test_nan_is_counted_and_fails_an_accuracy_once_written(model: Path, data: Path) -> None:
    x = X.copy()
    x[[17, 200], 2] = np.nan
    np.savez(data, x=x)
    assert run(model, data)[1] == ["output 'y' is NaN in 2 of 300 rows, first in 17"]
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
    bad.write_bytes(bad.read_bytes()[:-60])
    head = "(uint8[N,4,6,3] x) => (float[N,4,6,3] y)"
    path = write(head, "y = Cast<to = 1>(x)", tmp_path)
    with pytest.raises(BadInput, match=r"17\.png: is not a readable image"):
        run(path, folder, batch=4)
    bad.unlink()
    found, notes = run(path, folder, batch=4)
    assert (found.samples, found.resumed, len(notes)) == (29, 16, 1)
    np.testing.assert_array_equal(np.load(found.path)["y"], np.delete(pixels, 17, axis=0))


def test_a_classifier_that_answers_with_names_goes_through_each_verb(tmp_path: Path) -> None:
    model = string_labels.write_classifier(tmp_path / "m.onnx")
    rows = string_labels.samples(9)
    with dk.load(model, "cpu") as engine:
        assert prove_batch(engine, model, None).passed
        want = engine({"X": rows})
    assert dk.compare(model, model).parity.passed
    found = dk.compare(model, string_labels.write_classifier(tmp_path / "o.onnx", scale=-1.0))
    with pytest.raises(GateFailed, match=r"output 'label' .* strings differ") as caught:
        found.raise_if_over()
    assert "LinearClassifier" in caught.value.hint
    labels = want["label"].astype(str)
    labels[0] = "another"
    np.savez(tmp_path / "x.npz", X=rows, labels=labels)
    predicted = dk.predict(model, tmp_path / "x.npz", tmp_path / "y.npz", batch=4)
    assert predicted.accuracy.value == 8 / 9
    with np.load(tmp_path / "y.npz") as got:  # without pickles
        assert got["label"].tolist() == want["label"].tolist()
        np.testing.assert_array_equal(got["probabilities"], want["probabilities"])
