"""Headless Chromium, driven over its DevTools protocol, and what a person does on the page."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tests.support.serving.running import Running

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NO_CHROMIUM = "no chromium on PATH"
WAIT_S = 60  # a limit against hanging, not a measure


class Tab:
    """One page. `problems`: what its console and its CSP complained about; `requests`: URLs."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._out, self._in, self._unread = requests, answers, b""
        self._count = 0
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        (page,) = [each["targetId"] for each in targets if each["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            message = json.loads(self._receive())
            if message.get("id") == self._count:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found
            self._note(message)

    def _receive(self) -> bytes:
        while b"\0" not in self._unread:
            data = self._in.read(1 << 20)
            assert data, "chromium has ended"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"]))
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))

    def open(self, url: str) -> None:
        """Go there. That it has loaded is for `until` to tell."""
        self.call("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, promises waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait, in the page, until an expression is true."""
        reached = self.ask(
            "new Promise((done) => { const began = performance.now(); const look = () => {"
            f" let met = false; try {{ met = Boolean({condition}); }} catch {{}}"
            f" if (met || performance.now() - began > {WAIT_S * 1000}) done(met);"
            " else setTimeout(look, 20); }; look(); })"
        )
        shown = self.ask("document.body.innerText")
        assert reached, f"{condition} never came true; problems: {self.problems}; page: {shown}"

    def text(self, selector: str) -> str:
        """What a reader sees of the first element of this selector."""
        return str(self.ask(f"document.querySelector({json.dumps(selector)}).innerText"))

    def drag(self, points: list[tuple[float, float]]) -> None:
        """Press the left button at the first point, move through all, let go."""
        moves = [("mouseMoved", point) for point in points]
        for kind, (x, y) in [("mousePressed", points[0]), *moves, ("mouseReleased", points[-1])]:
            button = {"button": "left", "buttons": 1, "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def choose_file(self, selector: str, path: Path) -> None:
        """Give a file to the input of this selector, as a person choosing it would."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def look(self, *, width: int = 1280) -> None:
        """Set the width of the window."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """A browser with one empty tab; its profile lies in `folder`."""
    assert CHROMIUM is not None
    (theirs, requests), (answers, ours) = os.pipe(), os.pipe()  # its descriptors 3 and 4
    options = (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"),
    )
    with (
        os.fdopen(requests, "wb", buffering=0) as out,
        os.fdopen(answers, "rb", buffering=0) as into,
        subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{ours}', "bash", CHROMIUM, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs, ours),
            start_new_session=True,  # to end it with all its children
        ) as process,
    ):
        os.close(theirs)
        os.close(ours)
        try:
            yield Tab(out, into)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


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
