"""Every place that describes a model names the file that answers now, also after a reload."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from deploykit.core.errors import BadInput
from deploykit.core.files import sha256
from deploykit.engines.oip.protobuf import message_from
from deploykit.serving.models.reload import Reloader, Source
from deploykit.serving.options import ServeOptions
from deploykit.serving.serve import open_engines
from tests.support.serving.reloading import model, replace
from tests.support.serving.running import Running, running

OPTIONS = ServeOptions(device="cpu", threads=1)

PLACES: dict[str, Callable[[Running], str]] = {
    "metadata": lambda server: str(server.ask("GET", "/v2/models/m").json["parameters"]),
    "configuration": lambda server: str(server.ask("GET", "/v2/models/m/config").json),
    "gRPC configuration": lambda server: str(
        message_from("ModelConfigResponse", {"config": server.server.repository.find("m").config()})
    ),
    "status": lambda server: str(server.ask("GET", "/status").json["models"][0]),
    "docs": lambda server: server.ask("GET", "/docs").body.decode(),
    "metrics": lambda server: server.ask("GET", "/metrics").body.decode(),
}


def shown(server: Running) -> dict[str, set[str]]:
    """The hashes in each place."""
    return {name: set(re.findall("[0-9a-f]{64}", ask(server))) for name, ask in PLACES.items()}


def test_every_description_names_the_file_that_answers_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deploykit.serving.models.reload")
    path = model(tmp_path / "m.onnx", 1.0)
    first, source = sha256(path), Source(path, partial(open_engines, path, OPTIONS))
    with running({"m": source.load()}) as server:
        reloader = Reloader(server.server.repository, {"m": source}, poll_s=3600)
        path.write_bytes(b"not a model")  # before anybody looks: it never answers
        reloader.poll()
        reloader.poll()
        assert shown(server) == {place: {first} for place in PLACES}
        assert server.ask("GET", "/v2/models/m").json["parameters"]["generation"] == "1"
        replace(model(tmp_path / "new.onnx", 2.0), path)
        second = sha256(path)
        reloader.poll()
        reloader.poll()
        reloader.close()
        assert second != first
        assert shown(server) == {place: {second} for place in PLACES}
        about = server.ask("GET", "/v2/models/m").json["parameters"]
        assert (about["file"], about["generation"]) == ("m.onnx", "2")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", about["loaded"])
        assert 'deploykit_model_generation{model="m",version="1"} 2' in PLACES["metrics"](server)
    assert caplog.messages[-1].endswith(f"was replaced and is in use, SHA-256 {second}")


def test_a_file_name_that_is_not_utf_8_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xff.onnx")
    try:
        model(tmp_path / "m.onnx", 1.0).rename(path)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with pytest.raises(BadInput, match="the path is not UTF-8"):
        open_engines(path, OPTIONS)
