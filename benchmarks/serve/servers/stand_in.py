"""Our server with an engine of no cost, so that the server's own work is all that is measured.

python stand_in.py PORT WORKERS
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent.parent))

from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Engine
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server, run
from deploykit.serving.workers.group import Member
from deploykit.serving.workers.parent import Parent

_ZEROS = np.zeros((1024, 10), np.float32)


class Free(Engine):
    """Takes what the small CNN takes, gives zeros."""

    device = "cpu"
    runtime = "none"
    steady = True
    max_batch = None
    batching = RowIndependence(True, "by construction", (1 << 20,))
    inputs = (TensorSpec("x", "float32", ("N", 1, 28, 28)),)
    outputs = (TensorSpec("y", "float32", ("N", 10)),)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": _ZEROS[: len(feeds["x"])]}

    def close(self) -> None:
        pass


port, workers = (int(word) for word in sys.argv[1:3])
options = ServeOptions(http_port=port)


def serve(member: Member) -> int:
    return Server({"m": Free()}, options, group=member).run(lambda *_: None)


if workers == 1:
    run(Server({"m": Free()}, options), lambda *_: None)
else:
    Parent(workers, serve, options, lambda _: nullcontext()).run(lambda *_: None)
