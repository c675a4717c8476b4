"""What else may be fastest on this CPU: other runtimes that are installed, and bfloat16.

A rival is timed only if its outputs are right; nobody asked for it, so its failure fails nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api.bench_columns import BASELINE, Entry, open_session
from deploykit.core.artefact import Artefact
from deploykit.core.errors import DeploykitError
from deploykit.core.extras import install_hint, installed
from deploykit.core.machine import Machine
from deploykit.core.runtime import ALL, RUNTIMES, Runtime

if TYPE_CHECKING:
    from deploykit.measure.report.report import NotMeasured

_HALF = "bf16"
_RUNS = ("fp32", _HALF, "int8")  # what rivals compute in where the CPU can


def find_rivals(
    every: Sequence[Entry], machine: Machine, folder: Path
) -> tuple[list[Entry], list[NotMeasured]]:
    """The rivals of these entries, and what was not tried, with the reason.

    `folder` is for the float32 model in bfloat16, and has to live as long as they are used.
    """
    from deploykit.measure.report.report import NotMeasured

    graphs = [e for e in every if e.artefact.format == "onnx" and e.precision in _RUNS]
    graphs = [*{each.artefact.sha256: each for each in reversed(graphs)}.values()][::-1]
    gaps: dict[str, str] = {}
    found: list[Entry] = []
    for runtime in ALL:
        if "onnx" not in runtime.opens or runtime.opens[0] == "onnx" or not runtime.on_cpu:
            continue
        if not all(map(installed, runtime.modules)):
            gaps[runtime.title] = f"not installed: {install_hint(runtime.modules[0])}"
            continue
        found += [_rival(runtime, each, each.artefact, each.precision) for each in graphs]
        if "avx512_bf16" not in machine.cpu_features:
            gaps[f"{runtime.title} {_HALF}"] = "this CPU has no instructions for it"
        elif every[0].precision == "fp32" and not any(e.precision == _HALF for e in graphs):
            try:
                rounded = _rounded(every[0].artefact, folder)
                found.append(_rival(runtime, every[0], rounded, _HALF))
            except DeploykitError as exc:
                gaps[f"{runtime.title} {_HALF}"] = exc.message
    modules = [each for each in every if each.runtime == "torch"]
    torch = RUNTIMES["torch"]
    found += [_rival(torch, each, each.artefact, _HALF) for each in modules]
    if not modules:
        gaps["PyTorch"] = "no module was given: add the checkpoint that the model was exported from"
    if not any(item.precision == "int8" and item.artefact.runtime.on_cpu for item in every):
        gaps["INT8"] = "no INT8 file was given; `deploykit quantize --to int8` makes one"
    alike = Counter(each.rival for each in found)
    names = [each.rival + f" of {each.label}" * (alike[each.rival] > 1) for each in found]
    found = [replace(each, rival=n, label=n) for each, n in zip(found, names, strict=True)]
    return found, [NotMeasured(f"{what} on the CPU", why) for what, why in gaps.items()]


def _rival(runtime: Runtime, of: Entry, artefact: Artefact, precision: str) -> Entry:
    """Of the entry `of`, whose name is its label until all are known."""
    opener = partial(open_session, runtime.name, artefact, precision, None, of.options)
    label = artefact.path.stem if of.label == BASELINE else of.label
    rival = f"{runtime.title} {precision}"
    return Entry(artefact, precision, {}, opener, runtime.name, rival, of.options, label)


def _rounded(artefact: Artefact, folder: Path) -> Artefact:
    """The graph in bfloat16, as `quantize` writes it."""
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization.convert import convert

    path = folder / f"{artefact.path.stem}.{_HALF}.onnx"
    graph, _ = convert(Graph.open(artefact.path), _HALF, None, runtime="openvino")
    graph.save(path, temporary=True)
    return Artefact(path)
