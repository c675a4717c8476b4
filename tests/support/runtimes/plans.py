"""A TensorRT plan on an H200, and the manifest that describes it."""

from __future__ import annotations

import hashlib

from deploykit.core.evidence import BuildRecord, Evidence
from deploykit.core.manifest import Manifest
from deploykit.core.tensors import TensorSpec
from deploykit.engines.tensorrt.compatibility import Here

HERE = Here("10.13.3.9", "NVIDIA H200", "9.0", 132, "580.65.06", "13.0")
CONTENT = b"ptrt" + bytes(range(256)) * 40
BUILT = {
    **HERE.facts(),
    "cuda": "13",
    "model": "resnet.onnx",
    "profile": "h200",
    "batch": "1,8,32",
}


def described(content: bytes = CONTENT, version_compatible: bool = False, **built: str) -> Manifest:
    return Manifest(
        format="tensorrt",
        inputs=(TensorSpec("x", "float32", ("N", 4)),),
        outputs=(TensorSpec("y", "float32", ("N", 4)),),
        precision={"float16": 20, "float32": 3},
        sha256=hashlib.sha256(content).hexdigest(),
        made_from=("ab" * 32,),
        built_on={**BUILT, **built},
        evidence=Evidence(build=BuildRecord("h200", (), version_compatible)),
    )
