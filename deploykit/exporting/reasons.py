"""Explain why torch could not export a model: a line of the user's own code, and one sentence.

`NotExported` names the file and line, and says whether torch's other exporter may be tried: a graph
that silently keeps one branch of an `if`, or one size of an axis, is worse than none.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from deploykit.core.errors import BadInput, causes, first_line
from deploykit.core.extras import require
from deploykit.core.tensors import TensorSpec
from deploykit.engines.torch.files import (
    dtype_of,
    innermost,
    is_users,
    is_written_for_tracing,
    raised_at,
    rewrite_for,
    source_place,
)

torch: ModuleType = require("torch")
_dispatch: Any = require("torch.utils._python_dispatch")

_SHAPES_LOGGER = "torch.fx.experimental.symbolic_shapes"  # logs each size that it fixes
_FIXES = re.compile(r"\bEq\(s\w+, (\d+)\) \[guard added\]")
_GUARD = re.compile(r"(\S.*) \[guard added\]")
_PIECES = re.compile(r"eval Eq\((?!.*Mod)(.*\bs\d+\b.*), \d+\) \[guard added\]")  # their number is
_SYMBOL = re.compile(r"create_symbol (s\d+) = (\d+) for")
_FUNCTIONS = {  # functions in torch's expressions for conditions on a size
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "Max": max,
    "Min": min,
}
_TRIED = sorted({2**power + more for power in range(1, 15) for more in (0, 1)})  # above 1
_SIZE_TAKEN = re.compile(r"^(\d+) not in VR\[(\d+), (\w+)\]")
_SOURCE = re.compile(r" = L\[.*?\]\.size\(\)\[\d+\]")
_NO_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_NODE = re.compile(r"Error when translating node .*\[target=torch\.ops\.(\w+\.\w+)")
_LONGEST = 200  # characters of torch's own words
_DETECTOR_HINT = (
    "give a detector one image of a fixed size, 'images:float32[1,3,480,640]'; else export its "
    "backbone and head, and select the boxes outside the model"
)
_LINES = {  # of the user's code -> what to write instead
    r"\b(\w*split\w*|\w*chunk\w*|unbind|range)\(|`for .* in ": "a graph cannot hold a number of "
    "pieces, or rounds of a loop, that follows a size or the data: pad x to whole pieces and make "
    "these an axis, as x.unflatten(dim, (-1, length)) does, and compute along it; or give the axis "
    "a fixed size",
    r"\b(max|avg)_pool\dd\(": "a window of pooling that follows a size cannot be in a graph: "
    "x.amax(dim) or x.mean(dim) computes the same over the whole axis",
    r"\blinspace\(": "torch.arange(n) * step computes the same, with n and step of x.shape",
    r"\btake_along_dim\(": "torch.gather(x, dim, index) computes the same",
    r"\baffine_grid\(": "keep the grid of coordinates in a buffer, or give H and W a fixed size",
    r"\b(len|int|round|float)\(|\b(math|np|numpy)\.": "keep a size as torch gives it: x.shape[0] "
    "in place of len(x); //, * and ** 0.5 in place of int(), math and numpy",
}
DECIDES = " decides by the data, which a graph cannot hold"
BY_DATA_HINT = "write it with torch.where or torch.cond, or compute it outside the model"
FREE_HINT = "export with a fixed size for that axis, or change the model to work at any size"


FINAL = "final"  # the other exporter would write a graph that is wrong: it must not be tried
FIXED = "fixed"  # final, as an axis became a constant; another way of tracing may keep it
BY_DATA = "by data"  # a branch on a tensor
CAPTURED = "captured"  # torch.export itself succeeded: nothing in the model depends on the data


class NotExported(BadInput):
    """`cause`: one of those above, or "". `operator`: what ONNX or torch lacks: "aten.median"."""

    def __init__(
        self, message: str, *, hint: str | None = None, cause: str = "", operator: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.cause, self.operator = cause, operator


def explain(
    exc: BaseException, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> NotExported:
    """Return what went wrong in a sentence, with the innermost line of the user's own code.

    `sizes`: what the dynamic axes of `inputs` were exported at.
    """
    chain = list(causes(exc))
    frame = raised_at(exc)
    place = source_place(frame.filename, frame.lineno or 0, frame.name) if frame else ""
    own = next((item for item in chain if isinstance(item, NotExported)), None)
    if own is not None:
        return NotExported(f"{own.message} ({place})", hint=own.hint, cause=own.cause)
    kinds = [type(item) for item in chain]
    if any(
        kind.__name__ == "GuardOnDataDependentSymNode"
        or (kind.__module__.startswith("torch._dynamo") and "data-dependent" in str(item).lower())
        for kind, item in zip(kinds, chain, strict=True)
    ):
        if frame and is_written_for_tracing(frame.filename):
            return NotExported(
                f"torch.export does not take torchvision's selection of boxes ({place})",
                hint=_DETECTOR_HINT,
            )
        return NotExported(
            f"{place or 'the model'}{DECIDES}",
            hint=hint_for(place, BY_DATA_HINT),
            cause=BY_DATA,
        )
    reason = first_line(chain[-1])
    if match := _SIZE_TAKEN.search(reason):  # one that must equal another, or be no smaller
        for spec in inputs:
            for at, axis in enumerate(spec.shape):
                if sizes.get(str(axis)) == int(match[1]) and match[2] == match[3]:
                    return baked(spec, at, int(match[2]), place)
                if sizes.get(str(axis)) == int(match[1]) < int(match[2]):
                    return NotExported(
                        f"the model takes axis {axis} (axis {at} of input '{spec.name}') from "
                        f"{match[2]} on",
                        hint="give an example that is longer along it",
                        cause=FIXED,
                    )
    if re.search("Constraints violated|Expected op to be '=='", reason):
        lines = [line.strip(" -") for line in str(chain[-1]).splitlines()[1:] if line.strip()]
        return NotExported(
            f"the inputs' axes are not free: {_SOURCE.sub('', lines[0] if lines else reason)}",
            hint=FREE_HINT,
            cause=FIXED,
        )
    missing, node = _NO_OPERATOR.search(reason), _NODE.search("\n".join(map(str, chain)))
    operator = missing[1] if missing else node[1] if node else ""
    if missing:
        reason = f"ONNX has no operator for {operator}"
    elif node:
        reason = f"its exporter does not take this use of {operator}: {reason}"
    reason = textwrap.shorten(reason, _LONGEST, placeholder=" ...")
    where = f" ({place})" if place else ""
    return NotExported(
        f"torch cannot export the model: {reason}{where}",
        hint=hint_for(place, None) if re.search("split|chunk|unbind", reason) else None,
        cause=CAPTURED if any(kind.__name__ == "ConversionError" for kind in kinds) else "",
        operator=operator,
    )


def baked(spec: TensorSpec, at: int, size: object, place: str) -> NotExported:
    """Refuse a graph in which the line `place` made axis `at` of `spec` a number or expression."""
    kind = "at" if isinstance(size, int) else "to"
    return NotExported(
        f"the model fixes axis {spec.shape[at]} (axis {at} of input '{spec.name}') {kind} {size}: "
        + (place or "something in it reads that size as a constant"),
        hint=hint_for(place, FREE_HINT),
        cause=FIXED,
    )


def hint_for(place: str, other: str | None) -> str | None:
    """Return how to write the line at `place` for a graph, where that is known; else `other`."""
    return next((hint for pattern, hint in _LINES.items() if re.search(pattern, place)), other)


class Decision(NamedTuple):
    """A condition on the sizes of axes, whose branch the graph keeps, and the line that set it."""

    condition: str
    place: str

    def __str__(self) -> str:
        text = re.sub(r"\bNe\((\w+), (\w+)\)", r"\1 != \2", self.condition)
        return f"{text} ({self.place})" if text else self.place

    def holds(self, sizes: Mapping[str, int]) -> bool | None:
        """Return whether it holds at `sizes`; None where that is not known."""
        try:
            code = compile(self.condition, "condition", "eval")
            return bool(eval(code, {"__builtins__": {}}, {**_FUNCTIONS, **sizes}))  # noqa: S307 - torch's
        except Exception:  # noqa: BLE001 - a function that is not listed: better to name too many
            return None


class SizeWatch(logging.Handler):
    """Collects from torch's log the lines of the user's code that fixed, or branched on, sizes.

    The log names lines of torch; the Python stack at that moment holds the user's.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.places: dict[int, str] = {}
        self.pieces: list[tuple[str, str]] = []  # their number, in symbols, and the line that cuts
        self.symbols: dict[str, int] = {}  # to the size that the example has
        self.guards: dict[str, str] = {}  # to the line of the user's code that decided by them

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if match := _SYMBOL.search(message):
            self.symbols[match[1]] = int(match[2])
        elif match := _FIXES.search(message):
            self.places.setdefault(int(match[1]), innermost(sys._getframe()))
        elif match := _PIECES.search(message):
            self.pieces.append((match[1], innermost(sys._getframe())))
        elif (match := _GUARD.search(message)) and (place := _decided_at(sys._getframe())):
            self.guards.setdefault(match[1].removeprefix("eval "), place)

    def place(self, size: int) -> str:
        """Return the line that fixed the axis of this size, or cut it into `size` pieces; or ""."""
        if size in self.places:
            return self.places[size]
        names = [symbol for symbol, at in self.symbols.items() if at == size]
        cuts = (place for count, place in self.pieces if any(name in count for name in names))
        return next(filter(None, cuts), "")

    def decisions(self, sizes: Mapping[str, int]) -> tuple[Decision, ...]:
        """Return what was decided by the sizes of the example, which are `sizes` by axis.

        Conditions that hold for every size above 1 are left out, and those on other numbers.
        """
        axes = {size: axis for axis, size in sizes.items()}
        names = {symbol: axes.get(size, symbol) for symbol, size in self.symbols.items()}
        found: dict[str, Decision] = {}
        for guard, place in self.guards.items():
            guard = guard.removeprefix("runtime_assert ")
            tried = [dict.fromkeys(self.symbols, size) for size in _TRIED]
            always = all(Decision(guard, "").holds(sizes) for sizes in tried)
            if not always and not re.search(r"\bu\d+\b", guard):
                text = re.sub(r"s\d+", lambda match: names.get(match[0], match[0]), guard)
                found.setdefault(place, Decision(text, place))
        return tuple(found.values())

    def __enter__(self) -> SizeWatch:
        logger = logging.getLogger(_SHAPES_LOGGER)
        self._before = (logger.level, logger.propagate, logger.handlers)
        logger.setLevel(logging.INFO)
        logger.propagate, logger.handlers = False, [self]
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger(_SHAPES_LOGGER)
        level, logger.propagate, logger.handlers = self._before
        logger.setLevel(level)


def _decided_at(frame: FrameType | None) -> str:
    """The line of the user's code that made a Python bool of a comparison of sizes; else ""."""
    while frame is not None and frame.f_code.co_name != "__bool__":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == "__bool__":
        frame = frame.f_back
    if frame is None or not is_users(frame.f_code.co_filename):
        return ""
    return source_place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


_RANDOM_HINT = (
    "an exported model answers the same each time: in eval return the mean, and give F.dropout "
    "training=self.training"
)
_STATE_HINT = "a graph keeps no state between calls: take it as an input, and return the new one"
_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")

# operator -> its use, whether arguments are that use, what to write instead
_LOWERED_WRONGLY: dict[str, tuple[str, Callable[[Mapping[str, Any]], bool], str]] = {
    "scatter_reduce_?|index_reduce_?": (
        "scatter_reduce(reduce='mean')",
        lambda given: given.get("reduce") == "mean",
        "add by index, and divide by the counts, ones added by the same index",
    ),
    "avg_pool[23]d": (
        "avg_pool(divisor_override)",
        lambda given: bool(given.get("divisor_override")),
        "leave divisor_override out, and multiply by the window's area / divisor",
    ),
    r"_upsample\w*_aa": (
        "interpolate(antialias=True)",
        lambda _: True,
        "give height and width a fixed size, or resize outside the model",
    ),
    "arange": (
        "an arange that falls",
        lambda given: isinstance(given.get("step"), (int, float)) and given["step"] < 0,
        "torch.arange(n).flip(0) computes the same",
    ),
}


class CallWatch(_dispatch.TorchDispatchMode):  # type: ignore[misc] # torch comes through require
    """Records, while active, the first line that called each operator, by "aten.name".

    `random`: the line that drew random numbers. `changed`: the model's own tensors that a line
    wrote to, by name. `suspects`: what torch's exporter is known to write wrongly, and the rewrite,
    by line. `types`: of all tensors. `value_read`: the running call read a value. `reads`: where
    Python got a value, or a size, that follows the inputs' values, so that these decide what runs;
    `fixed`: where it got another tensor's value.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.lines: dict[str, str] = {}
        self.suspects: dict[str, tuple[str, str]] = {}
        self.types: set[str] = set()
        self.ended = self.value_read = False
        self.reads: list[str] = []
        self.fixed: set[str] = set()
        self._inputs: tuple[Any, ...] = ()
        self._following: dict[int, Any] = {}  # the inputs, and what was computed of them
        self.random = ""
        self.changed: dict[str, str] = {}
        whole = isinstance(module, torch.nn.Module)  # not a function of TorchScript
        own = (*module.named_parameters(), *module.named_buffers()) if whole else ()
        self._own = {tensor.data_ptr(): name for name, tensor in own if tensor.numel()}

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        place = innermost(sys._getframe())
        self.lines.setdefault(f"{func.namespace}.{func._opname}", place)
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
        given |= kwargs or {}
        for pattern, (what, differs, hint) in _LOWERED_WRONGLY.items():
            if re.fullmatch(pattern, func._opname) and differs(given):
                self.suspects.setdefault(place, (what, hint))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = self.random or place
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            name = self._own.get(args[0].data_ptr())
            if name is not None:
                self.changed.setdefault(name.removeprefix("module."), place)
        found = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        self.types |= {dtype_of(each) for each in tensors}
        made = torch.utils._pytree.tree_leaves(found)
        value = any(isinstance(each, (bool, int, float)) for each in made)
        if not any(_memory(each) in self._following for each in tensors):
            self.fixed |= {place} if value else set()
        else:
            kinds = {each.dtype for each in tensors[1:]}  # x[i] is as long as an integer i
            if torch.Tag.dynamic_output_shape in func.tags and (
                func._opname != "index" or kinds & {torch.bool, torch.uint8}
            ):
                self.reads.append(place)
            self.value_read |= value
            self._follow([*made, *tensors[: func._schema.is_mutable]])
        return found

    @contextlib.contextmanager
    def of(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Follow `inputs` while the block runs."""
        self._inputs = tuple(  # zeros hide what dropout does
            torch.randn_like(each) if each.is_floating_point() and not each.any() else each.clone()
            for each in inputs
        )
        self._follow(inputs)
        with _PythonCalls(self), self:
            yield

    def _follow(self, values: Sequence[Any]) -> None:
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        self._following |= {_memory(each): each for each in tensors}

    @property
    def reads_inputs(self) -> bool:
        return bool(self.reads) or not self.ended

    def add_to(self, error: BadInput | Any) -> bool:
        """Say in `error` why the model's answers differ from call to call; False if they do not."""
        if self.random and self._differs():
            error.message += f"; the model draws random numbers at {self.random}"
            error.hint = _RANDOM_HINT
        elif self.changed:
            name, place = next(iter(self.changed.items()))
            error.message += f"; the model changes its own '{name}' at {place}"
            error.hint = _STATE_HINT
        else:
            return False
        return True

    def _differs(self) -> bool:
        """Return whether two runs on the same inputs, from two seeds, have other outputs."""
        runs: list[Any] = []
        with contextlib.suppress(Exception), torch.random.fork_rng(), torch.no_grad():
            for seed in (0, 1):
                torch.manual_seed(seed)
                runs.append(torch.utils._pytree.tree_leaves(self.module(*self._inputs)))
            pairs = zip(*runs, strict=True)
            return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
        return False

    def add_operator(self, error: BadInput, operator: str) -> None:
        """Name the line that calls `operator` in `error`, and what to write instead."""
        place = self.lines.get(operator, "")
        if place and place not in error.message:
            error.message += f" ({place})"
        error.hint = error.hint or rewrite_for(operator)


class _PythonCalls(torch.overrides.TorchFunctionMode):  # type: ignore[misc,name-defined]
    """Tells `watch` that Python got a value of a call, unless torch only checked one."""

    def __init__(self, watch: CallWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        found, watch = func(*args, **(kwargs or {})), self.watch
        leaves = torch.utils._pytree.tree_leaves(found)
        if watch.value_read and not any(isinstance(each, torch.Tensor) for each in leaves):
            watch.reads.append(innermost(sys._getframe()))
        watch.value_read = False
        return found


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def check_layers(error: BadInput, module: Any) -> None:
    """Say that the export failed over torch's own quantized layers, if it did."""
    for name, layer in getattr(module, "named_modules", tuple)():
        if type(layer).__module__.startswith(_QUANTIZED):
            error.message = (
                f"layer '{name.removeprefix('module.')}' is one of torch's quantized layers, which "
                f"its exporter does not take ({type(layer).__module__}.{type(layer).__name__})"
            )
            error.hint = "export the float model, then: deploykit quantize --to int8 --calib DATA"
            return
