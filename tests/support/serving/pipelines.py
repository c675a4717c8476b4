"""Servers with pipelines, and a client for their HTTP routes."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import deploykit as dk
from tests.support.onnx_zoo import linear, save
from tests.support.serving.faults import until

WAIT_S = 60  # against hanging


class Client:
    def __init__(self, url: str, grpc: str | None = None) -> None:
        self.place = urlsplit(url).netloc
        self.grpc = grpc or ""

    def ask(self, target: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """The status, and the body as JSON or as text."""
        connection = http.client.HTTPConnection(self.place, timeout=WAIT_S)
        method = "GET" if body is None else "POST"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, target, body, named)
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        text = data.decode()
        return reply.status, json.loads(text) if text[:1] in ("[", "{", '"') else text

    def predict(self, name: str, body: bytes, **headers: str) -> tuple[int, Any]:
        return self.ask(f"/v2/models/{name}/predict", body, **headers)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels."""
        _, text = self.ask("/metrics")
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if all(w in line for w in wanted)
        )

    def until(self, reached: Callable[[], Any]) -> None:
        until(reached)


@contextmanager
def served(*files: Path, **options: Any) -> Iterator[Client]:
    pipelines = {path.stem: path for path in files}
    with dk.serve(pipelines=pipelines, device="cpu", **{"grpc_port": None, **options}) as server:
        yield Client(server.url, server.grpc_url)


def form(name: str, data: bytes) -> tuple[bytes, str]:
    head = f'--XX\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n'
    body = head.encode() + b"Content-Type: image/png\r\n\r\n" + data + b"\r\n--XX--\r\n"
    return body, "multipart/form-data; boundary=XX"


STAGES = """
import threading
from deploykit import BadInput

IN_FLIGHT = {"slow": 2}
TIMEOUT_MS = {"brief": 60_000}
GATE = threading.Event()
DONE = []


def asked(text: str) -> list[str]:
    if text == "free":
        GATE.set()
    return text.split()


def slow(asked: list[str]) -> int:
    if "wait" in asked:
        GATE.wait(20)
    if "raise" in asked:
        raise ValueError("a secret of the server")
    if "refuse" in asked:
        raise BadInput("no such word")
    if "exit" in asked:
        exit(3)
    return "one" if "string" in asked else 1


def brief(asked: list[str], slow: int) -> int:
    if "hang" in asked:
        GATE.wait(20)
    return slow


def answer(brief: int, asked: list[str]) -> object:
    DONE.append(asked)
    if "open" in asked:
        GATE.set()
    if "late" in asked:
        threading.Event().wait(0.15)
    if "huge" in asked:
        return "x" * (8 << 20)
    if "bytes" in asked:
        return b"%PDF"
    if "set" in asked:
        return {1}
    if "long" in asked:
        return 1 << 70
    return {"done": asked}


"""
ECHO = """
import numpy as np
linear = {"model": "linear.onnx", "x": "row"}
def row(request: dict) -> np.ndarray: return np.array(request["row"], np.float32)
def answer(linear: np.ndarray, request: dict) -> dict: return {"y": linear, "id": request["id"]}
"""


def write_words(folder: Path, brief_ms: int = 60_000) -> tuple[Path, Path]:
    """A pipeline of functions, and one with a model. `brief_ms`: the limit of the stage `brief`."""
    words, echo = folder / "words.py", folder / "echo.py"
    words.write_text(STAGES.replace("60_000", str(brief_ms)))
    echo.write_text(ECHO)
    save(linear(), folder / "linear.onnx")
    return words, echo


@contextmanager
def serving_words(folder: Path, brief_ms: int = 60_000, **options: Any) -> Iterator[Client]:
    with served(*write_words(folder, brief_ms), **{"timeout_ms": 60_000, **options}) as client:
        yield client
        client.predict("words", b"free")  # no thread stays


def outcomes(client: Client, stage: str, outcome: str) -> float:
    """Of a stage of `words`."""
    name = "deploykit_pipeline_stage_requests_total"
    return client.metric(name, pipeline="words", stage=stage, outcome=outcome)
