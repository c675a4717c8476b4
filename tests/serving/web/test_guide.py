"""The page at /docs: its examples are run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest

from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.fake import FakeEngine
from tests.support.serving.running import Running, running

pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
TOKEN = "a token of some length"


class Echo(FakeEngine):
    """Gives its inputs back, under their names with an underscore."""

    def __init__(self, *specs: TensorSpec) -> None:
        super().__init__()
        self.inputs = specs
        self.outputs = tuple(TensorSpec(f"{s.name}_", s.dtype, s.shape) for s in specs)

    def __call__(self, feeds):
        return {f"{name}_": np.array(array) for name, array in feeds.items()}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, _: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)


def examples(server: Running, **headers: str) -> dict[str, str]:
    """The code of each example by its title."""
    reply = server.ask("GET", "/docs", Host=f"127.0.0.1:{server.port}", **headers)
    assert reply.status == 200
    blocks = re.findall(r"<h3>(.*?)</h3><pre><code>(.*?)</code></pre>", reply.body.decode(), re.S)
    return {title: unescape(code) for title, code in blocks}


def execute(title: str, code: str) -> str:
    command = ["bash", "-c", code] if title == "curl" else [sys.executable, "-c", code]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "TOKEN": TOKEN}
    )
    assert answer.returncode == 0, f"{title}:\n{code}\n{answer.stderr}"
    return answer.stdout


PICTURE = [
    TensorSpec("it's a <picture>", "uint8", ("N", 3, 5, 5)),
    TensorSpec("on", "bool", ("N",)),
]
TEXT = [TensorSpec("t", "string", ("N", 2)), TensorSpec("x", "float32", ("N", 2))]
HALF = [TensorSpec("h", "float16", ("N", 2)), TensorSpec("b", "bfloat16", ("N", 2))]


@pytest.mark.parametrize(
    ("specs", "titles"),
    [
        (PICTURE, ["curl", "Python", "over HTTP", "over gRPC"]),
        (TEXT, ["curl", "over HTTP", "over gRPC"]),
        (HALF, ["over HTTP", "over gRPC"]),
    ],
    ids=["picture", "text", "half"],
)
def test_every_example_runs_as_it_stands(specs: list[TensorSpec], titles: list[str]) -> None:
    with running({"m": Echo(*specs)}, token=TOKEN, grpc_port=0) as server:
        found = examples(server, Authorization=f"Bearer {TOKEN}")
        assert [title.rpartition("client ")[2] for title in found] == titles
        for title, code in found.items():
            shown = execute(title, code)
            assert all(f"{spec.name}_" in shown for spec in specs), shown
            assert "text" in shown or "1" in shown


def test_a_short_request_is_shown_with_its_numbers() -> None:
    with running() as server:
        found = examples(server)
        assert list(found) == ["curl", "Python", "Python, tritonclient over HTTP"]
        assert '"shape": [1, 4], "data": [1, 1, 1, 1]' in found["curl"]
        assert '"data":[3.0,3.0,3.0,3.0]' in execute("curl", found["curl"])


def test_a_name_is_text_and_the_page_has_no_script() -> None:
    """W3."""
    evil = TensorSpec("<img src=x onerror=alert(1)>", "float32", ("N", 4))
    with running({"m": Echo(evil)}) as server:
        reply = server.ask("GET", "/docs")
        tags = Tags()
        tags.feed(reply.body.decode())
        assert not {"img", "script", "iframe"} & set(tags.found)
        assert b"&lt;img src=x onerror=alert(1)&gt;" in reply.body
        assert reply.headers["content-security-policy"].startswith("default-src 'self'")
        assert reply.headers["x-content-type-options"] == "nosniff"
