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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from deploykit.core.errors import BadInput, NotFound, first_line, without_secrets
from deploykit.core.tensors import BATCH, DTYPE_BYTES, PROTOCOL_NAMES, TensorSpec
from deploykit.engines.data.samples import Samples, random_feeds, read_npz, read_samples
from deploykit.loadtest.check import Expected, error_text, one_line
from deploykit.loadtest.questions import (
    MOST_BYTES,
    TIMEOUT_S,
    HttpQuestions,
    Questions,
    answer_or,
    model_options,
    model_path,
    not_oip,
)

OUTPUTS = "outputs/"  # before names in golden samples
REFUSED = 429  # says nothing against the request
VARIANTS = 8  # different inputs, so that a cache in the server does not answer
VARIANTS_BYTES = 64 << 20  # together; one is always made
_DTYPES = {PROTOCOL_NAMES[dtype]: dtype for dtype in DTYPE_BYTES if dtype != "bfloat16"}
_DTYPES["BYTES"] = "string"  # for items alone


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
    grpc: bool = False
    options: Mapping[str, str] = field(default_factory=dict)  # of the model, as the server has them

    def ask(self) -> Questions:
        """What answers questions about the server."""
        return questions(self.url, self.host, self.address, self.port, self.grpc)

    @property
    def block(self) -> bytes:
        """The header block of each call over gRPC; none over HTTP."""
        if not self.grpc:
            return b""
        from deploykit.loadtest.grpc import header_block

        return header_block(self.host, "ModelInfer")

    @property
    def loopback(self) -> bool:
        return self.address == "localhost" or ipaddress.ip_address(self.address).is_loopback

    @property
    def path(self) -> str:
        return model_path(self.model)

    @property
    def pipeline(self) -> bool:
        """Whether it takes no tensors."""
        return self.about.get("platform") == "deploykit_pipeline"


def find_model(url: str, model: str | None) -> RemoteModel:
    """Ask the server at `url` (http://host[:port]) for its models and the metadata of one.

    `model` None: the only one that is ready. Raises BadInput or NotFound.
    """
    host, address, port, grpc = _resolve(url)
    server = questions(url, host, address, port, grpc)
    names = server.model_names()
    if model is None:
        if names is None or len(names) != 1:
            have = "does not list its models" if names is None else f"serves {len(names)} models"
            listed = f": {', '.join(names)}" if names else ""
            raise BadInput(f"{url}: {have}{listed}", hint="choose one with `model`")
        model = names[0]
    elif names is not None and model not in names:
        raise NotFound(f"{url}: no model '{model}'", hint=f"the models are: {', '.join(names)}")
    metadata = server.metadata(model)
    inputs = tuple(_spec(url, model, item) for item in metadata["inputs"])
    outputs = tuple(
        item["name"]
        for item in metadata.get("outputs") or ()
        if isinstance(item, dict) and isinstance(item.get("name"), str)
    )
    config = answer_or(dict[str, Any](), server.config, model)
    about = _about(metadata, config, server.about())
    options = model_options(config)
    return RemoteModel(url, host, address, port, model, inputs, outputs, about, grpc, options)


def questions(url: str, host: str, address: str, port: int, grpc: bool) -> Questions:
    """Over the protocol that the load is of."""
    if not grpc:
        return HttpQuestions(url, host, address, port)
    from deploykit.loadtest.grpc import GrpcQuestions  # needs hpack

    return GrpcQuestions(url, host, address, port)


def _about(
    metadata: Mapping[str, Any], config: Mapping[str, Any], server: Mapping[str, Any]
) -> dict[str, str]:
    """Name and version of the server; platform, device and file of the model, where it says so."""
    own, more = metadata.get("parameters"), config.get("parameters")
    more = more if isinstance(more, dict) else {}
    values = {
        "server": server.get("name"),
        "version": server.get("version"),
        "platform": metadata.get("platform"),
        **{k: v.get("string_value") for k, v in more.items() if isinstance(v, dict)},
        **(own if isinstance(own, dict) else {}),
    }
    return {
        name: one_line(value)
        for name, value in values.items()
        if isinstance(name, str) and isinstance(value, str) and value
    }


def _resolve(url: str) -> tuple[str, str, int, bool]:
    """`Host:` header, IP address, port, and whether it is gRPC. The name is looked up once."""
    hint = "write it as http://HOST:PORT or grpc://HOST:PORT"
    try:
        parts = urlsplit(url)
        grpc = parts.scheme == "grpc"
        name, port = parts.hostname, parts.port or (8001 if grpc else 80)
    except ValueError as exc:
        raise BadInput(f"'{without_secrets(url)}' is not a URL: {exc}", hint=hint) from exc
    if (
        parts.scheme not in ("http", "grpc")
        or not url.isprintable()
        or not name
        or not re.fullmatch(r"[A-Za-z0-9.:_%-]+", name)
    ):
        raise BadInput(f"'{without_secrets(url)}' is not an http:// or grpc:// URL", hint=hint)
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise BadInput(f"'{without_secrets(url)}': only a host and a port are allowed", hint=hint)
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
            return f"{shown}:{port}", str(address[0]), port, grpc
    raise BadInput(
        f"{url}: no server answers there: {reason}",
        hint="start one with: deploykit serve model.onnx",
    )


def _spec(url: str, model: str, item: object) -> TensorSpec:
    """A tensor of the metadata.

    The protocol has no names for axes of any length: -1 on axis 0 is the batch, elsewhere "axis1".
    """
    if not isinstance(item, dict):
        raise not_oip(url, "an input of its metadata is not an object")
    name, datatype, shape = item.get("name"), item.get("datatype"), item.get("shape")
    if not isinstance(name, str) or not isinstance(shape, list):
        raise not_oip(url, "an input of its metadata has no name or shape")
    if datatype not in _DTYPES:
        raise BadInput(f"{url}: {model}: no random values can be made for {name}, a {datatype}")
    axes: list[int | str] = []
    for position, size in enumerate(shape):
        if isinstance(size, bool) or not isinstance(size, int) or size < -1:
            raise not_oip(url, f"'{name}' has the shape {shape}")
        axes.append(size if size != -1 else f"axis{position}" if position else BATCH)
    return TensorSpec(name, _DTYPES[datatype], tuple(axes))


def free_axis_sizes(remote: RemoteModel, axes: Mapping[str, int]) -> dict[str, int]:
    """The size of each axis of any length but the batch, for random inputs.

    `axes`: by "axis1", or by any name where there is one such axis. Raises BadInput where one has
    no size, and on a name or a size that fits none.
    """
    free = {axis: spec for spec in remote.inputs for axis in spec.shape if isinstance(axis, str)}
    free.pop(BATCH, None)
    found = dict(axes)
    if len(free) == 1 and len(axes) == 1:
        found = dict.fromkeys(free, *axes.values())
    names = " and ".join(free) or "none"
    if any(size < 1 for size in found.values()) or not found.keys() <= free.keys():
        given = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise BadInput(
            f"`axes` {given}: the axes of any length of {remote.model}, besides the batch, are: "
            f"{names}; each size is 1 or more"
        )
    for axis, spec in free.items():
        if axis not in found:
            raise BadInput(
                f"{remote.url}: {remote.model}: input {spec}: {axis} has no size",
                hint=f"give one with `axis` {axis}=128, or inputs that the model takes with "
                "`data`, such as its FILE.golden.npz",
            )
    return found


def make_feeds(
    remote: RemoteModel,
    batch: int,
    seed: int,
    samples: Samples | None = None,
    axes: Mapping[str, int] | None = None,
) -> list[Mapping[str, np.ndarray]]:
    """The inputs of up to VARIANTS requests, seeded and random.

    `samples`: their rows in turn instead. Raises BadInput when `batch` is above 1 and the model has
    no batch axis, and as `free_axis_sizes` does.
    """
    for spec in remote.inputs:
        if spec.dtype == "string":
            raise BadInput(
                f"{remote.url}: {remote.model}: no random values can be made for {spec.name}, "
                "a BYTES"
            )
    if batch > 1 and not any(spec.batched for spec in remote.inputs):
        raise BadInput(f"{remote.url}: {remote.model} has no batch axis: batch {batch} is not 1")
    if samples is not None and axes:
        raise BadInput("`axes` and `data` exclude each other", hint="the data have sizes")
    sizes = {BATCH: batch, **free_axis_sizes(remote, axes or {})} if samples is None else {}

    def feeds(number: int) -> Mapping[str, np.ndarray]:
        if samples is None:
            return random_feeds(remote.inputs, sizes, seed + number)
        return rows_of(samples.inputs, number, samples.batching(batch, remote.inputs)[0])

    found = [feeds(0)]
    each_bytes = sum(array.nbytes for array in found[0].values())
    while len(found) < VARIANTS and each_bytes * (len(found) + 1) <= VARIANTS_BYTES:
        found.append(feeds(len(found)))
    return found


def rows_of(arrays: Mapping[str, np.ndarray], number: int, size: int) -> dict[str, np.ndarray]:
    """The rows of that request; after the last comes the first again."""
    rows = range(number * size, (number + 1) * size)
    return {name: array.take(rows, axis=0, mode="wrap") for name, array in arrays.items()}


def read_expected(
    path: Path, remote: RemoteModel, batch: int, max_error: float
) -> tuple[Samples, Expected]:
    """Golden samples: the inputs to send, and what the requests must be answered with."""
    samples = read_samples(path, remote.inputs)
    arrays = read_npz(path)
    outputs = {n.removeprefix(OUTPUTS): a for n, a in arrays.items() if n.startswith(OUTPUTS)}
    if not outputs or any(a.shape[:1] != (len(samples),) for a in outputs.values()):
        raise BadInput(
            f"{path}: has no outputs to expect, one for each sample",
            hint="golden samples do: arrays outputs/NAME in the FILE.golden.npz next to a model",
        )
    size, _ = samples.batching(batch, remote.inputs)
    answers = [rows_of(outputs, number, size) for number in range(VARIANTS)]
    return samples, Expected(answers, max_error)


def make_requests(remote: RemoteModel, feeds: Sequence[Mapping[str, np.ndarray]]) -> list[bytes]:
    """Whole requests, with binary tensors both ways."""
    return [_request(remote, each) for each in feeds]


def _request(remote: RemoteModel, feeds: Mapping[str, np.ndarray]) -> bytes:
    tensors = [
        (
            spec.name,
            PROTOCOL_NAMES[spec.dtype],
            feeds[spec.name].shape,
            np.ascontiguousarray(
                feeds[spec.name], feeds[spec.name].dtype.newbyteorder("<")
            ).tobytes(),
        )
        for spec in remote.inputs
    ]
    if remote.grpc:
        from deploykit.loadtest.grpc import call_of, infer_request

        return call_of(infer_request(remote.model, tensors))
    items = [
        {
            "name": name,
            "shape": list(shape),
            "datatype": datatype,
            "parameters": {"binary_data_size": len(raw)},
        }
        for name, datatype, shape, raw in tensors
    ]
    head = json.dumps({"inputs": items, "parameters": {"binary_data_output": True}}).encode()
    lines = (
        f"POST {remote.path}/infer HTTP/1.1",
        f"Host: {remote.host}",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + sum(len(raw) for *_, raw in tensors)}",
    )
    return b"".join(["\r\n".join([*lines, "", ""]).encode(), head, *(raw for *_, raw in tensors)])


def probe(remote: RemoteModel, request: bytes) -> None:
    """Send one request before the run. Raises BadInput when the server calls it wrong (4xx)."""
    if remote.grpc:
        from deploykit.loadtest.grpc import GrpcQuestions, probe_call

        server = GrpcQuestions(remote.url, remote.host, remote.address, remote.port)
        probe_call(server, remote.model, request)
        return
    try:
        with socket.create_connection((remote.address, remote.port), TIMEOUT_S) as connection:
            connection.sendall(request)
            response = http.client.HTTPResponse(connection, method="POST")
            response.begin()
            body = response.read(MOST_BYTES)
    except TimeoutError as exc:
        raise BadInput(
            f"{remote.url}: {remote.model}: no answer to an inference within {TIMEOUT_S:g} s"
        ) from exc
    except (OSError, http.client.HTTPException):
        return  # the run counts it as a failure, with its message
    if 400 <= response.status < 500 and response.status != REFUSED:
        raise BadInput(
            f"{remote.url}: {remote.model}: answered {response.status}: {error_text(body)}"
        )
