"""Export a PyTorch file to ONNX, and prove that both compute the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api import golden
from deploykit.api.artefacts import (
    Made,
    Progress,
    keep_if_equal,
    no_progress,
    onnx_manifest,
    parity_sizes,
    staged,
)
from deploykit.core.artefact import sniff
from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.evidence import Evidence, ExportRecord, Preflight, SourceRecord
from deploykit.core.files import check_writable, sha256
from deploykit.core.preprocess import load_preprocess
from deploykit.core.profile import choose_profile, load_profile
from deploykit.core.tensors import BATCH, TensorSpec, parse_spec

if TYPE_CHECKING:
    import numpy as np

    from deploykit.core.profile import Profile
    from deploykit.measure.evaluate.parity import Parity
    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.engine import Engine
    from deploykit.runtimes.torch.engine import Loaded

Limits = Mapping[str, tuple[int, "int | None"]]  # least and largest size by axis

EXPORT_MAX_ERROR = 1e-4  # float32 on both sides: only the order of additions differs


def export(
    model: Path,
    out: Path | None = None,
    *,
    arch: str | None = None,
    inputs: Sequence[str] = (),
    batch: str = "dynamic",
    opset: int | None = None,
    profile: str | None = None,
    exporter: str = "auto",
    preprocess: str | None = None,
    samples: Path | None = None,
    allow_pickle: bool = False,
    max_error: float = EXPORT_MAX_ERROR,
    on_progress: Progress = no_progress,
) -> Made:
    """Export a PyTorch file to ONNX and prove that it computes the same at several sizes.

    `inputs`: specs as text, where the file does not hold them. `profile`: the target, which decides
    the opset and whose parser's operators are checked. `preprocess`: "imagenet" or a TOML file;
    the graph then takes bytes. `samples`: real inputs to compare and to record as golden samples,
    else seeded random ones. Raises GateFailed past `max_error`.
    """
    out = out or model.with_suffix(".onnx")
    check_writable(out)
    wanted = tuple(parse_spec(text) for text in inputs)
    kind = sniff(model)
    if kind not in ("torch", "safetensors"):
        raise BadInput(
            f"{model}: is a {kind} file, not a PyTorch file",
            hint="export takes .pt, .pth, .pt2, .safetensors and TorchScript files",
        )
    if out.resolve() == model.resolve():
        raise BadInput(f"{out}: is the model itself", hint="choose another -o")
    size = _batch_size(batch)
    pixels = load_preprocess(preprocess) if preprocess else None
    target = _target(profile)
    from deploykit.exporters import onnx as exporters
    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.engine import load
    from deploykit.runtimes.torch import engine as runtime

    if exporter not in exporters.EXPORTERS:
        known = ", ".join(exporters.EXPORTERS)
        raise BadInput(f"--exporter {exporter}: unknown", hint=f"one of: {known}")
    if opset is None:
        opset = exporters.opset_for(target) if target else exporters.DEFAULT_OPSET
    on_progress("loading the model", 0.0)
    loaded = runtime.load_module(model, arch=arch, inputs=wanted, allow_pickle=allow_pickle)
    if pixels is not None:
        loaded = runtime.with_preprocess(loaded, pixels)
    loaded = replace(
        loaded, inputs=_fixed(loaded.inputs, size), outputs=_fixed(loaded.outputs, size)
    )
    feeds = _feeds(loaded, samples, size)
    on_progress("exporting", 0.1)
    with staged(out) as tmp:
        done = exporters.export_module(
            loaded.module,
            loaded.inputs,
            loaded.outputs,
            tmp,
            opset=opset,
            exporter=exporter,
            sizes={axis: low + 1 for axis, (low, _) in loaded.limits.items() if low > 1},
        )
        torch_engine = runtime.TorchEngine(loaded, model.name, "cpu", None)
        with torch_engine as reference, load(tmp, "cpu") as exported:
            names = (model.name, out.name)
            on_progress("comparing with PyTorch", 0.7)
            parity = _compared(reference, exported, feeds, max_error, names, loaded.limits)
            recorded = golden.record(reference, _few(feeds, loaded.inputs), tmp)
        on_progress("writing the manifest", 0.95)
        graph = Graph.open(tmp)
        problems = _preflight(graph, target)
        evidence = Evidence(
            parity=parity,
            source=SourceRecord(
                loaded.source,
                sha256(model),
                loaded.ran_pickle,
                arch,
                sha256(code) if (code := _file_of(arch)) else None,
                tuple(loaded.notes),
            ),
            export=ExportRecord(
                done.exporter,
                done.opset,
                done.fallback or None,
                target.name if target else None,
                pixels,
            ),
            preflight=Preflight(target.name, tuple(problems)) if target else None,
            golden=recorded,
        )
        manifest = onnx_manifest(
            graph,
            (sha256(model),),
            tools=("torch", "onnx", "onnxscript"),
            evidence=evidence,
        )
        notes = list(loaded.notes)
        if loaded.ran_pickle:
            notes.append(f"{model.name} ran code of its own while it was loaded (--allow-pickle)")
        if done.fallback:
            notes.append(f"exported with torch's older {done.exporter} exporter: {done.fallback}")
        if recorded is None:
            notes.append("no golden samples recorded: inputs and outputs are too large")
        notes += [
            f"preflight for {target.name}: node '{p.node}' ({p.operator}): {p.why}"
            for p in problems
            if target
        ]
        made = Made(out, manifest, tuple(notes))
        return keep_if_equal(tmp, made, parity)


def _target(profile: str | None) -> Profile | None:
    if profile is None:
        return None
    return choose_profile()[0] if profile == "auto" else load_profile(profile)


def _preflight(graph: Graph, target: Profile | None) -> Sequence[Any]:
    if target is None:
        return ()
    from deploykit.quantization import preflight

    return preflight.unsupported(graph, target)


def _file_of(arch: str | None) -> Path | None:
    """The user's own file that `--arch` names; None for a module of a package."""
    where = (arch or "").rpartition(":")[0]
    return Path(where) if where.endswith(".py") else None


def _feeds(loaded: Loaded, samples: Path | None, size: int | None) -> list[dict[str, np.ndarray]]:
    """Inputs to compare on, at every size of the dynamic axes."""
    from deploykit.runtimes.data.samples import random_feeds, read_samples

    inputs, sizes = loaded.inputs, parity_sizes(loaded.inputs, loaded.limits)
    if samples is None:
        return [random_feeds(inputs, each, seed) for seed, each in enumerate(sizes)]
    found = read_samples(samples, inputs)
    counts = [size] if size else [each[BATCH] for each in sizes if BATCH in each]
    feeds = []
    for count in counts or [1]:
        first = next(found.batches(count))
        if len(next(iter(first.values()))) == count:
            feeds.append(first)
    if not feeds:
        raise BadInput(f"{samples}: {len(found)} samples do not fill a batch of {counts[0]}")
    return feeds


def _few(
    feeds: Sequence[Mapping[str, np.ndarray]], inputs: tuple[TensorSpec, ...]
) -> Mapping[str, np.ndarray]:
    """Golden samples: the first few rows of the largest feeds, or all of a fixed batch."""
    largest = max(feeds, key=lambda each: sum(array.nbytes for array in each.values()))
    if not all(spec.batched for spec in inputs):
        return largest
    return {name: array[: golden.SAMPLES] for name, array in largest.items()}


def _compared(
    reference: Engine,
    exported: Engine,
    feeds: Sequence[Mapping[str, np.ndarray]],
    max_error: float,
    names: tuple[str, str],
    limits: Limits,
) -> Parity:
    """Parity over all sizes; where the graph fails at one, the axis that it fixed is named."""
    from deploykit.measure.evaluate.parity import compare_engines

    try:
        return compare_engines(reference, exported, feeds, max_error=max_error, names=names)
    except DeploykitError as exc:
        axis = _baked(reference, exported, limits)
        if axis is None:
            raise
        raise BadInput(
            f"{names[1]}: the exporter fixed axis {axis}: at another size the graph does not "
            f"compute what the model does ({exc.message})",
            hint="export with a fixed size for that axis, or find where the model reads it as a "
            "Python number",
        ) from exc


def _baked(reference: Engine, exported: Engine, limits: Limits) -> str | None:
    """The first dynamic axis along which the graph fails and the model does not."""
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.runtimes.data.samples import random_feeds

    base, *_ = sizes = parity_sizes(reference.inputs, limits)
    for axis in base:
        for other in sizes[1:]:
            feeds = random_feeds(reference.inputs, {**base, axis: other[axis]})
            try:
                reference(feeds)
            except DeploykitError:
                continue
            try:
                compare_engines(reference, exported, [feeds])
            except DeploykitError:
                return axis
    return None


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
