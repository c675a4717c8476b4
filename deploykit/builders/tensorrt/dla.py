"""What a Jetson's deep learning accelerator (DLA) takes, and what of an engine runs on it.

Source: NVIDIA's TensorRT documentation 10.7 to 11.4.1, "Working with DLA", "Strongly Typed Networks
for DLA". Not yet run on a DLA.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploykit.builders.tensorrt.options import Options
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.evidence import Layer
from deploykit.core.precision import narrowest
from deploykit.onnx_graph.graph import Graph
from deploykit.runtimes.tensorrt.compatibility import version_numbers

_ABSENT = ((10, 8), (11, 4, 1))  # from the first to before the second
_PRECISIONS = ("fp16", "int8")
_ON_GPU = "leave out `dla` to run everything on the GPU"


def check_dla(nv: Any, options: Options) -> None:
    """Raise Unsupported where the installed TensorRT has no DLA."""
    first, back = _ABSENT
    if options.dla is not None and first <= version_numbers(str(nv.__version__)) < back:
        raise Unsupported(
            f"`dla` {options.dla}: TensorRT {nv.__version__} has no DLA: it exists up to 10.7 "
            "(JetPack 6) and from 11.4.1 (AGX Orin with JetPack 7.2.2 or later)",
            hint=_ON_GPU,
        )


def check_graph(options: Options, model: Path) -> None:
    """Raise BadInput for sizes that vary and Unsupported for a precision that a DLA lacks."""
    if options.dla is None:
        return
    ranges = {"batch": options.batch, **{f"axis {name}": a for name, a in options.axes.items()}}
    for name, axis in ranges.items():
        if axis.minimum != axis.maximum:
            raise BadInput(
                f"`dla` {options.dla}: a DLA takes no dynamic sizes, and {name} is {axis}",
                hint=f"build one size: `batch` {axis.optimum}" if name == "batch" else _ON_GPU,
            )
    found = narrowest(Graph.open(model).precision)
    if found not in _PRECISIONS:
        raise Unsupported(
            f"{model}: `dla` {options.dla}: a DLA computes in FP16 and INT8 only, the graph "
            f"is {found}",
            hint="`precision` fp16",
        )


def weakly_typed(nv: Any, options: Options) -> bool:
    """Before TensorRT 11 a DLA takes its precision from the builder's flags."""
    return options.dla is not None and version_numbers(str(nv.__version__)) < (11,)


def note_dla(layers: Sequence[Layer] | None, options: Options, where: str) -> tuple[str, ...]:
    """How many layers run on the DLA. Raises Unsupported where none does.

    TensorRT runs on the GPU what a DLA refuses, and says so in a verbose log only.
    """
    if options.dla is None:
        return ()
    if layers is None:
        return ("how many layers run on the DLA is not known: no layers could be read back",)
    count = sum(map(runs_on_dla, layers))
    if not count:
        raise Unsupported(
            f"{where}: `dla` {options.dla}: none of its {len(layers)} layers runs on the DLA; "
            "TensorRT put all of them on the GPU",
            hint=_ON_GPU,
        )
    return (
        f"{count} of {len(layers)} layers run on DLA core {options.dla}, the others on the GPU",
    )


def runs_on_dla(layer: Layer) -> bool:
    """A DLA's layer is one foreign node (NVIDIA/TensorRT issue 3143), as one of Myelin's is."""
    kind = layer.kind.lower()
    foreign = layer.name.startswith("{ForeignNode[") and not kind.startswith(("myelin", "kgen"))
    return "dla" in kind or foreign
