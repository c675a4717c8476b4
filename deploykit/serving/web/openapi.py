"""The OpenAPI 3.1 document of a server, exact for the models it serves.

A request's numbers must be as many as its shape
says, which no schema can express: so a JSON request is described for the batches 1 and 2, exactly,
and the text says how it goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deploykit import __version__
from deploykit.core.tensors import concrete
from deploykit.serving.models.repository import VERSION, ModelRepository, ServedModel
from deploykit.serving.oip.request import MAX_CLASSES, MAX_ID_BYTES
from deploykit.serving.oip.tensors import BINARY_ONLY, Slot

_SHOWN_BATCHES = (1, 2)
_OPEN: Mapping[str, Any] = {"type": "object"}
_TEXT = {"text/plain": {"schema": {"type": "string"}}}
_PAGE = {"text/html": {"schema": {"type": "string"}}}
_WHOLE = {"type": ["integer", "null"], "minimum": 0, "maximum": 2**64 - 1}
_BEYOND = 2.0**128 - 2.0**103  # the first number that float32 rounds to infinity
_RESERVED = {"^triton_": False}


def example_shape(model: ServedModel, slot: Slot, rows: int) -> tuple[int, ...]:
    """A shape the model takes, of `rows` rows; variable axes have their smallest bucket, or 1."""
    sizes = {axis: min(found) for axis, found in _lengths(model).items()}
    if model.max_batch:
        sizes[str(slot.spec.shape[0])] = rows
    return concrete(slot.spec, sizes)


def _lengths(model: ServedModel) -> Mapping[str, Sequence[int]]:
    return model.buckets.lengths if model.buckets is not None else {}


def document(service: ModelRepository) -> dict[str, Any]:
    names = list(service.models)
    paths: dict[str, Any] = {
        "/v2": _get("What this server is and can do", _json(_SERVER)),
        "/v2/health/live": _get("Whether the server is up", _json(_flags("live")), open_=True),
        "/v2/health/ready": _get(
            "Whether every model takes requests", _json(_flags("ready")), open_=True
        ),
        "/v2/models/stats": _get("Statistics of all models", _json(_STATISTICS)),
        "/v2/repository/index": {"post": _index()},
        "/metrics": _get("Counters and histograms for Prometheus", _TEXT),
        "/status": _get("What the page at / shows", _json(_OPEN)),
        "/": _get("A page to watch the server and try its models", _PAGE),
        "/docs": _get("How to call the models", _PAGE),
        "/openapi.json": _get("This document", _json(_OPEN)),
    }
    for version in ("", "/versions/{version}"):
        base = f"/v2/models/{{model}}{version}"
        of = [_parameter("model", names)] + ([_parameter("version", [VERSION])] if version else [])
        for end, text, schema in (
            ("", "A model's inputs and outputs", _MODEL),
            ("/config", "A model's configuration", _OPEN),
            ("/ready", "Whether a model takes requests", _flags("ready")),
            ("/stats", "A model's statistics", _STATISTICS),
        ):
            paths[base + end] = {"parameters": of, **_get(text, _json(schema))}
    for name, model in service.models.items():
        paths[f"/v2/models/{name}/infer"] = {"post": _infer(model)}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "deploykit",
            "version": __version__,
            "description": "The Open Inference Protocol, version 2, for the models served here.",
        },
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}},
    }
    if service.options.token is not None:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found


# -- operations


def _get(text: str, content: Mapping[str, Any], *, open_: bool = False) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": text, "responses": _responses(content)}
    if open_:
        operation["security"] = []
    return {"get": operation}


def _responses(content: Mapping[str, Any]) -> dict[str, Any]:
    error = {"$ref": "#/components/schemas/Error"}
    return {
        "200": {"description": "Done", "content": content},
        "default": {"description": "Why not", "content": _json(error)},
    }


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _parameter(name: str, values: list[str]) -> dict[str, Any]:
    schema = {"type": "string", "enum": values}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _index() -> dict[str, Any]:
    body = {"type": "object", "properties": {"ready": {"type": "boolean"}}}
    entry = _object(name=_STRING, version=_STRING, state=_STRING, reason=_STRING)
    return {
        "summary": "Every model, and whether it takes requests",
        "requestBody": {"required": False, "content": _json(body)},
        "responses": _responses(_json({"type": "array", "items": entry})),
    }


def _infer(model: ServedModel) -> dict[str, Any]:
    batch = f"up to {model.max_batch} rows" if model.max_batch else "as the model is, no batch"
    content: dict[str, Any] = {}
    if not any(slot.datatype in BINARY_ONLY for slot in model.signature.inputs.values()):
        content = _json(_request(model))
    else:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    answer = {
        **_json(_answer(model)),
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    }
    return {
        "summary": f"Infer with model '{model.name}'",
        "description": (
            f"A request holds {batch}. 'data' is flat, in row-major order, or nested like 'shape'. "
            "Instead of 'data', an input's parameters may hold 'binary_data_size': its bytes, "
            "little-endian, then follow the JSON, whose length the header "
            "Inference-Header-Content-Length says. The body may be compressed with gzip or deflate."
        ),
        "requestBody": {"required": True, "content": content},
        "responses": _responses(answer),
    }


# -- schemas

_STRING = {"type": "string"}


def _object(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _flags(name: str) -> dict[str, Any]:
    return _object(**{name: {"const": True}})


_ERROR = _object(error=_STRING)
_STRINGS = {"type": "array", "items": _STRING}
_SERVER = _object(name=_STRING, version=_STRING, extensions=_STRINGS)
_TENSORS = {
    "type": "array",
    "items": _object(
        name=_STRING, datatype=_STRING, shape={"type": "array", "items": {"type": "integer"}}
    ),
}
_MODEL = _object(
    name=_STRING, versions=_STRINGS, platform=_STRING, inputs=_TENSORS, outputs=_TENSORS
)
_STATISTICS = _object(model_stats={"type": "array", "items": _OPEN})


def _tuple(items: list[Any], least: int) -> dict[str, Any]:
    return {"type": "array", "prefixItems": items, "minItems": least, "maxItems": len(items)}


def _optional(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": [kind, "null"], **more}


def _request(model: ServedModel) -> dict[str, Any]:
    batches = [n for n in _SHOWN_BATCHES if n <= model.max_batch] or [1]
    slots = model.signature.inputs.values()
    inputs = [_tuple([_input(model, slot, rows) for slot in slots], len(slots)) for rows in batches]
    parameters = {
        "timeout": {**_WHOLE, "description": "microseconds it may wait"},
        "priority": {**_WHOLE, "description": "1 is the highest, 0 the server's choice"},
        "binary_data_output": {"type": "boolean"},
    }
    properties = {
        "id": _optional("string", maxLength=MAX_ID_BYTES),
        "parameters": _optional("object", properties=parameters, patternProperties=_RESERVED),
        "inputs": {"anyOf": inputs},
        "outputs": _optional("array", **_wanted(model)),
    }
    return {"type": "object", "required": ["inputs"], "properties": properties}


def _input(model: ServedModel, slot: Slot, rows: int) -> dict[str, Any]:
    shape = list(example_shape(model, slot, rows))
    count = math.prod(shape)
    data = {"type": "array", "items": _element(slot), "minItems": count, "maxItems": count}
    return _object(
        name={"const": slot.spec.name},
        datatype={"const": slot.datatype},
        shape={"const": shape},
        data=data,
    )


def _wanted(model: ServedModel) -> dict[str, Any]:
    """The outputs to send; some or all of them, the first ones in the model's order."""
    items = []
    for slot in model.signature.outputs.values():
        binary: dict[str, Any] = {"type": "boolean"}
        needed = []
        if slot.datatype in BINARY_ONLY:
            binary, needed = {"const": True}, ["binary_data"]
        properties: dict[str, Any] = {"binary_data": binary}
        if slot.datatype != "BYTES":
            properties["classification"] = _optional("integer", minimum=1, maximum=MAX_CLASSES)
        parameters = {
            "type": "object" if needed else ["object", "null"],
            "properties": properties,
            "required": needed,
            "patternProperties": {**_RESERVED, "^shared_memory_": False},
        }
        item = _object(name={"const": slot.spec.name}, parameters=parameters)
        if not needed:
            item["required"] = ["name"]
        items.append(item)
    found = _tuple(items, 0)
    del found["type"]
    return found


def _answer(model: ServedModel) -> dict[str, Any]:
    item = _object(
        name={"enum": list(model.signature.outputs)},
        datatype=_STRING,
        shape={"type": "array", "items": {"type": "integer", "minimum": 0}},
    )
    answer = _object(
        model_name={"const": model.name},
        model_version={"const": VERSION},
        outputs={"type": "array", "items": item},
    )
    answer["properties"]["id"] = _STRING
    return answer


def _element(slot: Slot) -> dict[str, Any]:
    if slot.datatype == "BYTES":
        return _STRING
    if slot.datatype == "BOOL":
        return {"type": "boolean"}
    if slot.datatype == "FP32":
        return {"type": "number", "exclusiveMinimum": -_BEYOND, "exclusiveMaximum": _BEYOND}
    if slot.datatype == "FP64":
        return {"type": "number"}
    bounds = np.iinfo(slot.dtype)
    return {"type": "integer", "minimum": int(bounds.min), "maximum": int(bounds.max)}
