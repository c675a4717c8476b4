"""Build or check a graph for a TensorRT target, with the user's options parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from deploykit.builders.builder import BuildResult, Shapes
from deploykit.builders.tensorrt import build as plans
from deploykit.builders.tensorrt.apart import build_apart, build_here
from deploykit.builders.tensorrt.build import BuildCheck
from deploykit.builders.tensorrt.options import Options, parse_workspace
from deploykit.builders.tensorrt.shapes import AxisRange, parse_axis, parse_batch
from deploykit.core.artefact import Artefact
from deploykit.core.extras import installed
from deploykit.core.profile import Profile
from deploykit.onnx_graph.graph import Graph

DEFAULT_BATCH = "1,8,32"


def build_engine(
    model: Artefact,
    out: Path,
    target: Profile,
    shapes: Shapes,
    on_progress: Callable[[str, float], None] | None = None,
) -> BuildResult:
    """Write the plan of `model` to `out`; raises as `plans.build` does.

    Where CPU and GPU share memory, in a process that ends before the engine is run and proven.
    """
    options = options_of(target, shapes, model)
    run = build_apart if target.unified_memory else build_here
    return run(model.path, out, options, on_progress)


def check(
    model: Artefact,
    target: Profile,
    shapes: Shapes,
    on_progress: Callable[[str, float], None] | None = None,
) -> BuildCheck:
    """Parse and build with the installed NVIDIA builder, and write nothing."""
    flavour = "tensorrt" if installed("tensorrt") or not installed("tensorrt_rtx") else "rtx"
    options = replace(options_of(target, shapes, model), flavour=flavour)
    return plans.check(model.path, options, on_progress)


def options_of(target: Profile, shapes: Shapes, model: Artefact) -> Options:
    """Raises BadInput for invalid sizes."""
    batched = any(spec.batched for spec in Graph.open(model.path).inputs)
    text = shapes.batch or (DEFAULT_BATCH if batched else None)
    return Options(
        profile=target,
        batch=parse_batch(text) if text else AxisRange(1, 1, 1),
        axes=dict(parse_axis(each) for each in shapes.axes),
        level=shapes.level,
        version_compatible=shapes.version_compatible,
        hardware_compatible=shapes.hardware_compatible,
        dla=shapes.dla,
        plugins=tuple(map(Path, shapes.plugins)),
        workspace_bytes=parse_workspace(shapes.workspace) if shapes.workspace else None,
        timing_cache=Path(shapes.timing_cache) if shapes.timing_cache else None,
        tf32=shapes.tf32,
        device=shapes.device,
    )
