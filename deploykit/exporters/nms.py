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
INDICES: Any = onnxscript.INT64
_library: Any = torch.library.Library("deploykit", "FRAGMENT")
_library.define(
    "suppress(Tensor boxes, Tensor scores, Tensor classes, int count, float iou, int most)"
    " -> Tensor"
)


def suppress(
    boxes_NA4: Any, scores_NA: Any, classes_NA: Any, count: int, iou: float, most: int
) -> Any:
    """The scores [N,A], 0 for a box that overlaps a better one of its class by more than `iou`.

    Boxes [N,A,4] are corners, classes [N,A] below `count`. Of each row the best `most` are kept;
    others may be, too.
    """
    return torch.ops.deploykit.suppress(boxes_NA4, scores_NA, classes_NA, count, iou, most)


@torch.library.impl(_library, "suppress", "CompositeExplicitAutograd")  # type: ignore[untyped-decorator]
def _suppress(
    boxes_NA4: Any, scores_NA: Any, classes_NA: Any, _: int, iou: float, most: int
) -> Any:
    kept_NA = torch.zeros_like(scores_NA)
    rows = zip(boxes_NA4, scores_NA, classes_NA, kept_NA, strict=True)
    for boxes, scores, classes, kept in rows:
        order = scores.argsort(descending=True, stable=True)
        order = order[scores[order] > 0]
        for _ in range(most):
            if not len(order):
                break
            best, order = order[0], order[1:]
            kept[best] = scores[best]
            other = classes[order] != classes[best]
            order = order[other | (_iou(boxes[best], boxes[order]) <= iou)]
    return kept_NA


@torch.library.register_fake("deploykit::suppress", lib=_library)  # type: ignore[untyped-decorator]
def _shape(_boxes: Any, scores: Any, *_options: Any) -> Any:
    return torch.empty_like(scores)


def onnx_forms() -> Mapping[Any, Callable[..., Any]]:
    """As torch.onnx.export takes them."""
    return {torch.ops.deploykit.suppress.default: _translate}


def _translate(
    boxes: VALUE, scores: VALUE, classes: INDICES, count: int, iou: float, most: int
) -> Any:
    """Each class has a row of scores of its own, 0 for boxes of the others."""
    one = op.Constant(value_ints=[1])
    each = op.Constant(value_ints=list(range(count)))
    own = op.Equal(op.Unsqueeze(classes, one), op.Reshape(each, op.Constant(value_ints=[1, -1, 1])))
    by_class = op.Where(own, op.Unsqueeze(scores, one), op.Constant(value_float=0.0))
    selected = op.NonMaxSuppression(
        boxes,
        by_class,
        op.Constant(value_ints=[most]),
        op.Constant(value_floats=[iou]),
        op.Constant(value_floats=[0.0]),
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
