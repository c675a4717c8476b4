"""Build a model for a hardware profile, and prove that what was built computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deploykit.api import build_tensorrt, golden, verify
from deploykit.api.artefacts import (
    Made,
    Progress,
    destination,
    keep_if_equal,
    no_progress,
    onnx_manifest,
    parity_sizes,
    span,
    staged,
)
from deploykit.api.build_tensorrt import CheckResult, PlanOptions, check_here, prove_plan
from deploykit.api.evaluate import Request, prepare
from deploykit.api.quantize import TARGETS, keep_if_passed, write_typed
from deploykit.api.quantize import check as check_request
from deploykit.builders.builder import BuildResult, Shapes, find_builder
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput
from deploykit.core.evidence import BuildRecord, Evidence
from deploykit.core.manifest import write_manifest
from deploykit.core.paths import StrPath
from deploykit.core.profile import Profile, choose_profile, load_profile

BUILD_MAX_ERROR = 1e-3  # fused float16 and INT8 kernels round at other places than the typed graph
_MOVED = (
    "the INT8 pairs, placed for TensorRT, were placed for ONNX Runtime with the ranges that the "
    "graph records; `quantize` with this profile measures their accuracy"
)


def build(
    model: ArtefactLike,
    profile: str = "auto",
    *,
    precision: str | None = None,
    calib: StrPath | None = None,
    data: StrPath | None = None,
    metric: str | None = None,
    max_drop: float | None = None,
    max_error: float = BUILD_MAX_ERROR,
    shapes: Shapes | None = None,
    out: StrPath | None = None,
    on_progress: Progress = no_progress,
) -> Made:
    """Build `model` for a hardware profile; with `precision`, quantise it first.

    `calib`, `data`, `metric`, `max_drop`: as in `quantize`. `shapes`: what a TensorRT engine is
    built for. Raises GateFailed when the built file differs from its source by more than
    `max_error` (an engine: see `prove_plan`) or has layers wider than asked, or when the quantised
    graph fails its evaluation; Unsupported for a target that cannot be built for here.
    """
    target, why = choose_profile() if profile == "auto" else (load_profile(profile), "")
    source = _open(model)
    request = Request(
        to=precision or "fp32",
        runtime=target.runtime,
        target=target,
        calib=Path(calib) if calib else None,
        data=Path(data) if data else None,
        metric=metric,
        max_drop=max_drop,
    )
    options = PlanOptions(target, shapes or Shapes(), request)
    place = _check(source, options, out)
    with staged(place) as tmp:
        typed, quantized = source, None
        if request.to != "fp32":
            quantized = _quantize(source, request, tmp, place, span(on_progress, 0.0, 0.6))
            typed = Artefact.described(tmp.with_name("typed.onnx"), quantized.manifest)
        files = _Files(source, typed, *_place_pairs(typed, target, tmp))
        step = span(on_progress, 0.6 if quantized else 0.0, 0.8)
        step("building", 0.0)
        built = find_builder(target.runtime)(files.placed, tmp, target, options.shapes, step)
        on_progress("comparing with the model", 0.8)
        if target.runtime == "tensorrt":
            made = prove_plan(built, source, typed, tmp, place, options)
        else:
            made = _prove_onnx(built, files, target, tmp, place, max_error)
    chosen = (f"profile auto: {target.name} ({why})",) if why else ()
    return replace(made, notes=(*_cost(quantized), *chosen, *made.notes))


def _check(source: Artefact, options: PlanOptions, out: StrPath | None) -> Path:
    """Where the engine goes. Raises BadInput, Unsupported: all that can be known before work."""
    target, request = options.target, options.request
    if target.runtime == "tensorrt":
        check_here(target, source)
    if request.to not in ("fp32", *TARGETS):
        raise BadInput(
            f"`precision` {request.to} is unknown", hint="one of: fp32, " + ", ".join(TARGETS)
        )
    if request.to != "fp32":
        check_request(request)
    suffix = ".trt" if target.runtime == "tensorrt" else f".{target.name}.onnx"
    return destination(source, out, suffix)


def _quantize(
    source: Artefact, request: Request, tmp: Path, place: Path, on_progress: Progress
) -> Made:
    """Write `typed.onnx` next to `tmp`. What fails its evaluation is kept as rejected."""
    typed = tmp.with_name("typed.onnx")
    on_progress("calibrating" if request.calib else "reading the model", 0.0)
    made = write_typed(prepare(source, request), typed, place.with_suffix(".onnx"), on_progress)
    if made.evaluation is not None and not made.evaluation.passed:
        keep_if_passed(typed, made, request.to)  # raises
    if made.search and made.search.interrupted:
        raise KeyboardInterrupt
    write_manifest(typed, made.manifest)
    return made


@dataclass(frozen=True)
class _Files:
    """The model, its typed graph, and that graph with its pairs where the runtime needs them."""

    source: Artefact
    typed: Artefact
    placed: Artefact
    moved: bool


def _place_pairs(typed: Artefact, target: Profile, tmp: Path) -> tuple[Artefact, bool]:
    """The graph with its INT8 pairs where ONNX Runtime has kernels, and whether they moved."""
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization.moving import move_pairs

    if target.runtime != "onnxruntime":
        return typed, False
    moved = move_pairs(Graph.open(typed.path), "onnxruntime")
    if moved is None:
        return typed, False
    return Artefact.open(moved.save(tmp.with_name("placed.onnx")).path), True


def _prove_onnx(
    built: BuildResult, files: _Files, target: Profile, tmp: Path, place: Path, max_error: float
) -> Made:
    """Compare the optimised graph with the one it was built from, and keep it."""
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.data.samples import random_feeds
    from deploykit.runtimes.engine import load

    source, typed, placed = files.source, files.typed, files.placed
    with load(placed, "cpu") as reference, load(tmp, "cpu") as engine:
        sizes = parity_sizes(engine.inputs)
        feeds = [random_feeds(engine.inputs, each, seed) for seed, each in enumerate(sizes)]
        names = (placed.name, place.name)
        parity = compare_engines(reference, engine, feeds, max_error=max_error, names=names)
        samples = golden.carry(typed, tmp)
        if samples is not None and files.moved:  # recorded with the pairs at other places
            replay, inputs = golden.recorded(samples, tmp, engine.inputs, engine.outputs)
            samples = golden.loosened(samples, compare_engines(replay, engine, [inputs]))
    asked, result = Graph.open(placed.path).precision, Graph.open(tmp)
    _check_integers(source, target, asked, result.precision)
    before = typed.manifest if typed is not source else None
    evidence = Evidence(
        parity=parity,
        build=BuildRecord(target.name),
        source_graph=before.evidence if before else None,
        golden=samples,
    )
    manifest = onnx_manifest(
        result,
        (source.sha256,),
        tools=("onnxruntime",),
        evidence=evidence,
        built_on=dict(built.built_on),
    )
    notes = (*([_MOVED] if files.moved else []), *_changed(asked, manifest.precision))
    return keep_if_equal(tmp, Made(place, manifest, notes), parity)


def _check_integers(
    model: Artefact, target: Profile, asked: Mapping[str, int], built: Mapping[str, int]
) -> None:
    """Raise BadInput where ONNX Runtime runs no INT8 node as such: slower than float32."""
    if not asked.get("int8") or built.get("int8"):
        return
    source = next(verify.sources(model.path, model.manifest), None) if model.manifest else None
    raise BadInput(
        f"{model}: ONNX Runtime runs none of its {asked['int8']} INT8 nodes in integers: their "
        "pairs are placed for TensorRT, and the file does not record the ranges to move them",
        hint=f"deploykit build {source or 'FLOAT32.onnx'} --profile {target.name} "
        "--precision int8 --calib FILE.npz",
    )


def _cost(quantized: Made | None) -> tuple[str, ...]:
    """What the lower precision cost, as notes."""
    if quantized is None:
        return ()
    search, evaluation = quantized.search, quantized.evaluation
    found = (search.why,) if search else ()
    return (*found, *((evaluation.describe(),) if evaluation else ()), *quantized.notes)


def _changed(asked: Mapping[str, int], built: Mapping[str, int]) -> tuple[str, ...]:
    """A note for each precision of which the built engine has fewer nodes than the graph."""
    return tuple(
        f"{name}: {count} nodes in the graph, {built.get(name, 0)} in the built engine: the others "
        "run in float32 here (INT8 for this target: build the float32 model with `precision` int8)"
        for name, count in asked.items()
        if name != "float32" and "float32" in built and built.get(name, 0) < count
    )


def check(
    model: ArtefactLike,
    profile: str,
    *,
    shapes: Shapes | None = None,
    on_progress: Progress | None = None,
) -> CheckResult:
    """Parse and build `model` for a target with whatever NVIDIA builder is here; keep nothing.

    Raises MissingExtra where there is none, BadInput for a profile that needs none.
    """
    target = load_profile(profile)
    source = _open(model)
    if target.runtime != "tensorrt":
        raise BadInput(f"profile '{target.name}' does not run TensorRT: there is nothing to check")
    return build_tensorrt.check(source, target, shapes or Shapes(), on_progress)


def _open(model: ArtefactLike) -> Artefact:
    source = Artefact.open(model)
    if source.format != "onnx":
        raise BadInput(
            f"{source}: is a {source.format} file, build takes .onnx", hint="deploykit export"
        )
    return source
