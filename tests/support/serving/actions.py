"""What a person does on the dashboard in a browser, and reads there."""

from __future__ import annotations

from tests.support.serving.browser import Tab
from tests.support.serving.running import Running


def open_page(tab: Tab, server: Running) -> Tab:
    tab.open("about:blank")  # the page before it may still ask a server that has ended
    tab.problems.clear()
    tab.requests.clear()
    tab.look()
    tab.open(f"http://127.0.0.1:{server.port}/")
    tab.until(f"location.port === '{server.port}' && document.querySelector('#tiles dd')")
    return tab


def choose_model(tab: Tab, name: str) -> None:
    tab.ask(f"[...document.querySelectorAll('#models-rows button')].find("
            f"(b) => b.textContent === '{name}').click()")  # fmt: skip
    assert tab.text("#try-title") == f"Try {name}"


def choose_way(tab: Tab, name: str) -> None:
    tab.ask(f"document.querySelector('#kinds input[value=\"{name}\"]').click()")


def run(tab: Tab) -> str:
    """Press Run and return the visible answer."""
    tab.ask("document.querySelector('#answer').replaceChildren()")
    tab.ask("document.querySelector('#run').click()")
    tab.until(
        "document.querySelector('#answer').innerText && !document.querySelector('#run').disabled"
    )
    tab.ask("document.querySelectorAll('#answer details').forEach((each) => { each.open = true; })")
    return tab.text("#answer")


def values(tab: Tab, output: int = 0) -> list[float]:
    """The values of one output."""
    text = tab.ask(f"document.querySelectorAll('#answer .values')[{output}].textContent")
    return [float(word) for word in text.split()]


def box(tab: Tab, selector: str) -> dict[str, float]:
    tab.ask(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
    found: dict[str, float] = tab.ask(
        f"(({{left, top, width, height}}) => ({{left, top, width, height}}))("
        f"document.querySelector('{selector}').getBoundingClientRect())"
    )
    return found
