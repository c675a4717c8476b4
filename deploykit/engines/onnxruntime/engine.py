"""Run an `.onnx` file with ONNX Runtime, on its CPU or CUDA provider.

The provider is read back after loading: ONNX Runtime only logs that it uses the CPU in place of
CUDA, which is an error here; single nodes on the CPU become a note.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.artefact import ArtefactLike
from deploykit.core.errors import (
    USE_LESS_MEMORY,
    BadInput,
    DeploykitError,
    OutOfMemory,
    Unsupported,
    cuda_error,
    first_line,
)
from deploykit.core.extras import install_command, require
from deploykit.core.machine import ASKED_BYTES, default_threads, memory_errors
from deploykit.core.subprocesses import run_apart
from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec, name_axes
from deploykit.engines.engine import Arrays, CallGuard, Engine, FeedCheck
from deploykit.engines.onnxruntime.file import (
    EXACT_INTEGERS,
    UNSHARED,
    adds_exactly,
    check_sums,
    external_weights,
    is_large,
    mapped_copy,
    rounds_sums,
    save_at,
)
from deploykit.graph.parse import FLOAT8, FLOAT16, INTEGER_PRODUCTS, damaged, onnx_files, read_facts

log = logging.getLogger(__name__)

ort = require("onnxruntime")
ort_state = require("onnxruntime.capi.onnxruntime_pybind11_state")


SHRINK_S = 10.0


class Arena:
    """Decides when a session on the CPU frees unused memory, which it would keep for ever.

    The first run of each SHRINK_S frees the memory of earlier runs, and so does a run with larger
    inputs than before, which needs larger blocks. The next runs then need new pages.
    """

    def __init__(self, ort: Any, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._until_s = -math.inf
        self._largest_bytes = 0
        self._shrink = ort.RunOptions()
        self._shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def options(self, feeds: Arrays) -> Any:
        """Return the options of a run with these inputs; None for the defaults."""
        now_s = self._clock_s()
        size = sum([array.nbytes for array in feeds.values()])
        if size <= self._largest_bytes and now_s < self._until_s:
            return None
        self._until_s, self._largest_bytes = now_s + SHRINK_S, size
        return self._shrink


_MOST_SHAPES = 8  # shapes of inputs whose buffers are kept


class Binding:
    """Runs one session's calls on `device`, such as ("cuda", 0), with input buffers that it keeps.

    `session.run` would allocate them in every call. It takes the module, so that tests bind a CPU
    session.
    """

    def __init__(
        self,
        ort: Any,
        session: Any,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        device: tuple[str, int],
    ) -> None:
        self._ort, self._session, self._device = ort, session, device
        self._inputs, self._outputs = inputs, outputs
        self._bound: dict[tuple[tuple[int, ...], ...], tuple[Any, list[Any]]] = {}
        self.last_copies_us = (0, 0)  # the last call's copies: to the device, and back

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run once; `feeds` fit the inputs. ONNX Runtime's exceptions propagate."""
        key = tuple(feeds[spec.name].shape for spec in self._inputs)
        bound, values = self._bound.get(key) or self._bind(key)
        started_ns = time.perf_counter_ns()
        for spec, value in zip(self._inputs, values, strict=True):
            value.update_inplace(np.ascontiguousarray(feeds[spec.name]))
        copied_ns = time.perf_counter_ns()
        self._session.run_with_iobinding(bound)
        ran_ns = time.perf_counter_ns()
        found = zip(self._outputs, bound.get_outputs(), strict=True)
        answers = {spec.name: value.numpy() for spec, value in found}
        ended_ns = time.perf_counter_ns()
        self.last_copies_us = ((copied_ns - started_ns) // 1000, (ended_ns - ran_ns) // 1000)
        return answers

    def close(self) -> None:
        self._bound.clear()
        self._session = None

    def _bind(self, key: tuple[tuple[int, ...], ...]) -> tuple[Any, list[Any]]:
        if len(self._bound) >= _MOST_SHAPES:
            del self._bound[next(iter(self._bound))]
        bound, values = self._bound[key] = self._session.io_binding(), list[Any]()
        for spec, shape in zip(self._inputs, key, strict=True):
            dtype = np.dtype(spec.dtype).type
            values.append(
                self._ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, *self._device)
            )
            bound.bind_ortvalue_input(spec.name, values[-1])
        for spec in self._outputs:
            bound.bind_output(spec.name, *self._device)
        return bound, values


_Rest = frozenset[tuple[str, tuple[int, ...]]]  # the shapes of inputs without their first axis
# A session that sees calls of so many rows only, and its inputs: a smaller call fills their first
# rows. Those of earlier calls may follow, as no row has an effect on another one's outputs.
_Sized = tuple[int, Binding, dict[str, np.ndarray]]
_MOST_SESSIONS = 9
_DEAR = 2.0  # times a steady call
_RUNS = 3


class BatchSizes:
    """Calls of any number of rows, on sessions that each see one batch size if that is faster.

    cuDNN plans every convolution anew when the shapes of a session's inputs change, as a server's
    batches do. A ResNet-50 called with 6 and 26 rows in turn took 150 ms a call on an H200, and
    3.6 ms with such sessions (ONNX Runtime 1.31.1; its issue 23006).
    """

    def __init__(
        self,
        first: Binding,
        reopen: Callable[[], Binding],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`reopen` returns a binding of another session of the same file."""
        self._first = self._used = first
        self._reopen = reopen
        self._clock_ns = clock_ns
        self._sized: dict[_Rest, list[_Sized]] = {}

    @property
    def last_copies_us(self) -> tuple[int, int]:
        return self._used.last_copies_us

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if self._sized:
            rows, rest = _rows_and_rest(feeds)
            for most, binding, full in self._sized.get(rest, ()):
                if 0 < rows <= most:
                    self._used = binding
                    if rows == most:
                        return binding(feeds)
                    for name, array in full.items():
                        array[:rows] = feeds[name]
                    return {name: array[:rows] for name, array in binding(full).items()}
        self._used = self._first
        return self._first(feeds)

    def prepare(self, calls: Iterable[Arrays]) -> None:
        """Open a session for one row, a quarter of the largest batch and all of it, if that pays.

        The rows of the model must be independent. Raises OutOfMemory.
        """
        shapes: dict[_Rest, dict[int, Arrays]] = {}
        for feeds in calls:
            rows, rest = _rows_and_rest(feeds)
            shapes.setdefault(rest, {})[rows] = feeds
        for rest, by_rows in shapes.items():
            most = max(by_rows)
            quarter = max((rows for rows in by_rows if 4 * rows <= most), default=most)
            chosen = sorted({min(by_rows), quarter, most}, reverse=True)
            opened = sum(map(len, self._sized.values()))
            if len(chosen) == 1 or opened + len(chosen) > _MOST_SESSIONS:
                continue
            if not self._sized and not self._dear(by_rows[most], by_rows[chosen[-1]]):
                return
            self._sized[rest] = sized = list[_Sized]()
            for rows in chosen:
                try:
                    binding = self._reopen() if opened or sized else self._first
                    full = {name: array.copy() for name, array in by_rows[rows].items()}
                    binding(full)
                    sized.insert(0, (rows, binding, full))
                except Exception as exc:
                    if not sized:
                        raise
                    text = "batches of %d rows or fewer are filled up to %d: no second session: %s"
                    log.warning(text, rows, sized[0][0], first_line(exc))
                    break

    def close(self) -> None:
        for binding in [self._first, *(x[1] for sized in self._sized.values() for x in sized)]:
            binding.close()
        self._sized.clear()

    def _dear(self, large: Arrays, small: Arrays) -> bool:
        """Return whether a call after one of another size takes far longer than one after its like.

        The shortest of a few counts: other programs can make any of them long.
        """
        changed, steady = list[int](), list[int]()
        for _ in range(_RUNS):
            self._first(large)
            for found in (changed, steady):
                started_ns = self._clock_ns()
                self._first(small)
                found.append(self._clock_ns() - started_ns)
        return min(changed) > _DEAR * min(steady)


def _rows_and_rest(feeds: Arrays) -> tuple[int, _Rest]:
    rows = len(next(iter(feeds.values())))
    return rows, frozenset([(name, array.shape[1:]) for name, array in feeds.items()])


def check_placement(path: Path, session: Any, version: str) -> tuple[str, ...]:
    """Return a note on the nodes of a CUDA session that run on the CPU, or that this is unknown.

    The session must be opened with `session.record_ep_graph_assignment_info`, new in 1.24. Raises
    Unsupported if all nodes do.
    """
    read = getattr(session, "get_provider_graph_assignment_info", None)
    if read is None:
        return (f"{path}: onnxruntime {version} does not report which nodes run on the CPU",)
    placed = [(part.ep_name, node.op_type) for part in read() for node in part.get_nodes()]
    kept = [kind for provider, kind in placed if provider == "CPUExecutionProvider"]
    if kept and len(kept) == len(placed):
        raise Unsupported(f"{path}: `device` is cuda, but every node runs on the CPU")
    if not kept:
        return ()
    kinds = sorted(set(kept))
    more = f" and {len(kinds) - 6} kinds more" if len(kinds) > 6 else ""
    count = f"{path}: {len(kept)} of {len(placed)} nodes run on the CPU"
    return (f"{count}, with copies between: {', '.join(kinds[:6])}{more}",)


def preload(ort: Any, folders: Sequence[str] | None = None) -> None:
    """Load CUDA's libraries from wheels in any folder of sys.path, or from the loader's own path.

    ONNX Runtime searches next to its own folder; `pip install --target` and a second site-packages
    have others. `folders`: sys.path. Does nothing in a version without CUDA or older than 1.21.
    """
    if not hasattr(ort, "preload_dlls"):
        return
    with contextlib.redirect_stdout(io.StringIO()):  # each lacks the libraries of the others
        for folder in map(Path, sys.path if folders is None else folders):
            for libraries in sorted(folder.glob("nvidia/*/lib")):
                ort.preload_dlls(directory=str(libraries))
    with contextlib.redirect_stdout(sys.stderr):  # it prints failures
        ort.preload_dlls()


_NODE = re.compile(r"running (\w+) node. Name:'(.*?)' Status Message: ")
_PREFIX = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : "
    r"(Load model from .*? failed: ?)?(This is an invalid model\. )?(Error: )?"
)


def reason(exc: Exception) -> str:
    """Return the first line of `exc`; for a failed node, its name and operator come first.

    That is the innermost one: a node in the body of an If fails with the If.
    """
    text = _PREFIX.sub("", first_line(exc), count=1)
    *_, node = [None, *_NODE.finditer(text)]
    why = text[node.end() :] if node else text
    why = why.rpartition(" was false. ")[2] or why
    return f"node '{node[2]}' ({node[1]}): {why}" if node else why


_DTYPES = {f"tensor({name})": name for name in PROTOCOL_NAMES if name != "bfloat16"}
_DTYPES |= {"tensor(float)": "float32", "tensor(double)": "float64"}


def spec_of(path: Path, node: Any) -> TensorSpec:
    """Return the spec of `node`, with a name for each unnamed dynamic axis (None)."""
    dtype = _DTYPES.get(node.type)
    if dtype is None:
        raise Unsupported(
            f"{path}: tensor '{node.name}' is a {node.type}, which is not supported",
            hint="convert it again without ZipMap: to_onnx(..., options={'zipmap': False})"
            if "map(" in node.type  # as skl2onnx writes the probabilities of a classifier
            else "export the model with tensors of float32, integers, booleans or strings",
        )
    return TensorSpec(node.name, dtype, name_axes(node.name, node.shape))


_OF_CUDA = (
    ort_state.Fail,
    ort_state.InvalidArgument,
    ort_state.RuntimeException,
    ort_state.EPFail,
    RuntimeError,
)
_REFUSALS = (ort_state.InvalidGraph, ort_state.InvalidArgument, ort_state.Fail)
_CUDA_FAILURE = re.compile(r"CUDA failure (\d+): ([^;\n]*)")
# These are slower on a CPU if fused: a BERT took 1.11 (float32) to 1.24 (INT8) times as long; see
# benchmarks/README.md.
SLOWER_ON_CPU = ("SkipLayerNormFusion", "BiasGeluFusion")


def open_engine(
    source: ArtefactLike,
    device: str = "auto",
    threads: int | None = None,
    trust: bool = False,  # noqa: ARG001 - a graph runs no code of its own
    *,
    spinning: bool = False,
    shared: Path | None = None,
) -> OnnxRuntimeEngine:
    """Open an ONNX file; raises BadInput for an invalid graph, Unsupported for the device.

    `spinning`: threads that wait for work keep their core busy, as is ONNX Runtime's default.
    `shared`: a folder; on the CPU, processes that name the same one share large weights.
    """
    path = Path(source)
    cuda = "CUDAExecutionProvider" in ort.get_available_providers()
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    if device != "cpu" and not cuda:
        raise Unsupported(
            f"{path}: `device` is {device}, but this onnxruntime has no CUDA provider",
            hint=f"pip uninstall onnxruntime; {install_command('gpu')}; see: deploykit doctor",
        )
    return OnnxRuntimeEngine(path, device, threads, spinning=spinning, shared=shared)


def open_as_written(path: Path) -> OnnxRuntimeEngine:
    """Open `path` on the CPU without optimisation: no node is fused, no cast is dropped.

    A file with integer products is optimised nevertheless: only then are they exact on every CPU.
    """
    return OnnxRuntimeEngine(path, "cpu", None, optimise=False)


class OnnxRuntimeEngine(Engine):
    """One InferenceSession. `session` is open to builders and benchmarks.

    `notes`: nodes that run on the CPU. `profile`: the prefix of the path that
    `session.end_profiling` writes to.
    """

    def __init__(
        self,
        path: Path,
        device: str,
        threads: int | None,
        *,
        optimise: bool = True,
        spinning: bool = False,
        shared: Path | None = None,
        profile: str = "",
    ) -> None:
        self.path = path
        self.runtime = f"onnxruntime {ort.__version__}"
        self.notes: tuple[str, ...] = ()
        self.session = None
        if shared is not None and device == "cpu" and is_large(path):
            try:
                self.session = _mapped(path, shared, threads, spinning)
            except (DeploykitError, OSError) as exc:
                self.notes = (f"{path}: its weights are not shared: {first_line(exc)}",)
        reopen = partial(_session, path, device, threads, optimise=optimise, spinning=spinning)
        self.session = self.session or reopen(profile=profile)
        used = self.session.get_session_options()
        if rounds_sums(used):
            self.notes += (f"{path}: nodes share INT8 weights: {UNSHARED}",)
        options = {name: getattr(used, name, None) for name in _OPTIONS}
        options |= {n: used.get_session_config_entry(n) for n in (SPINNING, EXACT_INTEGERS)}
        options["providers"] = ", ".join(self.session.get_providers())
        self.options = {name: getattr(value, "name", str(value)) for name, value in options.items()}
        self.inputs = tuple(spec_of(path, node) for node in self.session.get_inputs())
        self.outputs = tuple(spec_of(path, node) for node in self.session.get_outputs())
        self._names = [spec.name for spec in self.outputs]
        self._check, self._guard = FeedCheck(self.inputs, path.name), CallGuard(path.name)
        first = self.session.get_providers()[0]
        if (first == "CPUExecutionProvider") != (device == "cpu"):
            raise Unsupported(
                f"{path}: `device` is {device}, but ONNX Runtime chose {first}",
                hint="its CUDA or cuDNN libraries did not load; see: deploykit doctor",
            )
        self.device = "cuda:0" if device == "cuda" else device
        strings = "string" in {spec.dtype for spec in (*self.inputs, *self.outputs)}
        self.steady = self.device == "cpu" and not (
            any(spec.dtype == "string" for spec in self.inputs) or read_facts(path).slowed_by_values
        )
        self._arena = Arena(ort)
        self._binding: BatchSizes | None = None
        if self.device != "cpu" and not strings:  # GPU memory holds no strings
            kind, _, number = self.device.partition(":")
            self.notes += check_placement(path, self.session, ort.__version__)

            def bind(session: Any) -> Binding:
                return Binding(ort, session, self.inputs, self.outputs, (kind, int(number)))

            self._binding = BatchSizes(bind(self.session), lambda: bind(reopen()))

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if self.session is None:
            raise DeploykitError(f"{self.path.name}: the engine is closed")
        self._guard.check_process()
        self._check(feeds)
        try:
            if self._binding is not None:
                with self._guard:
                    return self._binding(feeds)
            options = self._arena.options(feeds)
            given = feeds if type(feeds) is dict else dict(feeds)
            found = self.session.run(self._names, given, options)
            return dict(zip(self._names, found, strict=True))
        except Exception:  # mapped and raised below: a `with` would slow down every call
            with onnxruntime_errors(self.path, self.device):
                raise

    def prepare(self, calls: Iterable[Arrays], *, joined: bool) -> None:
        """On CUDA, open a session for each of a few batch sizes if that is faster.

        Raises OutOfMemory.
        """
        if self._binding is not None and joined:
            with self._guard, onnxruntime_errors(self.path, self.device):
                self._binding.prepare(calls)

    def trim(self) -> bool:
        self._arena = Arena(ort)  # its first run frees memory
        return self._binding is None

    @property
    def last_copies_us(self) -> tuple[int, int]:  # type: ignore[override]  # never set
        """The last call's copies to the GPU and back; (0, 0) on the CPU, which copies nothing."""
        return self._binding.last_copies_us if self._binding is not None else (0, 0)

    def close(self) -> None:
        if self._binding is not None:
            self._binding.close()
        self._binding = None
        self.session = None


def session_options(
    threads: int | None, *, half: bool = False, exact: bool = True, spinning: bool = False
) -> Any:
    """Return a session's options: no spinning threads by default, no log, as errors are raised.

    `exact`: integer sums are exact on every CPU; without it, weights stay as the file has them.
    `half`: the graph has float16. At its default level ONNX Runtime's CPU provider crashes on some
    float16 graphs (seen with a transformer encoder, 1.31.1), so the level below is used.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or default_threads()
    options.inter_op_num_threads = 1
    options.add_session_config_entry(SPINNING, str(int(spinning)))
    options.add_session_config_entry(EXACT_INTEGERS, str(int(exact and not adds_exactly())))
    options.log_severity_level = 4
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_EXTENDED if half else level.ORT_ENABLE_ALL
    return options


SPINNING = "session.intra_op.allow_spinning"
_OPTIONS = (
    "intra_op_num_threads",
    "inter_op_num_threads",
    "graph_optimization_level",
    "execution_mode",
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
)


def _session(
    path: Path,
    device: str,
    threads: int | None,
    *,
    optimise: bool,
    spinning: bool = False,
    save: Path | None = None,
    profile: str = "",
) -> Any:
    """Open a session; `save`: the path for the optimised model, with its weights in a file."""
    if device == "cpu":
        check_sums(path, ort.__version__)
    facts = read_facts(path)
    integers = not facts.operators.isdisjoint(INTEGER_PRODUCTS)
    level = ort.GraphOptimizationLevel
    providers: list[Any] = ["CPUExecutionProvider"]
    if device != "cpu":
        number = int(device.partition(":")[2] or 0)
        # its default times every algorithm at the first call of each batch size: 0.3 to 1.3 s
        chosen = {"device_id": str(number), "cudnn_conv_algo_search": "HEURISTIC"}
        providers.insert(0, ("CUDAExecutionProvider", chosen))
        preload(ort)
        ort.set_default_logger_severity(3)  # 1.31 warns that CUDA's provider is no plugin
    exact = True
    while True:
        half = FLOAT16 in facts.element_types
        options = session_options(threads, half=half, exact=exact, spinning=spinning)
        weights = read_weights(path, options)  # keep until the session has copied them
        # optimised float8 graphs are wrong in 1.31.1 (accuracy 98.5 % became 75 % on a small CNN)
        if FLOAT8 in facts.element_types or not (optimise or integers):
            options.graph_optimization_level = level.ORT_DISABLE_ALL
        elif not (exact or integers):  # pairs are float32 if not fused
            options.graph_optimization_level = level.ORT_ENABLE_BASIC
        if save is not None:
            save_at(save, options)
        if profile:
            options.enable_profiling, options.profile_file_prefix = True, profile
        if device != "cpu":
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        with onnxruntime_errors(path, device):
            try:
                return ort.InferenceSession(
                    str(path),
                    sess_options=options,
                    providers=providers,
                    enable_fallback=0,
                    disabled_optimizers=SLOWER_ON_CPU if device == "cpu" else (),
                )
            except (ort_state.Fail, ort_state.RuntimeException) as exc:
                clash = ("replace the existing tensor", "Initializer with same name")  # 1.32, 1.23
                if not exact or not any(text in str(exc) for text in clash):
                    raise
        del weights
        exact = False


def _mapped(path: Path, shared: Path, threads: int | None, spinning: bool) -> Any:
    """Open a session on the copy of `path` in `shared`. Raises as `mapped_copy` does."""
    copy = mapped_copy(path, shared, lambda copy: run_apart(str(path), write_copy, path, copy))
    options = session_options(threads, spinning=spinning)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is optimised
    with onnxruntime_errors(path):
        return ort.InferenceSession(
            str(copy), options, providers=["CPUExecutionProvider"], enable_fallback=0
        )


def write_copy(path: Path, copy: Path, _on_progress: Callable[[str, float], None]) -> None:
    """Write the copy, in a process of its own: a session would fragment a server's memory."""
    options = _session(path, "cpu", 1, optimise=True, save=copy).get_session_options()
    if rounds_sums(options):
        raise Unsupported("nodes share INT8 weights")


def read_weights(path: Path, options: Any) -> object:
    """Give `options` the content of external weights; keep the result until the session is made."""
    with onnxruntime_errors(path):
        weights = external_weights(path)
    if weights and hasattr(options, "add_external_initializers_from_files_in_memory"):
        # 1.23 lacks it and maps the files: a truncated one ends the process with SIGBUS
        sizes = [data.nbytes for data in weights.values()]
        options.add_external_initializers_from_files_in_memory(
            [*weights], [*weights.values()], sizes
        )
    return weights


@contextlib.contextmanager
def onnxruntime_errors(path: Path, device: str = "cpu") -> Iterator[None]:
    """Turn exceptions of ONNX Runtime, and on CUDA those of CUDA, into ours that name the file."""
    try:
        with memory_errors(path, onnx_files(path)):
            try:
                yield
            except _OF_CUDA as exc:
                where, text = f"{path}: {device}", str(exc)
                if device != "cpu" and (asked := ASKED_BYTES.search(text)):
                    needed = f"{int(asked[1]) / 2**20:,.1f} MiB needed at once"
                    full = f"{where}: out of memory: {needed}"
                    raise OutOfMemory(full, hint=USE_LESS_MEMORY) from exc
                if device != "cpu" and (failed := _CUDA_FAILURE.search(text)):
                    code, words = int(failed[1]), failed[2].strip()
                    raise cuda_error(where, "ONNX Runtime", code, words) from exc
                raise
    except (ort_state.InvalidProtobuf, ort_state.NoModel) as exc:
        raise damaged(path) from exc
    except ort_state.NoSuchFile as exc:
        raise BadInput(f"{path}: {reason(exc)}") from exc
    except ort_state.NotImplemented as exc:
        raise Unsupported(f"{path}: {reason(exc)}", hint="see: deploykit doctor") from exc
    except (*_OF_CUDA, ort_state.InvalidGraph, ValueError) as exc:
        refused = isinstance(exc, _REFUSALS)
        error = BadInput if refused or "SafeIntOnOverflow" in str(exc) else Unsupported  # its sizes
        verb = "refused it" if refused else "failed"
        raise error(f"{path}: ONNX Runtime {verb}: {reason(exc)}") from exc


def providers() -> tuple[str, ...]:
    """Return the execution providers of the installed ONNX Runtime, most specific first."""
    return tuple(ort.get_available_providers())
