"""Write what Triton, KServe and Ray Serve need to serve a model, with a README.

Triton gets a model repository: ONNX for its ONNX Runtime backend, with the TensorRT provider on a
GPU. A built engine would load only on the same GPU and TensorRT, and a Triton image has its own.

KServe gets a ServingRuntime and an InferenceService. The folder is also what a pod serves: it is
put on a volume, and `deploykit boot` checks every byte, builds the engine on the pod's own device,
proves it, and only then opens the ports.

Ray Serve gets an application: `app.py` names the model; all else is in deploykit, which every node
of the cluster needs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import Unsupported
from deploykit.core.precision import names_of
from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec
from deploykit.deploying.docker import choose_image
from deploykit.deploying.folder import Contents, fill_templates, sample_rows
from deploykit.engines.batching import why_no_batch
from deploykit.serving.oip.request import to_bytes

_MODEL = "model.onnx"
# precision of a graph besides float32 -> value of Triton's `precision_mode` for ONNX Runtime's
# TensorRT provider
_MODES: Mapping[str, str] = {"fp16": "FP16", "int8": "INT8"}


def write_triton(folder: Path, contents: Contents) -> None:
    """Write a model repository into `folder`. Raises Unsupported if Triton cannot serve it."""
    home = folder / contents.name
    model, joined = home / "1" / _MODEL, not why_not_joined(contents)
    contents.copy_model(model)
    samples = sample_rows(contents, model, joined=joined)
    fields = _config(contents, samples)
    head = (
        "# Written by deploykit; https://github.com/triton-inference-server/server has its terms\n"
    )
    (home / "config.pbtxt").write_text(head + text_format(fields), encoding="utf-8")
    (home / "warmup").mkdir()
    for number, spec in enumerate(contents.manifest.inputs):
        (home / "warmup" / f"input-{number}").write_bytes(
            to_bytes(samples[spec.name], PROTOCOL_NAMES[spec.dtype])
        )
    fill_templates("triton", folder, contents, _placeholders(contents))


def why_not_joined(contents: Contents) -> str:
    """Return why Triton must not batch requests to the model; "" if it may."""
    manifest = contents.manifest
    why = why_no_batch(manifest.inputs, manifest.outputs)
    proof = manifest.evidence.batching
    if why or proof is None:
        return why or "no proof that its rows are independent (its manifest's evidence.batching)"
    return "" if proof.passed else proof.why


def _config(contents: Contents, samples: Mapping[str, np.ndarray]) -> dict[str, Any]:
    manifest, (_, usual, largest) = contents.manifest, contents.batch
    joined = not why_not_joined(contents)
    kind = "KIND_GPU" if contents.profile.device == "cuda" else "KIND_CPU"
    preferred = [size for size in dict.fromkeys((usual, largest)) if size > 1]
    found: dict[str, Any] = {
        "name": contents.name,
        "backend": "onnxruntime",
        "max_batch_size": largest if joined else 0,
        "input": [_tensor(spec, joined, contents) for spec in manifest.inputs],
        "output": [_tensor(spec, joined, contents) for spec in manifest.outputs],
        "version_policy": {"latest": {"num_versions": 1}},
        "instance_group": [{"count": 1, "kind": kind}],
    }
    if joined:
        found["dynamic_batching"] = {
            "preferred_batch_size": preferred,
            "max_queue_delay_microseconds": 0,
        }
    accelerator = _tensorrt(contents)
    if accelerator is not None:
        found["optimization"] = {
            "execution_accelerators": {"gpu_execution_accelerator": [accelerator]}
        }
    rows = list(dict.fromkeys((1, *preferred))) if joined else [1]
    found["model_warmup"] = [_warmup(size, manifest.inputs, samples, joined) for size in rows]
    about = {"model_sha256": contents.model.sha256, "profile": contents.profile.name}
    found["parameters"] = _map({f"deploykit_{k}": {"string_value": v} for k, v in about.items()})
    return found


def _tensor(spec: TensorSpec, joined: bool, contents: Contents) -> dict[str, Any]:
    """Return the configuration of an input or output; a scalar is a tensor of one element."""
    axes = spec.shape[1:] if joined else spec.shape
    if 0 in axes:
        raise Unsupported(f"{contents.model}: '{spec.name}' is empty, which Triton does not take")
    if spec.dtype == "bfloat16":
        raise Unsupported(
            f"{contents.model}: '{spec.name}' is bfloat16, which Triton's ONNX Runtime backend "
            "does not take",
            hint="export the model with float32 inputs and outputs",
        )
    dims = [-1 if isinstance(axis, str) else axis for axis in axes] or [1]
    found = {"name": spec.name, "data_type": _data_type(spec), "dims": dims}
    return found | ({"reshape": {"shape": []}} if joined and not axes else {})


def _data_type(spec: TensorSpec) -> str:
    name = PROTOCOL_NAMES[spec.dtype]
    return "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"


def _tensorrt(contents: Contents) -> dict[str, Any] | None:
    """Return the options of the TensorRT provider; None if profile or precisions exclude it."""
    manifest, profile = contents.manifest, contents.profile
    used = names_of(manifest.precision)
    if profile.runtime != "tensorrt" or not used <= set(_MODES):
        return None
    mode = next((_MODES[name] for name in ("int8", "fp16") if name in used), "FP32")
    options = {"precision_mode": mode, "trt_engine_cache_enable": "1"}
    options["trt_engine_cache_path"] = f"/tmp/{contents.name}-engines"  # noqa: S108 - in a container
    if profile.workspace_bytes:
        options["max_workspace_size_bytes"] = str(profile.workspace_bytes)
    return {"name": "tensorrt", "parameters": _map(options | _shapes(contents))}


def _shapes(contents: Contents) -> dict[str, str]:
    """Return the batch sizes to optimise for, if only the batch varies; else {}."""
    inputs = [s for s in contents.manifest.inputs if any(isinstance(a, str) for a in s.shape)]
    others = any(isinstance(axis, str) for spec in inputs for axis in spec.shape[1:])
    unwritable = any(letter in spec.name for spec in inputs for letter in ",:")
    if why_not_joined(contents) or others or unwritable:
        return {}
    found = {}
    sizes = (1, *contents.batch[1:])  # one row is valid, whatever the smallest batch
    for key, rows in zip(("min", "opt", "max"), sizes, strict=True):
        shapes = (f"{s.name}:{'x'.join(map(str, (rows, *s.shape[1:])))}" for s in inputs)
        found[f"trt_profile_{key}_shapes"] = ",".join(shapes)
    return found


def _warmup(
    rows: int, specs: Sequence[TensorSpec], samples: Mapping[str, np.ndarray], joined: bool
) -> dict[str, Any]:
    """Return one entry of `model_warmup`: a batch in which Triton repeats one row `rows` times."""
    inputs = {}
    for number, spec in enumerate(specs):
        kind, dims = _data_type(spec), list(samples[spec.name].shape[1 if joined else 0 :]) or [1]
        file = f"input-{number}"
        inputs[spec.name] = {"data_type": kind, "dims": dims, "input_data_file": file}
    name = f"batch of {rows}" if joined else "sample"
    return {"name": name, "batch_size": rows, "inputs": _map(inputs)}


def _placeholders(contents: Contents) -> dict[str, str]:
    why, on_gpu = why_not_joined(contents), contents.profile.device == "cuda"
    tensorrt = on_gpu and _tensorrt(contents) is not None
    return {
        "GPUS": "--gpus all " if on_gpu else "",
        "WHY_NOT": why,
        "JOINED": "" if why else "yes",
        "LARGEST": str(contents.batch[2]),
        "TENSORRT": "yes" if tensorrt else "",
        "CUDA": "yes" if on_gpu and not tensorrt else "",
    }


def _map(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a map field, which the text format writes as a list of its entries."""
    return [{"key": key, "value": value} for key, value in values.items()]


def text_format(message: Mapping[str, Any]) -> str:
    """Write a message in protobuf's text format: JSON without outer braces and quoted keys."""
    text = re.sub(r"(?m)^  ", "", json.dumps(message, indent=2, ensure_ascii=False)[2:-1])
    text = re.sub(r"\[\n[-\d,\s]+\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text)
    text = re.sub(r'"(\w+)":', r"\1:", text)
    return re.sub(r'\b(data_type|kind): "(\w+)"', r"\1: \2", text)  # enumerations


_NAME_LENGTH = 50  # KServe adds "-predictor" and more; 63 is a label's limit
_HASH_LENGTH = 6
_PERIOD_S = 10  # period of the probes
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_kserve(folder: Path, contents: Contents) -> None:
    """Write KServe's manifests into an empty folder. Raises BadInput for a changed model."""
    contents.copy_model(folder / "model" / f"{contents.name}.onnx")
    image = choose_image(contents.profile, None, "x86_64").with_extras(contents.extras)
    gpu = contents.profile.device == "cuda"
    build_s = 1800 if gpu else 120  # longest first start, with the build
    model = contents.model.path
    weights = contents.manifest.evidence.weights
    files = [model, *([model.with_name(weights.file)] if weights else [])]
    copies_mib = 4 * sum(path.stat().st_size for path in files) // (1 << 20)
    known = {
        "LABEL": dns_label(contents.name),
        "DOCKERFILE": image.dockerfile,
        "EXTRAS": image.arguments["EXTRAS"],
        "ARCHITECTURE": _ARCHITECTURES.get(contents.profile.architecture, ""),
        "MAX_BATCH": str(contents.batch[2]),
        "MEMORY": f"{(4096 if gpu else 1024) + copies_mib}Mi",
        "BUILD_S": str(build_s),
        "BUILD_MINUTES": str(build_s // 60),
        "PERIOD_S": str(_PERIOD_S),
        "BUILD_PERIODS": str(build_s // _PERIOD_S),
    }
    fill_templates("kserve", folder, contents, known)


def dns_label(name: str) -> str:
    """Return a Kubernetes name for a model (RFC 1123), with a hash if the name had to change."""
    plain = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"m-{plain}".rstrip("-")
    if plain == name and len(plain) <= _NAME_LENGTH:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{plain[: _NAME_LENGTH - _HASH_LENGTH - 1].rstrip('-')}-{digest}"


_CORES = 2  # per replica of Ray on a CPU


def write_ray(folder: Path, contents: Contents) -> None:
    """Write Ray's files into an empty folder. Raises BadInput for a changed model."""
    contents.copy_model(folder / "model" / f"{contents.name}.onnx")
    _, usual, largest = contents.batch
    gpu = contents.profile.device == "cuda"
    known = {
        "EXTRAS": ",".join(("serve", "ray", "gpu" if gpu else "cpu", *contents.extras)),
        "DEVICE": "cuda" if gpu else "cpu",
        "THREADS": str(None if gpu else _CORES),
        "CORES": str(_CORES),
        "BATCH": str(largest),
        "USUAL": str(usual),
        "REQUESTS": str(2 * largest),
    }
    fill_templates("ray", folder, contents, known)
