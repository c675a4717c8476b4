"""Read facts about an `.onnx` file from its protobuf's field headers, without the onnx package.

The onnx package is slow to import and loads the weights; a server needs neither. An unreadable file
has no facts here: loading it reports what is wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, Unsupported, os_reason, quote
from deploykit.core.files import check_data_file, open_readable
from deploykit.core.machine import cpu_features, file_text
from deploykit.core.protobuf import Pages, fields


def small_floats(path: Path) -> set[str]:
    """Which of "float16" and "float8" (E4M3) tensors, inputs, outputs or Casts are of."""
    try:
        with Pages(path) as data:
            kinds = set(_types_in(data, "model", 0, len(data)))
    except (OSError, ValueError, IndexError, RecursionError):
        return set()
    return {name for name, kind in _SMALL_FLOATS.items() if kind in kinds}


def multiplies_integers(path: Path, *, scaled_in_each_call: bool = False) -> bool:
    """Whether the file has operators that multiply 8-bit integers, as a built INT8 file has.

    `scaled_in_each_call`: only products of activations whose scale follows from each call's values.
    """
    return has_operator(path, _SCALED_IN_EACH_CALL if scaled_in_each_call else _INTEGER_PRODUCTS)


def has_operator(path: Path, kinds: Collection[bytes]) -> bool:
    """Whether a node of the file, at any depth, is one of `kinds`."""
    try:
        with Pages(path) as data:
            return _operator_in(data, "model", 0, len(data), kinds)
    except (OSError, ValueError, IndexError, RecursionError):
        return False


def slowed_by_values(path: Path) -> bool:
    """Whether values of the inputs, not their shapes alone, set how much a run computes.

    True where that is unknown.
    """
    try:
        with Pages(path) as data:
            parts = [(at, stop) for number, at, stop in fields(data, 0, len(data)) if number == 7]
            functions = any(number == 25 for number, _, _ in fields(data, 0, len(data)))
            if functions and _operator_in(data, "model", 0, len(data), set(_WORK)):
                return True  # what the nodes of a function are given is not followed
            return _values_set_work(data, *parts[-1])
    except (OSError, ValueError, IndexError, RecursionError):
        return True


def _values_set_work(data: Pages, begin: int, end: int) -> bool:
    """Follow all that depends on the values of a graph's inputs to the operators of _WORK."""
    parts = list(fields(data, begin, end))
    from_values = {_first(data, at, stop, 1) for number, at, stop in parts if number == 11}
    from_values -= {_first(data, at, stop, 8) for number, at, stop in parts if number == 5}
    nodes = []
    for number, at, stop in parts:
        if number == 1:
            node = [each for each in fields(data, at, stop) if each[2] != -1]
            attributes = [(a, b) for n, a, b in node if n == 5]
            if any(_operator_in(data, "attribute", a, b, set(_WORK)) for a, b in attributes):
                return True  # in a branch
            takes, gives = ([data[a:b] for n, a, b in node if n == which] for which in (1, 2))
            nodes.append((_first(data, at, stop, 4), takes, gives))
    known = 0
    while known < len(from_values):  # again, as long as nodes stand before those they depend on
        known = len(from_values)
        for kind, takes, gives in nodes:
            sized = [takes[n] for n in _WORK.get(kind, ()) if n < len(takes)]
            if kind == b"Loop" or from_values.intersection(sized):
                return True
            if kind not in _SHAPES and from_values.intersection(takes):
                from_values.update(gives)
    return False


def _first(data: Pages, begin: int, end: int, wanted: int) -> bytes:
    """The field `wanted` of a message, where it is of bytes; empty without one."""
    for number, at, stop in fields(data, begin, end):
        if number == wanted and stop != -1:
            return data[at:stop]
    return b""


def stored_twice(path: Path) -> str:
    """A name that two initializers of the graph have; empty where each has its own."""
    try:
        with Pages(path) as data:
            graphs = [(at, stop) for number, at, stop in fields(data, 0, len(data)) if number == 7]
            seen: set[bytes] = set()
            for number, at, stop in fields(data, *graphs[-1]):
                if number == 5 and stop != -1:
                    name = _first(data, at, stop, 8)
                    if name in seen:
                        return name.decode(errors="replace")
                    seen.add(name)
    except (OSError, ValueError, IndexError, RecursionError):
        pass
    return ""


def onnx_files(path: Path) -> Iterator[Path]:
    """The file, then those that hold its weights; it is read only if these are asked for."""
    yield path
    yield from (path.parent / location for location in external_files(path))


def external_files(path: Path) -> list[str]:
    """The locations, relative to the model's folder, that its tensors name for their data."""
    return sorted({location for location, _, _ in external_spans(path)})


def external_spans(path: Path) -> list[tuple[str, str, str]]:
    """Location, offset and length, as the file has them or empty, of each tensor's data."""
    try:
        with Pages(path) as data:
            return list(_spans(data, "model", 0, len(data)))
    except (OSError, ValueError, IndexError, RecursionError):
        return []


def _spans(data: Pages, message: str, begin: int, end: int) -> Iterator[tuple[str, str, str]]:
    """What TensorProto.external_data (13: key 1, value 2) say, at any depth."""
    members = _MEMBERS.get(message, {})
    entries: dict[str, str] = {}
    for number, at, stop in fields(data, begin, end):
        if stop == -1:
            continue
        if message == "tensor" and number == 13:
            found = {n: data[a:b] for n, a, b in fields(data, at, stop) if b != -1}
            key, value = (found.get(each, b"").decode(errors="replace") for each in (1, 2))
            entries[key] = value
        elif number in members:
            yield from _spans(data, members[number], at, stop)
    if "location" in entries:
        yield entries["location"], entries.get("offset", ""), entries.get("length", "")


# Where tensors and types stand, by the field numbers of onnx.proto: message -> {field: message}.
_MEMBERS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 11: "value", 12: "value", 13: "value", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "value": {2: "type"},
    "type": {1: "tensor_type"},
}
# Operators, and which of their inputs set how much they or later nodes compute, by values.
_WORK: Mapping[bytes, tuple[int, ...]] = {
    b"Loop": (0, 1),
    b"If": (0,),
    b"BeamSearch": (0,),
    b"GreedySearch": (0,),
    b"Sampling": (0,),
    b"WhisperBeamSearch": (0,),
    b"NonMaxSuppression": (0, 1),
    b"NonZero": (0,),
    b"Compress": (1,),
    b"Unique": (0,),
    b"ImageDecoder": (0,),
    b"AffineGrid": (1,),
    b"BlackmanWindow": (0,),
    b"CenterCropPad": (1,),
    b"Col2Im": (1, 2),
    b"ConstantOfShape": (0,),
    b"DFT": (1,),
    b"Expand": (1,),
    b"HammingWindow": (0,),
    b"HannWindow": (0,),
    b"MaxUnpool": (2,),
    b"MelWeightMatrix": (0, 1),
    b"OneHot": (1,),
    b"Pad": (1,),
    b"Range": (0, 1, 2),
    b"Resize": (1, 2, 3),
    b"STFT": (1, 3),
    b"Tile": (1, 2),
    b"Upsample": (1,),
}
_SCALED_IN_EACH_CALL = frozenset((b"ConvInteger", b"MatMulInteger", b"DynamicQuantizeMatMul"))
_INTEGER_PRODUCTS = _SCALED_IN_EACH_CALL | frozenset(
    b"QLinearConv QLinearMatMul QGemm QAttention MatMulIntegerToFloat DynamicQuantizeLSTM".split()
)
_SHAPES = (b"Shape", b"Size")
_HOLD_NODES = ("graph", "function", "node", "attribute")
_DATA_TYPE = {"tensor": 2, "tensor_type": 1}  # the field that holds a TensorProto.DataType
_TYPE_NAMES = (b"to", b"dtype")  # attributes whose number is one: of Cast, and of generators
_SMALL_FLOATS = {"float16": 10, "float8": 17}


def _operator_in(data: Pages, message: str, begin: int, end: int, kinds: Collection[bytes]) -> bool:
    members = _MEMBERS.get(message, {})
    for number, at, stop in fields(data, begin, end):
        if stop == -1:
            continue
        if message == "node" and number == 4 and data[at:stop] in kinds:
            return True
        inner = members.get(number)
        if inner in _HOLD_NODES and _operator_in(data, inner, at, stop, kinds):
            return True
    return False


def _types_in(data: Pages, message: str, begin: int, end: int) -> Iterator[int]:
    """The element types that the protobuf `message` in data[begin:end] speaks of."""
    members = _MEMBERS.get(message, {})
    name = b""
    for number, at, stop in fields(data, begin, end):
        if stop == -1:
            named = message == "attribute" and number == 3 and name in _TYPE_NAMES
            if named or number == _DATA_TYPE.get(message):
                yield at
        elif message == "attribute" and number == 1:
            name = data[at:stop]
        elif number in members:
            yield from _types_in(data, members[number], at, stop)


# Read the external weights of an `.onnx` file, each file whole.

_NUMBER = re.compile(r"[0-9]{1,18}")


def external_weights(path: Path) -> dict[str, np.ndarray]:
    """The bytes of each external weights file, by its location in the model.

    ONNX Runtime would map the file, and truncating it would end the process (SIGBUS).
    """
    found = {}
    twice = stored_twice(path)
    if twice:
        raise BadInput(
            f"{path}: two initializers have the name '{twice}'",
            hint="which of them counts is not defined: rename one, or export it again",
        )
    # ONNX Runtime 1.23 reads any file, later ones follow hard links
    for location, offset, length in external_spans(path):
        where = f"{path}: its weights"
        size = check_data_file(path, location, where).st_size
        numbers = [offset or "0", length or "0"]
        if not all(_NUMBER.fullmatch(each) for each in numbers) or sum(map(int, numbers)) > size:
            raise BadInput(
                f"{where}: {quote(location)} has {size} bytes, the model wants offset "
                f"{quote(offset)}, length {quote(length)}"
            )
        if location in found:
            continue
        try:
            with open_readable(path.parent / location) as handle:
                found[location] = np.fromfile(handle, np.uint8)
        except OSError as exc:
            raise BadInput(f"{where}: {location}: {os_reason(exc)}") from exc
    return found


# Copies of models whose weights several processes map, so that they are in memory once.
#
# ONNX Runtime gives each session weights of its own, and packs them for its kernels. Of a model
# that
# it saved optimised and packed, with its weights in another file, it maps that file. Such a copy
# fits
# this CPU and this version alone: it is made when a server starts and goes with it.

LEAST_BYTES = 4 << 20  # of a model's files: less is not worth a copy
_LEAST_TENSOR_BYTES = 1024  # smaller ones stay in the graph
_PREFIX = "deploykit-weights-"
_MODEL, _WEIGHTS = "model.onnx", "weights"
_USED, _WRITING = "used", "writing"  # files that are locked
_NEW_S = 60.0  # a folder without a lock may be that of a server that starts


@contextlib.contextmanager
def copies_folder() -> Iterator[Path | None]:
    """A folder for copies, removed at the end; None where no temporary file can be written.

    What servers have left of which all processes were killed at once is removed first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _NEW_S:
                _remove_unused(left, create=True)
    with contextlib.ExitStack() as stack:
        folder = None
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(use_copies(folder))
        yield folder


@contextlib.contextmanager
def use_copies(folder: Path | None) -> Iterator[None]:
    """Keep the folder of another process until the end, and remove it if no other uses it then.

    So it goes with the last process of a server, whichever was killed before.
    """
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.callback(_remove_unused, folder)
            with contextlib.suppress(OSError):  # somebody has removed it
                stack.enter_context(_locked(folder / _USED, fcntl.LOCK_SH))
        yield


def _remove_unused(folder: Path, create: bool = False) -> None:
    """Remove a folder whose lock no process holds.

    `create`: make the lock's file where it is missing; in a folder that is being removed it would
    be left over.
    """
    exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
    with contextlib.suppress(OSError), _locked(folder / _USED, exclusive, create):
        shutil.rmtree(folder, ignore_errors=True)


def mapped_copy(path: Path, folder: Path, write: Callable[[Path], object]) -> Path:
    """The copy of the model `path` in `folder`; the first process to ask has to `write` it.

    Raises OSError, and as `write`.
    """
    stats = [each.stat() for each in onnx_files(path)]
    known = [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in stats]
    model, version = (
        hashlib.sha256(repr(each).encode()).hexdigest()[:16] for each in (path, known)
    )
    place = folder / f"{model}-{version}"
    with _locked(folder / _WRITING, fcntl.LOCK_EX):
        if not place.exists():
            new = folder / "new"  # one of a process that was killed may be there
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            try:
                write(new / _MODEL)
                for old in folder.glob(f"{model}-*"):  # those that are mapped stay in memory
                    shutil.rmtree(old, ignore_errors=True)
                new.rename(place)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    return place / _MODEL


def is_large(path: Path) -> bool:
    """Whether the model's files are worth a copy."""
    return sum(each.stat().st_size for each in onnx_files(path) if each.is_file()) >= LEAST_BYTES


def save_at(copy: Path, options: Any) -> None:
    """Have the session that `options` are for write `copy` and, next to it, its weights."""
    options.optimized_model_filepath = str(copy)
    optimised = "session.optimized_model_external_initializers"
    for name, value in (
        (f"{optimised}_file_name", _WEIGHTS),
        (f"{optimised}_min_size_in_bytes", str(_LEAST_TENSOR_BYTES)),
        ("session.save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(name, value)


@contextlib.contextmanager
def _locked(path: Path, flags: int, create: bool = True) -> Iterator[None]:
    """Hold the lock of a file; raises OSError where another process holds it and LOCK_NB is set."""
    number = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(number, flags)
        yield
    finally:
        os.close(number)


# Exact sums of 8-bit products: what ONNX Runtime needs for them, and where it cannot give them.

# x86-64 without VNNI or AMX adds pairs of uint8 x int8 products in 16 bits and cuts what does not
# fit. With this, ONNX Runtime stores the weights as uint8 there when it optimises (seen on AVX2:
# 17 dB -> exact, 1.35 x the time). 1.32.0 does so on CPUs with VNNI too, whose sums are exact
# without it: there it cost ResNet-18 2.1 x the time for the same bits. Source: its
# onnxruntime_session_options_config_keys.h and "Quantize ONNX Models", "U8U8".
EXACT_INTEGERS = "session.x64quantprecision"
UNSHARED = "ONNX Runtime runs them in float32, or rounds their sums, on a CPU without VNNI"
# before it, not for activations that are scaled in each call (9 to 31 dB with 1.23 to 1.29)
_EXACT_FOR_ALL = (1, 30)


def cuts_sums(version: str) -> bool:
    """Whether ONNX Runtime `version`, on this CPU, adds MatMulInteger's products in 16 bits."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    return numbers < _EXACT_FOR_ALL and not adds_exactly()


def rounds_sums(options: Any) -> bool:
    """Whether a session was opened without what exact sums need on this CPU."""
    return bool(options.get_session_config_entry(EXACT_INTEGERS) == "0") and not adds_exactly()


def adds_exactly() -> bool:
    """Whether this CPU has instructions that add 8-bit products without a sum in 16 bits."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    features = cpu_features(file_text(Path("/proc/cpuinfo")))
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(features)


def check_sums(path: Path, version: str) -> None:
    """Raise Unsupported for a model whose sums would be wrong here."""
    if cuts_sums(version) and multiplies_integers(path, scaled_in_each_call=True):
        raise Unsupported(
            f"{path}: ONNX Runtime {version} cuts the sums of this model's INT8 products "
            "on a CPU without VNNI",
            hint="pip install 'onnxruntime>=1.30' (from Python 3.11 on)",
        )
