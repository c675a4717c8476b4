"""Build a model for a hardware profile, and prove that what was built computes the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name

import numpy as np

from deploykit.building.builder import (
    Builder,
    BuildJob,
    BuildResult,
    Shapes,
    check_options,
    count_precisions,
    open_graph_file,
    parse_axis,
    parse_batch,
)
from deploykit.core.arguments import checked
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput
from deploykit.core.evidence import (
    BuildRecord,
    CalibrationRecord,
    Evaluation,
    Evidence,
    Layer,
    PrecisionReadBack,
)
from deploykit.core.files import StrPath
from deploykit.core.precision import CALIBRATED, FLOATS, max_engine_error
from deploykit.core.profile import choose_profile, load_profile
from deploykit.core.runtime import RUNTIMES
from deploykit.core.tensors import BATCH, batch_axes, dynamic_sizes
from deploykit.engines.batching import spread_places
from deploykit.engines.data.samples import Samples, check_calibration, read_samples
from deploykit.engines.engine import Arrays, Engine, load
from deploykit.evaluation import golden
from deploykit.evaluation.artefacts import (
    Made,
    Progress,
    carry_task,
    destination,
    find_sources,
    keep_if_equal,
    named_files,
    no_progress,
    onnx_manifest,
    span,
    stage,
)
from deploykit.evaluation.feeds import (
    MOST_SAMPLES,
    Feeds,
    comparison_feeds,
    feeds_at_sizes,
    given_sizes,
    rows_that_fit,
    small_batches,
)
from deploykit.evaluation.parity import DRAWS_NUMBERS, compare_engines, draws_numbers
from deploykit.graph.edit import Editor
from deploykit.graph.graph import Graph
from deploykit.graph.parse import INTEGER_PRODUCTS, read_facts
from deploykit.quantization.half_precision import open_rounded
from deploykit.quantization.job import (
    Job,
    QuantizeRequest,
    accuracy_notes,
    calibration_record,
    evaluate_engine,
    evaluate_engines,
    golden_samples,
    prepare,
)
from deploykit.quantization.moving import move_pairs
from deploykit.quantization.qdq import Calibration, Range
from deploykit.quantization.quantize import (
    TARGETS,
    check_quantize_options,
    keep_if_passed,
    write_graph,
)

BUILD_MAX_ERROR = 1e-3  # fused float16 and INT8 kernels round at other places than the graph


@checked
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
    force: bool = False,
    on_progress: Progress = no_progress,
) -> Made:
    """Build `model` for a hardware profile; with `precision`, quantise it first.

    `calib`, `data`, `metric`, `max_drop`, `force`: as in `quantize`; without `precision`, `calib`
    finds the ranges that an INT8 graph lacks when its pairs are moved for a CPU. The file is
    compared on `data`, or `calib`. `shapes`: the sizes that a TensorRT engine is built for; another
    file is compared at these, if there are no samples. Raises GateFailed when the built file
    differs from its source by more than `max_error` (an engine: see `prove_plan`) or runs layers in
    more bits than asked, or when the quantised graph fails its evaluation; Unsupported for a target
    that cannot be built for here.
    """
    shapes = shapes or Shapes()
    auto = profile == "auto"
    target, why = choose_profile(shapes.device) if auto else (load_profile(profile), "")
    source = open_graph_file(model)
    request = QuantizeRequest(
        to=precision or "fp32",
        runtime=target.runtime,
        target=target,
        calib=Path(calib) if calib else None,
        data=Path(data) if data else None,
        metric=metric,
        max_drop=max_drop,
    )
    plans = target.runtime == "tensorrt"
    if plans:
        from deploykit.building import prove, tensorrt

        check_options(tensorrt.options_of(target, shapes, source))
        prove.check_here(target, source, shapes.device)
    else:
        shapes.refuse(target)
        axes = {name: each.optimum for name, each in map(parse_axis, shapes.axes)}
        batch = parse_batch(shapes.batch).optimum if shapes.batch else None
        request = replace(request, batch=batch, axis=axes)
    if request.to not in ("fp32", *TARGETS):
        raise BadInput(
            f"`precision` {request.to} is unknown", hint="one of: fp32, " + ", ".join(TARGETS)
        )
    if request.to != "fp32":
        check_quantize_options(request)
    elif request.calib is not None and not RUNTIMES[target.runtime].scales_outputs:
        raise BadInput("`calib` has no effect without `precision`", hint="`precision` int8")
    place = destination(
        source,
        out,
        RUNTIMES[target.runtime].suffix.format(profile=target.name),
        (calib, data, *shapes.plugins, *named_files(metric, profile)),
        kind=RUNTIMES[target.runtime].opens[0],
        force=force,
    )
    with stage(place) as tmp:
        samples, given = None, request.data or request.calib
        if given and (plans or request.to == "fp32"):  # else a quantization reads them
            samples = read_samples(given, Graph.open(source.path).inputs, task=source.task)
        job = BuildJob(source, target, request, shapes, tmp, place, max_error, samples)
        made = (prove.build_plan if plans else build_for_runtime)(job, on_progress)
    chosen = (f"profile auto: {target.name} ({why})",) if why else ()
    return replace(made, notes=(*chosen, *made.notes))


_FOLLOW = (
    "the INT8 pairs, placed for TensorRT, were placed for the CPU with the ranges that the "
    "graph records or that follow from its scales"
)
_MEASURED = (
    "the INT8 pairs were placed for the CPU; ranges that the graph does not hold are those of "
    "the calibration data"
)
_MOVED = "placed.onnx"  # the graph with its pairs moved


@dataclass(frozen=True)
class Placed:
    """The graph to build from, notes on its pairs, and the data that gave them ranges."""

    graph: Graph
    notes: tuple[str, ...] = ()
    calibration: CalibrationRecord | None = None


def place_pairs(job: BuildJob) -> Placed:
    """Return the source's graph, its pairs moved where ranges are known. Raises BadInput."""
    from deploykit.quantization.calibrate import calibrate

    source, runtime = job.source, RUNTIMES[job.target.runtime]
    graph, file, calib = Graph.open(source.path), job.tmp.with_name(_MOVED), job.request.calib
    if calib is None:
        moved = move_pairs(graph, runtime.name) if runtime.scales_outputs else None
        return Placed(moved[0].save(file), (_FOLLOW,)) if moved else Placed(graph)
    built = not read_facts(source.path).operators.isdisjoint(INTEGER_PRODUCTS)
    if built or "int8" not in graph.precision:
        raise BadInput(
            f"{source}: `calib` has no effect: the graph has no INT8 pairs to place",
            hint="leave it out" if built else "`precision` int8 quantizes it",
        )
    samples = read_samples(calib, graph.inputs, task=source.task)
    doubts = tuple(check_calibration(samples, graph.inputs))
    found: list[Calibration] = []

    def measure(plain: Graph) -> Mapping[str, Range]:
        found.append(calibrate(plain, samples))
        return found[0].clipped

    by_data = move_pairs(graph, runtime.name, measure)
    if by_data is None:
        raise _stuck(job, graph, "`calib` cannot help: ")
    record = calibration_record(job.request, found[0], doubts)
    return Placed(by_data[0].save(file), (_MEASURED, *doubts), record)


def place_foreign(job: BuildJob, graph: Graph, built: Graph) -> Placed | None:
    """Move the pairs of a foreign graph, if few nodes run in integers where they are."""
    if graph.path != job.source.path or not few_integers(graph, built):
        return None
    moved = move_pairs(graph, job.target.runtime, derive=True)
    if moved is None:
        return None
    notes = [_FOLLOW]
    if unknown := moved[1]:
        notes.append(
            f"{len(unknown)} tensor(s) that INT8 needs a range for stayed in float32, as no range "
            f"follows from the file's scales ({', '.join(unknown[:3])}); data give it: "
            f"deploykit build {job.source} --profile {job.target.name} --calib FILE.npz"
        )
    return Placed(moved[0].save(job.tmp.with_name(_MOVED)), tuple(notes))


def check_integers(job: BuildJob, graph: Graph, built: Graph) -> None:
    """Raise BadInput if ONNX Runtime runs few INT8 nodes in integers: slower than float32."""
    source, kind = job.source, "int8" if graph.precision.get("int8") else "int16"
    asked, runs = graph.precision.get(kind, 0), built.precision.get(kind, 0)
    if not asked or (runs and not (graph.path == source.path and few_integers(graph, built))):
        return
    if job.quantizes:  # to quantize again would change nothing
        raise BadInput(
            f"{source}: ONNX Runtime runs none of its {asked} INT8 nodes in integers",
            hint="build it without `precision`: float32 is faster than that",
        )
    start = f"ONNX Runtime runs {runs or 'none'} of its {asked} {kind.upper()} nodes in integers: "
    raise _stuck(job, graph, start)


def _stuck(job: BuildJob, graph: Graph, start: str) -> BadInput:
    source, target = job.source, job.target
    halves = sorted({"float16", "bfloat16"} & set(graph.precision))
    why = "its pairs are placed for TensorRT, and no ranges follow to move them"
    if halves:
        why = f"its pairs are placed for TensorRT, and it computes in {halves[0]} between"
    elif "int16" in graph.precision:
        why = "it has no kernels for 16 bits"
    found = find_sources(source.path, source.manifest) if source.manifest else iter(())
    again = f"{next(found, 'FLOAT32.onnx')} --profile {target.name}"
    return BadInput(
        f"{source}: {start}{why}",
        hint=f"deploykit build {again} --precision int8 --calib FILE.npz",
    )


def few_integers(graph: Graph, built: Graph) -> bool:
    return 2 * built.precision.get("int8", 0) < graph.precision.get("int8", 0)


_NOT_CHECKED = (
    "the accuracy of this graph was not checked: give labelled data (`data`), or quantize the "
    "float32 model for this profile"
)


def build_for_runtime(job: BuildJob, on_progress: Progress) -> Made:
    """Build the source into `tmp`, prove what was built and keep it at `place`.

    Its accuracy is measured once, on the file that is kept: after a change of precision always,
    else where the request has labelled data.
    """
    source, request, tmp = job.source, job.request, job.tmp
    quantize, before = None, None
    if job.quantizes:
        step = span(on_progress, 0.0, 0.6)
        quantize = prepare(source, request, step)
        graph, before = write_graph(quantize, tmp.with_name("typed.onnx"), job.place.name, step)
        placed = Placed(graph)
        if before.search and before.search.interrupted:
            raise KeyboardInterrupt
    else:
        placed = place_pairs(job)
    step = span(on_progress, 0.6 if quantize else 0.0, 0.8)
    step("building", 0.0)
    runtime = RUNTIMES[job.target.runtime]
    builder: Builder = resolve_name(runtime.builder)
    kind, built = runtime.opens[0], list[BuildResult]()

    def write(graph: Graph, out: Path) -> Graph:
        built.append(builder(Artefact.open(graph.path), out, job.target, job.shapes, step))
        return Graph.open(out) if kind == "onnx" else graph

    result = write(placed.graph, tmp)
    if kind == "onnx" and (moved := place_foreign(job, placed.graph, result)):
        placed, result = moved, write(moved.graph, tmp)
    graph, layers = placed.graph, built[-1].layers
    check_integers(job, graph, result)
    on_progress("comparing with the model", 0.8)
    sizes: list[_Run] = []
    evidence = _prove(job, quantize, placed, sizes)
    declared, notes = declare_outputs(graph, sizes)
    if notes:
        result = write(declared.save(tmp.with_name("declared.onnx")), tmp)
        with load(tmp, runtime.usable("cpu")) as engine:
            proof = golden.prove_batch(engine, tmp, evidence.golden)
            notes += golden.batching_notes(engine, proof)
        evidence = replace(evidence, batching=proof, notes=(*evidence.notes, *notes))
    evidence = replace(
        evidence,
        build=BuildRecord(job.target.name),
        source_graph=before,
        precision=_read_back(layers, graph.precision),
    )
    searched = [before.search.why] if before and before.search else []
    notes = [*searched, *(before.notes if before else ()), *evidence.notes, *built[-1].notes]
    notes += evidence.precision.wider if evidence.precision else ()
    manifest = onnx_manifest(
        result,
        (source.sha256,),
        tools=runtime.packages[:1],
        evidence=evidence,
        built_on={**built[-1].built_on, "model": source.name},
    )
    manifest = replace(manifest, task=carry_task(source, tmp))
    if kind != "onnx":
        manifest = replace(manifest, format=kind, sha256=Artefact(tmp).sha256, evidence=evidence)
    if layers is not None:
        manifest = replace(manifest, precision=count_precisions(layers))
    advice = " (INT8 for this target: build the float32 model with `precision` int8)"
    for name, count in graph.precision.items():
        runs = result.precision.get(name, 0)
        if name != "float32" and "float32" in result.precision and runs < count:
            notes.append(
                f"{name}: {count} nodes in the graph, {runs} in the built engine: the others "
                f"run in float32 here{advice if request.to not in CALIBRATED else ''}"
            )
    made = Made(job.place, manifest, tuple(notes))
    if made.parity and not made.parity.passed:
        return keep_if_equal(tmp, made, made.parity)
    return keep_if_passed(tmp, made, request.to)


_Run = tuple[Mapping[str, int], Mapping[str, tuple[int, ...]]]  # sizes of axes, shapes of outputs


def declare_outputs(graph: Graph, runs: Sequence[_Run]) -> tuple[Graph, list[str]]:
    """Return `graph` with outputs declared as they were in `runs`, and a note on each change.

    A size that is not as declared becomes an axis, by the name of the input's that has its size.
    """
    editor, notes = Editor(graph), []
    values = {value.name: value for value in editor.graph.output}
    for spec in graph.outputs:
        seen = [(sizes, shapes[spec.name]) for sizes, shapes in runs if spec.name in shapes]
        ranks = {len(shape) for _, shape in seen}
        if len(ranks) != 1:
            continue
        declared = spec.shape if ranks == {len(spec.shape)} else [-1] * ranks.pop()
        axes: list[int | str] = []
        for at, axis in enumerate(declared):
            if isinstance(axis, int) and any(shape[at] != axis for _, shape in seen):
                names = [n for n in seen[0][0] if all(s[n] == each[at] for s, each in seen)]
                axes.append(names[0] if names else f"{spec.name}_{at}")
            else:
                axes.append(axis)
        if tuple(axes) != spec.shape:
            dims = values[spec.name].type.tensor_type.shape.dim
            del dims[:]
            for each in axes:
                dims.add(**{"dim_param" if isinstance(each, str) else "dim_value": each})
            shape = ",".join(map(str, axes))
            notes.append(f"the file declares output {spec}; it is [{shape}]: corrected")
    return editor.finish(list(editor.graph.node)), notes


def _prove(job: BuildJob, quantize: Job | None, placed: Placed, runs: list[_Run]) -> Evidence:
    """Compare the built file with `placed`, and evaluate it. `runs` gets the sizes of each run."""
    graph, source, request, target = placed.graph, job.source, job.request, job.target
    runtime, tmp, name = RUNTIMES[target.runtime], job.tmp, job.place.name
    moved, bound = quantize is None and graph.path != source.path, job.max_error
    narrow = set(graph.precision) - {"float32"}
    if narrow and runtime.opens[0] != "onnx":
        bound = max(bound, max_engine_error(narrow))
    evaluation: Evaluation | None = None
    samples = None
    with load(tmp, runtime.usable("cpu")) as engine, ExitStack() as stack:
        if runtime.name != "onnxruntime" and "bfloat16" in graph.precision:
            reference = stack.enter_context(open_rounded(graph, tmp.parent))
        else:
            reference = stack.enter_context(load(graph.path, "cpu"))
        data = quantize.samples if quantize else job.samples
        feeds, fewer = _feeds(reference, engine, data, graph, job.shapes)
        notes, most = [*placed.notes, *fewer], rows_that_fit(feeds, graph.path)
        title = f"{source.name} in {request.to}" if quantize else source.name
        names = (title, name)

        joined: list[golden.Joined] = []
        keep = golden.keep_largest(feeds, joined)

        def each(number: int, ours: Arrays, outputs: Arrays) -> None:
            sizes = dynamic_sizes(engine.inputs, _shapes_of(feeds[number]))
            runs.append((sizes, _shapes_of(outputs)))
            keep(number, ours, outputs)

        parity = compare_engines(
            reference, engine, feeds, max_error=bound, names=names, each=each, random=data is None
        )
        if not parity.passed:
            drawn = draws_numbers(reference, feeds[-1])
            return Evidence(parity=parity, notes=(DRAWS_NUMBERS,) * drawn)
        if quantize or (moved and request.data):
            stack.close()
            reference = stack.enter_context(load(source, "cpu"))
        if quantize:
            evaluation = evaluate_engines(quantize, reference, engine, name, graph)
            samples = golden_samples(quantize, tmp, reference, engine)
            notes += accuracy_notes(quantize, evaluation)
        else:
            evaluation = evaluate_engine(reference, engine, request, source, name)
            samples = golden.carry(source, tmp)
            if samples is not None and moved:  # recorded with the pairs at other places
                samples = golden.loosen(samples, tmp, engine)
        proof = golden.prove_batch(engine, tmp, samples, most, joined)
        notes += golden.batching_notes(engine, proof)
    if moved and not evaluation:
        notes.append(_NOT_CHECKED)
    return Evidence(
        parity=parity,
        accuracy=evaluation,
        calibration=placed.calibration,
        golden=samples,
        batching=proof,
        notes=tuple(notes),
    )


def _shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _feeds(
    reference: Engine, engine: Engine, samples: Samples | None, graph: Graph, shapes: Shapes
) -> tuple[list[Feeds], tuple[str, ...]]:
    """Return inputs to compare on, and notes: some samples at several batches, or random ones."""
    ranges = dict(map(parse_axis, shapes.axes))
    rows = batch_axes(engine.inputs)
    if shapes.batch is not None:
        ranges |= dict.fromkeys(rows or (BATCH,), parse_batch(shapes.batch))
    usual = {axis: sizes.optimum for axis, sizes in ranges.items()}
    given_sizes(engine.inputs, None, usual, samples)
    if samples is not None:
        count = max(MOST_SAMPLES, samples.fixed_batch(engine.inputs) or 0)
        places = np.sort(spread_places(len(samples), count))
        samples = replace(samples, inputs=samples.rows(places))
    feeds, notes = comparison_feeds(reference, engine, samples, graph.path, usual)
    if samples is not None:
        return [*small_batches(samples, feeds, engine), *feeds], notes
    ends = [
        {axis: getattr(sizes, end) for axis, sizes in ranges.items()}
        for end in ("minimum", "maximum")
    ]
    found = dynamic_sizes(engine.inputs, _shapes_of(feeds[0]))
    more = [{**found, **sizes} for sizes in ends if sizes != usual]
    return [*feeds, *(feeds_at_sizes(engine.inputs, sizes=[sizes])[0] for sizes in more)], notes


def _read_back(
    layers: Sequence[Layer] | None, asked: Mapping[str, int]
) -> PrecisionReadBack | None:
    """Return the layers' precisions; `wider` names each of the graph's that no layer runs in."""
    if layers is None:
        return None
    executed = count_precisions(layers)
    runs = ", ".join(executed)
    wider = tuple(
        f"{name}: {count} nodes in the graph, no layer of the engine: they run in {runs} here"
        for name, count in asked.items()
        if name in FLOATS | {"int8"} and name not in executed
    )
    shares = {name: count / sum(executed.values()) for name, count in executed.items()}
    return PrecisionReadBack(
        tuple(layers),
        wider,
        shares,
        seen=1.0,
        wider_share=float(bool(wider)),
        allow_wider=True,  # the CPU that it runs on decides, which may be another
    )
