"""Files that are nearly models: every verb refuses them in one line, none is called a bug."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from deploykit.core.errors import BadInput
from scripts.fuzz_models import verbs
from tests.support.campaign import CAMPAIGN, rounds
from tests.support.installed import needs

ROOT = Path(__file__).resolve().parents[2]


def nested(path: Path, depth: int) -> Path:
    """`depth` If in one another."""
    other = "other () => (float[] e) { e = Identity(x) }"
    body = "o0 = Identity(x)"
    for number in range(1, depth + 1):
        then = f"body () => (float[] o{number - 1}) {{ {body} }}"
        branch = then if number == 1 else other
        out = "y" if number == depth else f"o{number}"
        body = f"{out} = If <then_branch = {then}, else_branch = {branch}> (c)"
    ends = "(float[N,4] x, bool c) => (float[N,4] y)"
    head = '<ir_version: 10, opset_import: ["" : 18]> g'
    onnx.save(onnx.parser.parse_model(f"{head} {ends} {{ {body} }}"), path)
    return path


@pytest.mark.parametrize("verb", ["inspect", "fp16", "build", "serve"])
def test_nested_subgraphs_are_taken_to_a_depth(tmp_path: Path, verb: str) -> None:
    path = nested(tmp_path / "m.onnx", 12)
    if verb == "fp16":  # all are in bodies
        with pytest.raises(BadInput, match="no node of it would compute in float16"):
            verbs(path)[verb]()
    else:
        verbs(path)[verb]()
    with pytest.raises(BadInput, match="more than 12 deep"):
        verbs(nested(path, 14))[verb]()


def external(path: Path, location: str, offset: str = "0", length: str = "9600") -> Path:
    """A product with 9,600 bytes of weights that are said to be at `location`."""
    weights = numpy_helper.from_array(np.ones((8, 300), np.float32), "w")
    path.with_name("w.bin").write_bytes(weights.raw_data)
    path.with_name("folder").mkdir(exist_ok=True)
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g '
        "(float[N,8] x) => (float[N,300] y) { y = MatMul(x, w) }"
    )
    stored = model.graph.initializer.add()
    stored.CopyFrom(weights)
    stored.ClearField("raw_data")
    stored.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        stored.external_data.add(key=key, value=value)
    model.doc_string = "long enough to hold the weights" * 400
    onnx.save(model, path)
    return path


BEYOND = "needs 9600 bytes|its offset or length|the model wants offset"
EXTERNAL = {  # what the model says of its weights: location, offset, length; and why it is refused
    "itself": (("m.onnx",), "is the model itself"),
    "a folder": (("folder",), "is not a regular file"),
    "a device": (("/dev/zero",), "outside the model's folder"),
    "outside": (("folder/../../m.bin",), "outside the model's folder"),
    "outside on Windows": (("..\\m.bin",), "outside the model's folder"),
    "nothing": (("nothing.bin",), "cannot be read"),
    "a name with a NUL": (("w\0.bin",), "cannot be read"),
    "beyond the end": (("w.bin", "1000000000000"), BEYOND),
    "before the start": (("w.bin", "-8"), BEYOND),
    "of no length": (("w.bin", "0", "-1"), BEYOND),
    "5000 digits": (("w.bin", "9" * 5000), BEYOND),
}


def link_folder(path: Path) -> None:
    path.with_name("sub").symlink_to(path.parent)


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {  # put in the place of the weights
    "a symbolic link": (
        lambda path: path.symlink_to(path.with_name("secret.bin")),
        "behind a symbolic link",
    ),
    "a hard link": (lambda path: os.link(path.with_name("secret.bin"), path), "links: 2"),
    "a pipe": (os.mkfifo, "not a regular file"),
    "in a linked folder": (link_folder, "behind a symbolic link"),
}


@pytest.mark.parametrize("name", [*EXTERNAL, *OTHERS])
def test_weights_that_are_not_in_a_file_next_to_the_model_are_refused(
    tmp_path: Path, name: str
) -> None:
    places, reason = EXTERNAL.get(name, (("w.bin",), ""))
    path = external(tmp_path / "m.onnx", *(["sub/w.bin"] if "linked" in name else places))
    if name in OTHERS:
        put, reason = OTHERS[name]
        path.with_name("w.bin").rename(path.with_name("secret.bin"))
        put(path.with_name("w.bin"))
    before = sorted(tmp_path.iterdir())
    for verb in ("inspect", "fp16", "build", "serve"):
        with pytest.raises(
            BadInput, match=rf"m\.onnx: (tensor 'w'|its weights).*({reason})"
        ) as caught:
            verbs(path)[verb]()
        assert len(caught.value.message) < 2000
        assert "ONNXRuntimeError" not in caught.value.message
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 400 MB, of which the disk holds a page."""
    path = tmp_path_factory.mktemp("large") / "m.onnx"
    external(path, "w.bin")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].dims[:] = [8, 12_500_000]
    model.graph.initializer[0].external_data[2].value = str(400_000_000)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 12_500_000
    onnx.save(model, path)
    os.truncate(path.with_name("w.bin"), 400_000_000)
    return path


def limited(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


@pytest.mark.parametrize(
    "line",
    [
        "build m.onnx --profile cpu -o b.onnx",
        "bench m.onnx --quick -o report",
        "serve m.onnx --http-port 0 --grpc-port=none",
        "predict m.onnx d.npz -o p.npz",
    ],
)
def test_a_model_that_does_not_fit_into_memory_is_exit_3_with_the_sizes(
    large: Path, line: str
) -> None:
    np.savez(large.with_name("d.npz"), x=np.zeros((16, 8), np.float32))
    ran = subprocess.run(
        [sys.executable, "-m", "deploykit", *line.split()],
        cwd=large.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=partial(limited, 900 << 20),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 3, ran.stderr
    (error,) = (each for each in ran.stderr.splitlines() if each.startswith("error: "))
    assert "MiB are free" in error
    assert "bad_alloc" not in error
    assert "Traceback" not in ran.stderr


MODELS = [("fuzz_models", str(seed), str(rounds(30, 2000))) for seed in range(rounds(1, 8))]


@pytest.mark.parametrize("words", [*MODELS, ("fuzz_commands", *["--all"] * CAMPAIGN)])
def test_nothing_that_a_user_passes_is_called_a_bug(tmp_path: Path, words: tuple[str, ...]) -> None:
    program, *more = words
    if program == "fuzz_commands":
        needs("torch")
    command = [sys.executable, "-W", "ignore", "-m", f"scripts.{program}", tmp_path, *more]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    assert [line for line in lines if line.startswith("BUG")] == []
    assert lines[-1:] == ["DONE"], f"{lines[-1:]}: exit {ran.returncode}: {ran.stderr[-500:]}"
