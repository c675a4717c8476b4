"""The OpenAPI 3.1 document of a server: openapi.json with the names of the served models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from deploykit import __version__
from deploykit.serving.models.pipelines import ServedPipeline
from deploykit.serving.models.repository import ModelRepository

_TEMPLATE = Path(__file__).with_name("openapi.json")
_JSON = "application/json"


_IMAGES = ("image/jpeg", "image/png", "image/webp")
_CONTENT = {"type": "string", "format": "binary"}


def document(repository: ModelRepository) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(_TEMPLATE.read_bytes())
    found["info"]["version"] = __version__
    with_task = [name for name, model in repository.models.items() if model.task.ready]
    names: dict[str, Iterable[str]] = {
        "served": repository.served,
        "model": repository.models,
        "task-model": with_task,
    }
    for parameter, chosen in names.items():
        found["components"]["parameters"][parameter]["schema"]["enum"] = list(chosen)
    if not with_task:
        found["paths"] = {path: of for path, of in found["paths"].items() if "/predict" not in path}
    for name, pipeline in repository.pipelines.items():
        found["paths"][f"/v2/models/{name}/predict"] = {"post": _of_pipeline(pipeline)}
    if repository.options.token is not None:
        found["security"] = [{"token": []}]
    return found


def _of_pipeline(pipeline: ServedPipeline) -> dict[str, Any]:
    about = pipeline.metadata()["parameters"]
    text = {"type": "string", "minLength": 1}
    form = {
        "type": "object",
        "properties": {pipeline.input: _CONTENT},
        "required": [pipeline.input],
    }
    by_kind: dict[str, dict[str, Any]] = {
        "image": dict.fromkeys(_IMAGES, _CONTENT),
        "text": {"text/plain": text, "application/json": text},
        "json": {"application/json": {}},
        "bytes": {"application/octet-stream": {**_CONTENT, "minLength": 1}},
    }
    bodies = by_kind[pipeline.takes]
    answer = ("application/octet-stream", _CONTENT) if about["gives"] == "bytes" else (_JSON, {})
    error = {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "summary": f"Run the pipeline {pipeline.name}: {about['stages']}",
        "description": f"The answer is {about['gives']}. Over gRPC: ModelInfer with one BYTES "
        f"input, '{pipeline.input}', of shape [1].",
        "requestBody": {
            "required": True,
            "content": {
                kind: {"schema": schema}
                for kind, schema in {**bodies, "multipart/form-data": form}.items()
            },
        },
        "responses": {
            "200": {"description": "Success", "content": {answer[0]: {"schema": answer[1]}}},
            "default": {"description": "Error", "content": error},
        },
    }
