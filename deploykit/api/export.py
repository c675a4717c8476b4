"""Export a PyTorch model to ONNX, and prove that both compute the same."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deploykit.api import batching, golden
from deploykit.api.artefacts import Made, Progress, keep_if_equal, no_progress, onnx_manifest, stage
from deploykit.api.feeds import MOST_SAMPLES, first_rows, rows_note, rows_that_fit
from deploykit.api.outputs import claim, named_files
from deploykit.api.source import ExportSource, check_source, open_source
from deploykit.core.artefact import ArtefactLike
from deploykit.core.errors import BadInput, DeploykitError, GateFailed, Unsupported
from deploykit.core.evidence import (
    Evidence,
    ExportRecord,
    GoldenSamples,
    Parity,
    Preflight,
    Problem,
    RowIndependence,
)
from deploykit.core.paths import StrPath
from deploykit.core.preprocess import Preprocess
from deploykit.core.profile import load_profile
from deploykit.core.tensors import BATCH, TensorSpec, parse_spec
from deploykit.runtimes.data.preprocess import load_preprocess

if TYPE_CHECKING:
    import numpy as np
    import torch

    from deploykit.api.source import Tensors
    from deploykit.core.profile import Profile
    from deploykit.exporters.onnx import Exported
    from deploykit.runtimes.engine import Arrays, Engine
    from deploykit.runtimes.rows import JoinedRun
    from deploykit.runtimes.torch.engine import TorchEngine
    from deploykit.runtimes.torch.loaded import Loaded

    AxisLimits = Mapping[str, tuple[int, int | None]]  # least and largest size by axis

EXPORT_MAX_ERROR = 1e-4  # float32 on both sides: only the order of additions differs


def export(
    model: ArtefactLike | torch.nn.Module,
    example_inputs: Tensors | None = None,
    *,
    out: StrPath | None = None,
    arch: str | None = None,
    inputs: Sequence[str] = (),
    batch: str | int = "dynamic",
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    opset: int | None = None,
    profile: str | None = None,
    exporter: str = "auto",
    preprocess: str | None = None,
    samples: StrPath | None = None,
    allow_pickle: bool = False,
    max_error: float | None = None,
    force: bool = False,
    on_progress: Progress = no_progress,
) -> Made:
    """Export a PyTorch model to ONNX and prove that it computes the same at several sizes.

    `model`: a live `nn.Module`, which stays as it is; a .pt, .pth, .ckpt, .pt2, .safetensors or
    TorchScript file; or a Hugging Face folder. `example_inputs`: a tensor, a tuple of tensors by
    position or a dict of tensors by name, from which the specs follow; axis 0 is the batch, and
    `dynamic_axes` names further axes of any size, {"input_ids": {1: "T"}}. `inputs` gives the specs
    instead, 'x:float32[N,3,224,224]' for each. `out`: by default the model's name with .onnx; a
    live module needs one.

    `arch`: what builds the model of bare weights, pkg.mod:callable or ./file.py:callable. `batch`:
    "dynamic" or a size. `profile`: the target, which decides the opset and whose operators are
    checked. `preprocess`: "imagenet" or a TOML file; the graph then takes bytes. `samples`: real
    inputs (.npz or a folder) to compare on, of which a few are kept as golden samples; without
    them, seeded random ones. `max_error`: the bound of max |a-b| / max |a|; where None it
    is 1e-4, or 8 times what float32 itself gives: the model in float32 against it in float64.
    `force`: replace a file that deploykit did not write.

    Raises BadInput for what is missing or wrong, MissingExtra, and GateFailed past `max_error`; the
    file is then kept as NAME.rejected.onnx.
    """
    check_source(model)
    target, size = load_profile(profile) if profile is not None else None, _batch_size(batch)
    read = (samples, *named_files(preprocess, profile, arch))
    place = claim(_destination(model, out), "onnx", (model, *read), force=force)
    pixels = load_preprocess(preprocess) if preprocess else None
    opset = _check_options(exporter, opset, target)
    on_progress("loading the model", 0.0)
    source = open_source(
        model, example_inputs, tuple(map(parse_spec, inputs)), dynamic_axes, arch, allow_pickle
    )
    source = replace(source, loaded=_prepare(source.loaded, pixels, size))
    feeds = _feeds(source, Path(samples) if samples else None, size)
    with stage(place) as tmp:
        on_progress("exporting", 0.1)
        done = _write(source.loaded, tmp, opset, exporter)
        on_progress("comparing with PyTorch", 0.7)
        with _naming_decisions(done, source.loaded):
            proof = _prove(source, tmp, feeds, max_error, place.name, done.sizes)
            on_progress("writing the manifest", 0.95)
            made = _record(source, done, place, tmp, proof, target, pixels)
            return keep_if_equal(tmp, made, proof.parity)


@contextlib.contextmanager
def _naming_decisions(done: Exported, loaded: Loaded) -> Iterator[None]:
    """Add to the error of a graph that is not the model which branches it keeps, and the cure."""
    from deploykit.exporters.onnx import add_cause

    try:
        yield
    except (BadInput, GateFailed, Unsupported) as exc:
        add_cause(exc, loaded.module, loaded.inputs, done.sizes, done.decided)
        raise


class _Proof(NamedTuple):
    """What was measured of the graph."""

    parity: Parity
    recorded: GoldenSamples | None
    batching: RowIndependence
    notes: tuple[str, ...]


def _record(
    source: ExportSource,
    done: Exported,
    place: Path,
    tmp: Path,
    proof: _Proof,
    target: Profile | None,
    pixels: Preprocess | None,
) -> Made:
    """The manifest of the graph at `tmp`, and the notes for the user."""
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization import preflight

    graph = Graph.open(tmp)
    problems = tuple(preflight.unsupported(graph, target)) if target else ()
    evidence = Evidence(
        parity=proof.parity,
        source=source.record,
        export=ExportRecord(
            done.exporter,
            done.opset,
            done.fallback or None,
            target.name if target else None,
            pixels,
        ),
        preflight=Preflight(target.name, problems) if target else None,
        batching=proof.batching,
        golden=proof.recorded,
    )
    tools = ("torch", "onnx", "onnxscript")
    manifest = onnx_manifest(graph, source.hashes, tools=tools, evidence=evidence)
    warnings = proof.parity.warnings
    notes = (*_notes(source, done, proof.recorded, target, problems, warnings), *proof.notes)
    return Made(place, manifest, notes)


def _destination(model: ArtefactLike | torch.nn.Module, out: StrPath | None) -> Path:
    """Where the graph goes: `out`, else next to the model."""
    source = Path(model) if isinstance(model, (str, os.PathLike)) else None
    if out is None and source is None:
        raise BadInput("`out` is missing: a live module has no file name", hint="out='model.onnx'")
    folder = source is not None and source.is_dir()
    own = None
    if source is not None and folder:
        base = source if source.name not in ("", "..") else source.resolve()
        own = base.parent / f"{source.resolve().name or 'model'}.onnx"
    return Path(out) if out is not None else own or Path(str(source)).with_suffix(".onnx")


def _check_options(exporter: str, opset: int | None, target: Profile | None) -> int:
    """The opset to write. Raises BadInput for an unknown exporter, MissingExtra without torch."""
    from deploykit.exporters import onnx as exporters

    if exporter not in exporters.EXPORTERS:
        known = ", ".join(exporters.EXPORTERS)
        raise BadInput(f"`exporter` {exporter}: unknown", hint=f"one of: {known}")
    if opset is not None:
        return opset
    return exporters.opset_for(target) if target else exporters.DEFAULT_OPSET


def _batch_size(batch: str | int) -> int | None:
    """None for "dynamic", else the fixed size."""
    text = str(batch)
    if text == "dynamic":
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise BadInput(f"`batch` {batch}: must be 'dynamic' or a size of at least 1")
    return int(text)


def _prepare(loaded: Loaded, pixels: Preprocess | None, size: int | None) -> Loaded:
    """`loaded` behind the preprocessing, its batch fixed at `size` unless that is None."""
    if pixels is not None:
        from deploykit.runtimes.torch.loaded import with_preprocess

        loaded = with_preprocess(loaded, pixels)
    if size is None:
        return loaded

    def fix(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(spec, shape=tuple(size if axis == BATCH else axis for axis in spec.shape))
            for spec in specs
        )

    return replace(loaded, inputs=fix(loaded.inputs), outputs=fix(loaded.outputs))


def _feeds(
    source: ExportSource, samples: Path | None, size: int | None
) -> list[dict[str, np.ndarray]]:
    """Inputs to compare on: the examples, and others at every size of the dynamic axes."""
    from deploykit.core.tensors import mismatch
    from deploykit.measure.evaluate.feeds import feeds_at_sizes, parity_sizes
    from deploykit.runtimes.data.samples import read_samples

    inputs, limits = source.loaded.inputs, source.loaded.limits
    feeds: list[dict[str, np.ndarray]] = []
    if source.example is not None:
        example = dict(source.example)
        if not any(mismatch(s, example[s.name].dtype.name, example[s.name].shape) for s in inputs):
            feeds.append(example)  # else the batch is fixed at another size, or it takes bytes
    if samples is None:
        return feeds + feeds_at_sizes(inputs, limits)
    found, sizes = read_samples(samples, inputs), parity_sizes(inputs, limits)
    counts = [size] if size else [each[BATCH] for each in sizes if BATCH in each]
    for count in counts or [1]:
        first = next(found.batches(count))
        if len(next(iter(first.values()))) == count:
            feeds.append(first)
    if not feeds:
        raise BadInput(f"{samples}: {len(found)} samples do not fill a batch of {counts[0]}")
    return feeds


def _write(loaded: Loaded, tmp: Path, opset: int, exporter: str) -> Exported:
    from deploykit.exporters.capture import example_sizes
    from deploykit.exporters.onnx import export_module

    inputs, outputs, usual = loaded.inputs, loaded.outputs, example_sizes(loaded.inputs)
    sizes = {axis: low + 1 for axis, (low, _) in loaded.limits.items() if low >= usual[axis]}
    return export_module(
        loaded.module, inputs, outputs, tmp, opset=opset, exporter=exporter, sizes=sizes
    )


def _prove(
    source: ExportSource,
    tmp: Path,
    feeds: Sequence[Mapping[str, np.ndarray]],
    max_error: float | None,
    out_name: str,
    sizes: Mapping[str, int],
) -> _Proof:
    """Compare the graph with the module, record golden samples next to it, prove its batch."""
    from deploykit.runtimes.engine import load
    from deploykit.runtimes.torch.engine import TorchEngine

    loaded, names = source.loaded, (source.name, out_name)
    joined: list[JoinedRun] = []
    most = rows_that_fit(feeds, tmp)
    feeds = first_rows(feeds, most)
    with TorchEngine(loaded, source.name, "cpu", None) as reference:
        with load(tmp, "cpu") as exported:
            bound = EXPORT_MAX_ERROR if max_error is None else max_error
            keep = batching.keep_runs(exported, feeds, joined)
            parity = _compare(reference, exported, feeds, bound, names, sizes, keep)
            recorded = golden.record(reference, _few(feeds, loaded.inputs), tmp)
            rows = batching.prove_batch(exported, tmp, recorded, most, joined)
            notes = (*rows_note(most), *batching.notes(exported, rows))
        if max_error is None and not parity.passed:  # the graph is closed: float64 needs its memory
            few = feeds if most == MOST_SAMPLES else feeds[:1]  # in float64, with slow kernels
            parity = _add_float32_errors(parity, reference, few)
        return _Proof(parity, recorded, rows, notes)


def _add_float32_errors(
    parity: Parity, reference: TorchEngine, feeds: Sequence[Mapping[str, np.ndarray]]
) -> Parity:
    """What float32 itself gives: in float64, else in other batches; the largest feeds left out.

    In float64 the smallest feeds come first: most graphs pass with them. Other batches need rows.
    """
    from deploykit.measure.evaluate.parity import add_float32_errors, in_other_batches

    feeds = sorted(feeds, key=lambda each: sum(array.size for array in each.values()))
    feeds = feeds[: max(1, len(feeds) - 1)]
    try:
        return add_float32_errors(parity, reference, reference.in_float64, feeds)
    except DeploykitError:  # its code names float32
        with contextlib.suppress(DeploykitError):  # nor does it take single rows
            others = partial(in_other_batches, reference)
            parity = add_float32_errors(parity, reference, others, feeds[::-1])
        return parity


def _compare(
    reference: Engine,
    exported: Engine,
    feeds: Sequence[Mapping[str, np.ndarray]],
    max_error: float,
    names: tuple[str, str],
    sizes: Mapping[str, int],
    keep: Callable[[int, Arrays, Arrays], None],
) -> Parity:
    """Parity over all sizes; where the graph fails at one, the axis that it fixed is named.

    `sizes`: what the dynamic axes were exported at. `keep`: as `each` of a comparison.
    """
    from deploykit.measure.evaluate.parity import compare_engines

    try:
        return compare_engines(
            reference, exported, feeds, max_error=max_error, names=names, each=keep
        )
    except DeploykitError as exc:
        axis = _fixed_axis(reference, exported, sizes)
        if axis is None:
            raise
        raise BadInput(
            f"{names[1]}: the exporter fixed axis {axis}: at another size the graph does not "
            f"compute what the model does ({exc.message})",
            hint="export with a fixed size for that axis, or find where the model reads it as a "
            "Python number",
        ) from exc


def _fixed_axis(reference: Engine, exported: Engine, base: Mapping[str, int]) -> str | None:
    """The first dynamic axis along which the graph fails and the model does not.

    `base`: the sizes at which the graph was exported. None where it fails at these too.
    """
    from deploykit.measure.evaluate.feeds import parity_sizes
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.runtimes.data.samples import random_feeds

    others = parity_sizes(reference.inputs, reference.limits)
    changes = [{}, *({axis: each[axis]} for axis in base for each in others if axis in each)]
    for change in changes:
        feeds = random_feeds(reference.inputs, {**base, **change})
        try:
            reference(feeds)
        except DeploykitError:
            continue
        try:
            compare_engines(reference, exported, [feeds])
        except DeploykitError:
            return next(iter(change), None)
    return None


def _few(
    feeds: Sequence[Mapping[str, np.ndarray]], inputs: tuple[TensorSpec, ...]
) -> Mapping[str, np.ndarray]:
    """Golden samples: the first few rows of the largest feeds, or all of a fixed batch."""
    largest = max(feeds, key=lambda each: sum(array.nbytes for array in each.values()))
    if not inputs[0].batched or len({spec.shape[0] for spec in inputs}) > 1:
        return largest
    return {name: array[: golden.SAMPLES] for name, array in largest.items()}


def _notes(
    source: ExportSource,
    done: Exported,
    recorded: GoldenSamples | None,
    target: Profile | None,
    problems: Sequence[Problem],
    warnings: Sequence[str],
) -> tuple[str, ...]:
    notes = [*source.loaded.notes, *warnings]
    if source.loaded.ran_pickle:
        notes.append(f"{source.name} ran code of its own while it was loaded (`allow_pickle`)")
    if done.decided and not done.fallback:
        notes.append(f"the graph is for sizes with {', '.join(done.decided)}")
    if done.fallback:
        notes.append(f"exported with torch's older {done.exporter} exporter: {done.fallback}")
    if recorded is None:
        notes.append("no golden samples recorded: inputs and outputs are too large")
    notes += [
        f"preflight for {target.name}: node '{each.node}' ({each.operator}): {each.why}"
        for each in problems
        if target
    ]
    return tuple(notes)
