"""Read a PyTorch file of any kind, without running code in it unless that is allowed.

Weights are read by torch's restricted unpickler, which loads only tensors and plain values; `.pt2`,
TorchScript and any other pickle need `allow_pickle`. Errors of the user's module, then or later,
name its line and advise what to write instead.
"""

from __future__ import annotations

import linecache
import logging
import pickle
import re
import sysconfig
import traceback
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from deploykit.core import errors
from deploykit.core.artefact import sniff, torch_kind, wrong_format
from deploykit.core.errors import BadInput, DeploykitError, OutOfMemory, causes, first_line
from deploykit.core.extras import require
from deploykit.core.machine import USE_LESS, does_not_fit, lacks_memory, memory_errors

torch = require("torch")


_ABSENT = re.compile(
    r"operator (\w+)::(\w+) does not exist"  # its library is missing or does not load
    r"|Unknown builtin op: (\w+)::(\w+)"  # TorchScript's message
    r"|Could not run '(\w+)::(\w+)'"  # it is declared without a kernel
)
_NO_KERNELS = "Couldn't load custom C++ ops"  # torchvision's message
_TORCHVISION_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    (
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, "
        "int pooled_width, int sampling_ratio, bool aligned) -> Tensor"
    ),
)


def _declare_torchvision() -> Any:
    """Declare torchvision's operators if its library, built for another torch, does not load.

    Such a torchvision (its usual wheel next to a CPU build of torch) cannot be imported without
    them, though most of its networks use none. Keep the result: torch drops them with it.
    """
    spec = find_spec("torchvision")
    try:
        for path in Path(str(spec.origin)).parent.glob("_C*.so") if spec is not None else ():
            torch.ops.load_library(str(path))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _TORCHVISION_OPERATORS:
            library.define(schema)
        return library
    return None


_torchvision = _declare_torchvision()


def absent(exc: BaseException) -> str | None:
    """Return the operator that `exc` reports as missing, as "torchvision::nms", else None."""
    for each in causes(exc):
        if match := _ABSENT.search(str(each)):
            return "::".join(filter(None, match.groups()))
        if _NO_KERNELS in str(each):
            return "torchvision::nms"
    return None


def lacks(where: object, operator: str) -> BadInput:
    """Return the error for a model that needs an operator of a missing library."""
    library = operator.partition("::")[0]
    return BadInput(
        f"{where}: needs the operator {operator} of the library {library}, which is not installed, "
        f"or was built for another torch than {torch.__version__}",
        hint=f"install {library} from the same place as torch: both for CPUs, or both for CUDA",
    )


# Training scripts store the weights under these keys, next to epoch and so on; the first counts.
_WEIGHT_KEYS = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "net",
    "network",
    "weights",
    "ema",
)
_REFUSED = re.compile(r"GLOBAL (\S+)")  # torch's message names the object that the pickle needs


# Lightning stores hyper_parameters in an AttributeDict, which is read as a dict without Lightning.
_LIGHTNING_DICTS = [
    (dict, f"{package}.AttributeDict")
    for package in (
        "lightning.fabric.utilities.data",
        "lightning.pytorch.utilities.parsing",
        "lightning_fabric.utilities.data",
        "pytorch_lightning.utilities.parsing",
    )
]


class RunsCode(BadInput):
    """Loading the file would run code in it, which is not allowed."""


@dataclass(frozen=True)
class Content:
    """The content of a file.

    `source` is "checkpoint" (`value`: its dict), "state_dict", "safetensors" or "Lightning"
    (tensors by name), "torch.export" (an ExportedProgram), or, of a module, "TorchScript",
    "pickle", "Hugging Face" or "module". `notes`: what was selected from the file or changed, one
    sentence each. `arguments`: the hyper_parameters that Lightning saved.
    """

    source: str
    value: Any
    ran_pickle: bool = False
    notes: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


def read(path: Path, *, allow_pickle: bool) -> Content:
    """Open `path` by its content. Raises NotFound, BadInput; MissingExtra for `.safetensors`."""
    kind = sniff(path)
    if kind == "safetensors":
        library, load_file = require("safetensors"), require("safetensors.torch").load_file
        try:  # the library checks lengths, types and places first
            tensors = load_file(str(path), device="cpu")
        except (library.SafetensorError, RuntimeError, ValueError, OSError, LookupError) as exc:
            raise BadInput(f"{path}: is a damaged .safetensors file: {first_line(exc)}") from exc
        if not tensors:
            raise BadInput(f"{path}: holds no tensors")
        return Content(kind, tensors)
    if kind != "torch":
        raise wrong_format(path, kind, "a PyTorch file")
    form = torch_kind(path)
    if form == "pickle":
        return _classify(path, *_unpickle(path, allow_pickle=allow_pickle))
    if not allow_pickle:
        raise RunsCode(
            f"{path}: is a {form} file, and loading it may run code stored in it, so it was not "
            "loaded",
            hint="if you trust whoever made the file: `allow_pickle`; else ask for the weights "
            "alone and name what builds the model with `arch`",
        )
    with module_errors(f"{path}: cannot be loaded as {form}"), quiet("torch"):
        if form == "torch.export":
            with path.open("rb") as handle:  # torch would insist on a path ending in .pt2
                value = torch.export.load(handle)
        else:
            value = torch.jit.load(str(path), map_location="cpu")
    return Content(form, value, ran_pickle=True)


def dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextmanager
def module_errors(where: object) -> Iterator[None]:
    """Map errors as `core.errors.users_code` does, and add the line of the user's code.

    Too little memory, which is not the code's fault, becomes OutOfMemory.
    """
    try:
        with errors.users_code(where), memory_errors(where):
            try:
                yield
            except torch.OutOfMemoryError as exc:
                full = f"{where}: the GPU's memory is full: {first_line(exc)}"
                raise OutOfMemory(full, hint=USE_LESS) from exc
            except Exception as exc:
                if operator := absent(exc):
                    raise lacks(where, operator) from exc
                raise
    except BadInput as exc:
        if exc.__cause__ is not None:
            advise(exc, exc.__cause__)
        raise


@contextmanager
def quiet(*packages: str) -> Iterator[None]:
    """Suppress warnings, and what the loggers of these packages write."""
    names = [each for each in logging.root.manager.loggerDict if each.partition(".")[0] in packages]
    loggers = [logging.getLogger(name) for name in (*packages, *names)]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def is_state_dict(content: Any) -> bool:
    """Return whether `content` is tensors by name, plus any `_extra_state` of a module."""
    return (
        isinstance(content, Mapping)
        and all(isinstance(key, str) for key in content)
        and any(isinstance(value, torch.Tensor) for value in content.values())
        and all(
            isinstance(value, torch.Tensor) or key.endswith("_extra_state")
            for key, value in content.items()
        )
    )


def _classify(path: Path, value: Any, ran_pickle: bool) -> Content:
    """Tell a checkpoint, weights and a module apart; look one level down for the last two."""
    if isinstance(value, Mapping) and "deploykit_checkpoint" in value:
        return Content("checkpoint", value, ran_pickle)
    if (
        isinstance(value, Mapping)
        and is_state_dict(value.get("state_dict"))
        and ("hyper_parameters" in value or "pytorch-lightning_version" in value)
    ):
        arguments = value.get("hyper_parameters")
        arguments = dict(arguments) if isinstance(arguments, Mapping) else {}
        return Content("Lightning", value["state_dict"], ran_pickle, arguments=arguments)
    found, notes = value, []
    if isinstance(value, Mapping) and not is_state_dict(value):
        for key in _WEIGHT_KEYS:
            if is_state_dict(value.get(key)) or isinstance(value.get(key), torch.nn.Module):
                left = ", ".join(str(other) for other in list(value)[:10] if other != key)
                notes.append(f"took '{key}' out of the file; not used: {left or 'nothing else'}")
                found = value[key]
                break
    if isinstance(found, torch.nn.Module):
        return Content("pickle", found, ran_pickle, tuple(notes))
    if is_state_dict(found):
        return Content("state_dict", found, ran_pickle, tuple(notes))
    raise BadInput(
        f"{path}: holds a {type(value).__name__}, neither a checkpoint nor a state_dict",
        hint="save it with: torch.save(model.state_dict(), path)",
    )


def _unpickle(path: Path, *, allow_pickle: bool) -> tuple[Any, bool]:
    """Return the content of the pickle at `path`, and whether it was allowed to run code."""
    mmap = zipfile.is_zipfile(path)  # then weights go straight from disk into the module
    try:
        with quiet("torch"), torch.serialization.safe_globals(_LIGHTNING_DICTS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap), False
    except pickle.UnpicklingError as exc:
        refusal = exc
    except Exception as exc:  # a damaged file can raise anything in torch
        raise _damage_error(path, exc) from exc
    if not allow_pickle:
        asked = _REFUSED.search(str(refusal))
        what = f" ({asked[1]})" if asked else ""
        raise RunsCode(
            f"{path}: loading it would run Python code stored in the file{what}, so it was not "
            "loaded",
            hint="save the weights alone: torch.save(model.state_dict(), path); or, if you trust "
            "whoever made the file: `allow_pickle`",
        ) from refusal
    try:
        with quiet("torch"):
            return torch.load(path, map_location="cpu", weights_only=False, mmap=mmap), True
    except (ImportError, AttributeError) as exc:  # a pickle only names its classes
        raise BadInput(
            f"{path}: cannot be unpickled: {_reason(exc)}",
            hint="it needs the code that it was saved with: put that on PYTHONPATH, or save the "
            "weights alone and use `arch`",
        ) from exc
    except Exception as exc:  # code of the file may raise anything
        raise _damage_error(path, exc) from exc


def _damage_error(path: Path, exc: Exception) -> DeploykitError:
    if lacks_memory(exc):
        return does_not_fit(path, str(exc), [path])
    if operator := absent(exc):
        return lacks(path, operator)
    return BadInput(
        f"{path}: is not a readable PyTorch file (truncated or damaged?): {_reason(exc)}"
    )


def _reason(exc: Exception) -> str:
    return f"{type(exc).__name__}: {first_line(exc)}"


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


def list_names(words: Sequence[str], most: int = 10) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more if words else "none"
