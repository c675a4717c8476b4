"""Find the line of the user's code that torch failed at, and advise what to write instead."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

from deploykit.core.errors import BadInput, causes
from deploykit.core.extras import require

torch = require("torch")

_OWN = (Path(__file__).resolve().parents[2], Path(str(torch.__file__)).resolve().parent)
_LIBRARY = Path(sysconfig.get_paths()["stdlib"]).resolve()
_TOOLS = {"onnxscript", "onnx_ir", "numpy", "einops", "einx"}  # no libraries of models
_LINEAR_ALGEBRA = (
    "ONNX has no linear algebra but products: compute it before the export where it is of weights, "
    "else outside the model"
)
_REWRITES = {  # torch's message, or an operator that it cannot translate -> advice
    "Expected more than 1 value per channel": "one row has no statistics of its own: give "
    "F.batch_norm the running ones, and training=self.training",
    "uninitialized parameter": "run the model once before the export, so that its lazy layers get "
    "their weights: model(example)",
    "meta tensor": "give the model its weights first: model.to_empty(device='cpu'), then "
    "model.load_state_dict(...)",
    r"\boffsets\b": "give nn.EmbeddingBag ids of [N,T], a row for each bag, filled up with its "
    "`padding_idx`: it then takes no offsets",
    "index .*out of (bounds|range)": "integer inputs are random where `samples` gives no real "
    "ones, and may be no valid ids of this model",
    r"aten\.(nan)?median": "the lower median is x.sort(dim).values.select(dim, (n - 1) // 2)",
    r"aten\.(searchsorted|bucketize)": "for sorted boundaries it is "
    "(x.unsqueeze(-1) > boundaries).sum(-1)",
    r"aten\.unique_consecutive": "return what it is given, and drop repeats outside the model",
    r"aten\.(_?linalg|cholesky|_?lu_|geqrf|triangular)": _LINEAR_ALGEBRA,
    "fake_quantize": "torch's older exporter keeps it where sizes are x.shape[0], not len(x) or "
    "int(...); else switch it off, export, and: deploykit quantize --to int8 --calib DATA",
    r"\b(aten|prims)\.": "write that line with other operators, or compute it outside the model",
}


def advise(error: BadInput, cause: BaseException) -> None:
    """Add the line of the user's code that `cause` passed through, and a rewrite, to `error`."""
    frame = raised_at(cause)
    place = source_place(frame.filename, frame.lineno or 0, frame.name) if frame else ""
    if place and place not in error.message:
        error.message += f" ({place})"
    error.hint = error.hint or rewrite_for(f"{cause} {place}")


def rewrite_for(reason: str) -> str | None:
    """Return what to write instead for torch's `reason` or operator; None if not known."""
    found = (hint for pattern, hint in _REWRITES.items() if re.search(pattern, reason))
    return next(found, None)


def is_users(file: str) -> bool:
    """Return whether `file` is the user's or a model library's, not torch, deploykit or Python."""
    if file.startswith("<"):
        return False
    parents = Path(file).resolve().parents
    installed = any(parent.name == "site-packages" for parent in parents)
    tool = any(parent.name in _TOOLS for parent in parents)
    return not (tool or any(own in parents for own in _OWN)) and (
        installed or _LIBRARY not in parents
    )


def is_written_for_tracing(file: str) -> bool:
    """Return whether `file` is torchvision's, whose branches on data a tracer can follow."""
    return "torchvision" in Path(file).parts


def source_place(file: str, line: int, function: str = "") -> str:
    """Return a place in a source file: "mine.py:14, in forward: `if x.sum() > 0:`"."""
    code = linecache.getline(file, line).strip()
    inside = f", in {function}" if function else ""
    return f"{Path(file).name}:{line}{inside}" + (f": `{code}`" if code else "")


def innermost(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code that is running in `frame`; "" if none."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return source_place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ""


def raised_at(exc: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's code in the traceback of `exc` or its causes."""
    for each in reversed(list(causes(exc))):
        for frame in reversed(traceback.extract_tb(each.__traceback__)):
            if is_users(frame.filename):
                return frame
    return None
