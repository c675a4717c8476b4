"""The bytes that each server takes and gives: the same rows in every encoding. Pure.

In: rows, float32. Out: `Ask`, one prepared request, and arrays from answers. For gRPC: the body of
an HTTP/2 request as h2load sends it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MODEL = "m"  # what every server calls its model; its input is "x", its output "y"
JSON_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Ask:
    """One request. `encoding`: one of `ENCODINGS`."""

    encoding: str
    path: str
    headers: Mapping[str, str]
    body: bytes


def _binary(rows: np.ndarray) -> Ask:
    item = {"name": "x", "datatype": "FP32", "shape": list(rows.shape)}
    document = {
        "inputs": [{**item, "parameters": {"binary_data_size": rows.nbytes}}],
        "parameters": {"binary_data_output": True},
    }
    head = json.dumps(document, separators=(",", ":")).encode()
    headers = {JSON_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
    return Ask("v2 binary", f"/v2/models/{MODEL}/infer", headers, head + rows.tobytes())


def _json(rows: np.ndarray) -> Ask:
    # the shortest decimal of each float32: a float64's seventeen digits would be unfair
    data = ",".join(str(value) for value in rows.ravel())
    item = f'{{"name":"x","datatype":"FP32","shape":{list(rows.shape)},"data":[{data}]}}'
    headers = {"Content-Type": "application/json"}
    return Ask("v2 JSON", f"/v2/models/{MODEL}/infer", headers, f'{{"inputs":[{item}]}}'.encode())


def _raw(rows: np.ndarray) -> Ask:
    return Ask("raw", "/infer", {"Content-Type": "application/octet-stream"}, rows.tobytes())


ENCODINGS = {"v2 binary": _binary, "v2 JSON": _json, "raw": _raw}


def answer(encoding: str, json_length: str | None, body: bytes) -> np.ndarray:
    """The values of "y", flat. `json_length`: the answer's header of that name."""
    if encoding == "raw":
        return np.frombuffer(body, "<f4")
    size = len(body) if json_length is None else int(json_length)
    (output,) = json.loads(body[:size])["outputs"]
    if size < len(body):
        return np.frombuffer(body[size:], "<f4")
    return np.asarray(output["data"], np.float32).ravel()


def grpc_message(rows: np.ndarray) -> bytes:
    """A ModelInferRequest whose tensor is raw."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="x", datatype="FP32", shape=rows.shape)
    request.raw_input_contents.append(rows.tobytes())
    return request.SerializeToString()


def grpc_frame(message: bytes) -> bytes:
    """What a gRPC request's DATA frames hold: a flag (not compressed), a length, the bytes."""
    return struct.pack(">BI", 0, len(message)) + message


def grpc_answer(message: bytes) -> np.ndarray:
    """The values of "y" in a ModelInferResponse, flat."""
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelInferResponse.FromString(message)
    return np.frombuffer(response.raw_output_contents[0], "<f4")
