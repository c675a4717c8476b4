"""A served ONNX file that tests replace while two threads call it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import DeploykitError
from deploykit.engines.engine import Engine, load
from deploykit.serving.batching.queue import Pending
from deploykit.serving.models.reload import Reloader, Source
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.request import Request
from deploykit.serving.options import ServeOptions

LIMIT_S = 60  # against hanging, not a measure
FEEDS = {"x": np.ones((1, 4), np.float32)}
KEY = (("x", "FP32", (4,)),)


def model(path: Path, value: float, *, width: int = 4, external: bool = False) -> Path:
    """Write y = x + value; with `external` the value is in a separate file."""
    weights = numpy_helper.from_array(np.full((1, width), value, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", width])],
        [weights],
    )
    found = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(found, path, save_as_external_data=external, location="w.bin", size_threshold=0)
    return path


def replace(new: Path, path: Path) -> None:
    """Rename over the old file, as `build` does."""
    new.replace(path)


class Serving:
    """A ModelRepository of one ONNX file, called all the time by two threads, and its Reloader."""

    def __init__(self, path: Path, *, limit_s: float = LIMIT_S) -> None:
        self.path = path
        self.loaded: list[Engine] = []
        self.source = Source(path, self.load)
        first = load(path, "cpu", threads=1)
        self.repository = ModelRepository({"m": first}, ServeOptions())
        self.repository.warm_up()
        self.reloader = Reloader(self.repository, {"m": self.source}, poll_s=3600, limit_s=limit_s)
        self._ended = threading.Event()
        self.failures: list[DeploykitError] = []
        self.seen: set[float] = set()
        self._threads = [threading.Thread(target=self._send_requests) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def load(self) -> list[Engine]:
        self.loaded.append(load(self.path, "cpu", threads=1))
        return self.loaded[-1:]

    def ask(self) -> float | DeploykitError:
        answered = threading.Event()
        found: list[Pending] = []

        def done(pending: Pending) -> None:
            found.append(pending)
            answered.set()

        request = Request(FEEDS, 1, KEY, ())
        self.repository.find("m").submit(request, done)
        assert answered.wait(LIMIT_S)
        return found[0].error or float(found[0].outputs["y"][0, 0])

    def _send_requests(self) -> None:
        while not self._ended.is_set():
            answer = self.ask()
            if isinstance(answer, DeploykitError):
                self.failures.append(answer)
            else:
                self.seen.add(answer)

    def renew(self, value: float) -> float | DeploykitError:
        """Replace the file by one with `value`, reload, and ask."""
        replace(model(self.path.with_name("new"), value), self.path)
        self.poll_twice()
        return self.ask()

    def poll_twice(self) -> None:
        """A file is loaded when it is unchanged between two polls."""
        self.reloader.poll()
        self.reloader.poll()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self.reloader.close()
        self.repository.close()
