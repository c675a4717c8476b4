"""Headless Chromium, driven over its DevTools protocol with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NO_CHROMIUM = "no chromium on PATH"
WAIT_S = 60  # a limit against hanging, not a measure


class WebSocket:
    """RFC 6455 as far as DevTools needs it: text out, text in."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port), WAIT_S)
        self._stream = self._socket.makefile("rb")
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        self._socket.sendall(
            f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        status = self._stream.readline()
        assert b" 101 " in status, status
        while self._stream.readline().strip():
            pass

    def send(self, text: str) -> None:
        data, mask = text.encode(), secrets.token_bytes(4)
        if len(data) < 126:
            head = bytes([0x81, 0x80 | len(data)])
        elif len(data) < 1 << 16:
            head = bytes([0x81, 0xFE]) + len(data).to_bytes(2, "big")
        else:
            head = bytes([0x81, 0xFF]) + len(data).to_bytes(8, "big")
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self._socket.sendall(head + mask + masked)

    def receive(self) -> str:
        """The next text; Chromium masks nothing and pings never."""
        data = b""
        while True:
            first, second = self._stream.read(2)
            size = second & 0x7F
            if size > 125:
                size = int.from_bytes(self._stream.read(2 if size == 126 else 8), "big")
            data += self._stream.read(size)
            assert first & 0x0F in (0, 1), f"frame {first:#x}"
            if first & 0x80:
                return data.decode()

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


class Tab:
    """One page. `problems`: what its console and its CSP complained about; `requests`: URLs."""

    def __init__(self, url: str) -> None:
        self._socket = WebSocket(url)
        self._count = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.receive())
            if message.get("id") == self._count:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found
            self._note(message)

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
        limit = WAIT_S * 1000
        reached = self.ask(
            "new Promise((done) => { const began = performance.now(); const look = () => {"
            f" let met = false; try {{ met = Boolean({condition}); }} catch {{}}"
            f" if (met || performance.now() - began > {limit}) done(met);"
            " else setTimeout(look, 20); }; look(); })"
        )
        shown = self.ask("document.body.innerText")
        assert reached, f"{condition} never came true; problems: {self.problems}; page: {shown}"

    def text(self, selector: str) -> str:
        """What a reader sees of the first element of this selector."""
        return str(self.ask(f"document.querySelector({json.dumps(selector)}).innerText"))

    def key(self, name: str, *, shift: bool = False) -> None:
        """Press and release one key: Tab, Enter, ArrowDown, a space, a letter."""
        text = {"Enter": "\r"}.get(name, name if len(name) == 1 else "")
        code = {"Tab": 9, "Enter": 13, " ": 32, "Delete": 46}.get(name, 0)
        code = code or {f"Arrow{to}": 37 + i for i, to in enumerate(_ARROWS)}.get(name, 0)
        base: dict[str, Any] = {
            "key": name,
            "modifiers": 8 if shift else 0,
            "windowsVirtualKeyCode": code,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **base)
        self.call("Input.dispatchKeyEvent", type="keyUp", **base)

    def drag(self, points: list[tuple[float, float]]) -> None:
        """Press the left button at the first point, move through all, let go."""
        for kind, at in [
            ("mousePressed", points[0]),
            *(("mouseMoved", point) for point in points),
            ("mouseReleased", points[-1]),
        ]:
            self.call(
                "Input.dispatchMouseEvent",
                type=kind, x=at[0], y=at[1], button="left", buttons=1, clickCount=1,
            )  # fmt: skip

    def choose_file(self, selector: str, path: Path) -> None:
        """Give a file to the input of this selector, as a person choosing it would."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def look(self, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        """Set the colour scheme and the size of the window."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def close(self) -> None:
        self._socket.close()


_ARROWS = ("Left", "Up", "Right", "Down")


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """A browser with one empty tab; its profile lies in `folder`."""
    assert CHROMIUM is not None
    with subprocess.Popen(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # to end it with all its children
    ) as process:  # fmt: skip
        try:
            port = _port(folder / "DevToolsActivePort")
            with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=WAIT_S) as answer:
                pages = [each for each in json.load(answer) if each["type"] == "page"]
            tab = Tab(pages[0]["webSocketDebuggerUrl"])
            try:
                yield tab
            finally:
                tab.close()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _port(file: Path) -> int:
    pause = threading.Event()
    for _ in range(WAIT_S * 50):
        with suppress(FileNotFoundError, ValueError, IndexError):
            return int(file.read_text().splitlines()[0])
        pause.wait(0.02)
    raise AssertionError("chromium did not start")
