"""`deploykit build` end to end on this machine's TensorRT: its options, one after another.

Each step is one command that a user types. The model is the small CNN of the tests, made by
`python -m scripts.gpu.builds FOLDER`, with samples for the calibration.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.gpu.steps import PYTHON, Step

_DEPLOYKIT = [PYTHON, "-m", "deploykit"]
# title -> the words after `build MODEL -o PLAN`
OPTIONS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "fp32 again": (),  # with the timing cache of the first
    "no TF32": ("--no-tf32",),
    "fp16": ("--precision", "fp16"),
    "int8": ("--precision", "int8", "--calib", "{folder}/calib.npz"),
    "version compatible": ("--version-compatible",),
    "hardware compatible": ("--hardware-compatible", "ampere-plus"),
}


def steps(folder: Path, skip: str) -> Iterator[Step]:
    """`skip`: why TensorRT cannot be had; empty if it can."""
    if skip:
        yield Step("build", "all of it", [], 0, skip=skip)
        return
    made, source = "make the model", folder / "cnn.onnx"
    yield Step("build", made, [PYTHON, "-m", "scripts.gpu.builds", str(folder)], 120)
    for title, words in OPTIONS.items():
        plan = folder / f"{title.replace(' ', '-').replace(',', '')}.trt"
        given = [word.format(folder=folder) for word in words]
        command = [*_DEPLOYKIT, "build", str(source), "-o", str(plan), "--batch", "1,4,16"]
        yield Step("build", title, [*command, *given, "--json"], 600, after=made)
        replay = [*_DEPLOYKIT, "compare", str(plan), "--device", "cuda", "--json"]
        yield Step("build", f"{title}: replay", replay, 120, after=title)


def make(folder: Path) -> None:
    import numpy as np

    from tests.support.onnx_zoo import mnist_like, save

    save(mnist_like(), folder / "cnn.onnx")
    spec = mnist_like().graph.input[0]
    shape = [axis.dim_value for axis in spec.type.tensor_type.shape.dim][1:]
    values = np.random.default_rng(0).standard_normal((64, *shape)).astype(np.float32)
    np.savez(folder / "calib.npz", **{spec.name: values})


if __name__ == "__main__":
    make(Path(sys.argv[1]))
