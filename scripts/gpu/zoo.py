"""The zoo on the GPU: each model in each precision, built, proven and compared with a CPU.

In: names. Out: the `Step`s, each of which needs the one before it. The file is exported and
quantized through the command line; the gate of `quantize` may refuse it, as it should where a
precision does not suit a model. What it let pass must then hold on the GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.gpu.steps import PYTHON, Step

if TYPE_CHECKING:
    from tests.support.zoo.members import Member

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "fp8")
_DEPLOYKIT = [PYTHON, "-m", "deploykit"]
_GATE = 1  # the exit code of a gate


def steps(
    names: Sequence[str], precisions: Sequence[str], folder: Path, skips: tuple[str, str]
) -> Iterator[Step]:
    """For each member: make, export; for each precision: quantize, build, compare.

    `names` empty: every member that is not large. `skips`: why TensorRT, and why ONNX Runtime's
    CUDA provider, cannot be had; empty if they can.
    """
    why = "torch is not installed" if importlib.util.find_spec("torch") is None else ""
    if all(skips):
        why = f"TensorRT: {skips[0]}; ONNX Runtime: {skips[1]}"
    if why:
        yield Step("zoo", "all of it", [], 0, skip=why)
        return
    from tests.support.zoo.members import ZOO

    chosen = names or [name for name, member in ZOO.items() if not member.large]
    for name in chosen:
        if name not in ZOO:
            yield Step("zoo", name, [], 0, skip=f"not in the zoo: {', '.join(ZOO)}")
            continue
        member, source = ZOO[name], folder / f"{name}.onnx"
        made, exported = f"{name}: make", f"{name}: export"
        words = [PYTHON, "-m", "tests.support.zoo.members", name, str(folder), "--samples", "64"]
        yield Step("zoo", made, words, 600, skip=member.missing)
        words = [*_DEPLOYKIT, "export", str(folder / f"{name}.safetensors"), "-o", str(source)]
        words += ["--arch", member.arch, "--json"]
        words += [word for spec in member.inputs for word in ("--input", spec)]
        yield Step("zoo", exported, words, 600, after=made)
        for to in precisions:
            typed, before = source, exported
            if to != "fp32":
                typed, before = folder / f"{name}.{to}.onnx", f"{name}: quantize to {to}"
                words = _quantize(source, to, typed, member, folder)
                yield Step("zoo", before, words, 900, after=exported, refusal=_GATE)
            yield from _proven(member, to, typed, before, skips, folder)


def _quantize(source: Path, to: str, typed: Path, member: Member, folder: Path) -> list[str]:
    words = [*_DEPLOYKIT, "quantize", str(source), "--to", to, "-o", str(typed), "--json"]
    words += ["--calib", str(folder / f"{member.name}.calib.npz")]
    if member.labelled is not None:
        words += ["--data", str(folder / f"{member.name}.test.npz"), "--max-drop", "0.01"]
    return words


def _proven(
    member: Member, to: str, typed: Path, before: str, skips: tuple[str, str], folder: Path
) -> Iterator[Step]:
    """TensorRT's engine against the typed file on a CPU, and ONNX Runtime's on the GPU."""
    name = member.name
    compare = [PYTHON, "-m", "scripts.gpu.parity", str(typed)]
    plan, built = folder / f"{name}.{to}.trt", f"{name}: build {to}"
    words = [*_DEPLOYKIT, "build", str(typed), "--profile", "auto", "--batch", "1,8,32"]
    if any("T" in spec.rpartition("[")[2] for spec in member.inputs):
        words += ["--axis", "T=1,24,64"]
    if member.labelled is not None:
        words += ["--data", str(folder / f"{name}.test.npz"), "--max-drop", "0.01"]
    words += ["-o", str(plan), "--json"]
    no_plan, no_cuda = skips
    yield Step("zoo", built, words, 900, skip=no_plan, after=before)
    title = f"{name}: {to}: TensorRT against the CPU"
    words = [*compare, str(plan), "--precision", to]
    yield Step("zoo", title, words, 300, skip=no_plan, after=built)
    if to in ("fp32", "fp16"):  # what ONNX Runtime's CUDA provider has kernels for
        title = f"{name}: {to}: ONNX Runtime CUDA against the CPU"
        words = [*compare, str(typed), "--precision", to]
        yield Step("zoo", title, words, 300, skip=no_cuda, after=before)
