"""Write the page /docs: each model's inputs and outputs, and programs that call it.

Every name is escaped. The page works without scripts; docs.js adds tabs and copy buttons.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from deploykit.serving.models.repository import ModelRepository, ServedModel
from deploykit.serving.web.examples import Address, examples

__all__ = ["CONTENT_TYPE", "Address", "page"]

CONTENT_TYPE = "text/html; charset=utf-8"
_PAGE = Path(__file__).with_name("guide.html")


def page(repository: ModelRepository, address: Address) -> bytes:
    models = repository.models.values()
    links = "".join(f'<a href="#{m.name}">{escape(m.name)}</a> ' for m in models)
    contents = f'<nav class="contents" aria-label="Models">{links}</nav>' if len(models) > 1 else ""
    sections = [_section(model, address) for model in models]
    return _PAGE.read_text("utf-8").replace("CONTENT", contents + "".join(sections)).encode()


def _section(model: ServedModel, address: Address) -> str:
    tensors = [("input", slot) for slot in model.signature.inputs.values()]
    tensors += [("output", slot) for slot in model.signature.outputs.values()]
    rows = "".join(
        f'<tr><td>{kind}</td><th scope="row">{escape(slot.spec.name)}</th><td>{slot.datatype}</td>'
        f"<td>[{escape(', '.join(map(str, slot.spec.shape)))}]</td></tr>"
        for kind, slot in tensors
    )
    batch = f"up to {model.max_batch} rows per request"
    if not model.max_batch:
        batch = f"not batched: {model.not_batched}"
    summary = escape(f"{model.engines[0].runtime} on {model.device}, {batch}")
    blocks = "".join(
        f'<div class="example"><h3>{title}</h3><pre tabindex="0"><code>{escape(code)}</code></pre>'
        "</div>"
        for title, code in examples(model, address).items()
    )
    name = escape(model.name)
    if model.task.ready:
        summary += f"; task: {model.task.parameters['task']}"
    return (
        f'<section id="{name}" aria-label="{name}"><h2>{name}</h2><p class="quiet">{summary}</p>'
        f'{_file(model)}<div class="wide"><table><thead><tr><th scope="col">Tensor</th>'
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
