"""The dashboard's files by path and its figures, and the page /docs with programs for each model.

The files are read once and load nothing from other sites. The programs use the model's names, types
and shapes; every name is escaped. /docs works without scripts: docs.js adds tabs and copy buttons.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from deploykit import __version__
from deploykit.core.files import LOOK
from deploykit.core.tensors import concrete
from deploykit.serving.models.model import ServedModel
from deploykit.serving.models.pipelines import ServedPipeline
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.observe.metrics import REQUEST_US
from deploykit.serving.oip.request import BINARY_ONLY, Slot

HTML = "text/html; charset=utf-8"
_TYPES: Mapping[str, str] = {
    ".html": HTML,
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


def status(repository: ModelRepository) -> dict[str, Any]:
    """Return the dashboard's figures of this process, in about 20 µs per model, without waiting.

    Totals since the start, times in µs: two responses give the rates between them.
    """
    sample = repository.sampler.latest()
    process = {**sample.process, "at_s": sample.at_s} if sample and sample.process else None
    return {
        "version": __version__,
        "at_us": time.monotonic_ns() // 1000,
        "at_s": time.time(),
        "not_ready": repository.why_not_ready(),
        "process": process,
        "gpus": [gpu.to_dict() for gpu in sample.gpus] if sample else [],
        "buckets_us": REQUEST_US,
        "models": [
            {
                **(_model_status(each) if isinstance(each, ServedModel) else each.status()),
                "not_ready": repository.why_not_ready(each),
            }
            for each in repository.served.values()
        ],
    }


def _model_status(model: ServedModel) -> dict[str, Any]:
    metadata, policy = model.metadata(), model.batcher.policy
    return {
        "name": model.name,
        "platform": metadata["platform"],
        "device": model.engines[0].device,
        "runtime": model.engines[0].runtime,
        "engines": model.batcher.engines,
        "max_batch": model.max_batch,
        "batch_limit": policy.max_batch,
        "delay_us": policy.max_delay_us,
        "queue": policy.queue,
        "notes": list(model.notes),
        "task": model.task.facts,
        **model.in_use._asdict(),
        "inputs": metadata["inputs"],
        "outputs": metadata["outputs"],
        "waiting": model.batcher.take_most_waiting(),  # when it is asked, few may wait
        "in_flight": model.unanswered,
        **model.metrics.status(),
    }


_GUIDE = Path(__file__).with_name("guide.html")
_MOST_VALUES = 64  # values of a request that are written out for curl
_SAMPLES = {"image": "photo.jpg", "text": "a sentence", "json": '{"key": 1}', "bytes": "file.bin"}
_FILES = ("image", "bytes")
_VALUES: Mapping[str, tuple[object, str]] = {  # of a datatype: an element in JSON, an array
    "BYTES": ("text", "np.full({}, 'text', object)"),
    "BOOL": (True, "np.ones({}, np.bool_)"),
    "BF16": (1, "np.ones({}, ml_dtypes.bfloat16)"),
}


@dataclass(frozen=True)
class Address:
    """The server's address; `host` includes the port, as in the header Host."""

    scheme: str
    host: str
    grpc_port: int | None
    token: bool
    root_path: str = ""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}{self.root_path}"

    def curl(self, model: str, verb: str) -> str:
        header = ' \\\n  -H "Authorization: Bearer $TOKEN"' if self.token else ""
        return f"curl {self.url}/v2/models/{model}/{verb}{header}"


def guide(repository: ModelRepository, address: Address) -> bytes:
    names = repository.served
    links = "".join(f'<a href="#{name}">{escape(name)}</a> ' for name in names)
    contents = f'<nav class="contents" aria-label="Models">{links}</nav>' if len(names) > 1 else ""
    sections = [_of_pipeline(each, address) for each in repository.pipelines.values()]
    sections += [_of_model(model, address) for model in repository.models.values()]
    return _GUIDE.read_text("utf-8").replace("CONTENT", contents + "".join(sections)).encode()


def _of_model(model: ServedModel, address: Address) -> str:
    batch = f"up to {model.max_batch} rows per request"
    if not model.max_batch:
        batch = f"not batched: {model.not_batched}"
    summary = f"{model.engines[0].runtime} on {model.device}, {batch}"
    programs, takes = dict[str, str](), model.task.parameters.get("takes")
    if model.task.ready:
        summary += f"; task: {model.task.parameters['task']}"
    if takes is not None:
        programs = _of_items(model.name, takes, takes, address)
    inputs, outputs = model.signature.inputs.values(), model.signature.outputs.values()
    lengths = model.buckets.lengths if model.buckets is not None else {}
    sizes = {axis: min(found) for axis, found in lengths.items()}
    shapes = []  # one row, the smallest buckets
    for slot in inputs:
        row = {str(slot.spec.shape[0]): 1} if model.max_batch else {}
        shapes.append((slot, list(concrete(slot.spec, {**sizes, **row}))))
    programs |= _of_tensors(model, shapes, address)
    tensors = [
        (kind, slot.spec.name, slot.datatype, ", ".join(map(str, slot.spec.shape)))
        for kind, slots in (("input", inputs), ("output", outputs))
        for slot in slots
    ]
    return _section(model.name, summary, tensors, programs)


def _of_pipeline(pipeline: ServedPipeline, address: Address) -> str:
    about = pipeline.metadata()["parameters"]
    tensors = [
        ("input", pipeline.input, about["takes"], "1"),
        ("output", pipeline.output, about["gives"], "1"),
    ]
    programs = _of_items(pipeline.name, pipeline.takes, pipeline.input, address)
    summary = f"pipeline: {about['stages'].replace(', ', ' → ')}"
    return _section(pipeline.name, summary, tensors, programs)


def _section(
    name: str,
    summary: str,
    tensors: Iterable[tuple[str, str, str, str]],
    programs: Mapping[str, str],
) -> str:
    """Return one section. `tensors`: kind, name, type, shape."""
    rows = "".join(
        f'<tr><td>{kind}</td><th scope="row">{escape(each)}</th><td>{escape(datatype)}</td>'
        f"<td>[{escape(shape)}]</td></tr>"
        for kind, each, datatype, shape in tensors
    )
    blocks = "".join(
        f'<div class="example"><h3>{title}</h3><pre tabindex="0"><code>{escape(code)}</code></pre>'
        "</div>"
        for title, code in programs.items()
    )
    return (
        f'<section id="{name}" aria-label="{name}"><h2>{name}</h2>'
        f'<p class="quiet">{escape(summary)}</p>'
        '<div class="wide"><table><thead><tr><th scope="col">Tensor</th>'
        '<th scope="col">Name</th><th scope="col">Type</th><th scope="col">Shape</th></tr></thead>'
        f'<tbody>{rows}</tbody></table></div><div class="examples">{blocks}</div></section>'
    )


def _of_items(name: str, takes: str, field: str, address: Address) -> dict[str, str]:
    """Return the programs for one kind of item. `takes`: see `_SAMPLES`; `field`: of a form."""
    item = _SAMPLES[takes]
    form = f"{field}=@{item}" if takes in _FILES else f"{field}={shlex.quote(item)}"
    token = ', token=os.environ["TOKEN"]' if address.token else ""
    return {
        f"curl, {takes}": f"{address.curl(name, 'predict')} -F {form}\n",
        f"Python, {takes}": ("import os\n\n" if token else "")
        + f"import deploykit as dk\n\nwith dk.client({address.url!r}{token}) as client:\n"
        f"    print(client.predict({item!r}, {name!r}))\n",
    }


def _of_tensors(
    model: ServedModel, inputs: list[tuple[Slot, list[int]]], address: Address
) -> dict[str, str]:
    """Return the programs that send tensors of these shapes; curl only where they are small."""
    name, arrays, tensors = model.name, "", list[str]()
    outputs = model.signature.outputs
    small = sum(math.prod(shape) for _, shape in inputs) <= _MOST_VALUES
    for slot, shape in inputs:
        value, array = _VALUES.get(slot.datatype, (1, f"np.ones({{}}, np.{slot.dtype.name})"))
        arrays += f"    ({slot.spec.name!r}, {slot.datatype!r}, {array.format(shape)}),\n"
        data = [value] * (math.prod(shape) * small)
        tensor = {"name": slot.spec.name, "datatype": slot.datatype, "shape": shape, "data": data}
        tensors.append(f"    {json.dumps(tensor)}")
    programs = {}
    types = {slot.datatype for slot in (*model.signature.inputs.values(), *outputs.values())}
    if small and types.isdisjoint(BINARY_ONLY):
        body = shlex.quote('{\n  "inputs": [\n' + ",\n".join(tensors) + "\n  ]\n}")
        programs["curl"] = f"{address.curl(name, 'infer')} \\\n  -d {body}\n"
    host = address.host
    host = host if host.endswith("]") else host.rpartition(":")[0] or host  # without the port
    grpc = f"# over gRPC: tritonclient.grpc and {host}:{address.grpc_port}\n"
    shown = "".join(f"print({each!r}, answer.as_numpy({each!r}))\n" for each in outputs)
    imports = "import os\n" * address.token + "import ml_dtypes\n" * ("ml_dtypes." in arrays)
    secure = ", ssl=True" if address.scheme == "https" else ""
    headers = ", headers={'authorization': 'Bearer ' + os.environ['TOKEN']}" * address.token
    programs["tritonclient"] = f"""{imports}import numpy as np
import tritonclient.http as client

inputs = []
for name, datatype, array in [
{arrays}]:
    inputs.append(client.InferInput(name, list(array.shape), datatype))
    inputs[-1].set_data_from_numpy(array)
{grpc * (address.grpc_port is not None)}\
with client.InferenceServerClient("{address.host}{address.root_path}"{secure}) as server:
    answer = server.infer("{name}", inputs{headers})
{shown}"""
    return programs
