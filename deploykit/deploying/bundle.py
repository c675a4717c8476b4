"""Bundle a model with all that a device or a cluster needs to run it, with checksums."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from deploykit.building.build import build, few_integers
from deploykit.building.builder import AxisRange, parse_axis, parse_batch, ranges
from deploykit.core.artefact import Artefact, ArtefactLike, write_manifest, wrong_format
from deploykit.core.errors import BadInput, GateFailed, Unsupported, did_you_mean, quote
from deploykit.core.evidence import Evidence
from deploykit.core.files import StrPath, atomic_write
from deploykit.core.json_value import Record
from deploykit.core.precision import CALIBRATED, max_engine_error, names_of
from deploykit.core.profile import Profile, load_profile, profile_names
from deploykit.core.runtime import RUNTIMES
from deploykit.core.tensors import BATCH
from deploykit.deploying import STARTED, WRITERS
from deploykit.deploying.folder import (
    SERVED_NAME,
    Bundle,
    Contents,
    claim_bundle,
    epoch_s,
    seal,
    staged_folder,
    write_tar,
)
from deploykit.engines.data.samples import random_feeds, read_samples
from deploykit.engines.engine import Engine, load
from deploykit.evaluation import golden
from deploykit.evaluation.artefacts import Progress, carry_task, no_progress, onnx_manifest, stage
from deploykit.evaluation.feeds import parity_sizes
from deploykit.graph.graph import Graph
from deploykit.graph.preflight import find_mismatch
from deploykit.quantization.half_precision import open_graph

if TYPE_CHECKING:
    import numpy as np


def complete_model(
    source: Artefact, samples: StrPath | None, out: Path, runtime: str
) -> tuple[Artefact, tuple[str, ...]]:
    """Return `source` if it has a manifest and golden samples, else a completed copy, and a note.

    The copy is at `out`; ONNX Runtime runs the samples on the CPU, as `runtime` would round them.
    `samples`: inputs as an .npz or a folder, which replace recorded ones; None for random inputs.
    Raises BadInput for an INT8 or FP8 model with random inputs, which prove too little, and what
    opening and running it raises.
    """
    known = source.manifest
    if samples is None and known is not None and golden.find_samples(source.path, known):
        return source, ()
    graph = Graph.open(source.path)
    low = names_of(graph.precision) & set(CALIBRATED)
    if low and samples is None:
        raise BadInput(
            f"{source}: has no golden samples, and random inputs say too little of "
            f"{', '.join(sorted(low))}",
            hint="`samples`: an .npz or a folder of real inputs",
        )
    graph = graph.save(out)
    with open_graph(runtime, graph, out.parent) as engine:
        found = golden.record(engine, _inputs(engine, samples, source), out)
        if found is None:
            raise BadInput(f"{source}: its inputs and outputs are too large for golden samples")
        proof = known.evidence.batching if known else None
        proof = proof or golden.prove_batch(engine, out, found)
    found = replace(found, max_error=max(found.max_error, max_engine_error(graph.precision)))
    before = known.evidence if known else Evidence()
    evidence = replace(before, golden=found, batching=proof, weights=None)
    tools = ("onnx", "onnxruntime")
    manifest = onnx_manifest(
        graph, (source.sha256,), tools=tools, evidence=evidence, task=carry_task(source, out)
    )
    write_manifest(out, manifest)
    what = f"inputs of {samples}" if samples else "random inputs"
    note = f"golden samples recorded here with ONNX Runtime, on {what}"
    return Artefact.from_manifest(out, manifest), (note,)


def _inputs(engine: Engine, samples: StrPath | None, source: Artefact) -> dict[str, np.ndarray]:
    if samples is None:
        return random_feeds(
            engine.inputs, {**parity_sizes(engine.inputs)[0], BATCH: golden.SAMPLES}
        )
    read = read_samples(Path(samples), engine.inputs, task=source.task)
    size, _ = read.batching(golden.SAMPLES, engine.inputs)
    return next(read.batches(size))


@dataclass(frozen=True)
class Bundled(Record):
    """A bundle that was written. `bytes`: of all its files. `tar`: the same as one file."""

    path: Path
    bundle: Bundle
    bytes: int
    tar: Path | None = None
    notes: tuple[str, ...] = ()


def bundle(
    model: ArtefactLike,
    profile: str,
    *,
    out: StrPath,
    to: str = "docker",
    name: str | None = None,
    batch: str = "1,8,32",
    axes: Sequence[str] = (),
    samples: StrPath | None = None,
    wheels: bool = False,
    release: str | None = None,
    force: bool = False,
    on_progress: Progress = no_progress,
) -> Bundled:
    """Write a folder with `model` and all that the target needs to serve it.

    The same inputs give the same bytes; their time is `$SOURCE_DATE_EPOCH`.

    Args:
        model: An ONNX file.
        profile: The hardware target.
        out: The folder; with a name that ends in .tar, that file and the folder without the ending.
        to: "docker", "triton", "kserve" or "ray".
        name: The name that the model is served under [the file's].
        batch: "MIN,OPT,MAX" for TensorRT; `axes`: other dynamic axes, ["T=16,128,512"].
        samples: Inputs to record golden samples on [the recorded ones].
        wheels: Also write the packages to install, for a target without a network.
        release: Release of the target's host, "jetpack-6.2" or "cuda-12" [the profile's default].
        force: Replace a bundle that was changed.

    Raises BadInput for an engine, which belongs to one device, for a file made for ONNX Runtime
    where the target runs TensorRT, for INT8 pairs that the cluster's server would compute in
    float32, for a precision that the target lacks, and for an INT8 or FP8 model without golden
    samples; GateFailed for a model that did not pass its gate.
    """
    source, target = Artefact.open(model), load_profile(profile)
    _check_asked(to, target, {"wheels": wheels, "release": release})
    _check(source, target)
    sizes = parse_batch(batch)
    contents = Contents(
        model=source,
        profile=target,
        name=_served_name(name, source.path),
        batch=(sizes.minimum, sizes.optimum, sizes.maximum),
        wheels=wheels,
        release=release,
        axes=tuple(axes),
    )
    tar = Path(out).suffix == ".tar"
    folder = Path(out).with_suffix("") if tar else out
    place = claim_bundle(folder, (source, samples), tar=tar, force=force)
    packed = place.with_name(f"{place.name}.tar") if tar else None
    with ExitStack() as stack:
        tmp = stack.enter_context(atomic_write(packed)) if packed else None
        staged = stack.enter_context(staged_folder(place))
        on_progress("golden samples", 0.0)
        copy = stack.enter_context(stage(staged.parent / f"{contents.name}.onnx"))
        _check_runs(source, target, to, copy.parent)
        ready, notes = complete_model(source, samples, copy, target.runtime)
        contents = replace(contents, model=ready)
        _check_sizes(contents)
        notes = (*notes, *_on_gpu_without_tensorrt(to, contents))
        on_progress("collecting the files", 0.2)
        resolve_name(WRITERS[to])(staged, contents)
        on_progress("checksums", 0.8)
        made = seal(staged, contents, to)
        if tmp is not None:
            write_tar(staged, tmp, place.name)
    total = sum(entry.bytes for entry in made.files.values())
    return Bundled(place, made, total, packed, notes)


def _on_gpu_without_tensorrt(to: str, contents: Contents) -> Iterator[str]:
    """Yield what is slow or missing where ONNX Runtime alone runs the model on a GPU."""
    target, low = contents.profile, names_of(contents.manifest.precision) & set(CALIBRATED)
    if low and target.device != "cpu" and (to == "ray" or (to == "triton" and "fp8" in low)):
        kinds = " and ".join(sorted(low)).upper()
        yield (
            f"{to.capitalize()} serves the file with ONNX Runtime, which computes {kinds} nodes on "
            "a GPU in float32: an fp16 model is faster there"
        )
    if to == "ray" and target.boards:
        yield "PyPI's onnxruntime-gpu has no kernels for a Jetson: install NVIDIA's own there"


def _check_asked(to: str, target: Profile, for_docker: Mapping[str, object]) -> None:
    """Raise BadInput for a kind, profile or option that cannot be bundled."""
    if to not in WRITERS:
        raise BadInput(f"`to` {quote(to)}: is not a kind of bundle", hint=did_you_mean(to, WRITERS))
    for option, value in for_docker.items():
        if value and to != "docker":
            raise BadInput(f"`{option}` has no effect with `to` {to}")
    if target.runtime not in ("onnxruntime", "tensorrt"):  # only their packages have locks
        raise BadInput(
            f"profile '{target.name}': no bundle has {RUNTIMES[target.runtime].title}'s packages",
            hint="install them on the device and copy the built file there; or `profile` cpu",
        )
    if target.name not in profile_names():
        raise BadInput(
            f"profile '{target.name}': the device knows only deploykit's own profiles",
            hint=did_you_mean(target.name, profile_names(), "deploykit profiles lists them"),
        )
    epoch_s()


def _served_name(name: str | None, model: Path) -> str:
    """Return `name`, else the file's stem with each invalid character replaced by '-'."""
    found = name if name is not None else re.sub(r"[^A-Za-z0-9._-]+", "-", model.stem).strip(".-")
    if not SERVED_NAME.fullmatch(found):
        what = f"`name` {quote(name)}: cannot be" if name is not None else f"{model}: does not give"
        hint = "`name`: 1 to 63 letters, digits, '.', '_' or '-'; '.' and '-' are not the first"
        raise BadInput(f"{what} the name of a served model", hint=hint)
    return found


def _check_sizes(contents: Contents) -> None:
    """Raise BadInput where the device could not build an engine of these sizes."""
    inputs, given = contents.manifest.inputs, contents.batch
    if contents.profile.runtime == "tensorrt":
        batched = any(spec.batched for spec in inputs)
        batch = AxisRange(*given) if batched else AxisRange(1, 1, 1)
        ranges(inputs, batch, dict(map(parse_axis, contents.axes)))
    elif contents.axes:
        raise BadInput("`axes` has no effect: the target's runtime takes any size")


def _check(source: Artefact, target: Profile) -> None:
    """Raise BadInput for a file that is known not to run on the target."""
    if source.format == "tensorrt":
        raise BadInput(
            f"{source}: is a TensorRT engine, which belongs to the device that built it",
            hint="bundle the .onnx it was built from; the device builds its engine at first boot",
        )
    if source.format != "onnx":
        raise wrong_format(source, source.format, "an ONNX file")
    if source.manifest is not None and source.manifest.evidence.wrong:
        raise GateFailed(f"{source}: did not pass its gate: {source.manifest.evidence.wrong}")
    graph = Graph.open(source.path)
    precision = source.manifest.precision if source.manifest else graph.precision
    lacking = names_of(precision) - set(target.precisions)
    if lacking:
        raise BadInput(
            f"{source}: computes in {', '.join(sorted(lacking))}, which profile "
            f"'{target.name}' lacks",
            hint=f"it has {', '.join(target.precisions)}: deploykit quantize --profile "
            f"{target.name}",
        )
    if error := find_mismatch(source, graph, target):
        raise error


def _check_runs(source: Artefact, target: Profile, to: str, folder: Path) -> None:
    """Raise BadInput for a file that the kind's own server, ONNX Runtime, does not open.

    Nor may INT8 pairs be computed in float32 on a CPU: the build that the device makes at its first
    start is made here, and what a server that gets the file as it is makes of it.
    """
    from deploykit.building.onnxruntime import build as optimise

    graph, known = Graph.open(source.path), source.manifest
    pairs = any(node.op_type == "QuantizeLinear" for node in graph.model.graph.node)
    built = known is not None and bool(known.built_on)
    on_cpu = target.runtime == "onnxruntime"
    placed = pairs and on_cpu and not built and "int8" in graph.precision
    if to in STARTED:
        if placed:
            build(source, target.name, out=folder / "built.onnx")
        return
    try:
        load(source, "cpu").close()
    except BadInput as exc:
        raise BadInput(
            f"{exc.message}; with `to` {to} it is ONNX Runtime that serves it",
            hint=f"bundle an fp16 model, or `to` {' or '.join(STARTED)}, where TensorRT runs it",
        ) from exc
    except Unsupported:  # CUDA may have the kernels that its CPU lacks
        if on_cpu:
            raise
    if placed:
        optimise(source.path, folder / "optimised.onnx")
        first = f"deploykit build {source} --profile {target.name}"
        if few_integers(graph, run := Graph.open(folder / "optimised.onnx")):
            build(source, target.name, out=folder / "built.onnx")  # or it has another cure
            raise BadInput(
                f"{source}: ONNX Runtime on a CPU, which gets the file as it is, would run "
                f"{run.precision.get('int8', 0)} of its {graph.precision['int8']} INT8 nodes in "
                "integers",
                hint=f"bundle what this writes: {first}",
            )
