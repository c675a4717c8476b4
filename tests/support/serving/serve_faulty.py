"""`deploykit serve` with a stand-in for the engine, whose faults its clients ask for.

Everything but the opening of the file is the real command: options, logs, signals, exit codes. The
engine answers y = 2x + 1; the first value of a row, if it is one of FAULTS, says what goes wrong.
No call returns while there is a file `hold` in the working folder.
It takes FAULT_LATENCY_S, and FAULT_PER_ROW_S more for each row; FAULT_ROWS is its largest batch,
FAULT_WIDTH its numbers in a row; closing it takes FAULT_CLOSE_S. With
FAULT_OPENS only so many workers can open the model: they count themselves in the folder. Workers
that die are replaced FAULT_DELAY_S later, and killed after FAULT_MISSED reports that they miss.
FAULT_ECHO_S is for how long a SIGTERM counts as one with the next. FAULT_SHARE_BYTES is what a
worker and the process of the engines share above the largest body; one that is not connected asks
again after FAULT_CONNECT_S.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from deploykit.cli.main import script
from deploykit.core.errors import BadInput, OutOfMemory
from deploykit.engines.cuda.errors import DeviceLost
from deploykit.serving import processes as serve_processes
from deploykit.serving import serve
from deploykit.serving.workers import group, parent, signals
from deploykit.serving.workers import parent as hub
from tests.support.fake_engine import FakeEngine

POISON, MEMORY, LOST, HANG, SHAPE, DTYPE, FEWER = FAULTS = (-1, -2, -3, -4, -5, -6, -7)
HOLD = Path("hold")
WIDTH = int(os.environ.get("FAULT_WIDTH", "4"))


class Faulty(FakeEngine):
    """A FakeEngine with accidents."""

    lost = False

    def close(self):
        time.sleep(float(os.environ.get("FAULT_CLOSE_S", "0")))
        super().close()

    def __call__(self, feeds):
        asked = {int(value) for value in feeds["x"][:, 0]} & set(FAULTS)
        if POISON in asked:
            raise RuntimeError("/host/path/engine.cc:42: 0xdeadbeef: a row it cannot bear")
        if MEMORY in asked:
            raise OutOfMemory("cuda:0: out of memory: 9.0 MiB needed, 1.0 MiB free of 2.0 MiB")
        if LOST in asked or self.lost:
            self.lost = True
            raise DeviceLost("cuda:0: the GPU is lost to this process")
        while HANG in asked:
            time.sleep(3600)
        while HOLD.exists():
            time.sleep(0.001)
        y = super().__call__(feeds)["y"]
        if SHAPE in asked:
            y = np.repeat(y, 2, axis=1)
        if DTYPE in asked:
            y = y.astype(np.float64)
        return {"y": y[:-1] if FEWER in asked else y}


def open_proven(_file, *_, instances=1, **_more):
    """As the real one: engines of a file that was checked."""
    if "FAULT_OPENS" in os.environ:
        Path(f"opened.{os.getpid()}").touch()
        if len(list(Path().glob("opened.*"))) > int(os.environ["FAULT_OPENS"]):
            raise BadInput("m.onnx: cannot be opened once more")
    if "FAULT_LOAD" in os.environ:
        raise OutOfMemory("cuda:0: out of memory: 9.0 GiB needed, 1.0 GiB free of 2.0 GiB")
    return [
        Faulty(
            width=WIDTH,
            latency_s=float(os.environ.get("FAULT_LATENCY_S", "0")),
            per_row_s=float(os.environ.get("FAULT_PER_ROW_S", "0")),
            max_batch=int(os.environ.get("FAULT_ROWS", "0")) or None,
        )
        for _ in range(instances)
    ]


if __name__ == "__main__":
    serve.check_readable = lambda file: file
    serve_processes._why_shared = lambda *_: ""
    hub.MOST_MISSED = int(os.environ.get("FAULT_MISSED", hub.MOST_MISSED))
    hub.EVERY_US = int(os.environ.get("FAULT_EVERY_US", hub.EVERY_US))
    parent.SHARE_BYTES = int(os.environ.get("FAULT_SHARE_BYTES", parent.SHARE_BYTES))
    signals.ECHO_S = float(os.environ.get("FAULT_ECHO_S", signals.ECHO_S))
    group.CONNECT_S = float(os.environ.get("FAULT_CONNECT_S", group.CONNECT_S))
    parent.DELAY_S = float(os.environ.get("FAULT_DELAY_S", parent.DELAY_S))
    serve.open_engines = lambda file, options, _: open_proven(file, instances=options.instances)
    script()
