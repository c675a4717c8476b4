"""Run every `deploykit` line that README and docs show in a `console` block, in their order.

    python -m scripts.shown_lines FOLDER

Prints what failed. A line may exit with 3 where this machine lacks a GPU or TensorRT: all before
that was accepted.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import deploykit as dk
from scripts.pages import blocks, place, server
from tests.support.bundles import proven_model
from tests.support.onnx_zoo import mnist_like
from tests.support.runtimes.pictures import encoded

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {  # an input in the line -> where lines with it run
    "detector.onnx": "howto-detector.md, whole, in a campaign",
    "./sentiment": "howto-bert.md, whole, in a campaign: it downloads the model",
    "faces.py": "tests/cli/test_predict.py, with a pipeline of no faces",
    "cats-dogs": "tests/training: it trains for minutes",
    "m.pt": "as cats-dogs",
    "m.onnx": "as cats-dogs",
    "http://127.0.0.1:8000": "with the server of its page",
    "model.trt": "on a GPU: the engine is built there",
    "T=128": "tests/planning: its model has such an axis",
    "cert.pem": "tests/serving: with a certificate of its own",
}


def lines(page: Path) -> Iterator[list[str]]:
    """The words of the `deploykit` commands in the page's `console` blocks."""
    for _, text in blocks(page, "console"):
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("$ deploykit "):
                yield shlex.split(line.removeprefix("$ "), comments=True)


SHOWN = {shlex.join(words): words for page in PAGES for words in lines(page)}


def prepare(here: Path) -> None:
    """Write the files that the lines name."""
    import torch
    from safetensors.torch import save_file

    from deploykit.engines.torch.presets import build_named

    weights = build_named("resnet18", {}).state_dict()
    torch.save(weights, here / "resnet18.pth")
    save_file(weights, here / "weights.safetensors")
    torch.save(build_named("lraspp_mobilenet_v3_large", {}).state_dict(), here / "w.pth")
    (here / "imagenet.txt").write_text("".join(f"class {n}\n" for n in range(1000)))
    (here / "token").write_text("a secret of sixteen characters\n")
    (here / "token").chmod(0o600)
    (here / "images").mkdir()
    noise = np.random.default_rng(0)
    for name in ("photo.jpg", "cat.jpg", *(f"images/{number}.png" for number in range(12))):
        pixels = noise.integers(0, 255, (64, 64, 3), np.uint8)
        (here / name).write_bytes(encoded(pixels, "jpeg" if name.endswith("jpg") else "PNG"))
    model = proven_model(here / "model.onnx", mnist_like())
    images = noise.random((3000, 1, 28, 28), np.float32)
    with dk.load(model) as engine:
        logits = engine({"image": images})["logits"]
    first, second = np.sort(logits)[:, -1], np.sort(logits)[:, -2]
    sure = np.argsort(second - first)[:300]  # rounding changes none of their answers
    images, labels = images[sure], logits[sure].argmax(1)
    np.savez(here / "calibration.npz", image=images)
    np.savez(here / "test.npz", image=images, labels=labels)
    (here / "data").mkdir()
    shutil.copy(here / "test.npz", here / "data")
    data = {"calib": here / "test.npz", "data": here / "test.npz", "max_drop": 0.9}
    dk.quantize(model, "int8", out=here / "model.int8.onnx", **data)
    dk.bundle(model, "cpu", out=here / "bundle")


def run_lines(folder: Path) -> Iterator[str]:
    """Run the lines, as one may need what another wrote; yield those that failed."""
    for words in SHOWN.values():
        if any(part in words for part in ELSEWHERE):
            continue
        if words[1] in ("serve", "boot"):
            begin = ["deploykit", "boot", "bundle", "--cache", "engines"]
            try:
                with server(words if words[1] == "serve" else [*begin, *words[5:]], folder):
                    continue
            except AssertionError as exc:
                if "exit 3" not in str(exc):
                    yield f"{words}: {exc}"
            continue
        done = subprocess.run(
            words, cwd=folder, env=place(), capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 3):
            yield f"{words}: {done.stderr}"


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
    for failure in run_lines(Path(sys.argv[1])):
        print(failure)
