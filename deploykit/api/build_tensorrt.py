"""TensorRT engines: build one and prove what was built, or check that it could be built."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api import golden, verify
from deploykit.api.artefacts import Made, Progress, keep, reject
from deploykit.core.artefact import read_manifest
from deploykit.core.errors import DeploykitError, GateFailed, Unsupported
from deploykit.core.evidence import BuildRecord, Evidence
from deploykit.core.extras import installed
from deploykit.core.files import sha256
from deploykit.core.machine import Machine, this_machine, tool_versions
from deploykit.core.manifest import Manifest, write_manifest
from deploykit.core.precision import max_engine_error, narrowest
from deploykit.core.profile import Profile, fits
from deploykit.core.tensors import TensorSpec

if TYPE_CHECKING:
    from deploykit.builders.tensorrt.build import Checked, Facts
    from deploykit.builders.tensorrt.inspector import Layer
    from deploykit.builders.tensorrt.options import Options
    from deploykit.runtimes.cuda.driver import Cudart

DEFAULT_BATCH = "1,8,32"


@dataclass(frozen=True)
class Shapes:
    """What an engine is built for, as typed on the command line; None and () are the defaults."""

    batch: str | None = None
    axes: Sequence[str] = ()
    level: int | None = None
    version_compatible: bool = False
    hardware_compatible: str | None = None  # "ampere-plus" or "same-compute-capability"
    dla: int | None = None


@dataclass(frozen=True)
class Labelled:
    """What the engine's own accuracy is judged on, as for `quantize`."""

    data: Path
    metric: str | None = None
    max_drop: float | None = None


@dataclass(frozen=True)
class CheckResult:
    """What NVIDIA's builder on this machine says of a file; no engine was kept."""

    path: Path
    profile: str
    checked: Checked

    def to_dict(self) -> dict[str, Any]:
        return {"path": str(self.path), "profile": self.profile, **self.checked.to_dict()}

    def raise_if_refused(self) -> None:
        """Raise GateFailed naming the first node that was refused."""
        if not self.checked.accepted:
            problems = self.checked.problems
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise GateFailed(f"{self.path}: refused: {problems[0]}{more}", result=self)


def check(
    model: Path, target: Profile, shapes: Shapes, on_progress: Progress | None = None
) -> CheckResult:
    """Parse and build `model` with whatever NVIDIA builder is here, report, and keep nothing."""
    from deploykit.builders.tensorrt import build

    flavour = "tensorrt" if installed("tensorrt") or not installed("tensorrt_rtx") else "rtx"
    options = replace(_options(target, shapes, model), flavour=flavour)
    return CheckResult(model, target.name, build.check(model, options, on_progress))


def build_plan(
    source: Path,
    typed: Path,
    tmp: Path,
    out: Path,
    target: Profile,
    shapes: Shapes,
    on_progress: Progress | None = None,
    *,
    calib: Path | None = None,
    labelled: Labelled | None = None,
) -> Made:
    """Build `typed` (made from `source`) into `tmp`, prove it, and keep it as `out`.

    `calib`: what `typed` was calibrated with, for the command that builds it again. Raises
    GateFailed when a layer runs wider than the graph asks, the outputs differ, or the accuracy on
    `labelled` drops; the engine is then kept as NAME.rejected.trt.
    """
    from deploykit.builders.tensorrt import build, inspector
    from deploykit.onnx_graph.graph import Graph

    graph = Graph.open(typed)
    device = _device()
    options = _options(target, shapes, typed)
    if device is not None:
        options = replace(options, free_bytes=device.memory()[0])
    facts = build.build(typed, tmp, options, on_progress)
    before = read_manifest(typed)
    graph_evidence = before.evidence if before else None
    layers = facts.layers
    wider = inspector.mismatches(verify.asked(graph), layers) if layers is not None else ()
    samples = golden.carry(typed, tmp) or verify.record(typed, tmp, _sizes(options, graph.inputs))
    manifest = Manifest(
        format="tensorrt",
        inputs=graph.inputs,
        outputs=graph.outputs,
        precision=_counted(layers) if layers is not None else graph.precision,
        sha256=sha256(tmp),
        made_from=tuple(dict.fromkeys(sha256(path) for path in (source, typed))),
        made_with=tool_versions("tensorrt", "onnx"),
        built_on={
            **_built_on(facts, device),
            "model": source.name,
            "precision": _label(graph_evidence, graph.precision),
            **({"calib": calib.name} if calib else {}),
        },
        evidence=Evidence(
            precision=verify.read_back(layers, wider),
            build=BuildRecord(target.name, facts.flags_used, options.version_compatible),
            source_graph=graph_evidence,
        ),
    )
    if samples is not None:
        bound = max(samples.max_error, max_engine_error(manifest.precision))
        golden_samples = replace(samples, max_error=bound)
        manifest = manifest.with_evidence(golden=golden_samples)
    evidence, why = _prove(tmp, manifest, typed, labelled, source, out.name)
    manifest = replace(manifest, evidence=evidence)
    notes = (*facts.notes, *([why] if why else []))
    made = Made(out, manifest, notes)
    if evidence.wrong:
        made = reject(tmp, made)
        raise GateFailed(
            f"{out.name}: {evidence.wrong}; the engine is kept as {made.path}",
            hint="other kernels: --level 5; or find the node that differs: deploykit compare",
            result=made,
        )
    return keep(tmp, made)


def _prove(
    tmp: Path,
    manifest: Manifest,
    typed: Path,
    labelled: Labelled | None,
    source: Path,
    name: str,
) -> tuple[Evidence, str]:
    """The evidence with what running the staged engine shows, and why there is none if so."""
    from deploykit.runtimes.engine import load

    write_manifest(tmp, manifest)  # an engine is opened with its manifest only
    evidence, parity, why = manifest.evidence, None, ""
    read = evidence.precision
    try:
        with load(tmp, "auto") as opened:
            engine: Any = opened
            parity, why = verify.prove(engine, tmp, manifest, typed, name)
            with contextlib.suppress(DeploykitError):  # a figure to read: no reason to fail
                times = engine.layer_times_ms(verify.feeds_for(engine)[-1])
                if read is not None:
                    read = verify.read_back(read.layers, read.wider, times)
            evaluation = None
            if labelled is not None and parity is not None and parity.passed:
                evaluation = verify.judge(
                    engine,
                    source,
                    labelled.data,
                    metric=labelled.metric,
                    max_drop=labelled.max_drop,
                    name=name,
                )
            evidence = replace(evidence, parity=parity, precision=read, accuracy=evaluation)
    except Unsupported as exc:
        why = exc.message
    if parity is None:
        why = f"the engine was not run here, so it is not verified: {why}"
    return evidence, why


def _sizes(options: Options, inputs: Sequence[TensorSpec]) -> dict[str, int]:
    """Sizes of the dynamic axes to record samples at: few rows, the others at their best."""
    rows = max(1, min(golden.SAMPLES, options.batch.maximum))
    dynamic = {axis for spec in inputs for axis in spec.shape if isinstance(axis, str)}
    return {axis: options.axes[axis].optimum if axis in options.axes else rows for axis in dynamic}


def check_here(target: Profile, model: Path) -> None:
    """Raise Unsupported unless this machine is the target and has what it takes to build there."""
    machine = this_machine()
    here = machine.gpus[0].name if machine.gpus else machine.l4t and machine.board
    hint = (
        f"see whether it could be built: deploykit build {model} --profile {target.name} --check; "
        f"for this machine's CPU: deploykit build {model} --profile cpu"
    )
    if not here or not _is_target(machine, target):
        raise Unsupported(
            f"profile '{target.name}' is not this machine, which has "
            f"{here or 'no NVIDIA GPU'}: a TensorRT engine is built on its target",
            hint=hint,
        )
    if not installed("tensorrt"):
        raise Unsupported(
            f"profile '{target.name}' needs TensorRT, which is not installed here",
            hint="pip install 'deploykit[tensorrt]'; on a Jetson it comes with JetPack",
        )


def _is_target(machine: Machine, target: Profile) -> bool:
    """As `choose_profile` tells it; a profile that names neither board nor GPU fits any."""
    return fits(target, machine) or not (target.boards or target.gpu_names)


def _options(target: Profile, shapes: Shapes, model: Path) -> Options:
    from deploykit.builders.tensorrt.options import Options
    from deploykit.builders.tensorrt.shapes import AxisRange, parse_axis, parse_batch
    from deploykit.onnx_graph.graph import Graph

    batched = any(spec.batched for spec in Graph.open(model).inputs)
    text = shapes.batch or (DEFAULT_BATCH if batched else None)
    return Options(
        profile=target,
        batch=parse_batch(text) if text else AxisRange(1, 1, 1),
        axes=dict(parse_axis(each) for each in shapes.axes),
        level=shapes.level,
        version_compatible=shapes.version_compatible,
        hardware_compatible=shapes.hardware_compatible,
        dla=shapes.dla,
    )


def _device() -> Cudart | None:
    """The GPU that TensorRT builds on, asked through CUDA; None where that cannot be."""
    try:
        from deploykit.runtimes.cuda.driver import Cudart

        return Cudart(0)
    except DeploykitError:
        return None


def _built_on(facts: Facts, device: Cudart | None) -> Mapping[str, str]:
    """What the builder knows, but first what the device that it used says of itself.

    `nvidia-smi` counts GPUs that CUDA_VISIBLE_DEVICES hides, and knows no multiprocessors.
    """
    if device is None:
        return facts.built_on
    from deploykit.runtimes.tensorrt.open import here

    return {**facts.built_on, **here(device).facts()}


def _counted(layers: Sequence[Layer]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for layer in layers:
        if layer.precision is not None:
            counts[layer.precision] = counts.get(layer.precision, 0) + 1
    return dict(sorted(counts.items()))


def _label(graph_evidence: Evidence | None, precision: Mapping[str, int]) -> str:
    """What the graph was quantised to, as `precision` names it; else what its nodes compute in."""
    if graph_evidence is not None and graph_evidence.quantize is not None:
        return graph_evidence.quantize.to
    return narrowest(precision)
