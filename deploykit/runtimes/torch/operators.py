"""Operators that a model needs from another library: torchvision's are provided, others named."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from deploykit.core.errors import BadInput, causes
from deploykit.core.extras import require

torch = require("torch")

_T = TypeVar("_T")
_ABSENT = re.compile(
    r"operator (\w+)::(\w+) does not exist"  # its library is not imported, or does not load
    r"|Unknown builtin op: (\w+)::(\w+)"  # TorchScript says it so
    r"|Could not run '(\w+)::(\w+)'"  # declared without a kernel
)
_NO_KERNELS = "Couldn't load custom C++ ops"  # torchvision's own words
_TORCHVISION_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    (
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, "
        "int pooled_width, int sampling_ratio, bool aligned) -> Tensor"
    ),
)


def with_torchvision(run: Callable[[], _T]) -> _T:
    """`run()`, once more if it lacked torchvision's operators.

    A torchvision that was built for another torch (its usual wheel next to a CPU build of torch)
    fails at its first operator, though most of its networks need none of them; with the operators
    declared it imports.
    """
    try:
        return run()
    except Exception as exc:  # only looked at: what it is not for goes on
        found = absent(exc)
        if found is None or not found.startswith("torchvision::"):
            raise
        _provide_torchvision()
        return run()


def absent(exc: BaseException) -> str | None:
    """The operator, as "torchvision::nms", that `exc` says is not there; None for other errors."""
    for each in causes(exc):
        if match := _ABSENT.search(str(each)):
            return "::".join(filter(None, match.groups()))
        if _NO_KERNELS in str(each):
            return "torchvision::nms"
    return None


def lacks(where: object, operator: str) -> BadInput:
    """The error for a model that needs an operator of a library that is not here."""
    library = operator.partition("::")[0]
    return BadInput(
        f"{where}: needs the operator {operator} of the library {library}, which is not installed, "
        f"or was built for another torch than {torch.__version__}",
        hint=f"install {library} from the same place as torch: both for CPUs, or both for CUDA",
    )


@cache
def _provide_torchvision() -> Any:
    """Import torchvision's operators; declare them where it is not the one for this torch."""
    try:
        return import_module("torchvision")
    except ImportError:
        return None
    except RuntimeError as exc:
        if absent(exc) is None:
            raise
    library = torch.library.Library("torchvision", "DEF")  # torch forgets them without the object
    for schema in _TORCHVISION_OPERATORS:
        library.define(schema)
    return library
