"""The models of the conformance suite, and how each runtime opens them.

Each is a `Case`: specs, an ONNX graph, the same as torch source, and what it computes in NumPy. All
of them are exact in every precision, so that answers are compared bit for bit. `absent` says why a
runtime cannot be tested on this machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from deploykit.core.machine import this_machine
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.engines.engine import Arrays, Engine
from tests.support.fake_engine import FakeEngine

LARGEST_BATCH, LARGEST_STEPS = 64, 32  # of a TensorRT plan
TABLE = (np.arange(30, dtype=np.float32) - 15).reshape(10, 3)

_Node = tuple[str, Sequence[str], str]  # operator, inputs, output


@dataclass(frozen=True)
class Case:
    """`forward`: what stands after `return` in torch; `compute`: the same on arrays by name."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[_Node, ...]
    forward: str
    compute: Callable[[Arrays], Arrays]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def input_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(parse_spec(text) for text in self.inputs)

    @property
    def output_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(parse_spec(text) for text in self.outputs)

    def feeds(self, batch: int, *, start: int = 0, **axes: int) -> dict[str, np.ndarray]:
        """Inputs of `batch` rows: small whole numbers that differ from each other and by `start`.

        Booleans alternate, ids run through the table.
        """
        found = {}
        for number, spec in enumerate(self.input_specs):
            sizes = {"N": batch, "T": 3, **axes}
            shape = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.shape]
            values = np.arange(np.prod(shape, dtype=int)).reshape(shape) + start + 3 * number
            found[spec.name] = (values % _MODULUS[spec.dtype]).astype(spec.dtype)
        return found


_MODULUS = {"float32": 1 << 20, "float16": 512, "int64": len(TABLE), "bool": 2}

AFFINE = Case(
    "affine",
    ("x:float32[N,4]",),
    ("y:float32[N,4]",),
    (("Mul", ["x", "two"], "m"), ("Add", ["m", "one"], "y")),
    "x * 2.0 + 1.0",
    lambda feeds: {"y": 2 * feeds["x"] + 1},
    {"one": np.float32(1), "two": np.float32(2)},
)
SEQUENCE = replace(
    AFFINE, name="sequence", inputs=("x:float32[N,T,2]",), outputs=("y:float32[N,T,2]",)
)
FIXED = replace(AFFINE, name="fixed", inputs=("x:float32[2,4]",), outputs=("y:float32[2,4]",))
HALF = replace(
    AFFINE,
    name="half",
    inputs=("x:float16[N,4]",),
    outputs=("y:float16[N,4]",),
    compute=lambda feeds: {"y": (2 * feeds["x"] + 1).astype(np.float16)},
    constants={"one": np.float16(1), "two": np.float16(2)},
)
TWO_INPUTS = Case(
    "two-inputs",
    ("b:float32[N,4]", "a:float32[N,4]"),  # not in the order of their names
    ("difference:float32[N,4]", "sum:float32[N,4]"),
    (("Sub", ["a", "b"], "difference"), ("Add", ["a", "b"], "sum")),
    "a - b, a + b",
    lambda feeds: {"difference": feeds["a"] - feeds["b"], "sum": feeds["a"] + feeds["b"]},
)
IDS = Case(
    "ids",
    ("ids:int64[N,5]",),
    ("rows:float32[N,5,3]", "next:int64[N,5]"),
    (("Gather", ["table", "ids"], "rows"), ("Add", ["ids", "one"], "next")),
    "self.table[ids], ids + 1",
    lambda feeds: {"rows": TABLE[feeds["ids"]], "next": feeds["ids"] + 1},
    {"table": TABLE, "one": np.int64(1)},
)
MASK = Case(
    "mask",
    ("x:float32[N,4]", "keep:bool[N,4]"),
    ("kept:float32[N,4]", "dropped:bool[N,4]"),
    (("Where", ["keep", "x", "zero"], "kept"), ("Not", ["keep"], "dropped")),
    "torch.where(keep, x, 0.0), ~keep",
    lambda feeds: {"kept": np.where(feeds["keep"], feeds["x"], 0), "dropped": ~feeds["keep"]},
    {"zero": np.float32(0)},
)
CASES = (AFFINE, SEQUENCE, HALF, TWO_INPUTS, IDS, MASK, FIXED)


def onnx_model(case: Case) -> onnx.ModelProto:
    """`case` as a checked ONNX model; node outputs that no spec names are left without a type."""

    def value(spec: TensorSpec) -> onnx.ValueInfoProto:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
        return helper.make_tensor_value_info(spec.name, kind, list(spec.shape))

    graph = helper.make_graph(
        [helper.make_node(kind, list(names), [out]) for kind, names, out in case.nodes],
        case.name,
        [value(spec) for spec in case.input_specs],
        [value(spec) for spec in case.output_specs],
        [numpy_helper.from_array(np.asarray(v), name) for name, v in case.constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


_MODULE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(30, dtype=torch.float32).reshape(10, 3) - 15)

    def forward(self, {arguments}):
        return {values}
"""


def open_onnxruntime(folder: Path, case: Case, device: str = "cpu") -> Engine:
    from deploykit.engines.onnxruntime.engine import open_engine

    return open_engine(_onnx_file(folder, case), device)


def open_openvino(folder: Path, case: Case) -> Engine:
    from deploykit.engines.openvino import open_engine

    return open_engine(_onnx_file(folder, case), "cpu")


def open_torch(folder: Path, case: Case, device: str = "cpu") -> Engine:
    """A deploykit checkpoint whose architecture is a file, as with `--arch ./model.py:Model`."""
    from deploykit.core.files import import_object
    from deploykit.engines.torch.engine import TorchEngine
    from deploykit.engines.torch.open import load_module, save_checkpoint

    source = folder / f"{case.name.replace('-', '_')}.py"
    arguments = ", ".join(spec.name for spec in case.input_specs)
    source.write_text(_MODULE.format(arguments=arguments, values=case.forward), encoding="utf-8")
    arch = f"{source}:Model"
    build = import_object(arch)
    assert callable(build)
    path = source.with_suffix(".pt")
    specs: Any = SimpleNamespace(inputs=case.input_specs, outputs=case.output_specs)
    save_checkpoint(path, build(), case.name, specs)
    return TorchEngine(load_module(path, arch=arch), path.name, device, None)


def plan_options(folder: Path, case: Case) -> Any:
    """Batches of 1 to `LARGEST_BATCH`, or the one that the case has."""
    from deploykit.building.builder import AxisRange, Options, Shapes
    from deploykit.core.profile import choose_profile

    dynamic = any("T" in spec.shape for spec in case.input_specs)
    first = case.input_specs[0].shape[0]
    batch = (first,) * 3 if isinstance(first, int) else (1, 8, LARGEST_BATCH)
    axes = {"T": AxisRange(1, 3, LARGEST_STEPS)} if dynamic else {}
    shapes = Shapes(timing_cache=folder / "timing.cache")
    return Options(choose_profile()[0], shapes, AxisRange(*batch), axes)


@cache
def plan_of(name: str) -> tuple[bytes, Mapping[str, str]]:
    """The plan of a case and what it was built on; built once a process, as that takes seconds.

    Once for all processes that share the folder DEPLOYKIT_GPU_PLANS.
    """
    from deploykit.building import tensorrt as builder

    case = next(each for each in CASES if each.name == name)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(os.environ.get("DEPLOYKIT_GPU_PLANS", own))
        out, built_on = folder / f"{name}.trt", folder / f"{name}.json"
        if not built_on.exists():
            facts = builder.build(_onnx_file(folder, case), out, plan_options(folder, case))
            built_on.write_text(json.dumps(dict(facts.built_on)), encoding="utf-8")
        return out.read_bytes(), json.loads(built_on.read_text(encoding="utf-8"))


def open_tensorrt(folder: Path, case: Case) -> Engine:
    """Load the plan that the builder itself made of `case`."""
    from deploykit.core.artefact import Manifest, write_manifest
    from deploykit.core.files import sha256
    from deploykit.engines.engine import load

    content, built_on = plan_of(case.name)
    plan = folder / f"{case.name}.trt"
    plan.write_bytes(content)
    specs = case.input_specs, case.output_specs
    manifest = Manifest("tensorrt", *specs, {}, sha256(plan), (), {}, built_on=built_on)
    write_manifest(plan, manifest)
    return load(plan, "cuda:0")


def _onnx_file(folder: Path, case: Case) -> Path:
    path = folder / f"{case.name}.onnx"
    path.write_bytes(onnx_model(case).SerializeToString())
    return path


def open_stand_in(_folder: Path, case: Case) -> Engine:
    """Our TensorRT engine on a TensorRT made of Python, which computes what the case does.

    So the suite proves its names, dtypes, shapes, batches and buffers on machines without a GPU.
    """
    from deploykit.core.artefact import Manifest
    from tests.support.runtimes.fake_tensorrt import tensor
    from tests.support.runtimes.gpu_machine import Opened
    from tests.support.runtimes.own_cuda import FakeCuda

    types = {"float32": "FLOAT", "float16": "HALF", "int64": "INT64", "bool": "BOOL"}
    sizes: Any = {"N": (1, 8, LARGEST_BATCH), "T": (1, 3, LARGEST_STEPS)}
    tensors = [
        tensor(spec.name, mode, spec.shape, types[spec.dtype])
        for mode, specs in (("INPUT", case.input_specs), ("OUTPUT", case.output_specs))
        for spec in specs
    ]
    profile = {
        spec.name: [[sizes.get(n, (n,) * 3)[at] for n in spec.shape] for at in range(3)]
        for spec in case.input_specs
    }
    manifest = Manifest("tensorrt", case.input_specs, case.output_specs)
    cuda = FakeCuda(new_machine=False)
    return Opened(tensors, (profile,), manifest, cuda=cuda, computes=case.compute).engine


OPENERS: Mapping[str, Callable[[Path, Case], Engine]] = {
    "fake": lambda *_: FakeEngine(width=4),  # which computes `AFFINE` whatever is asked
    "onnxruntime-cpu": open_onnxruntime,
    "onnxruntime-cuda": partial(open_onnxruntime, device="cuda"),
    "openvino": open_openvino,
    "torch": open_torch,
    "torch-cuda": partial(open_torch, device="cuda:0"),
    "tensorrt": open_tensorrt,
    "tensorrt-stand-in": open_stand_in,
}
_GPU = ("onnxruntime-cuda", "torch-cuda", "tensorrt")


@cache
def absent(runtime: str) -> str:
    """Why `runtime` is not on this machine; empty if it is. Loads no library without a GPU."""
    package = runtime.partition("-")[0]
    if runtime in ("fake", "tensorrt-stand-in"):
        return ""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if runtime not in _GPU:
        return ""
    if not (this_machine().gpus or this_machine().l4t):  # an older Jetson has no `nvidia-smi`
        return "no NVIDIA GPU here"
    module = importlib.import_module(package)
    if package == "torch":
        return "" if module.cuda.is_available() else "this torch sees no GPU"
    if package == "onnxruntime":
        there = "CUDAExecutionProvider" in module.get_available_providers()
        return "" if there else "this onnxruntime has no CUDA provider"
    return "it is the build rig: it runs no plan" if hasattr(module, "IS_RTX_RIG") else ""


def param(runtime: str) -> Any:
    """`runtime` as a parameter of a fixture, with its marks."""
    marks = [pytest.mark.gpu] if runtime in _GPU else []
    marks += [pytest.mark.torch] if runtime.startswith("torch") else []
    return pytest.param(runtime, marks=marks)


PRESENT = [param(runtime) for runtime in OPENERS if not absent(runtime)]
