"""Write the page /docs: each model's inputs and outputs, and programs that call it.

The programs use the model's names, types and shapes. Every name is escaped. The page works without
scripts; docs.js adds tabs and copy buttons.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from deploykit.core.tensors import concrete
from deploykit.serving.models.model import ServedModel
from deploykit.serving.models.pipelines import ServedPipeline
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.tensors import BINARY_ONLY, LENGTH_BYTES, Slot

_MOST_VALUES = 16  # values of a request that are written as literals
_SAMPLES = {  # an example of each kind of input
    "image": "photo.jpg",
    "text": "a sentence",
    "json": '{"key": 1}',
    "bytes": "file.bin",
}
_FILES = ("image", "bytes")


@dataclass(frozen=True)
class Address:
    """The server's address; `host` includes the port, as in the header Host."""

    scheme: str
    host: str
    grpc_port: int | None
    token: bool

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}"

    @property
    def grpc(self) -> str:
        name = self.host if self.host.endswith("]") else self.host.rpartition(":")[0] or self.host
        return f"{name}:{self.grpc_port}"


def examples(model: ServedModel, address: Address) -> dict[str, str]:
    """Return the programs by title."""
    found = {
        **_of_task(model, address),
        "curl": _curl(model, address),
    }
    types = {slot.spec.name: slot.datatype for slot in model.signature.inputs.values()}
    what = model.name, _arrays(model), types, model.signature.outputs, address
    found["tritonclient (HTTP)"] = _triton(*what, "http")
    if address.grpc_port is not None:
        found["tritonclient (gRPC)"] = _triton(*what, "grpc")
    return {title: code for title, code in found.items() if code is not None}


def pipeline_examples(pipeline: ServedPipeline, address: Address) -> dict[str, str]:
    """Return the programs for a pipeline by title."""
    found = _of_items(pipeline.name, pipeline.takes, pipeline.input, address)
    if address.grpc_port is not None:
        item = _SAMPLES[pipeline.takes]
        value = f"open({item!r}, 'rb').read()" if pipeline.takes in _FILES else repr(item)
        arrays = f"arrays = {{\n    {pipeline.input!r}: np.array([{value}], object),\n}}\n"
        inputs, outputs = {pipeline.input: "BYTES"}, [pipeline.output]
        found["tritonclient (gRPC)"] = _triton(
            pipeline.name, arrays, inputs, outputs, address, "grpc"
        )
    return found


def _of_task(model: ServedModel, address: Address) -> dict[str, str]:
    """Return the programs for a model that takes images or sentences."""
    takes = model.task.parameters.get("takes")
    return {} if takes is None else _of_items(model.name, takes, takes, address)


def _of_items(name: str, takes: str, field: str, address: Address) -> dict[str, str]:
    """Return the programs for one kind of item. `takes`: see `_SAMPLES`; `field`: of a form."""
    item = _SAMPLES[takes]
    form = f"-F {field}=@{item}" if takes in _FILES else f"-F {field}={_shell_quote(item)}"
    header = ' \\\n  -H "Authorization: Bearer $TOKEN"' if address.token else ""
    token = ', token=os.environ["TOKEN"]' if address.token else ""
    lines = [
        *(["import os", ""] if token else []),
        "import deploykit as dk",
        "",
        f"with dk.client({address.url!r}{token}) as client:",
        f"    print(client.predict({item!r}, {name!r}))",
    ]
    return {
        f"curl, {takes}": f"curl {address.url}/v2/models/{name}/predict{header} {form}\n",
        f"Python, {takes}": "\n".join(lines) + "\n",
    }


def _url(model: ServedModel, address: Address) -> str:
    return f"{address.url}/v2/models/{model.name}/infer"


def _slots(model: ServedModel) -> list[tuple[Slot, list[int]]]:
    """Return each input with a valid shape: one row, the smallest buckets."""
    lengths = model.buckets.lengths if model.buckets is not None else {}
    sizes = {axis: min(found) for axis, found in lengths.items()}
    found = []
    for slot in model.signature.inputs.values():
        row = {str(slot.spec.shape[0]): 1} if model.max_batch else {}
        found.append((slot, list(concrete(slot.spec, {**sizes, **row}))))
    return found


def _has_json(*slots: Slot) -> bool:
    return not any(slot.datatype in BINARY_ONLY for slot in slots)


def _value(slot: Slot) -> Any:
    return {"BYTES": "text", "BOOL": True}.get(slot.datatype, 1)


def _describe(slot: Slot, shape: list[int]) -> dict[str, Any]:
    return {"name": slot.spec.name, "datatype": slot.datatype, "shape": shape}


def _shell_quote(text: str) -> str:
    """Return `text` as one word for a shell."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _curl(model: ServedModel, address: Address) -> str | None:
    """Return a program that sends a few values as JSON, or else zeros after a JSON header."""
    if not _has_json(*model.signature.outputs.values()):
        return None
    slots = _slots(model)
    sizes = [math.prod(shape) for _, shape in slots]
    header = ' \\\n  -H "Authorization: Bearer $TOKEN"' if address.token else ""
    url = _url(model, address)
    if sum(sizes) <= _MOST_VALUES and _has_json(*(slot for slot, _ in slots)):
        inputs = [
            {**_describe(slot, shape), "data": [_value(slot)] * size}
            for (slot, shape), size in zip(slots, sizes, strict=True)
        ]
        lines = ",\n".join(f"    {json.dumps(item)}" for item in inputs)
        body = f'{{\n  "inputs": [\n{lines}\n  ]\n}}'
        return f"curl {url}{header} \\\n  -d {_shell_quote(body)}\n"
    counts = [
        size * (slot.item_bytes or LENGTH_BYTES)
        for (slot, _), size in zip(slots, sizes, strict=True)
    ]
    inputs = [
        {**_describe(slot, shape), "parameters": {"binary_data_size": count}}
        for (slot, shape), count in zip(slots, counts, strict=True)
    ]
    lines = ",\n".join(f"  {json.dumps(item)}" for item in inputs)
    return (
        f'header={_shell_quote(f"""{{"inputs": [{chr(10)}{lines}{chr(10)}]}}""")}\n'
        "# zeros; send the values of your tensors, little-endian, in place of `head`\n"
        f'{{ printf %s "$header"; head -c {sum(counts)} /dev/zero; }} |\n'
        f"curl {url}{header} \\\n"
        '  -H "Inference-Header-Content-Length: ${#header}" \\\n  --data-binary @-\n'
    )


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


def _triton(
    name: str,
    arrays: str,
    types: dict[str, str],
    outputs: Iterable[str],
    address: Address,
    kind: str,
) -> str:
    title = "Authorization" if kind == "http" else "authorization"
    header = f", headers={{'{title}': 'Bearer ' + os.environ['TOKEN']}}" if address.token else ""
    shown = "\n".join(f"print({each!r}, answer.as_numpy({each!r}))" for each in outputs)
    imports = ["import os"] if address.token else []
    imports += ["import ml_dtypes"] if "BF16" in types.values() else []
    imports += ["import numpy as np", f"import tritonclient.{kind} as client"]
    secure = ", ssl=True" if address.scheme == "https" else ""
    place = address.host if kind == "http" else address.grpc
    return (
        "\n".join(imports)
        + f"""

{arrays}types = {types!r}
inputs = []
for name, array in arrays.items():
    inputs.append(client.InferInput(name, list(array.shape), types[name]))
    inputs[-1].set_data_from_numpy(array)
with client.InferenceServerClient("{place}"{secure}) as server:
    answer = server.infer("{name}", inputs{header})
{shown}
"""
    )


CONTENT_TYPE = "text/html; charset=utf-8"
_PAGE = Path(__file__).with_name("guide.html")


def page(repository: ModelRepository, address: Address) -> bytes:
    names = repository.served
    links = "".join(f'<a href="#{name}">{escape(name)}</a> ' for name in names)
    contents = f'<nav class="contents" aria-label="Models">{links}</nav>' if len(names) > 1 else ""
    sections = [_of_pipeline(each, address) for each in repository.pipelines.values()]
    sections += [_section(model, address) for model in repository.models.values()]
    return _PAGE.read_text("utf-8").replace("CONTENT", contents + "".join(sections)).encode()


def _section(model: ServedModel, address: Address) -> str:
    tensors = [("input", slot) for slot in model.signature.inputs.values()]
    tensors += [("output", slot) for slot in model.signature.outputs.values()]
    described = [
        (kind, slot.spec.name, slot.datatype, ", ".join(map(str, slot.spec.shape)))
        for kind, slot in tensors
    ]
    batch = f"up to {model.max_batch} rows per request"
    if not model.max_batch:
        batch = f"not batched: {model.not_batched}"
    summary = escape(f"{model.engines[0].runtime} on {model.device}, {batch}")
    if model.task.ready:
        summary += f"; task: {model.task.parameters['task']}"
    return _written(model.name, summary, _file(model), described, examples(model, address))


def _of_pipeline(pipeline: ServedPipeline, address: Address) -> str:
    about = pipeline.metadata()["parameters"]
    described = [
        ("input", pipeline.input, about["takes"], "1"),
        ("output", pipeline.output, about["gives"], "1"),
    ]
    summary = f"pipeline: {about['stages'].replace(', ', ' → ')}"
    programs = pipeline_examples(pipeline, address)
    return _written(pipeline.name, escape(summary), "", described, programs)


def _written(
    name: str,
    summary: str,
    more: str,
    tensors: Sequence[tuple[str, ...]],
    programs: Mapping[str, str],
) -> str:
    """Return one section. `summary`, `more`: HTML. `tensors`: kind, name, type, shape."""
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
    name = escape(name)
    return (
        f'<section id="{name}" aria-label="{name}"><h2>{name}</h2><p class="quiet">{summary}</p>'
        f'{more}<div class="wide"><table><thead><tr><th scope="col">Tensor</th>'
        '<th scope="col">Name</th><th scope="col">Type</th><th scope="col">Shape</th></tr></thead>'
        f'<tbody>{rows}</tbody></table></div><div class="examples">{blocks}</div></section>'
    )


def _file(model: ServedModel) -> str:
    facts, since = model.in_use.file, model.in_use.parameters
    if facts is None:
        return ""
    nodes = ", ".join(f"{count} {kind}" for kind, count in facts["precision"].items())
    precision = f" · {escape(nodes)} nodes" if nodes else ""
    return (
        f'<p class="quiet">{escape(facts["name"])}{precision} · SHA-256 <code class="hash">'
        f"{facts['sha256']}</code> · loaded {since['loaded']}, generation {since['generation']}</p>"
    )
