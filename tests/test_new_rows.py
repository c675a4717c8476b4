"""A runtime, a precision, a task and a bundle that only the tables know go through every command.

This is what `docs/contributing.md` promises: a row, the functions that it names, and a profile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from deploykit.deploying.folder import read_bundle, verify
from scripts import new_rows
from tests.support.cli.command import Run, one_process
from tests.support.installed import needs
from tests.support.onnx_zoo import save, zoo

WRAPPED = ("--profile", "./wrapped.toml")


@dataclass(frozen=True)
class Place:
    """A folder, and the command line with the new rows in it: one process."""

    folder: Path
    run: Run

    def answer(self, *words: str) -> dict[str, Any]:
        ran = self.run(*words, "--json")
        assert ran.code == 0, ran.err
        document: dict[str, Any] = json.loads(ran.out)
        return document


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A model, samples, a profile of the new runtime, and the engine that was built for it."""
    folder = tmp_path_factory.mktemp("rows")
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    text = "(float[N,256] x) => (float[N,256] y) { [layer] y = MatMul(x, W) }"
    save(zoo(text, {"W": weight}), folder / "model.onnx")
    np.savez(folder / "samples.npz", x=np.eye(8, 256, dtype=np.float32))
    (folder / "wrapped.toml").write_text(new_rows.PROFILE)
    (folder / "junk").write_bytes(b"junk" * 99)
    paths = f"{Path(new_rows.__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": paths}
    begin = "import new_rows\nnew_rows.add_rows()\n"
    with one_process(begin, cwd=folder, env=environment) as run:
        place = Place(folder, run)
        built = place.answer("build", "model.onnx", *WRAPPED)
        assert built["parity"]["passed"]
        yield place


def test_build_writes_the_format_of_the_row_and_inspect_knows_it(place: Place) -> None:
    engine = place.folder / "model.wrapped"
    assert engine.read_bytes().startswith(new_rows.MAGIC)
    found = place.answer("inspect", "model.wrapped")
    assert (found["format"], found["inputs"][0]["name"]) == ("wrapped", "x")
    assert found["manifest"]["built_on"]["profile"] == "wrapped"
    assert "onnx" in found["manifest"]["made_with"]
    (place.folder / "alone.wrapped").write_bytes(engine.read_bytes())
    for name, says in (
        ("alone.wrapped", "is a Wrapped Runtime engine without a manifest"),
        ("junk", "and .wrapped files"),
    ):
        ran = place.run("inspect", name)
        assert (ran.code, says in ran.err) == (2, True), ran.err


def test_the_engine_is_compared_run_and_timed_and_doctor_knows_it(place: Place) -> None:
    assert place.run("compare", "model.onnx", "model.wrapped").code == 0
    ran = place.answer("predict", "model.wrapped", "samples.npz", "-o", "y.npz")
    assert ran["samples"] == 8
    timed = ("--against", "model.onnx", "--batches", "1", "--quick", "--seconds", "0.05")
    report = place.answer("bench", "model.wrapped", *timed)
    assert {"wrapped 1.0"} < {point["runtime"] for point in report["points"]}
    named = {check["command"]: check["works"] for check in place.answer("doctor")["checks"]}
    assert named["build, bench, serve of Wrapped Runtime engines"]


@pytest.mark.parametrize(
    ("command", "choice"),
    [
        ("quantize", "wrapped|tensorrt|onnxruntime"),
        ("quantize", "int8-stored|fp16|"),
        ("bench", ".onnx or .trt or .wrapped files"),
        ("export", "--task rate|classify|"),
        ("bundle", "--to parcel|docker|"),
    ],
)
def test_help_offers_them(place: Place, command: str, choice: str) -> None:
    assert choice in " ".join(place.run(command, "--help").out.split())


def test_a_graph_is_written_in_the_new_precision_and_for_the_new_runtime(place: Place) -> None:
    made = place.answer("quantize", "model.onnx", "--to", "int8-stored")
    stored = onnx.load(place.folder / made["path"]).graph.node
    assert [node.op_type for node in stored] == ["DequantizeLinear", "MatMul"]
    words = ("--precision", "int8-stored", *WRAPPED, "-o", "stored.wrapped")
    assert place.answer("build", "model.onnx", *words)["parity"]["passed"]
    words = ("--to", "int8", "--runtime", "wrapped", "--calib", "samples.npz", "-o", "pairs.onnx")
    made = place.answer("quantize", "model.onnx", *words)
    assert made["manifest"]["evidence"]["quantize"]["runtime"] == "wrapped"


def test_a_model_gets_the_outputs_of_the_new_task_and_answers_with_them(place: Place) -> None:
    needs("torch", "onnxscript", "PIL")
    import torch
    from PIL import Image

    net = "import torch\n\ndef Net():\n    return torch.nn.Sequential("
    (place.folder / "net.py").write_text(net + "torch.nn.Flatten(), torch.nn.Linear(48, 1))\n")
    weights = {"1.weight": torch.zeros(1, 48), "1.bias": torch.zeros(1)}
    torch.save(weights, place.folder / "net.pt")
    Image.new("RGB", (8, 8)).save(place.folder / "photo.png")
    words = ["net.pt", "--arch", "./net.py:Net", "--input", "image:float32[N,3,4,4]"]
    words += ["--preprocess", "imagenet", "--task", "rate"]
    assert place.answer("export", *words)["manifest"]["task"]["kind"] == "rate"
    place.answer("build", "net.onnx", *WRAPPED)
    (found,) = place.answer("predict", "net.wrapped", "photo.png")["answers"]
    assert found == {"stars": 2.5}
    refused = place.run("export", *words, "--labels", "net.py")
    assert "--labels does not go with --task rate" in refused.err


def test_a_bundle_of_the_new_kind_is_sealed_and_checked_as_all_are(place: Place) -> None:
    words = ("bundle", "model.onnx", "--profile", "cpu", "--to", "parcel", "-o", "parcel")
    bundle = place.answer(*words)["bundle"]
    assert (bundle["kind"], bundle["model"]) == ("parcel", "model.onnx")
    files = {"README.md", *(f"model.onnx{end}" for end in ("", ".json", ".golden.npz"))}
    assert read_bundle(place.folder / "parcel").files.keys() == files
    assert verify(place.folder / "parcel").kind == "parcel"
    assert place.run(*words).code == 0  # an untouched bundle is replaced
    started = place.run("boot", "parcel", "--cache", "cache")
    assert "is a bundle for parcel, which does not start by itself" in started.err
