"""Export a PyTorch model to ONNX, and prove that both compute the same."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.core.artefact import ArtefactLike
from deploykit.core.errors import BadInput, GateFailed, Unsupported
from deploykit.core.evidence import Evidence, ExportRecord, Parity, Preflight
from deploykit.core.files import StrPath
from deploykit.core.manifest import Manifest
from deploykit.core.profile import Profile, load_profile
from deploykit.core.task import Task
from deploykit.core.tensors import BATCH, TensorSpec
from deploykit.engines.data.samples import random_feeds, read_samples
from deploykit.evaluation.artefacts import (
    Made,
    Progress,
    keep_if_equal,
    no_progress,
    onnx_manifest,
    stage,
)
from deploykit.evaluation.feeds import feeds_at_sizes, parity_sizes
from deploykit.evaluation.outputs import claim, named_files
from deploykit.exporting.load import ExportSource, check_source, open_source
from deploykit.exporting.proof import Proof, prove_export
from deploykit.exporting.task import Tasked, read_options, sides_of, with_task

if TYPE_CHECKING:
    import numpy as np
    import torch

    from deploykit.engines.torch.loaded import Loaded
    from deploykit.exporting.load import Tensors
    from deploykit.exporting.onnx import Exported


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
    preprocess: str | None = None,
    samples: StrPath | None = None,
    task: str | None = None,
    labels: StrPath | Sequence[str] | None = None,
    threshold: float | None = None,
    iou: float | None = None,
    boxes: int | None = None,
    tokenizer: StrPath | None = None,
    max_length: int | None = None,
    pooling: str | None = None,
    allow_pickle: bool = False,
    max_error: float | None = None,
    force: bool = False,
    on_progress: Progress = no_progress,
) -> Made:
    """Export a PyTorch model to ONNX and prove that it computes the same at several sizes.

    Args:
        model: a live `nn.Module`, which stays as it is; a .pt, .pth, .ckpt, .pt2, .safetensors or
            TorchScript file; or a Hugging Face folder.
        example_inputs: a tensor, a tuple by position or a dict by name; axis 0 is the batch. The
            model runs at its sizes, and on its integers, booleans and masks.
        out: by default MODEL.onnx.
        arch: builder of the model of bare weights: pkg.mod:callable, ./file.py:callable, a name of
            torchvision's, or "timm:NAME".
        inputs: specs in place of an example, 'x:float32[N,3,224,224]'; 'ids:int64[N,T<=512]' for an
            axis with a largest size.
        batch: "dynamic" or a size.
        dynamic_axes: other dynamic axes of the example, {"input_ids": {1: "T"}} or "T<=512".
        profile: the target, for opset and operators.
        preprocess: "imagenet" or a TOML file; the graph then takes bytes.
        samples: real inputs to compare on (.npz or a folder), else random ones.
        task: what the model is for, of `core.task.KINDS`; `labels` of its classes, names or a file,
            become part of it. `threshold` of a box, `iou` of two of a class, `boxes` at most;
            `tokenizer`: a tokenizer.json, `max_length` in tokens, `pooling` of them: "mean", "cls".
        max_error: the bound of max |a-b| / max |a| [1e-4, or 8 times what float32 itself gives].
        force: replace any file.

    Raises:
        BadInput: something is missing or wrong.
        MissingExtra: torch is not installed.
        GateFailed: the graph differs by more than `max_error`; NAME.rejected.onnx is kept.
    """
    check_source(model)
    target = load_profile(profile) if profile is not None else None
    text = str(batch)
    if text != "dynamic" and not (text.isascii() and text.isdigit() and int(text)):
        raise BadInput(f"`batch` {batch}: must be 'dynamic' or a size of at least 1")
    size = None if text == "dynamic" else int(text)
    options = read_options(
        task,
        labels=labels,
        threshold=threshold,
        iou=iou,
        boxes=boxes,
        tokenizer=tokenizer,
        max_length=max_length,
        pooling=pooling,
    )
    read = (samples, labels, tokenizer, *named_files(preprocess, profile, arch))
    place = claim(_destination(model, out), "onnx", (model, *read), force=force)
    from deploykit.engines.torch.loaded import load_preprocess  # MissingExtra without torch
    from deploykit.exporting.onnx import (
        DEFAULT_OPSET,
        example_sizes,
        export_module,
    )

    pixels, placing = load_preprocess(preprocess)
    if opset is None:
        opset = (target and target.opset) or DEFAULT_OPSET
    on_progress("loading the model", 0.0)
    source = open_source(model, example_inputs, inputs, dynamic_axes, arch, allow_pickle)
    job = with_task(source, options, pixels, placing)
    source = replace(source, loaded=_with_batch(job.loaded, size))
    rows = source.loaded.inputs[0].shape[:1]
    if job.task is not None and not {BATCH, 1}.issuperset(rows):  # its items come one by one
        raise BadInput(
            "`task`: the batch is a single item, or of any size", hint="`batch`: dynamic or 1"
        )
    feeds = _feeds(source, Path(samples) if samples else None, size, job.task)
    loaded, image = source.loaded, job.task.image if job.task else None
    usual = example_sizes(loaded.inputs)
    sizes = {axis: low + 1 for axis, (low, _) in loaded.limits.items() if low >= usual[axis]}
    sizes |= loaded.sizes
    if image and image.multiple > 1:
        sizes |= sides_of(loaded.inputs[0], image.multiple)
    with stage(place) as tmp:
        on_progress("exporting", 0.1)
        done = export_module(
            loaded.module,
            loaded.inputs,
            loaded.outputs,
            tmp,
            opset=opset,
            sizes=sizes,
            example=loaded.example,
        )
        on_progress("comparing with PyTorch", 0.7)
        with _naming_causes(done):
            proof = prove_export(source, tmp, feeds, max_error, place.name, done)
        _check_found(proof.parity, job, place)
        with _naming_causes(replace(done, decided=proof.decided)):
            on_progress("writing the manifest", 0.95)
            manifest, notes = _record(source, job, done, proof, target, tmp)
            return keep_if_equal(tmp, Made(place, manifest, notes), proof.parity)


def _check_found(parity: Parity, job: Tasked, place: Path) -> None:
    """Raise GateFailed where no box was compared: a detector with a threshold finds none in noise.

    An untrained detector gives equal scores, and rounding decides which of its boxes remain.
    """
    task = job.task
    if task is None or not task.outputs.boxes:
        return
    if all(row.zero or not row.values for row in parity.rows if row.output == task.outputs.scores):
        raise GateFailed(
            f"{place.name}: in the images of the comparison it finds no box that PyTorch finds, "
            "which shows nothing",
            hint=_hint_of_weights(job.loaded.module)
            or "`samples`: a folder of images in which the trained model finds some",
        )


def _hint_of_weights(module: Any) -> str | None:
    """Say that weights are NaN or infinite, as after a training that diverged."""
    weights = list(module.parameters())
    broken = sum(not bool(each.float().isfinite().all()) for each in weights)
    if not broken:
        return None
    return f"NaN or infinity is in {broken} of its {len(weights)} weights: export an earlier state"


@contextlib.contextmanager
def _naming_causes(done: Exported) -> Iterator[None]:
    """Add to the error of a graph that is not the model why it is not, and a cure."""
    from deploykit.exporting.onnx import add_cause

    try:
        yield
    except (BadInput, GateFailed, Unsupported) as exc:
        if isinstance(exc, GateFailed) and (hint := _hint_of_weights(done.job.module)):
            exc.hint = hint
        else:
            add_cause(exc, done.job, done.decided)
        raise


def _record(
    source: ExportSource,
    job: Tasked,
    done: Exported,
    proof: Proof,
    target: Profile | None,
    tmp: Path,
) -> tuple[Manifest, tuple[str, ...]]:
    from deploykit.graph import preflight
    from deploykit.graph.graph import Graph

    graph, name = Graph.open(tmp), target.name if target else None
    problems = tuple(preflight.unsupported(graph, target)) if target else ()
    evidence = Evidence(
        parity=proof.parity,
        source=source.record,
        export=ExportRecord(done.exporter, done.opset, done.fallback or None, name, job.pixels),
        preflight=Preflight(name, problems) if name else None,
        batching=proof.batching,
        golden=proof.recorded,
    )
    tools, task = ("torch", "onnx", "onnxscript"), job.keep_tokenizer(tmp)
    manifest = onnx_manifest(graph, source.hashes, tools=tools, evidence=evidence, task=task)
    notes = [*job.notes, *source.loaded.notes, *proof.parity.warnings]
    if source.loaded.ran_pickle:
        notes.append(f"{source.name} ran code of its own while it was loaded (`allow_pickle`)")
    if done.fallback:
        notes.append(f"exported with torch's older {done.exporter} exporter: {done.fallback}")
    elif proof.decided:
        notes.append(f"the graph is for sizes with {', '.join(map(str, proof.decided))}")
    if proof.recorded is None:
        notes.append("no golden samples recorded: inputs and outputs are too large")
    notes += [
        f"preflight for {name}: node '{each.node}' ({each.operator}): {each.why}"
        for each in problems
    ]
    return manifest, (*notes, *proof.notes)


def _destination(model: ArtefactLike | torch.nn.Module, out: StrPath | None) -> Path:
    if out is not None:
        return Path(out)
    if not isinstance(model, (str, os.PathLike)):
        raise BadInput("`out` is missing: a live module has no file name", hint="out='model.onnx'")
    source = Path(model)
    if not source.is_dir():
        return source.with_suffix(".onnx")
    base = source if source.name not in ("", "..") else source.resolve()
    return base.parent / f"{source.resolve().name or 'model'}.onnx"


def _with_batch(loaded: Loaded, size: int | None) -> Loaded:
    if size is None:
        return loaded

    def fix(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(spec, shape=tuple(size if axis == BATCH else axis for axis in spec.shape))
            for spec in specs
        )

    first, second = loaded.parts or (None, None)
    parts = (_with_batch(first, size), _with_batch(second, size)) if first and second else None
    return replace(loaded, inputs=fix(loaded.inputs), outputs=fix(loaded.outputs), parts=parts)


def _feeds(
    source: ExportSource, samples: Path | None, size: int | None, task: Task | None
) -> list[dict[str, np.ndarray]]:
    """Return inputs to compare on: examples, and others at every size of the dynamic axes."""

    inputs, limits, example = source.loaded.inputs, source.loaded.limits, source.loaded.example
    feeds: list[dict[str, np.ndarray]] = []
    if example.arrays:
        feeds.append(example.feeds(inputs, example.sizes(inputs), floats=True))
    if task and task.image and not task.image.height:
        feeds.append(random_feeds(inputs, sides_of(inputs[0], task.image.multiple)))
    if samples is None:
        return feeds + feeds_at_sizes(inputs, limits, example)
    found, sizes = read_samples(samples, inputs, task=task), parity_sizes(inputs, limits)
    counts = [size] if size else [each[BATCH] for each in sizes if BATCH in each]
    for count in counts or [1]:
        first = next(found.batches(count))
        if len(next(iter(first.values()))) == count:
            feeds.append(first)
    if not feeds:
        raise BadInput(f"{samples}: {len(found)} samples do not fill a batch of {counts[0]}")
    return feeds
