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
    stage,
)
from deploykit.api.build_tensorrt import CheckResult, PlanOptions, check_here, prove_plan
from deploykit.api.evaluate import Request, prepare
from deploykit.api.quantize import TARGETS, keep_if_passed, write_quantized
from deploykit.api.quantize import check as check_request
from deploykit.builders.builder import BuildResult, Shapes, find_builder
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput
from deploykit.core.evidence import BuildRecord, Evidence
from deploykit.core.manifest import write_manifest
from deploykit.core.paths import StrPath
from deploykit.core.profile import Profile, choose_profile, load_profile
from deploykit.core.runtime import RUNTIMES

BUILD_MAX_ERROR = (
    1e-3  # fused float16 and INT8 kernels round at other places than the graph_file graph
)
_PAIRS_MOVED = (
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
    `max_error` (an engine: see `prove_plan`) or runs layers in more bits than asked, or when the
    quantised graph fails its evaluation; Unsupported for a target that cannot be built for here.
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
    with stage(place) as tmp:
        graph_file, quantized = source, None
        if request.to != "fp32":
            quantized = _quantize(source, request, tmp, place, span(on_progress, 0.0, 0.6))
            graph_file = Artefact.from_manifest(tmp.with_name("typed.onnx"), quantized.manifest)
        files = _Files(source, graph_file, *_place_pairs(graph_file, target, tmp))
        step = span(on_progress, 0.6 if quantized else 0.0, 0.8)
        step("building", 0.0)
        built = find_builder(target.runtime)(files.placed, tmp, target, options.shapes, step)
        on_progress("comparing with the model", 0.8)
        if target.runtime == "tensorrt":
            made = prove_plan(built, source, graph_file, tmp, place, options)
        else:
            made = _prove(built, files, target, tmp, place, max_error)
    chosen = (f"profile auto: {target.name} ({why})",) if why else ()
    return replace(made, notes=(*_cost_notes(quantized), *chosen, *made.notes))


def _check(source: Artefact, options: PlanOptions, out: StrPath | None) -> Path:
    """Where the engine goes. Raises BadInput, Unsupported for all that shows before the work."""
    target, request = options.target, options.request
    if target.runtime == "tensorrt":
        check_here(target, source)
    if request.to not in ("fp32", *TARGETS):
        raise BadInput(
            f"`precision` {request.to} is unknown", hint="one of: fp32, " + ", ".join(TARGETS)
        )
    if request.to != "fp32":
        check_request(request)
    return destination(source, out, RUNTIMES[target.runtime].suffix.format(profile=target.name))


def _quantize(
    source: Artefact, request: Request, tmp: Path, place: Path, on_progress: Progress
) -> Made:
    """Write `typed.onnx` next to `tmp`. What fails its evaluation is kept as rejected."""
    graph_file = tmp.with_name("typed.onnx")
    made = write_quantized(
        prepare(source, request, on_progress), graph_file, place.with_suffix(".onnx"), on_progress
    )
    if made.evaluation is not None and not made.evaluation.passed:
        keep_if_passed(graph_file, made, request.to)  # raises
    if made.search and made.search.interrupted:
        raise KeyboardInterrupt
    write_manifest(graph_file, made.manifest)
    return made


@dataclass(frozen=True)
class _Files:
    """The model, its graph in the requested precision, and that graph with its pairs moved."""

    source: Artefact
    graph_file: Artefact
    placed: Artefact
    moved: bool


def _place_pairs(graph_file: Artefact, target: Profile, tmp: Path) -> tuple[Artefact, bool]:
    """The graph with its INT8 pairs where the runtime has kernels, and whether they moved."""
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization.moving import move_pairs

    if not RUNTIMES[target.runtime].scales_outputs:
        return graph_file, False
    moved = move_pairs(Graph.open(graph_file.path), target.runtime)
    if moved is None:
        return graph_file, False
    return Artefact.open(moved.save(tmp.with_name("placed.onnx")).path), True


def _prove(
    built: BuildResult, files: _Files, target: Profile, tmp: Path, place: Path, max_error: float
) -> Made:
    """Compare what was built with the graph it was built from, and keep it."""
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.data.samples import random_feeds
    from deploykit.runtimes.engine import load

    source, graph_file, placed = files.source, files.graph_file, files.placed
    runtime = RUNTIMES[target.runtime]
    with load(placed, "cpu") as reference, load(tmp, runtime.usable("cpu")) as engine:
        sizes = parity_sizes(engine.inputs)
        feeds = [random_feeds(engine.inputs, each, seed) for seed, each in enumerate(sizes)]
        names = (_describe(files), place.name)
        parity = compare_engines(reference, engine, feeds, max_error=max_error, names=names)
        samples = golden.carry(graph_file, tmp)
        if samples is not None and files.moved:  # recorded with the pairs at other places
            replay, inputs = golden.open_samples(samples, tmp, engine.inputs, engine.outputs)
            samples = golden.loosen(samples, compare_engines(replay, engine, [inputs]))
    asked, kind = Graph.open(placed.path), runtime.opens[0]
    result = Graph.open(tmp) if kind == "onnx" else asked
    _check_integers(source, target, asked.precision, result.precision)
    before = graph_file.manifest if graph_file is not source else None
    evidence = Evidence(
        parity=parity,
        build=BuildRecord(target.name),
        source_graph=before.evidence if before else None,
        golden=samples,
    )
    manifest = onnx_manifest(
        result,
        (source.sha256,),
        tools=runtime.packages[:1],
        evidence=evidence,
        built_on=dict(built.built_on),
    )
    if kind != "onnx":
        manifest = replace(manifest, format=kind, sha256=Artefact(tmp).sha256, evidence=evidence)
    moved = [_PAIRS_MOVED] * files.moved
    notes = (*moved, *_precision_notes(asked.precision, manifest.precision))
    return keep_if_equal(tmp, Made(place, manifest, notes), parity)


def _describe(files: _Files) -> str:
    """How a message names the graph that was built: the user never sees the temporary file."""
    quantize = files.graph_file.manifest.evidence.quantize if files.graph_file.manifest else None
    if files.graph_file is files.source or quantize is None:
        return files.source.name
    return f"{files.source.name} in {quantize.to}"


def _check_integers(
    model: Artefact, target: Profile, asked: Mapping[str, int], built: Mapping[str, int]
) -> None:
    """Raise BadInput where ONNX Runtime runs no INT8 node as such: slower than float32."""
    if not asked.get("int8") or built.get("int8"):
        return
    source = next(verify.find_sources(model.path, model.manifest), None) if model.manifest else None
    raise BadInput(
        f"{model}: ONNX Runtime runs none of its {asked['int8']} INT8 nodes in integers: their "
        "pairs are placed for TensorRT, and the file does not record the ranges to move them",
        hint=f"deploykit build {source or 'FLOAT32.onnx'} --profile {target.name} "
        "--precision int8 --calib FILE.npz",
    )


def _cost_notes(quantized: Made | None) -> tuple[str, ...]:
    """What the lower precision cost, as notes."""
    if quantized is None:
        return ()
    search, evaluation = quantized.search, quantized.evaluation
    found = (search.why,) if search else ()
    cost = (f"against {evaluation.parity.a}: {evaluation.describe()}",) if evaluation else ()
    return (*found, *cost, *quantized.notes)


def _precision_notes(asked: Mapping[str, int], built: Mapping[str, int]) -> tuple[str, ...]:
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
