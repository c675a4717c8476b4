"""The columns of `gpu_zoo.py`: one model as torch and ONNX Runtime run it, on the GPU and the CPU.

In: a torch module and its ONNX files. Out: `Column`s, engines that `deploykit.measure` times. A
"host" column takes arrays in the computer's memory and returns such: what a caller sees, copies
included. A "resident" one keeps its inputs and outputs on the GPU, and ends when the GPU is done.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.onnxruntime.engine import OnnxRuntimeEngine, open_engine

Arrays = Mapping[str, np.ndarray]
Call = Callable[[Arrays], dict[str, np.ndarray]]
TORCH = f"torch {torch.__version__}"


@dataclass
class Column:
    """An engine that stays open from one sweep to the next; `max_batch` bounds a slow one.

    `call` gives no outputs where they stay on the GPU. `group`: "cpu", "host" or "resident".
    """

    label: str
    group: str
    precision: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    device: str
    runtime: str
    call: Call
    max_batch: int | None = None
    note: str = ""

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return self.call(feeds)

    def close(self) -> None:
        """It is closed with the process: opening costs more than timing."""

    def __enter__(self) -> Column:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def all_columns(
    module: Any, files: Mapping[str, Path], device: str, *, compiled: str, cpu_largest: int
) -> list[Column]:
    """Every column of one model; the first is the CPU baseline.

    `files`: ONNX files by precision. `device`: "cuda", or "cpu" to try this script out. `compiled`:
    the backend of torch.compile, "" for none.
    """
    base = open_engine(files["fp32"], "cpu")
    specs = (base.inputs, base.outputs)
    columns = [
        Column(
            "CPU, ONNX Runtime fp32", "cpu", "fp32", *specs, "cpu", base.runtime, base, cpu_largest
        )
    ]
    for precision, path in files.items():
        engine = open_engine(path, device)
        name = f"ORT {precision}"
        columns.append(
            Column(name, "host", precision, *specs, engine.device, engine.runtime, engine)
        )
        call = resident_ort(engine, device)
        columns.append(
            Column(name, "resident", precision, *specs, engine.device, engine.runtime, call)
        )
    for precision, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        own = copy_of(module, device, dtype)
        kinds = [("torch eager", own)]
        if compiled:
            kinds.append(("torch.compile", torch.compile(own, backend=compiled)))
        for kind, run in kinds:
            call_host, call_resident = (
                host_torch(run, specs, device, dtype),
                resident_torch(run, specs[0], device, dtype),
            )
            name = f"{kind} {precision}"
            columns.append(Column(name, "host", precision, *specs, device, TORCH, call_host))
            columns.append(
                Column(name, "resident", precision, *specs, device, TORCH, call_resident)
            )
    return columns


def copy_of(module: Any, device: str, dtype: torch.dtype) -> Any:
    return copy.deepcopy(module).to(device=device, dtype=dtype).eval()


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of an answer in their order: of tuples, dicts and transformers' objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in flat(part)]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in flat(part)]
    return []


def put(array: np.ndarray, device: str, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def host_torch(
    run: Any,
    specs: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]],
    device: str,
    dtype: torch.dtype,
) -> Call:
    inputs, outputs = specs

    def call(feeds: Arrays) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            tensors = flat(run(*[put(feeds[spec.name], device, dtype) for spec in inputs]))
            arrays = [
                (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
                for tensor in tensors
            ]
        return {spec.name: array for spec, array in zip(outputs, arrays, strict=True)}

    return call


def resident_torch(
    run: Any, inputs: tuple[TensorSpec, ...], device: str, dtype: torch.dtype
) -> Call:
    kept = Kept(lambda feeds: [put(feeds[spec.name], device, dtype) for spec in inputs])

    def call(feeds: Arrays) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            run(*kept(feeds))
        if device != "cpu":
            torch.cuda.synchronize()
        return {}

    return call


def resident_ort(engine: OnnxRuntimeEngine, device: str) -> Call:
    """Inputs bound to memory on the device; outputs are made there anew by each run."""

    def bind(feeds: Arrays) -> Any:
        binding = engine.session.io_binding()
        for name, array in feeds.items():
            value = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), device, 0)
            binding.bind_ortvalue_input(name, value)
        for spec in engine.outputs:
            binding.bind_output(spec.name, device, 0)
        return binding

    kept = Kept(bind)

    def call(feeds: Arrays) -> dict[str, np.ndarray]:
        binding = kept(feeds)
        engine.session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return {}

    return call


class Kept:
    """What was made of the feeds of the last call, as long as the same feeds come again."""

    def __init__(self, make: Callable[[Arrays], Any]) -> None:
        self.make = make
        self.feeds: Arrays | None = None
        self.made: Any = None

    def __call__(self, feeds: Arrays) -> Any:
        if feeds is not self.feeds:
            self.made = None  # first, so that two batches are never on the GPU at once
            self.feeds, self.made = feeds, self.make(feeds)
        return self.made
