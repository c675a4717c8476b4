"""Non-maximum suppression as one operator, whose output has the shape of the scores.

torch's reference and ONNX's NonMaxSuppression keep the same boxes. ONNX lists them, as many as the
data give; here the scores of all others become 0, so that a batch has one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from deploykit.core.extras import require

torch: ModuleType = require("torch")
onnxscript: ModuleType = require("onnxscript")

op: Any = onnxscript.opset18
VALUE: Any = onnxscript.FLOAT
_library: Any = torch.library.Library("deploykit", "FRAGMENT")
_library.define("suppress(Tensor boxes, Tensor scores, float iou, float least, int most) -> Tensor")


@torch.library.impl(_library, "suppress", "CompositeExplicitAutograd")  # type: ignore[untyped-decorator]
def _suppress(boxes_NA4: Any, scores_NA: Any, iou: float, least: float, most: int) -> Any:
    kept_NA = torch.zeros_like(scores_NA)
    for boxes, scores, kept in zip(boxes_NA4, scores_NA, kept_NA, strict=True):
        order = scores.argsort(descending=True, stable=True)
        order = order[scores[order] > least]
        for _ in range(most):
            if not len(order):
                break
            best, order = order[0], order[1:]
            kept[best] = scores[best]
            order = order[_iou(boxes[best], boxes[order]) <= iou]
    return kept_NA


@torch.library.register_fake("deploykit::suppress", lib=_library)  # type: ignore[untyped-decorator]
def _shape(_boxes: Any, scores: Any, *_options: Any) -> Any:
    return torch.empty_like(scores)


def suppress(boxes_NA4: Any, scores_NA: Any, iou: float, least: float, most: int) -> Any:
    """The scores [N,A], 0 for boxes that overlap a better one by more than `iou`.

    Boxes [N,A,4] are corners. Of each row the best `most` above `least` are kept.
    """
    return torch.ops.deploykit.suppress(boxes_NA4, scores_NA, iou, least, most)


def onnx_forms() -> Mapping[Any, Callable[..., Any]]:
    """As torch.onnx.export takes them."""
    return {torch.ops.deploykit.suppress.default: _translate}


def _translate(boxes: VALUE, scores: VALUE, iou: float, least: float, most: int) -> Any:
    selected = op.NonMaxSuppression(
        boxes,
        op.Unsqueeze(scores, op.Constant(value_ints=[1])),
        op.Constant(value_ints=[most]),
        op.Constant(value_floats=[iou]),
        op.Constant(value_floats=[least]),
    )
    places = op.Gather(selected, op.Constant(value_ints=[0, 2]), axis=1)  # of image and box
    nothing = op.Mul(scores, op.Constant(value_float=0.0))
    return op.ScatterND(nothing, places, op.GatherND(scores, places))


def _iou(box_4: Any, others_M4: Any) -> Any:
    low = torch.maximum(box_4[:2], others_M4[:, :2])
    high = torch.minimum(box_4[2:], others_M4[:, 2:])
    shared = (high - low).clamp(min=0).prod(1)
    areas = (others_M4[:, 2:] - others_M4[:, :2]).prod(1)
    whole = (box_4[2:] - box_4[:2]).prod() + areas - shared
    return torch.where(shared > 0, shared / whole, torch.zeros_like(shared))
