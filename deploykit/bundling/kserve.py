"""Write manifests for KServe: a ServingRuntime, an InferenceService, and a README.

The folder is also what a pod serves: it is put on a volume, and `deploykit boot` checks every byte,
builds the engine on the pod's own device, proves it, and only then opens the ports.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from deploykit import __version__
from deploykit.bundling.contents import Contents
from deploykit.bundling.image import choose_image
from deploykit.bundling.yaml_text import Commented, yaml_document

# an image of Dockerfile.x86 or Dockerfile.jetson, target "build"; the user names it
_IMAGE = "deploykit"
_PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
_HTTP, _GRPC = 8000, 8001
_USER = 10001  # of the image
_NAME_LENGTH = 50  # KServe adds "-predictor" and more; 63 is a label's limit
_HASH_LENGTH = 6
_PERIOD_S = 10
_BUILD_S = {"cuda": 1800, "cpu": 120}  # at most, until the first start is ready
_DRAIN_S = 60  # longer than the server waits for what it accepted
_QUEUE_MS = 20  # the mean wait above which KEDA starts another pod
_MIB = 1 << 20
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

_README = """\
# {name} on KServe

Manifests and a model, written by deploykit {version} for the profile `{profile}`. Leave the folder
as it is: every byte is checked when a pod starts. What is yours goes into a folder next to it:

```yaml
# kustomization.yaml
resources: [../{folder}]
images: [{{name: deploykit, newName: registry.example.com/deploykit, newTag: "{version}"}}]
patches:
  - target: {{kind: InferenceService}}
    patch: |-
      - op: replace
        path: /spec/predictor/model/storageUri
        value: {storage}
      - op: replace
        path: /spec/predictor/autoScaling/metrics/0/external/metric/serverAddress
        value: {prometheus}
```

1. Image: build `{dockerfile}` of deploykit with `--target build --build-arg EXTRAS={extras}`, push
   it, and name it.
2. Volume: put this folder on it; `storageUri` is the folder `{name}` on the claim `models`.
3. Autoscaling needs KEDA and a Prometheus that scrapes the pods. Without them, remove
   `/spec/predictor/autoScaling` and the annotation `serving.kserve.io/autoscalerClass`.
4. `kubectl apply -k .`, then
   `kubectl wait --for=condition=Ready inferenceservice/{label} --timeout={build_s}s`.

- Probes: a pod is started and ready when `/v2/health/ready` answers 200; {build}
- Autoscaling: on the mean time that requests wait for an engine, {queue_ms} ms over all pods.
- Security: user {user}, a read-only root file system, no capabilities; writable are `/tmp` and
  `/engines`, both empty at the start of a pod.
- Clients: model `{name}` over the Open Inference Protocol; KServe's service is `{label}-predictor`.

Checked against the models of KServe 0.21 and the schemas of Kubernetes 1.35; not yet applied to a
cluster, nor run on a GPU.
"""


def write(folder: Path, contents: Contents) -> None:
    """Fill an empty folder. Raises BadInput for a model that changed meanwhile."""
    (folder / "model").mkdir()
    contents.copy_model(folder / "model" / f"{contents.name}.onnx")
    files = {
        "serving-runtime.yaml": _runtime(contents),
        "inference-service.yaml": _service(contents),
        "kustomization.yaml": {"resources": ["serving-runtime.yaml", "inference-service.yaml"]},
    }
    for name, document in files.items():
        (folder / name).write_text(yaml_document(document), encoding="utf-8")
    (folder / "README.md").write_text(_readme(contents), encoding="utf-8")


def dns_label(name: str) -> str:
    """A Kubernetes name for a model (RFC 1123); with a hash of the name where that is another."""
    plain = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"m-{plain}".rstrip("-")
    if plain == name and len(plain) <= _NAME_LENGTH:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{plain[: _NAME_LENGTH - _HASH_LENGTH - 1].rstrip('-')}-{digest}"


def _storage(contents: Contents) -> str:
    return f"pvc://models/{contents.name}"


def _runtime(contents: Contents) -> dict[str, Any]:
    scrape = {"port": str(_HTTP), "path": "/metrics"}
    selected = _ARCHITECTURES.get(contents.profile.architecture)
    spec: dict[str, Any] = {
        "annotations": {
            "prometheus.io/scrape": "true",
            **{f"prometheus.io/{key}": value for key, value in scrape.items()},
            **{f"prometheus.kserve.io/{key}": value for key, value in scrape.items()},
        },
        "supportedModelFormats": [{"name": "deploykit", "version": "1", "autoSelect": False}],
        "protocolVersions": ["v2", "grpc-v2"],
        "multiModel": False,
        "containers": [_container(contents)],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {
                Commented("name", "a claim in its place keeps engines between pods"): "engines",
                "emptyDir": {},
            },
        ],
    }
    if selected:
        spec["nodeSelector"] = {"kubernetes.io/arch": selected}
    if contents.profile.device == "cuda":
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": {"name": f"deploykit-{dns_label(contents.name)}"},
        "spec": spec,
    }


def _container(contents: Contents) -> dict[str, Any]:
    arguments = ["boot", "/mnt/models", "--cache", "/engines", "--host", "0.0.0.0"]  # noqa: S104
    arguments += ["--http-port", str(_HTTP), "--grpc-port", str(_GRPC)]
    ready = {"httpGet": {"path": "/v2/health/ready", "port": _HTTP}}
    live = {"httpGet": {"path": "/v2/health/live", "port": _HTTP}}
    failures = _BUILD_S[contents.profile.device] // _PERIOD_S
    return {
        "name": "kserve-container",
        "image": _IMAGE,
        "command": ["deploykit"],
        "args": [*arguments, "--max-batch", str(contents.batch[2])],
        "ports": [
            {"name": "http1", "containerPort": _HTTP, "protocol": "TCP"},
            {"name": "grpc", "containerPort": _GRPC, "protocol": "TCP"},
        ],
        "startupProbe": {**ready, "periodSeconds": _PERIOD_S, "failureThreshold": failures},
        "readinessProbe": {**ready, "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**live, "periodSeconds": _PERIOD_S, "failureThreshold": 3},
        "resources": _resources(contents),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - in a container
            {"name": "engines", "mountPath": "/engines"},
        ],
    }


def _resources(contents: Contents) -> dict[str, Any]:
    """CPU cores, and memory for the model in several forms; a build on a GPU needs the most."""
    gpu = contents.profile.device == "cuda"
    weights = contents.manifest.evidence.weights
    files = [contents.model.path]
    files += [contents.model.path.with_name(weights.file)] if weights else []
    mib = (4096 if gpu else 1024) + 4 * sum(path.stat().st_size for path in files) // _MIB
    asked = {"cpu": "2", "memory": f"{mib}Mi"} | ({"nvidia.com/gpu": "1"} if gpu else {})
    return {"requests": asked, "limits": {key: asked[key] for key in asked if key != "cpu"}}


def _service(contents: Contents) -> dict[str, Any]:
    label, of = dns_label(contents.name), f'{{model="{contents.name}"}}[1m]'
    waited, count = (f"sum(rate(deploykit_queue_seconds_{end}{of}))" for end in ("sum", "count"))
    query = f"1000 * {waited} / clamp_min({count}, 0.001)"
    metric = {
        "backend": "prometheus",
        Commented("serverAddress", "of your Prometheus"): _PROMETHEUS,
        Commented("query", "milliseconds that a request waits for an engine, on average"): query,
    }
    target = {"type": "Value", "value": str(_QUEUE_MS)}
    external = {"type": "External", "external": {"metric": metric, "target": target}}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": label,
            "annotations": {
                "serving.kserve.io/deploymentMode": "RawDeployment",
                "serving.kserve.io/autoscalerClass": "keda",
                "serving.kserve.io/enable-prometheus-scraping": "true",
            },
        },
        "spec": {
            "predictor": {
                "minReplicas": 1,
                "maxReplicas": 4,
                "autoScaling": {"metrics": [external]},
                "terminationGracePeriodSeconds": _DRAIN_S,
                "automountServiceAccountToken": False,
                "model": {
                    "runtime": f"deploykit-{label}",
                    "modelFormat": {"name": "deploykit", "version": "1"},
                    "protocolVersion": "v2",
                    Commented("storageUri", "this folder, on a volume"): _storage(contents),
                },
            }
        },
    }


def _readme(contents: Contents) -> str:
    image = choose_image(contents.profile, None, "x86_64").with_extras(contents.extras)
    gpu = contents.profile.device == "cuda"
    return _README.format(
        name=contents.name,
        version=__version__,
        profile=contents.profile.name,
        label=dns_label(contents.name),
        dockerfile=image.dockerfile,
        extras=image.arguments["EXTRAS"],
        storage=_storage(contents),
        prometheus=_PROMETHEUS,
        folder=contents.name,
        build_s=_BUILD_S[contents.profile.device],
        build=(
            f"the\n  first start builds an engine, and has {_BUILD_S['cuda'] // 60} minutes for it."
            if gpu
            else f"it has\n  {_BUILD_S['cpu']} s for that."
        ),
        queue_ms=_QUEUE_MS,
        user=_USER,
    )
