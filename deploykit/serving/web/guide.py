"""Write the page /docs: each model's inputs and outputs, and programs that call it.

Every name is escaped. The page works without scripts; docs.js adds tabs and copy buttons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from deploykit.serving.models.repository import ModelRepository, ServedModel, ServedPipeline
from deploykit.serving.web.examples import Address, examples, pipeline_examples

__all__ = ["CONTENT_TYPE", "Address", "page"]

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
    """One section. `summary`, `more`: HTML. `tensors`: kind, name, type, shape."""
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
