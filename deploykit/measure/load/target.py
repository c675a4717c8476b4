"""Find a model on an Open Inference Protocol server, and prepare requests for it.

Requests are whole HTTP messages as bytes, with tensors in the protocol's binary form. All of it
happens before the timing starts.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from deploykit.core.errors import BadInput, NotFound, first_line
from deploykit.core.tensors import BATCH, DTYPE_BYTES, PROTOCOL_NAMES, TensorSpec
from deploykit.measure.load.check import error_text, one_line
from deploykit.runtimes.data.samples import Samples, random_feeds

TIMEOUT_S = 10.0
VARIANTS = 8  # different inputs, so that a cache in the server does not answer
VARIANTS_BYTES = 64 << 20  # together; one is always made
_MOST_BYTES = 16 << 20  # of an answer before the run
_DTYPES = {PROTOCOL_NAMES[dtype]: dtype for dtype in DTYPE_BYTES if dtype != "bfloat16"}


@dataclass(frozen=True)
class RemoteModel:
    """One model on one server. `address`: what to connect to. `host`: the `Host:` header."""

    url: str
    host: str
    address: str
    port: int
    model: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...] = ()  # names
    about: Mapping[str, str] = field(default_factory=dict)  # what the server says of itself

    @property
    def loopback(self) -> bool:
        return self.address == "localhost" or ipaddress.ip_address(self.address).is_loopback

    @property
    def path(self) -> str:
        return f"/v2/models/{quote(self.model, safe='')}"


def find_model(url: str, model: str | None, *, with_data: bool = False) -> RemoteModel:
    """Ask the server at `url` (http://host[:port]) for its models and the metadata of one.

    `model` None: the only one that is ready. `with_data`: its inputs are not invented, so that any
    axis may be dynamic. Raises BadInput or NotFound.
    """
    host, address, port = _resolve(url)
    names = _model_names(url, address, port, host)
    if model is None:
        if names is None or len(names) != 1:
            have = "does not list its models" if names is None else f"serves {len(names)} models"
            listed = f": {', '.join(names)}" if names else ""
            raise BadInput(f"{url}: {have}{listed}", hint="choose one with `model`")
        model = names[0]
    elif names is not None and model not in names:
        raise NotFound(f"{url}: no model '{model}'", hint=f"the models are: {', '.join(names)}")
    remote = RemoteModel(url, host, address, port, model, ())
    status, body = _ask(url, address, port, host, "GET", remote.path)
    if status == 404:
        raise NotFound(f"{url}: no model '{model}': {error_text(body)}")
    metadata = _json(body) if status == 200 else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("inputs"), list):
        raise _not_oip(url, f"{remote.path} answered {status}")
    inputs = tuple(_spec(url, model, item, with_data) for item in metadata["inputs"])
    outputs = tuple(
        item["name"]
        for item in metadata.get("outputs") or ()
        if isinstance(item, dict) and isinstance(item.get("name"), str)
    )
    about = _about(metadata, _json(_ask(url, address, port, host, "GET", "/v2")[1]))
    return RemoteModel(url, host, address, port, model, inputs, outputs, about)


def _about(metadata: Mapping[str, Any], server: object) -> dict[str, str]:
    """Name and version of the server; platform, device and file of the model, where it says so."""
    found = dict(server) if isinstance(server, dict) else {}
    own = metadata.get("parameters")
    values = {
        "server": found.get("name"),
        "version": found.get("version"),
        "platform": metadata.get("platform"),
        **(own if isinstance(own, dict) else {}),
    }
    return {
        name: one_line(value)
        for name, value in values.items()
        if isinstance(name, str) and isinstance(value, str) and value
    }


def _resolve(url: str) -> tuple[str, str, int]:
    """`Host:` header, IP address and port. The name is looked up once, not for every connection."""
    hint = "write it as http://HOST:PORT"
    try:
        parts = urlsplit(url)
        name, port = parts.hostname, parts.port or 80
    except ValueError as exc:
        raise BadInput(f"'{url}' is not a URL: {exc}", hint=hint) from exc
    if parts.scheme != "http" or not name or not re.fullmatch(r"[A-Za-z0-9.:_%-]+", name):
        raise BadInput(f"'{url}' is not an http:// URL", hint=hint)
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise BadInput(f"'{url}': only a host and a port are allowed", hint=hint)
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise BadInput(f"{url}: no such host '{name}'", hint=hint) from exc
    # localhost may resolve to ::1 first, where nothing listens: take the address that answers
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as candidate:
            candidate.settimeout(TIMEOUT_S)
            try:
                candidate.connect(address)
            except OSError as exc:
                reason = exc.strerror or first_line(exc)
                continue
            shown = f"[{name}]" if ":" in name else name
            return f"{shown}:{port}", str(address[0]), port
    raise BadInput(
        f"{url}: no server answers there: {reason}",
        hint="start one with: deploykit serve model.onnx",
    )


def _model_names(url: str, address: str, port: int, host: str) -> list[str] | None:
    """The models that are ready; None where the server has no repository index."""
    status, body = _ask(url, address, port, host, "POST", "/v2/repository/index")
    index = _json(body) if status == 200 else None
    if isinstance(index, list) and all(isinstance(item, dict) for item in index):
        ready = [item for item in index if item.get("state", "READY") == "READY"]
        return list(dict.fromkeys(str(item.get("name")) for item in ready))
    status, body = _ask(url, address, port, host, "GET", "/v2")
    about = _json(body) if status == 200 else None
    if not isinstance(about, dict) or "name" not in about:
        raise _not_oip(url, f"/v2 answered {status}")
    return None


def _not_oip(url: str, why: str) -> BadInput:
    return BadInput(
        f"{url}: is not an Open Inference Protocol server ({why})",
        hint="the port is that of its HTTP interface, 8000 by default; not gRPC, not metrics",
    )


def _ask(
    url: str, address: str, port: int, host: str, verb: str, path: str, body: bytes = b""
) -> tuple[int, bytes]:
    """One request on a connection of its own. Raises BadInput when there is no HTTP answer."""
    connection = http.client.HTTPConnection(address, port, timeout=TIMEOUT_S)
    try:
        connection.request(verb, path, body or None, {"Host": host, "Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read(_MOST_BYTES)
    except TimeoutError as exc:
        raise BadInput(f"{url}: {path}: no answer within {TIMEOUT_S:g} s") from exc
    except (OSError, http.client.HTTPException) as exc:
        raise _not_oip(url, f"{path}: {first_line(exc)}") from exc
    finally:
        connection.close()


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _spec(url: str, model: str, item: object, with_data: bool) -> TensorSpec:
    """A tensor of the metadata, with -1 on axis 0 read as the batch."""
    if not isinstance(item, dict):
        raise _not_oip(url, "an input of its metadata is not an object")
    name, datatype, shape = item.get("name"), item.get("datatype"), item.get("shape")
    if not isinstance(name, str) or not isinstance(shape, list):
        raise _not_oip(url, "an input of its metadata has no name or shape")
    if datatype not in _DTYPES:
        raise BadInput(f"{url}: {model}: no random values can be made for {name}, a {datatype}")
    axes: list[int | str] = []
    for position, size in enumerate(shape):
        if isinstance(size, bool) or not isinstance(size, int) or size < -1:
            raise _not_oip(url, f"'{name}' has the shape {shape}")
        if size == -1 and position > 0 and not with_data:
            raise BadInput(
                f"{url}: {model}: input '{name}' is {shape}: axis {position} has no size",
                hint="give inputs that the model takes: `data`, such as its FILE.golden.npz",
            )
        axes.append(size if size != -1 else f"axis{position}" if position else BATCH)
    return TensorSpec(name, _DTYPES[datatype], tuple(axes))


def make_requests(
    remote: RemoteModel, batch: int, seed: int, samples: Samples | None = None
) -> tuple[list[bytes], dict[str, tuple[int, ...]]]:
    """Up to VARIANTS whole HTTP requests with seeded random inputs, binary tensors both ways.

    `samples`: their rows in turn instead. Also returns the inputs' shapes.

    Raises BadInput when `batch` is above 1 and the model has no batch axis.
    """
    if batch > 1 and not any(spec.batched for spec in remote.inputs):
        raise BadInput(f"{remote.url}: {remote.model} has no batch axis: batch {batch} is not 1")

    def feeds(number: int) -> Mapping[str, np.ndarray]:
        if samples is None:
            return random_feeds(remote.inputs, {BATCH: batch}, seed + number)
        size, _ = samples.batching(batch, remote.inputs)
        rows = range(number * size, (number + 1) * size)
        return {n: a.take(rows, axis=0, mode="wrap") for n, a in samples.inputs.items()}

    first = feeds(0)
    requests = [_request(remote, first)]
    while len(requests) < VARIANTS and len(requests[0]) * (len(requests) + 1) <= VARIANTS_BYTES:
        requests.append(_request(remote, feeds(len(requests))))
    return requests, {spec.name: first[spec.name].shape for spec in remote.inputs}


def _request(remote: RemoteModel, feeds: Mapping[str, np.ndarray]) -> bytes:
    tensors, raw = _binary(remote.inputs, feeds)
    head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    lines = (
        f"POST {remote.path}/infer HTTP/1.1",
        f"Host: {remote.host}",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + sum(map(len, raw))}",
    )
    return b"".join(["\r\n".join([*lines, "", ""]).encode(), head, *raw])


def _binary(
    specs: Sequence[TensorSpec], feeds: Mapping[str, np.ndarray]
) -> tuple[list[dict[str, Any]], list[bytes]]:
    tensors, raw = [], []
    for spec in specs:
        array = feeds[spec.name]
        raw.append(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
        tensors.append(
            {
                "name": spec.name,
                "shape": list(array.shape),
                "datatype": PROTOCOL_NAMES[spec.dtype],
                "parameters": {"binary_data_size": len(raw[-1])},
            }
        )
    return tensors, raw


def probe(remote: RemoteModel, request: bytes) -> None:
    """Send one request before the run. Raises BadInput when the server calls it wrong (4xx)."""
    try:
        with socket.create_connection((remote.address, remote.port), TIMEOUT_S) as connection:
            connection.sendall(request)
            response = http.client.HTTPResponse(connection, method="POST")
            response.begin()
            body = response.read(_MOST_BYTES)
    except TimeoutError as exc:
        raise BadInput(
            f"{remote.url}: {remote.model}: no answer to an inference within {TIMEOUT_S:g} s"
        ) from exc
    except (OSError, http.client.HTTPException):
        return  # the run counts it as a failure, with its message
    if 400 <= response.status < 500:
        raise BadInput(
            f"{remote.url}: {remote.model}: answered {response.status}: {error_text(body)}"
        )
