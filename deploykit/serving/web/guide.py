"""The page at /docs: how to call each model that is served, to be copied and run.

In: a Service and the address that the reader used. Out: HTML without scripts, every name in it
escaped. The examples hold the models' own names, types and shapes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from typing import Any

from deploykit.serving.models.repository import ServedModel, Service
from deploykit.serving.oip.tensors import BINARY_ONLY, Slot
from deploykit.serving.web.openapi import example_shape

CONTENT_TYPE = "text/html; charset=utf-8"
_SHOWN_NUMBERS = 16  # a list with more is written by Python
_AS_IT_IS = ("BYTES", "BF16")  # not the bytes of a numpy array


@dataclass(frozen=True)
class Address:
    """Where the server is for a client; `host` with its port, as in the header Host."""

    scheme: str
    host: str
    grpc_port: int | None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}"

    @property
    def grpc(self) -> str:
        name = self.host if self.host.endswith("]") else self.host.rpartition(":")[0] or self.host
        return f"{name}:{self.grpc_port}"


def page(service: Service, address: Address) -> bytes:
    token = service.options.token is not None
    sections = [_section(model, address, token) for model in service.models.values()]
    return _PAGE.replace("SECTIONS", "".join(sections)).encode()


def _section(model: ServedModel, address: Address, token: bool) -> str:
    tensors = [("input", slot) for slot in model.signature.inputs.values()]
    tensors += [("output", slot) for slot in model.signature.outputs.values()]
    rows = "".join(
        f"<tr><td>{kind}</td><td>{escape(slot.spec.name)}</td><td>{slot.datatype}</td>"
        f"<td>{escape(', '.join(map(str, slot.spec.shape)))}</td></tr>"
        for kind, slot in tensors
    )
    batch = f"up to {model.max_batch} rows a request" if model.max_batch else "not batched"
    examples = [("curl", _curl(model, address, token)), ("Python", _urllib(model, address, token))]
    examples.append(("Python, tritonclient over HTTP", _triton(model, address, token, "http")))
    if address.grpc_port is not None:
        examples.append(("Python, tritonclient over gRPC", _triton(model, address, token, "grpc")))
    blocks = "".join(
        f"<h3>{title}</h3><pre><code>{escape(code)}</code></pre>"
        for title, code in examples
        if code is not None
    )
    name = escape(model.name)
    return (
        f'<section id="{name}"><h2>{name}</h2><p class="quiet">{batch}</p><table><thead><tr>'
        f"<th>Tensor</th><th>Name</th><th>Type</th><th>Shape</th></tr></thead><tbody>{rows}"
        f"</tbody></table>{blocks}</section>"
    )


def _slots(model: ServedModel) -> list[tuple[Slot, list[int]]]:
    slots = model.signature.inputs.values()
    return [(slot, list(example_shape(model, slot, 1))) for slot in slots]


def _curl(model: ServedModel, address: Address, token: bool) -> str | None:
    """None for a model with an input that JSON cannot carry."""
    slots = _slots(model)
    if any(slot.datatype in BINARY_ONLY for slot, _ in slots):
        return None
    short = sum(math.prod(shape) for _, shape in slots) <= _SHOWN_NUMBERS
    inputs = []
    for slot, shape in slots:
        item: dict[str, Any] = {"name": slot.spec.name, "datatype": slot.datatype, "shape": shape}
        inputs.append({**item, "data": [_one(slot)] * (math.prod(shape) if short else 1)})
    header = " -H 'Authorization: Bearer '\"$TOKEN\"" if token else ""
    target = f"curl{header} {address.url}/v2/models/{model.name}/infer"
    if short:
        return f"{target} -d {_quoted(json.dumps({'inputs': inputs}))}"
    script = f"import json\nrequest = json.loads({json.dumps({'inputs': inputs})!r})\n"
    for number, (_, shape) in enumerate(slots):
        script += f'request["inputs"][{number}]["data"] *= {math.prod(shape)}\n'
    return f"python3 -c {_quoted(script + 'print(json.dumps(request))')} |\n  {target} -d @-"


def _quoted(text: str) -> str:
    """For a shell, as one word."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _one(slot: Slot) -> Any:
    if slot.datatype == "BYTES":
        return "text"
    return True if slot.datatype == "BOOL" else 1


def _arrays(model: ServedModel) -> str:
    lines = []
    for slot, shape in _slots(model):
        if slot.datatype == "BYTES":
            value = f"np.full({shape}, 'text', object)"
        else:
            kind = {"BF16": "ml_dtypes.bfloat16", "BOOL": "np.bool_"}.get(slot.datatype)
            value = f"np.ones({shape}, {kind or 'np.' + slot.dtype.name})"
        lines.append(f"    {slot.spec.name!r}: {value},")
    return "arrays = {\n" + "\n".join(lines) + "\n}\n"


def _urllib(model: ServedModel, address: Address, token: bool) -> str | None:
    """None for tensors whose bytes numpy alone does not make or read."""
    signature = model.signature
    slots = [*signature.inputs.values(), *signature.outputs.values()]
    if any(slot.datatype in _AS_IT_IS for slot in slots):
        return None
    types = {slot.datatype: slot.dtype.name for slot in slots}
    inputs = {slot.spec.name: slot.datatype for slot in signature.inputs.values()}
    header = "\n           'Authorization': 'Bearer ' + os.environ['TOKEN']," if token else ""
    return f"""import json{", os" if token else ""}
import urllib.request
import numpy as np

{_arrays(model)}types = {inputs!r}
inputs = [{{"name": name, "datatype": types[name], "shape": array.shape,
           "parameters": {{"binary_data_size": array.nbytes}}}} for name, array in arrays.items()]
head = json.dumps({{"inputs": inputs, "parameters": {{"binary_data_output": True}}}}).encode()
body = head + b"".join(array.tobytes() for array in arrays.values())
headers = {{"Inference-Header-Content-Length": str(len(head)),{header}}}
url = "{address.url}/v2/models/{model.name}/infer"
with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
    size = int(reply.headers["Inference-Header-Content-Length"])
    answer, rest = json.loads(reply.read(size)), reply.read()
for output in answer["outputs"]:
    size = output["parameters"]["binary_data_size"]
    array = np.frombuffer(rest[:size], {types!r}[output["datatype"]])
    rest = rest[size:]
    print(output["name"], array.reshape(output["shape"]))
"""


def _triton(model: ServedModel, address: Address, token: bool, kind: str) -> str:
    name = "Authorization" if kind == "http" else "authorization"
    header = f", headers={{'{name}': 'Bearer ' + os.environ['TOKEN']}}" if token else ""
    secure = ", ssl=True" if address.scheme == "https" else ""
    place = address.host if kind == "http" else address.grpc
    types = {slot.spec.name: slot.datatype for slot in model.signature.inputs.values()}
    shown = "\n".join(
        f"print({name!r}, answer.as_numpy({name!r}))" for name in model.signature.outputs
    )
    imports = ["import os"] if token else []
    imports += ["import ml_dtypes"] if "BF16" in types.values() else []
    imports += ["import numpy as np", f"import tritonclient.{kind} as client"]
    lines = "\n".join(imports)
    return f"""{lines}

{_arrays(model)}types = {types!r}
inputs = []
for name, array in arrays.items():
    inputs.append(client.InferInput(name, list(array.shape), types[name]))
    inputs[-1].set_data_from_numpy(array)
with client.InferenceServerClient("{place}"{secure}) as server:
    answer = server.infer("{model.name}", inputs{header})
{shown}
"""


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>How to call these models</title>
<link rel="stylesheet" href="/page.css">
<link rel="icon" href="/icon.svg">
<header><h1>How to call these models</h1>
<nav aria-label="More"><a href="/">Now</a> <a href="/openapi.json">OpenAPI</a></nav></header>
<main>SECTIONS</main>
</html>
"""
