"""The dashboard's files by path, read once; they load nothing from other sites."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deploykit.core.files import LOOK

_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOLDER = Path(__file__).with_suffix("")

FILES = {  # by path: type and content
    f"/{path.name}".replace("index.html", ""): (_TYPES[path.suffix], path.read_bytes())
    for path in (*sorted(_FOLDER.iterdir()), LOOK)
}
_OPENAPI = _FOLDER.with_name("openapi.json").read_bytes()  # the same for every server


def openapi(root_path: str) -> bytes:
    """Return the OpenAPI document of a server at this path."""
    servers = f'"servers": [{{"url": "{root_path}"}}], "paths"'.encode()
    return _OPENAPI.replace(b'"paths"', servers, 1) if root_path else _OPENAPI
