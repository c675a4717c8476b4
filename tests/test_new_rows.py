"""A runtime, a precision, a task and a bundle that only the tables know go through every command.

This is what `docs/contributing.md` promises: a row, the functions that it names, and a profile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from deploykit.deploying.folder import read_bundle, verify
from tests.support import new_rows
from tests.support.onnx_zoo import make, save


def deploykit(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, new_rows.__file__, *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def answer(*words: str | Path, folder: Path) -> dict:
    done = deploykit(*words, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, samples, a profile of the new runtime, and the engine that was built for it."""
    folder = tmp_path_factory.mktemp("rows")
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    node = helper.make_node("MatMul", ["x", "W"], ["y"], name="layer")
    model = make([node], {"x": ("N", 256)}, {"y": ("N", 256)}, {"W": weight})
    save(model, folder / "model.onnx")
    np.savez(folder / "samples.npz", x=np.eye(8, 256, dtype=np.float32))
    (folder / "wrapped.toml").write_text(new_rows.PROFILE)
    built = answer("build", "model.onnx", "--profile", "./wrapped.toml", folder=folder)
    assert built["parity"]["passed"]
    return folder


def test_build_writes_the_format_of_the_row_and_inspect_knows_it(folder: Path) -> None:
    found = answer("inspect", "model.wrapped", folder=folder)
    assert (folder / "model.wrapped").read_bytes().startswith(new_rows.MAGIC)
    assert found["format"] == "wrapped"
    assert found["inputs"][0]["name"] == "x"
    assert found["manifest"]["built_on"]["profile"] == "wrapped"
    assert "onnx" in found["manifest"]["made_with"]


def test_an_engine_without_its_manifest_is_named_by_the_title_of_its_runtime(folder: Path) -> None:
    alone = folder / "alone.wrapped"
    alone.write_bytes((folder / "model.wrapped").read_bytes())
    done = deploykit("inspect", alone, folder=folder)
    assert done.returncode == 2
    assert "is a Wrapped Runtime engine without a manifest" in done.stderr


def test_the_engine_is_compared_run_and_timed(folder: Path) -> None:
    assert deploykit("compare", "model.onnx", "model.wrapped", folder=folder).returncode == 0
    ran = answer("predict", "model.wrapped", "samples.npz", "-o", "y.npz", folder=folder)
    assert ran["samples"] == 8
    timed = ["--batches", "1", "--quick", "--seconds", "0.3"]
    report = answer("bench", "model.wrapped", "--against", "model.onnx", *timed, folder=folder)
    assert {"wrapped 1.0"} < {point["runtime"] for point in report["points"]}


def test_doctor_says_whether_its_engines_work(folder: Path) -> None:
    checks = answer("doctor", folder=folder)["checks"]
    named = {check["command"]: check["works"] for check in checks}
    assert named["build, bench, serve of Wrapped Runtime engines"]


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        ("quantize", ["wrapped|tensorrt|onnxruntime", "int8-stored|fp16|"]),
        ("bench", [".onnx or .trt or .wrapped files"]),
        ("export", ["--task rate|classify|"]),
        ("bundle", ["--to parcel|docker|"]),
    ],
)
def test_help_offers_them(command: str, choices: list[str], folder: Path) -> None:
    page = " ".join(deploykit(command, "--help", folder=folder).stdout.split())
    assert all(choice in page for choice in choices), page


def test_other_files_are_refused_with_a_list_that_has_the_new_one(folder: Path) -> None:
    (folder / "junk").write_bytes(b"junk" * 99)
    assert "and .wrapped files" in deploykit("inspect", "junk", folder=folder).stderr


def test_a_graph_is_written_in_the_new_precision_alone_and_on_the_way_to_an_engine(
    folder: Path,
) -> None:
    made = answer("quantize", "model.onnx", "--to", "int8-stored", folder=folder)
    stored = onnx.load(folder / made["path"]).graph.node
    assert [node.op_type for node in stored] == ["DequantizeLinear", "MatMul"]
    wanted = ["--precision", "int8-stored", "--profile", "./wrapped.toml", "-o", "stored.wrapped"]
    built = answer("build", "model.onnx", *wanted, folder=folder)
    assert built["parity"]["passed"]


def test_int8_pairs_are_placed_for_the_new_runtime(folder: Path) -> None:
    wanted = ["--to", "int8", "--runtime", "wrapped", "--calib", "samples.npz", "-o", "pairs.onnx"]
    made = answer("quantize", "model.onnx", *wanted, folder=folder)
    assert made["manifest"]["evidence"]["quantize"]["runtime"] == "wrapped"


def test_a_model_gets_the_outputs_of_the_new_task_and_answers_with_them(folder: Path) -> None:
    for package in ("torch", "onnxscript", "PIL"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import torch
    from PIL import Image

    net = "import torch\n\ndef Net():\n    return torch.nn.Sequential("
    (folder / "net.py").write_text(net + "torch.nn.Flatten(), torch.nn.Linear(48, 1))\n")
    torch.save({"1.weight": torch.zeros(1, 48), "1.bias": torch.zeros(1)}, folder / "net.pt")
    Image.new("RGB", (8, 8)).save(folder / "photo.png")
    words = ["--arch", "./net.py:Net", "--input", "image:float32[N,3,4,4]"]
    words += ["--preprocess", "imagenet", "--task", "rate"]
    made = answer("export", "net.pt", *words, folder=folder)
    assert made["manifest"]["task"]["kind"] == "rate"
    answer("build", "net.onnx", "--profile", "./wrapped.toml", folder=folder)
    (found,) = answer("predict", "net.wrapped", "photo.png", folder=folder)["answers"]
    assert found == {"stars": 2.5}
    refused = deploykit("export", "net.pt", *words, "--labels", "net.py", folder=folder)
    assert "--labels does not go with --task rate" in refused.stderr


def test_a_bundle_of_the_new_kind_is_sealed_and_checked_as_all_are(folder: Path) -> None:
    words = ["--profile", "cpu", "--to", "parcel", "-o", "parcel"]
    made = answer("bundle", "model.onnx", *words, folder=folder)
    assert (made["bundle"]["kind"], made["bundle"]["model"]) == ("parcel", "model.onnx")
    assert read_bundle(folder / "parcel").files.keys() == {
        "README.md", "model.onnx", "model.onnx.json", "model.onnx.golden.npz",
    }  # fmt: skip
    assert verify(folder / "parcel").kind == "parcel"
    again = deploykit("bundle", "model.onnx", *words, folder=folder)
    assert again.returncode == 0  # an untouched bundle is replaced
    started = deploykit("boot", "parcel", "--cache", "cache", folder=folder)
    assert "is a bundle for parcel, which does not start by itself" in started.stderr
