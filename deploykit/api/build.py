"""Make artefacts: train a recipe, build a model for a hardware profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api import build_tensorrt, golden, verify
from deploykit.api.artefacts import (
    Made,
    Progress,
    keep_if_equal,
    onnx_manifest,
    parity_sizes,
    staged,
)
from deploykit.api.build_tensorrt import CheckResult, Labelled, Shapes, build_plan, check_here
from deploykit.api.quantize import TARGETS, quantize
from deploykit.core.artefact import read_manifest, sniff
from deploykit.core.errors import BadInput
from deploykit.core.evidence import BuildRecord, Evidence, TrainingRecord
from deploykit.core.files import check_writable, make_folder, sha256
from deploykit.core.machine import tool_versions
from deploykit.core.manifest import Manifest, write_manifest
from deploykit.core.profile import Profile, choose_profile, load_profile
from deploykit.core.recipe import load_recipe

if TYPE_CHECKING:
    from deploykit.onnx_graph.graph import Graph

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
    from deploykit.measure.statistics import proportion
    from deploykit.runtimes.torch import engine as runtime
    from deploykit.training import loop

    initial = runtime.load_weights(weights) if weights else None
    splits = chosen.data(data)
    options = loop.Options(epochs, batch_size, device, amp, seed)
    trained = loop.train(chosen, splits, options, weights=initial, on_progress=on_progress)
    runtime.save_checkpoint(out, trained.module, recipe, chosen.inputs, chosen.outputs)
    accuracy = proportion(round(trained.scores.sum()), len(trained.scores))
    record = TrainingRecord(
        recipe, chosen.metric_name, len(trained.scores), accuracy, trained.figures
    )
    manifest = Manifest(
        format="torch",
        inputs=chosen.inputs,
        outputs=chosen.outputs,
        precision={"float32": sum(1 for _ in trained.module.parameters())},
        sha256=sha256(out),
        made_from=(sha256(weights),) if weights else (),
        made_with=tool_versions("torch"),
        evidence=Evidence(training=record),
    )
    write_manifest(out, manifest)
    if save_splits is not None:
        from deploykit.runtimes.data.samples import LABELS, write_npz

        make_folder(save_splits)
        for name, split in (("calibration", splits.calibration), ("test", splits.test)):
            write_npz(save_splits / f"{name}.npz", {**split.inputs, LABELS: split.labels})
    return Made(out, manifest)


def build(
    model: Path,
    profile: str = "auto",
    *,
    precision: str | None = None,
    calib: Path | None = None,
    data: Path | None = None,
    metric: str | None = None,
    max_drop: float | None = None,
    max_error: float = BUILD_MAX_ERROR,
    shapes: Shapes | None = None,
    out: Path | None = None,
    on_progress: Progress | None = None,
) -> Made:
    """Build `model` for a hardware profile; with `precision`, quantise first.

    `calib`, `data`, `metric`, `max_drop`: as in `quantize`. `shapes`: what a TensorRT engine is
    built for. Raises GateFailed when the built file differs from its source by more than
    `max_error` (an engine: see `engines`) or has layers wider than asked, or the quantised one
    fails its gate; Unsupported for a target that cannot be built for here.
    """
    target, why = choose_profile() if profile == "auto" else (load_profile(profile), "")
    _check_model(model)
    engine = target.runtime == "tensorrt"
    if engine:
        check_here(target, model)
    elif shapes is not None and shapes != Shapes():
        raise BadInput(
            f"profile '{target.name}' runs ONNX Runtime, which takes any batch and needs no shapes",
            hint="--batch, --axis, --level, --dla and the compatibility options are for TensorRT",
        )
    if precision not in (None, "fp32", *TARGETS):
        raise BadInput(
            f"--precision {precision}: is not offered", hint="one of: fp32, " + ", ".join(TARGETS)
        )
    out = out or model.with_suffix(".trt" if engine else f".{target.name}.onnx")
    check_writable(out)
    if out.resolve() == model.resolve():
        raise BadInput(f"{out}: is the model itself", hint="choose another -o")
    from deploykit.builders import onnxruntime as builder
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.data.samples import random_feeds
    from deploykit.runtimes.engine import load

    with staged(out) as tmp:
        typed, quantized = model, None
        if precision in TARGETS:
            typed = tmp.with_name("typed.onnx")
            quantized = quantize(
                model,
                precision,
                typed,
                calib=calib,
                data=data,
                metric=metric,
                max_drop=max_drop,
                runtime=target.runtime,
                profile=target.name if profile == "auto" else profile,
                on_progress=on_progress,
            )
            if quantized.search and quantized.search.interrupted:
                raise KeyboardInterrupt
        notes = _quantized(quantized)
        if engine:
            made = build_plan(
                model,
                typed,
                tmp,
                out,
                target,
                shapes or Shapes(),
                on_progress,
                calib=calib,
                labelled=Labelled(data, metric, max_drop) if data else None,
            )
            return replace(made, notes=(*notes, *made.notes))
        graph, moved = _placed_for_onnxruntime(Graph.open(typed), tmp.with_name("placed.onnx"))
        typed, asked = graph.path, graph.precision
        notes += moved
        facts = builder.build(typed, tmp)
        with load(typed, "cpu") as reference, load(tmp, "cpu") as built:
            sizes = parity_sizes(built.inputs)
            feeds = [random_feeds(built.inputs, each, seed) for seed, each in enumerate(sizes)]
            parity = compare_engines(
                reference, built, feeds, max_error=max_error, names=(typed.name, out.name)
            )
            samples = golden.carry(model if moved else typed, tmp)
            if samples is not None and moved:  # recorded with the pairs at other places
                replay, inputs = golden.recorded(samples, tmp, built.inputs, built.outputs)
                samples = golden.loosened(samples, compare_engines(replay, built, [inputs]))
        result = Graph.open(tmp)
        _check_integers(model, target, asked, result.precision)
        manifest = onnx_manifest(
            result,
            (sha256(model),),
            tools=("onnxruntime",),
            evidence=Evidence(
                parity=parity,
                build=BuildRecord(target.name),
                source_graph=quantized.evidence if quantized else None,
                golden=samples,
            ),
            built_on={**facts, "profile": target.name},
        )
        if why:
            notes += (f"profile auto: {target.name} ({why})",)
        notes += _changed(asked, manifest.precision)
        made = Made(out, manifest, notes)
        return keep_if_equal(tmp, made, parity)


def _quantized(made: Made | None) -> tuple[str, ...]:
    """What putting the precision into the graph cost, in words."""
    if made is None:
        return ()
    found = (made.search.why,) if made.search else ()
    cost = (made.evaluation.describe(),) if made.evaluation else ()
    return (*found, *cost, *made.notes)


def _placed_for_onnxruntime(graph: Graph, path: Path) -> tuple[Graph, tuple[str, ...]]:
    """The graph with its INT8 pairs where ONNX Runtime has kernels; a note if they moved."""
    from deploykit.quantization.moving import move_pairs

    moved = move_pairs(graph, "onnxruntime")
    if moved is None:
        return graph, ()
    note = (
        "the INT8 pairs, placed for TensorRT, were placed for ONNX Runtime with the ranges that "
        "the graph records; `quantize` with this profile measures their accuracy"
    )
    return moved.save(path), (note,)


def _check_integers(
    model: Path, target: Profile, asked: Mapping[str, int], built: Mapping[str, int]
) -> None:
    """Raise BadInput where ONNX Runtime runs no INT8 node as such: slower than float32."""
    if not asked.get("int8") or built.get("int8"):
        return
    manifest = read_manifest(model)
    source = next(verify.sources(model, manifest), None) if manifest else None
    raise BadInput(
        f"{model}: ONNX Runtime runs none of its {asked['int8']} INT8 nodes in integers: their "
        "pairs are placed for TensorRT, and the file does not record the ranges to move them",
        hint=f"deploykit build {source or 'FLOAT32.onnx'} --profile {target.name} "
        "--precision int8 --calib FILE.npz",
    )


def _changed(asked: Mapping[str, int], built: Mapping[str, int]) -> tuple[str, ...]:
    """A note for each precision of the graph that the built engine, read back, has less of."""
    return tuple(
        f"{name}: {count} nodes in the graph, {built.get(name, 0)} in the built engine: the rest "
        f"runs in float32 here (INT8 for this target: build --precision int8 --calib FILE.npz)"
        for name, count in asked.items()
        if name != "float32" and "float32" in built and built.get(name, 0) < count
    )


def check(
    model: Path,
    profile: str,
    *,
    shapes: Shapes | None = None,
    on_progress: Progress | None = None,
) -> CheckResult:
    """Parse and build `model` for a target with whatever NVIDIA builder is here; keep nothing.

    Raises MissingExtra where there is none, BadInput for a profile that needs none.
    """
    target = load_profile(profile)
    _check_model(model)
    if target.runtime != "tensorrt":
        raise BadInput(
            f"--check: profile '{target.name}' does not run TensorRT: there is nothing to check"
        )
    return build_tensorrt.check(model, target, shapes or Shapes(), on_progress)


def _check_model(model: Path) -> None:
    found = sniff(model)
    if found != "onnx":
        raise BadInput(f"{model}: is a {found} file, build takes .onnx", hint="deploykit export")
