"""The OpenAPI 3.1 document of a server: openapi.json with the names of the served models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from deploykit import __version__
from deploykit.serving.models.repository import ModelRepository

_FILE = Path(__file__).with_name("openapi.json")


def document(repository: ModelRepository) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(_FILE.read_bytes())
    found["info"]["version"] = __version__
    found["components"]["parameters"]["model"]["schema"]["enum"] = list(repository.models)
    with_task = [name for name, model in repository.models.items() if model.task.ready]
    found["components"]["parameters"]["task-model"]["schema"]["enum"] = with_task
    if not with_task:
        found["paths"] = {path: of for path, of in found["paths"].items() if "/predict" not in path}
    if repository.options.token is not None:
        found["security"] = [{"token": []}]
    return found
