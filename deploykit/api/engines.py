"""TensorRT engines: build one and prove what was built, or check that it could be built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.staging import Made, Progress, keep, parity_sizes, reject
from deploykit.core.artefact import Manifest, write_manifest
from deploykit.core.errors import DeploykitError, GateFailed, Unsupported
from deploykit.core.extras import installed
from deploykit.core.files import sha256
from deploykit.core.machine import Machine, this_machine, tool_versions
from deploykit.core.profile import Profile

if TYPE_CHECKING:
    from deploykit.builders.readback import Layer
    from deploykit.builders.tensorrt import Checked, Facts, Options
    from deploykit.measure.parity import Parity

DEFAULT_BATCH = "1,8,32"
# Kernels on a GPU round elsewhere than the typed graph that ONNX Runtime runs, TF32 included.
ENGINE_MAX_ERROR = 1e-2
LOW_PRECISION_MAX_ERROR = 1e-1


@dataclass(frozen=True)
class Shapes:
    """What an engine is built for, as typed on the command line; None and () are the defaults."""

    batch: str | None = None
    axes: Sequence[str] = ()
    level: int | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    dla: int | None = None


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
    from deploykit.builders import tensorrt

    flavour = "tensorrt" if installed("tensorrt") or not installed("tensorrt_rtx") else "rtx"
    options = replace(_options(target, shapes, model), flavour=flavour)
    return CheckResult(model, target.name, tensorrt.check(model, options, on_progress))


def build_plan(
    source: Path,
    typed: Path,
    tmp: Path,
    out: Path,
    target: Profile,
    shapes: Shapes,
    on_progress: Progress | None = None,
) -> Made:
    """Build `typed` (made from `source`) into `tmp`, prove it, and keep it as `out`.

    Raises GateFailed when a layer runs wider than the graph asks, or the outputs differ; the engine
    is then kept as NAME.rejected.trt.
    """
    from deploykit.builders import readback, tensorrt
    from deploykit.transforms import cost, graph

    model = graph.load_graph(typed)
    graph.name_nodes(model)
    summary = graph.summarise(model)
    asked = {c.name: c.precision for c in cost.node_costs(model, {}) if c.precision is not None}
    del model
    facts = tensorrt.build(typed, tmp, _options(target, shapes, typed), on_progress)
    layers = facts.layers
    manifest = Manifest(
        format="tensorrt",
        inputs=summary.inputs,
        outputs=summary.outputs,
        precision=_counted(layers) if layers is not None else summary.precision,
        sha256=sha256(tmp),
        made_from=tuple(dict.fromkeys(sha256(path) for path in (source, typed))),
        made_with=tool_versions("tensorrt", "onnx"),
        built_on=_built_on(facts, typed),
        checks={
            "flags": list(facts.flags_used),
            "layers": [layer.to_dict() for layer in layers] if layers is not None else None,
            "shares": readback.shares(layers) if layers is not None else None,
            "verified": False,
        },
    )
    wider = readback.mismatches(asked, layers) if layers is not None else ()
    parity, note = _parity(typed, tmp, manifest, out.name)
    proven = layers is not None and not wider and parity is not None and parity.passed
    manifest = replace(
        manifest,
        checks={
            **manifest.checks,
            "mismatches": list(wider),
            "parity": parity.to_dict() if parity else None,
            "verified": proven,
        },
    )
    notes = (*facts.notes, *([note] if note else []))
    made = Made(out, manifest, parity=parity, notes=notes)
    if wider or (parity is not None and not parity.passed):
        made = reject(tmp, made)
        reason = (
            "; ".join(wider[:3]) if wider else f"error {parity.worst.error:.3g}" if parity else ""
        )
        raise GateFailed(
            f"{out.name}: {reason}; the engine is kept as {made.path}",
            hint="other kernels: --level 5; or find the node that differs: deploykit compare",
            result=made,
        )
    return keep(tmp, made)


def check_here(target: Profile, model: Path) -> None:
    """Raise Unsupported unless this machine is the target and has what it takes to build there."""
    machine = this_machine()
    gpu = machine.gpus[0].name if machine.gpus else None
    hint = (
        f"see whether it could be built: deploykit build {model} --profile {target.name} --check; "
        f"for this machine's CPU: deploykit build {model} --profile cpu"
    )
    if gpu is None or not _is_target(machine, target):
        raise Unsupported(
            f"profile '{target.name}' is not this machine, which has "
            f"{gpu or 'no NVIDIA GPU'}: a TensorRT engine is built on its target",
            hint=hint,
        )
    if not installed("tensorrt"):
        raise Unsupported(
            f"profile '{target.name}' needs TensorRT, which is not installed here",
            hint="pip install 'deploykit[tensorrt]'; on a Jetson it comes with JetPack",
        )


def _is_target(machine: Machine, target: Profile) -> bool:
    """Whether the driver's name of a GPU is the profile's; a profile without names fits any."""
    return not target.gpu_names or any(gpu.name in target.gpu_names for gpu in machine.gpus)


def _options(target: Profile, shapes: Shapes, model: Path) -> Options:
    from deploykit.builders.shapes import AxisRange, parse_axis, parse_batch
    from deploykit.builders.tensorrt import Options
    from deploykit.transforms import checks, graph

    inputs, _ = graph.specs(checks.parse(model))
    batched = any(spec.batched for spec in inputs)
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


def _built_on(facts: Facts, typed: Path) -> Mapping[str, str]:
    """What the builder knows, and what the device itself says where there is one."""
    known = {**facts.built_on, "model": typed.name}
    try:
        from deploykit.runtimes.cuda_driver import Cudart
        from deploykit.runtimes.tensorrt import here

        return {**here(Cudart(0)).facts(), **known}
    except DeploykitError:
        return known


def _counted(layers: Sequence[Layer]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for layer in layers:
        if layer.precision is not None:
            counts[layer.precision] = counts.get(layer.precision, 0) + 1
    return dict(sorted(counts.items()))


def _parity(typed: Path, tmp: Path, manifest: Manifest, name: str) -> tuple[Parity | None, str]:
    """The engine against the typed graph on ONNX Runtime; None and why where it cannot run here."""
    from deploykit.measure.parity import compare_engines
    from deploykit.runtimes.data import random_feeds
    from deploykit.runtimes.engine import load

    write_manifest(tmp, manifest)  # an engine is opened with its manifest only
    low = set(manifest.precision) - {"float32"}
    bound = LOW_PRECISION_MAX_ERROR if low else ENGINE_MAX_ERROR
    try:
        with load(typed, "cpu") as reference, load(tmp, "auto") as engine:
            limits = {"N": (1, engine.max_batch)}
            sizes = parity_sizes(engine.inputs, limits)
            feeds = [random_feeds(engine.inputs, each, seed) for seed, each in enumerate(sizes)]
            return compare_engines(
                reference, engine, feeds, max_error=bound, names=(typed.name, name)
            ), ""
    except Unsupported as exc:
        return None, f"the engine was not run here, so it is not verified: {exc.message}"
