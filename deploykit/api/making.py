"""Make artefacts: train a recipe, export it, build it for a hardware profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deploykit.api.precision import PRECISIONS, quantize
from deploykit.api.staging import (
    PARITY_BATCHES,
    Made,
    Progress,
    keep_if_equal,
    onnx_manifest,
    staged,
)
from deploykit.core.artefact import Manifest, sniff, write_manifest
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.extras import installed
from deploykit.core.files import check_writable, make_folder, sha256
from deploykit.core.machine import this_machine, tool_versions
from deploykit.core.profile import Profile, choose_profile, load_profile
from deploykit.core.recipe import load_recipe
from deploykit.core.tensors import BATCH, TensorSpec, parse_spec

EXPORT_MAX_ERROR = 1e-4  # float32 on both sides: only the order of additions differs
BUILD_MAX_ERROR = 1e-3  # fused float16 and INT8 kernels round at other places than the typed graph


def train(
    recipe: str,
    out: Path,
    *,
    data: Path | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    amp: bool | None = None,
    weights: Path | None = None,
    seed: int = 0,
    save_splits: Path | None = None,
    on_progress: Progress | None = None,
) -> Made:
    """Train a recipe into a checkpoint.

    `save_splits`: a folder that gets calibration.npz and test.npz, for `quantize` and `predict`.
    """
    check_writable(out)
    chosen = load_recipe(recipe)
    from deploykit.measure.stats import proportion
    from deploykit.runtimes import torch as runtime
    from deploykit.training import loop

    initial = runtime.load_weights(weights) if weights else None
    splits = chosen.data(data)
    options = loop.Options(epochs, batch_size, device, amp, seed)
    trained = loop.train(chosen, splits, options, weights=initial, on_progress=on_progress)
    runtime.save_checkpoint(out, trained.module, recipe, chosen.inputs, chosen.outputs)
    accuracy = proportion(round(trained.scores.sum()), len(trained.scores))
    test = {"metric": chosen.metric_name, "n": len(trained.scores), **accuracy.to_dict()}
    manifest = Manifest(
        format="torch",
        inputs=chosen.inputs,
        outputs=chosen.outputs,
        precision={"float32": sum(1 for _ in trained.module.parameters())},
        sha256=sha256(out),
        made_from=(sha256(weights),) if weights else (),
        made_with=tool_versions("torch"),
        checks={"recipe": recipe, "training": trained.figures, "test": test},
    )
    write_manifest(out, manifest)
    if save_splits is not None:
        from deploykit.runtimes.data import LABELS, write_npz

        make_folder(save_splits)
        for name, split in (("calibration", splits.calibration), ("test", splits.test)):
            write_npz(save_splits / f"{name}.npz", {**split.inputs, LABELS: split.labels})
    return Made(out, manifest, accuracy=accuracy)


def export(
    model: Path,
    out: Path | None = None,
    *,
    arch: str | None = None,
    inputs: Sequence[str] = (),
    batch: str = "dynamic",
    opset: int | None = None,
    allow_pickle: bool = False,
    max_error: float = EXPORT_MAX_ERROR,
) -> Made:
    """Export a PyTorch file to ONNX and prove that it computes the same at several batch sizes.

    `inputs`: specs as text, where the file does not hold them. Raises GateFailed past `max_error`.
    """
    out = out or model.with_suffix(".onnx")
    check_writable(out)
    wanted = tuple(parse_spec(text) for text in inputs)
    if sniff(model) != "torch":
        raise BadInput(f"{model}: is not a PyTorch file", hint="export takes .pt and .pth files")
    from deploykit.exporters import onnx as exporter
    from deploykit.measure.parity import compare_engines
    from deploykit.runtimes import torch as runtime
    from deploykit.runtimes.data import random_feeds
    from deploykit.runtimes.engine import load

    loaded = runtime.load_module(model, arch=arch, inputs=wanted, allow_pickle=allow_pickle)
    size = _batch_size(batch)
    loaded = replace(
        loaded, inputs=_fixed(loaded.inputs, size), outputs=_fixed(loaded.outputs, size)
    )
    with staged(out) as tmp:
        exporter.export_module(
            loaded.module, loaded.inputs, loaded.outputs, tmp, opset=opset or exporter.DEFAULT_OPSET
        )
        axes = {axis for spec in loaded.inputs for axis in spec.shape if isinstance(axis, str)}
        feeds = [
            random_feeds(loaded.inputs, {axis: n if axis == BATCH else 2 + n for axis in axes}, n)
            for n in ((size,) if size else PARITY_BATCHES)
        ]
        torch_engine = runtime.TorchEngine(loaded, model.name, "cpu", None)
        with torch_engine as reference, load(tmp, "cpu") as exported:
            parity = compare_engines(
                reference, exported, feeds, max_error=max_error, names=(model.name, out.name)
            )
        manifest = onnx_manifest(
            tmp,
            (sha256(model),),
            tools=("torch", "onnx", "onnxscript"),
            checks={"parity": parity.to_dict(), "ran_pickle": loaded.ran_pickle, "arch": arch},
        )
        made = Made(out, manifest, parity=parity)
        return keep_if_equal(tmp, made, parity)


def build(
    model: Path,
    profile: str = "auto",
    *,
    precision: str | None = None,
    calib: Path | None = None,
    data: Path | None = None,
    max_drop: float = 0.01,
    max_error: float = BUILD_MAX_ERROR,
    out: Path | None = None,
) -> Made:
    """Build `model` for a hardware profile; with `precision`, quantise first.

    Raises GateFailed when the built file differs from its source by more than `max_error`, or the
    accuracy drops by more than `max_drop`; Unsupported for a target that cannot be built for here.
    """
    target, why = choose_profile() if profile == "auto" else (load_profile(profile), "")
    source_format = sniff(model)
    if source_format != "onnx":
        raise BadInput(
            f"{model}: is a {source_format} file, build takes .onnx", hint="deploykit export"
        )
    if target.runtime != "onnxruntime":
        raise _no_tensorrt(target, model)
    if precision not in (None, "fp32", *PRECISIONS):
        raise BadInput(
            f"--precision {precision}: is not offered",
            hint="one of: fp32, " + ", ".join(PRECISIONS),
        )
    out = out or model.with_suffix(f".{target.name}.onnx")
    check_writable(out)
    if out.resolve() == model.resolve():
        raise BadInput(f"{out}: is the model itself", hint="choose another -o")
    from deploykit.builders import onnxruntime as builder
    from deploykit.measure.parity import compare_engines
    from deploykit.runtimes.data import random_feeds
    from deploykit.runtimes.engine import load
    from deploykit.transforms import graph

    with staged(out) as tmp:
        typed = model
        if precision in PRECISIONS:
            typed = tmp.with_name("typed.onnx")
            quantize(
                model,
                precision,
                typed,
                calib=calib,
                data=data,
                max_drop=max_drop,
                runtime=target.runtime,
            )
        asked = graph.summarise(graph.load_graph(typed)).precision  # checked before it is run
        facts = builder.build(typed, tmp)
        with load(typed, "cpu") as reference, load(tmp, "cpu") as built:
            feeds = [random_feeds(built.inputs, {BATCH: n}, n) for n in PARITY_BATCHES]
            parity = compare_engines(
                reference, built, feeds, max_error=max_error, names=(typed.name, out.name)
            )
        manifest = onnx_manifest(
            tmp,
            (sha256(model),),
            tools=("onnxruntime",),
            checks={"parity": parity.to_dict()},
            built_on={**facts, "profile": target.name},
        )
        notes: tuple[str, ...] = (f"profile auto: {target.name} ({why})",) if why else ()
        notes += _changed(asked, manifest.precision)
        made = Made(out, manifest, parity=parity, notes=notes)
        return keep_if_equal(tmp, made, parity)


def _changed(asked: Mapping[str, int], built: Mapping[str, int]) -> tuple[str, ...]:
    """A note for each precision of the graph that the built engine, read back, has less of."""
    return tuple(
        f"{name}: {count} nodes in the graph, {built.get(name, 0)} in the built engine: the rest "
        f"runs in float32 here (INT8 for this target: build --precision int8 --calib FILE.npz)"
        for name, count in asked.items()
        if name != "float32" and "float32" in built and built.get(name, 0) < count
    )


def _batch_size(batch: str) -> int | None:
    """None for "dynamic", else the fixed size."""
    if batch == "dynamic":
        return None
    if not batch.isascii() or not batch.isdigit() or int(batch) < 1:
        raise BadInput(f"--batch {batch}: 'dynamic' or a size of 1 or more is needed")
    return int(batch)


def _fixed(specs: tuple[TensorSpec, ...], size: int | None) -> tuple[TensorSpec, ...]:
    """The specs with the batch axis fixed at `size`; as they are for None."""
    if size is None:
        return specs
    return tuple(
        replace(spec, shape=tuple(size if axis == BATCH else axis for axis in spec.shape))
        for spec in specs
    )


def _no_tensorrt(target: Profile, model: Path) -> Unsupported:
    """Why a TensorRT target cannot be built here, and what would work."""
    machine = this_machine()
    gpu = machine.gpus[0].name if machine.gpus else "no NVIDIA GPU"
    lacks = "TensorRT is installed" if installed("tensorrt") else "TensorRT is not installed"
    return Unsupported(
        f"profile '{target.name}' needs a TensorRT engine, which this version of deploykit cannot "
        f"build; here: {gpu}, {lacks}",
        hint=f"what works here: deploykit build {model} --profile cpu",
    )
