"""The one table of runtimes: the formats each opens and builds, its devices, its packages.

A new runtime is a row here, the functions that it names, an extra in `pyproject.toml`, a profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Runtime:
    """One row. `name` is what profiles, manifests and engines say, `title` what people read.

    `opens`: the file formats it runs, the one it builds first; a format's first row is its default.
    `engine`: "module:function" of the type `OpenEngine`, `builder` of the type `Builder`, "" where
    no profile can name the runtime. `suffix`: how the name of a built file ends. `magic`: what such
    a file has at an offset.
    """

    name: str
    title: str
    extra: str
    modules: tuple[str, ...]  # the modules that it imports
    packages: tuple[str, ...]  # their packages, for `doctor` and manifests
    opens: tuple[str, ...]
    engine: str
    devices: tuple[str, ...] = ("cpu",)
    builder: str = ""
    suffix: str = ""  # {profile} becomes the target's name
    magic: tuple[int, bytes] = (0, b"")
    scales_outputs: bool = False  # INT8 nodes need scales on their outputs, too
    overlaps: bool = False  # engines keep calls in flight and use CUDA graphs
    shares: bool = False  # processes can share one copy of the weights

    @property
    def on_cpu(self) -> bool:
        return "cpu" in self.devices

    def usable(self, device: str) -> str:
        """Return `device`, or "auto" if that is a CPU and the runtime needs a GPU."""
        return "auto" if device == "cpu" and not self.on_cpu else device


ALL = (
    Runtime(
        "tensorrt",
        "TensorRT",
        extra="tensorrt",
        modules=("tensorrt", "cuda"),
        packages=("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
        opens=("tensorrt",),
        engine="deploykit.engines.tensorrt.engine:open_engine",
        devices=("cuda",),
        builder="deploykit.building.tensorrt:build_engine",
        suffix=".trt",
        magic=(1, b"trt"),
        overlaps=True,
    ),
    Runtime(
        "onnxruntime",
        "ONNX Runtime",
        extra="cpu",
        modules=("onnxruntime",),
        packages=("onnxruntime", "onnxruntime-gpu"),
        opens=("onnx",),
        engine="deploykit.engines.onnxruntime.engine:open_engine",
        devices=("cpu", "cuda"),
        builder="deploykit.building.onnxruntime:build_engine",
        suffix=".{profile}.onnx",
        scales_outputs=True,
        shares=True,
    ),
    Runtime(
        "openvino",
        "OpenVINO",
        extra="openvino",
        modules=("openvino",),
        packages=("openvino",),
        opens=("openvino", "onnx"),
        engine="deploykit.engines.openvino:open_engine",
        builder="deploykit.building.openvino:build_engine",
        suffix=".{profile}.onnx",
        magic=(2, b"\x12\x16deploykit for OpenVINO"),  # the producer of an ONNX file
        scales_outputs=True,
    ),
    Runtime(
        "torch",
        "PyTorch",
        extra="export",
        modules=("torch",),
        packages=("torch",),
        opens=("torch", "safetensors"),
        engine="deploykit.engines.torch.engine:open_engine",
        devices=("cpu", "cuda"),
    ),
)
RUNTIMES: Mapping[str, Runtime] = {each.name: each for each in ALL}
BY_FORMAT: Mapping[str, Runtime] = {name: each for each in reversed(ALL) for name in each.opens}
TARGET_RUNTIMES = tuple(each.name for each in ALL if each.builder)  # a profile may name these
BUILT = tuple(sorted({each.suffix[each.suffix.rindex(".") :] for each in ALL if each.builder}))
READS = (".pt", ".pth", ".pt2", ".safetensors", *BUILT)
