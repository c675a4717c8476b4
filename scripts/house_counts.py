"""Count how the package is laid out and what its commands do: `python scripts/house_counts.py`.

Prints a table. Line counts, words with two meanings and flags in errors are read from the syntax
trees; parses, copies, sessions, hashes and calls across files are counted while a command runs.
"""

from __future__ import annotations

import ast
import http.client
import inspect
import json
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PACKAGE = ROOT / "deploykit"
FLOORS = {"core": 1, "runtimes": 2, "onnx_graph": 2, "api": 4, "cli": 5}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# public names that two modules have on purpose: whoever sees one must know what the others do
SHARED = {
    "build": "the verb, and each builder's own step of it; always called on its module",
    "build_engine": "what each runtime's row in `core/runtime.py` names as its builder",
    "check": "the TensorRT builder's step, and `target.check`, which gives it a profile's values",
    "encode": "a reply as JSON and as protobuf: the protocols' modules have the same steps",
    "main": "the entry of a process: `python -m`",
    "open_engine": "what each runtime's row in `core/runtime.py` names as its opener",
    "plan": "the verb, and the protocol's step that decides how a request is read, on its module",
    "quantizable": "the nodes that the writer in the same module, `qdq` or `dynamic`, quantises",
    "read": "a file of the module's format: `report.read`, `safetensors.read`, `files.read`",
    "write": "a file of the module's format: `report.write`, `storage.write`; a bundle of its kind",
}
COMMAND = re.compile(r"\b(deploykit|docker|pip|git|python) \S")


def trees() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "_data" not in path.parts:
            name = path.relative_to(PACKAGE).as_posix()
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def lines_of(room: str) -> int:
    return sum(len(p.read_text("utf-8").splitlines()) for p in (PACKAGE / room).rglob("*.py"))


def long_functions(found: dict[str, ast.Module]) -> list[str]:
    return [
        f"{name}:{node.name}"
        for name, tree in found.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno + 1 > 60
    ]


def twice(found: dict[str, ast.Module]) -> list[str]:
    """Public functions and classes at the top of two modules or more."""
    names: Counter[str] = Counter()
    for name, tree in found.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) or (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and not name.startswith("cli/")  # a command has the name of its verb
            ):
                names[node.name] += not node.name.startswith("_")
    return sorted(name for name, count in names.items() if count > 1)


def flags_in_errors(found: dict[str, ast.Module]) -> list[str]:
    """Strings of raised errors outside cli/ that spell a flag, whole commands left out."""
    wrong = []
    for name, tree in found.items():
        if name.startswith("cli/"):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            for part in ast.walk(node.exc):
                if isinstance(part, (ast.Constant, ast.JoinedStr)):
                    text = ast.unparse(part)
                    if FLAG.search(text) and not COMMAND.search(text):
                        wrong.append(f"{name}:{part.lineno}")
    return sorted(set(wrong))


class Trace:
    """Files passed, calls from file to file, and climbs back up to a higher floor."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.calls = self.climbs = 0
        self.active = True

    def __enter__(self) -> Trace:
        threading.setprofile(self.see)
        sys.setprofile(self.see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def see(self, frame: Any, event: str, _argument: object) -> None:
        if event != "call" or not self.active:
            return
        here = ours(frame.f_code.co_filename)
        resumed = frame.f_code.co_flags & inspect.CO_GENERATOR  # each value would count as a call
        if here is None or resumed or frame.f_code.co_name == "<module>":
            return
        self.files.add(here)
        caller = frame.f_back
        while caller is not None and ours(caller.f_code.co_filename) is None:
            caller = caller.f_back
        there = ours(caller.f_code.co_filename) if caller else None
        if there not in (None, here):
            self.calls += 1
            self.climbs += floor(here) > floor(str(there))


def ours(file: str) -> str | None:
    prefix = f"{PACKAGE}/"
    return file[len(prefix) :] if file.startswith(prefix) else None


def floor(name: str) -> int:
    return FLOORS.get(name.split("/")[0], 3)


class Counting:
    """Counts calls of functions while a block runs."""

    def __init__(self, **places: tuple[Any, str]) -> None:
        self.counts: Counter[str] = Counter()
        self._places = places
        self._kept: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Counter[str]:
        for label, (owner, name) in self._places.items():
            original = getattr(owner, name)
            self._kept.append((owner, name, original))
            setattr(owner, name, self._wrap(label, original))
        return self.counts

    def _wrap(self, label: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[label] += 1
            return original(*args, **kwargs)

        return counted

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self._kept:
            setattr(owner, name, original)


def model_and_data(folder: Path) -> tuple[Path, Path]:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((8, 3, 3, 3)),
        "w2": rng.standard_normal((10, 8)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "w2"], ["y"], "head", transB=1),
    ]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 16, 16])
    answer = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])
    arrays = [numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items()]
    graph = helper.make_graph(nodes, "counted", [image], [answer], arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path, data = folder / "m.onnx", folder / "calib.npz"
    onnx.save(model, path)
    np.savez(data, x=rng.standard_normal((128, 3, 16, 16)).astype(np.float32))
    return path, data


def count_quantize(folder: Path) -> Counter[str]:
    import hashlib

    import onnxruntime as ort

    from deploykit.api.quantize import quantize
    from deploykit.onnx_graph import graph

    model, data = model_and_data(folder)
    places: dict[str, tuple[Any, str]] = {
        "parses": (graph, "read_model"),
        "copies without weights": (graph, "make_skeleton"),
        "sessions": (ort, "InferenceSession"),
        "hashes": (hashlib, "sha256"),
    }
    with Counting(**places) as counts:
        quantize(model, "int8", folder / "q.onnx", calib=data)
    return counts


def trace_build(folder: Path) -> Trace:
    from deploykit.api.build import build

    model, data = model_and_data(folder)
    build(model, "cpu", precision="int8", calib=data, out=folder / "first.onnx")  # imports done
    with Trace() as trace:
        build(model, "cpu", precision="int8", calib=data, out=folder / "b.onnx")
    return trace


def trace_request(folder: Path) -> tuple[int, int]:
    """One HTTP request with a binary tensor, after three like it.

    Of ten: the one with the fewest calls, whose bytes arrived at once.
    """
    import numpy as np

    from deploykit.runtimes.engine import load
    from deploykit.serving.options import ServeOptions
    from deploykit.serving.server import Server

    model, _ = model_and_data(folder)
    x = np.zeros((1, 3, 16, 16), np.float32).tobytes()
    size = {"parameters": {"binary_data_size": len(x)}}
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 3, 16, 16], **size}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    trace, ready = Trace(), threading.Event()
    trace.active = False
    threading.setprofile(trace.see)  # for the server's threads, which start now
    server = Server({"m": [load(model, "cpu")]}, ServeOptions(http_port=0))
    thread = threading.Thread(target=lambda: server.run(lambda *_: ready.set()))
    thread.start()
    threading.setprofile(None)
    ready.wait()
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    seen = []
    for number in range(13):
        trace.files, trace.calls, trace.active = set(), 0, number > 2
        connection.request("POST", "/v2/models/m/infer", head + x, headers)
        connection.getresponse().read()
        trace.active = False
        seen.append((trace.calls, len(trace.files)))
    connection.close()
    server.stop()
    thread.join()
    return min(seen[3:])


def main() -> None:
    found = trees()
    rows: list[tuple[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        counts = count_quantize(Path(name))
        rows += [(f"quantize --to int8: {label}", count) for label, count in counts.items()]
    with tempfile.TemporaryDirectory() as name:
        trace = trace_build(Path(name))
    rows += [
        ("build --precision int8: files passed", len(trace.files)),
        ("build --precision int8: calls across files", trace.calls),
        ("build --precision int8: climbs back up", trace.climbs),
    ]
    with tempfile.TemporaryDirectory() as name:
        calls, passed = trace_request(Path(name))
    rows += [
        ("one request, binary tensor: files passed", passed),
        ("one request, binary tensor: calls across files", calls),
    ]
    rows += [
        (f"{room}/: lines", lines_of(room)) for room in ("core", "runtimes", "builders", "api")
    ]
    rows.append(("package: lines", lines_of("")))
    for label, names in (
        ("functions over 60 lines", long_functions(found)),
        ("public names in two modules, not listed in SHARED", sorted({*twice(found)} - {*SHARED})),
        ("error texts outside cli/ with flags", flags_in_errors(found)),
    ):
        rows.append((label, f"{len(names)}  {' '.join(names[:40])}"))
    print("| what | count |\n| --- | --- |")
    for label, value in rows:
        print(f"| {label} | {value} |")


if __name__ == "__main__":
    main()
