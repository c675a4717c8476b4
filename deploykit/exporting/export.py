"""Export a PyTorch model to ONNX, and prove that both compute the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from deploykit.core.artefact import ArtefactLike, Manifest, sniff, wrong_format
from deploykit.core.errors import BadInput, DeploykitError, GateFailed, Unsupported
from deploykit.core.evidence import (
    Evidence,
    ExportRecord,
    GoldenSamples,
    Parity,
    ParityRow,
    Preflight,
    RowIndependence,
    SourceRecord,
)
from deploykit.core.files import StrPath, check_readable, sha256
from deploykit.core.profile import Profile, load_profile
from deploykit.core.tensors import BATCH, TensorSpec, batch_axes, parse_spec
from deploykit.engines.data.examples import Example
from deploykit.engines.data.samples import random_feeds, read_samples
from deploykit.engines.engine import Arrays, Engine, RecordedEngine, load
from deploykit.evaluation import golden
from deploykit.evaluation.artefacts import (
    Made,
    Progress,
    claim,
    keep_if_equal,
    named_files,
    no_progress,
    onnx_manifest,
    stage,
)
from deploykit.evaluation.feeds import (
    MOST_SAMPLES,
    feeds_at_sizes,
    first_rows,
    parity_sizes,
    rows_note,
    rows_that_fit,
)
from deploykit.evaluation.parity import add_float32_errors, compare_engines, in_other_batches
from deploykit.exporting.task import Tasked, read_options, sides_of, with_task

if TYPE_CHECKING:
    import torch

    from deploykit.engines.torch.engine import TorchEngine
    from deploykit.engines.torch.loaded import Loaded
    from deploykit.exporting.onnx import Exported
    from deploykit.exporting.reasons import Decision

    Tensors = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]

DynamicAxes = Mapping[str, Mapping[int, str]]


def export(
    model: ArtefactLike | torch.nn.Module,
    example_inputs: Tensors | None = None,
    *,
    out: StrPath | None = None,
    arch: str | None = None,
    inputs: Sequence[str] = (),
    batch: str | int = "dynamic",
    dynamic_axes: DynamicAxes | None = None,
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
    path = _check_source(model)
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
    place = claim(_destination(path, out), "onnx", (model, *read), force=force)
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
    source = _open_source(model, path, example_inputs, inputs, dynamic_axes, arch, allow_pickle)
    job = with_task(source.loaded, path, options, pixels, placing)
    job = replace(job, loaded=_with_batch(job.loaded, size))
    loaded, image = job.loaded, job.task.image if job.task else None
    if job.task and not {BATCH, 1}.issuperset(loaded.inputs[0].shape[:1]):  # items come one by one
        raise BadInput(
            "`task`: the batch is a single item, or of any size", hint="`batch`: dynamic or 1"
        )
    feeds = _feeds(job, Path(samples) if samples else None, size)
    usual = example_sizes(loaded.inputs)
    sizes = {axis: low + 1 for axis, (low, _) in loaded.limits.items() if low >= usual[axis]}
    sizes |= loaded.sizes
    if image and image.multiple > 1:
        sizes |= sides_of(loaded.inputs[0], image.multiple)
    with stage(place) as tmp:
        on_progress("exporting", 0.1)
        done = export_module(loaded, tmp, opset=opset, sizes=sizes)
        on_progress("comparing with PyTorch", 0.7)
        with _naming_causes(done):
            proof = prove_export(loaded, (source.name, place.name), tmp, feeds, max_error, done)
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
    notes = [*job.notes, *job.loaded.notes, *proof.parity.warnings]
    if job.loaded.ran_pickle:
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


def _destination(source: Path | None, out: StrPath | None) -> Path:
    if out is not None:
        return Path(out)
    if source is None:
        raise BadInput("`out` is missing: a live module has no file name", hint="out='model.onnx'")
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


def _feeds(job: Tasked, samples: Path | None, size: int | None) -> list[dict[str, np.ndarray]]:
    """Return inputs to compare on: examples, and others at every size of the dynamic axes."""
    loaded, task = job.loaded, job.task
    inputs, limits, example = loaded.inputs, loaded.limits, loaded.example
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


# The proof that the graph computes what the model does, at several sizes.

_FAR = 512  # the largest size that is tried where a branch may end
EXPORT_MAX_ERROR = 1e-4  # float32 on both sides: only the order of additions differs

_IN_PARTS = "compared in two parts: the values by which the answers are chosen, then the choice"


class Proof(NamedTuple):
    """The measurements of an exported graph. `decided`: which sizes it is for."""

    parity: Parity
    recorded: GoldenSamples | None
    batching: RowIndependence
    notes: tuple[str, ...]
    decided: tuple[Decision, ...]


def prove_export(
    loaded: Loaded,
    names: tuple[str, str],
    tmp: Path,
    feeds: Sequence[Mapping[str, np.ndarray]],
    max_error: float | None,
    done: Exported,
) -> Proof:
    """Compare the graph `tmp` with its source, record golden samples next to it, prove its batch.

    `names`: what the comparison calls the two. `feeds`: the inputs to compare on, at several sizes.
    `max_error`: the user's bound. `done`: how it was exported.
    """
    from deploykit.engines.torch.engine import TorchEngine

    most = rows_that_fit(feeds, tmp)
    feeds = first_rows(feeds, most, loaded.inputs)
    bound = EXPORT_MAX_ERROR if max_error is None else max_error
    with TorchEngine(loaded, names[0], "cpu", None) as reference:
        reference.limits = loaded.limits
        feeds, left_out = _taken(reference, feeds, loaded.example)
        check = partial(compare_engines, feeds_list=feeds, max_error=bound, names=names)
        with load(tmp, "cpu") as exported:
            joined: list[golden.Joined] = []
            parity = check(reference, exported, each=golden.keep_largest(feeds, joined))
            few, recorded = _record_few(reference, feeds, tmp)
            rows = golden.prove_batch(exported, tmp, recorded, most, joined)
            notes = (*left_out, *rows_note(most))
            chooses = all("float" not in spec.dtype for spec in loaded.outputs)
            if loaded.parts is not None and (chooses or not parity.passed):
                values, first = _compare_parts(loaded, tmp, done, exported, check, most)
                parity, rows = replace(parity, rows=values), rows if rows.passed else first
                notes += (_IN_PARTS,)
            notes += golden.batching_notes(exported, rows)
            decided = tuple(x for x in done.decided if _limits(x, reference, exported, done))
            if parity.passed:
                notes += _probe_outside(reference, exported, few)
        if max_error is None and not parity.passed:  # the graph is closed: float64 needs its memory
            least = feeds if most == MOST_SAMPLES else feeds[:1]  # in float64, with slow kernels
            least = sorted(least, key=lambda each: sum(array.size for array in each.values()))
            least = least[: max(1, len(least) - 1)]  # most graphs pass with the smallest
            try:
                parity = add_float32_errors(parity, reference, reference.in_float64, least)
            except DeploykitError:  # its code names float32: other batches, which need rows
                with contextlib.suppress(DeploykitError):  # it takes no single rows either
                    by_rows = partial(in_other_batches, reference)
                    parity = add_float32_errors(parity, reference, by_rows, least[::-1])
        return Proof(parity, recorded, rows, notes, decided)


def _taken(
    reference: Engine, feeds: Sequence[Mapping[str, np.ndarray]], example: Example
) -> tuple[list[Mapping[str, np.ndarray]], tuple[str, ...]]:
    """Return the feeds that the model takes, with the example's values where it refuses others.

    A size at which it takes neither is left out, with a note; the first feeds are the example.
    """
    if not example.arrays:
        return list(feeds), ()
    kept, lost = [*feeds[:1]], []
    for each in feeds[1:]:
        sizes = Example(each).sizes(reference.inputs)
        for tried in (each, example.feeds(reference.inputs, sizes, floats=True)):
            with contextlib.suppress(DeploykitError):
                reference(tried)
                kept.append(tried)
                break
        else:
            lost.append(" ".join(f"{axis}={size}" for axis, size in sorted(sizes.items())))
    notes = (f"not compared at {', '.join(lost)}, which the model does not take",)
    return kept, notes if lost else ()


def _record_few(
    reference: Engine, feeds: Sequence[Arrays], tmp: Path
) -> tuple[Arrays, GoldenSamples | None]:
    """Record rows of the largest feeds, or all of them where edges of a graph point at rows."""
    specs = reference.inputs
    most = max(feeds, key=lambda each: sum(array.nbytes for array in each.values()))
    cut = {spec.name for spec in specs if spec.batched}
    few = {name: a[: golden.SAMPLES] if name in cut else a for name, a in most.items()}
    with contextlib.suppress(DeploykitError):
        if not any(axis in spec.shape[1:] for axis in batch_axes(specs) for spec in specs):
            return few, golden.record(reference, few, tmp)
    return most, golden.record(reference, most, tmp)


class _ChosenBy:
    """A model in two parts: `graph` gives the values, PyTorch chooses by them.

    Where scores differ by 1e-7, either choice is right, and equal choices show little of them. This
    has the parts of an Engine that a comparison needs.
    """

    def __init__(self, graph: Engine, choice: Engine) -> None:
        self.graph, self.choice = graph, choice
        self.inputs, self.outputs = graph.inputs, choice.outputs

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return self.choice(self.graph(feeds))


def _compare_parts(
    loaded: Loaded,
    tmp: Path,
    done: Exported,
    exported: Engine,
    check: Callable[..., Parity],
    most: int,
) -> tuple[tuple[ParityRow, ...], RowIndependence]:
    """Return the rows of both parts, and the proof of the first one's batch."""
    from deploykit.engines.torch.engine import TorchEngine
    from deploykit.exporting.onnx import export_module

    first, second = cast("tuple[Loaded, Loaded]", loaded.parts)
    with tempfile.TemporaryDirectory(dir=tmp.parent) as folder:
        file, sizes = Path(folder) / "first.onnx", done.job.sizes
        export_module(first, file, opset=done.opset, sizes=sizes)
        with (
            TorchEngine(first, "its first part", "cpu", None) as reference,
            TorchEngine(second, "its second part", "cpu", None) as choice,
            load(file, "cpu") as graph,
        ):
            values = check(reference, graph)
            chosen = check(cast("Engine", _ChosenBy(graph, choice)), exported)
            batch = golden.prove_batch(graph, file, None, most)
    return (*values.rows, *chosen.rows), batch


def _limits(decision: Decision, reference: Engine, exported: Engine, done: Exported) -> bool:
    """Return whether the graph is not the model where `decision` does not hold.

    torch names every size that it compared: often both branches compute the same.
    """
    base = done.job.sizes
    least = {axis: reference.limits.get(axis, (1, None))[0] for axis in base}
    most = {axis: reference.limits.get(axis, (1, None))[1] or _FAR for axis in base}
    sizes = ({**base, a: n} for a in base for n in range(least[a], min(most[a], _FAR) + 1))
    outside = next((each for each in (*sizes, least) if decision.holds(each) is False), None)
    if outside is not None:
        feeds = [done.job.given.feeds(reference.inputs, outside, floats=True)]
        with contextlib.suppress(DeploykitError):
            return not compare_engines(reference, exported, feeds).passed
    return True


_ROWS = 2
_OUTSIDE_MAX_ERROR = 1e-2  # of values this large; what float32 itself loses is added


def _probe_outside(
    reference: TorchEngine, exported: Engine, usual: Mapping[str, np.ndarray]
) -> tuple[str, ...]:
    """Return a note for each kind of input on which the graph does not answer as the model does.

    A kernel may be exact on the comparison's ordinary values and wrong beyond: ONNX Runtime's
    Sigmoid is 0 from -18 on, and attention over a row that is masked as a whole has no definition
    that all share. `usual`: inputs that the model takes. What the model itself refuses is left out.
    """
    specs, notes = reference.inputs, []
    batched = {spec.name for spec in specs if spec.batched}
    arrays = {n: array[:_ROWS] if n in batched else array for n, array in usual.items()}
    masks = {x.name for x in specs if x.dtype == "bool" or "mask" in x.name.lower()}
    floats = {x.name: arrays[x.name] for x in specs if "float" in x.dtype and x.name not in masks}
    masks -= {x.name for x in specs if "float" in x.dtype}
    random, trials = np.random.default_rng(0), dict[str, dict[str, np.ndarray]]()
    for size in (1e2, 1e4, 0.0):
        trials[f"values of up to {size:g}" if size else "zeros"] = {
            name: random.uniform(-size, size, array.shape).astype(array.dtype)
            for name, array in floats.items()
        }
    for name in sorted(masks):
        for value in (True, False):
            what = f"'{name}' {str(value).lower()} everywhere"
            trials[what] = {name: np.full_like(arrays[name], value)}
    for what, changed in trials.items():
        feeds = {**arrays, **changed}
        with contextlib.suppress(DeploykitError):
            known = RecordedEngine(specs, reference.outputs, reference(feeds), reference.runtime)
            try:
                parity = compare_engines(known, exported, [feeds], max_error=_OUTSIDE_MAX_ERROR)
                why = _difference(reference, parity, feeds, only_places=what == "zeros")
            except DeploykitError as exc:  # the graph does not take what the model does
                why = exc.message
            if why and changed:
                notes.append(f"with {what} the graph does not answer as PyTorch does: {why}")
    return tuple(notes)


def _difference(
    reference: TorchEngine, parity: Parity, feeds: Mapping[str, np.ndarray], *, only_places: bool
) -> str:
    """Return by what the answers differ; "" if they do not, or float32 explains it.

    `only_places`: look at NaN and the infinities alone, as equal scores may be ordered differently.
    """
    if not parity.passed:
        with contextlib.suppress(DeploykitError):  # its code names float32
            parity = add_float32_errors(parity, reference, reference.in_float64, [feeds])
    for row in parity.rows:
        if row.places_match and only_places:
            continue
        if not row.places_match or (row.problem and not row.floating):
            return f"output '{row.output}': {row.problem}"
        if not row.problem and row.error > parity.bound(row):
            return f"output '{row.output}' is off by {row.error:.2g} of its largest value"
    return ""


# The model, from a live module, a file or a folder, and the record of where it came from.


@dataclass(frozen=True)
class ExportSource:
    """A model and where it came from."""

    name: str
    loaded: Loaded
    hashes: tuple[str, ...]
    record: SourceRecord


def _check_source(model: object) -> Path | None:
    """Return the path of a file or folder once it may hold a model. Raises NotFound or BadInput."""
    if not isinstance(model, (str, os.PathLike)):
        return None
    path = Path(model)
    kind = "a folder" if path.is_dir() else sniff(path)
    if kind not in ("a folder", "torch", "safetensors"):
        raise wrong_format(path, kind, "a PyTorch file or a Hugging Face folder")
    return path


def _open_source(
    model: ArtefactLike | torch.nn.Module,
    path: Path | None,
    example: Tensors | None,
    inputs: Sequence[str],
    dynamic_axes: DynamicAxes | None,
    arch: str | None,
    allow_pickle: bool,
) -> ExportSource:
    from deploykit.engines.torch import loaded as live
    from deploykit.engines.torch import open as runtime

    feeds: dict[str, np.ndarray] = {}
    most: dict[str, int] = {}
    listed = [inputs] if isinstance(inputs, str) else inputs  # a string has letters, too
    specs = tuple(parse_spec(_without_most(text, most)) for text in listed)
    if isinstance(example, (str, os.PathLike)):
        raise BadInput("`example_inputs` is a path: the file to write is `out`", hint="out=...")
    if example is not None and specs:
        raise BadInput("`example_inputs` and `inputs` both describe the inputs: give one")
    if dynamic_axes is not None and example is None:
        raise BadInput("`dynamic_axes` needs `example_inputs`", hint="`inputs` names axes itself")
    if example is not None:
        named = {
            name: {place: _without_most(axis, most) for place, axis in axes.items()}
            for name, axes in (dynamic_axes or {}).items()
        }
        specs, feeds = live.specs_from(model, example, named)
    given = Example(feeds, most)
    if path is None:
        if not live.is_module(model):
            kind = type(model).__name__
            raise BadInput(f"`model` is a {kind}: a path or an nn.Module is needed")
        loaded = live.load_live(model, specs, given)
        name, weights = live.name_of(model), live.hash_weights(model)
        record = SourceRecord(loaded.source, weights, False, name, notes=loaded.notes)
        return ExportSource(name.rpartition(".")[2], loaded, (weights,), record)
    loaded = runtime.load_module(
        path, arch=arch, inputs=specs, allow_pickle=allow_pickle, example=given
    )
    hashes = tuple(map(sha256, runtime.weight_files(path) if path.is_dir() else [path]))
    code = Path((arch or "").rpartition(":")[0])  # the user's own file; else a package's module
    record = SourceRecord(
        loaded.source,
        hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest(),
        loaded.ran_pickle,
        loaded.model_class,
        arch,
        sha256(check_readable(code)) if code.suffix == ".py" else None,
        loaded.notes,
    )
    return ExportSource(path.name, loaded, hashes, record)


def _without_most(text: str, most: dict[str, int]) -> str:
    """Return `text` with "T" in place of each "T<=32", and keep that size in `most`.

    Raises BadInput for a size that is not a number of 2 or more, or differs from an earlier one.
    """

    def keep(match: re.Match[str]) -> str:
        axis, size = match[1], match[2]
        known = most.setdefault(axis, int(size) if size.isdigit() else 0)
        if known < 2 or str(known) != size:
            raise BadInput(
                f"'{text}': the largest size of axis {axis} is a number of 2 or more, one for all",
                hint="'ids:int64[N,T<=512]'",
            )
        return axis

    return re.sub(r"([^\W\d]\w*)\s*<=\s*(\w*)", keep, text)
