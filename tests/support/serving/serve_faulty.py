"""`deploykit serve` with a stand-in for the engine, whose faults its clients ask for.

Everything but the opening of the file is the real command: options, logs, signals, exit codes. The
engine answers y = 2x + 1; the first value of a row, if it is one of FAULTS, says what goes wrong.
No call returns while there is a file `hold` in the working folder; at its end it writes to `ran`
how many rows it answered whose first value is 100 or more, which a warm-up has not. It takes
FAULT_LATENCY_S for a call; FAULT_ROWS is its largest batch, FAULT_WIDTH its numbers in a row;
closing it takes FAULT_CLOSE_S, after it wrote `closing`. With FAULT_OPENS only so many workers can
open the model: they count themselves in the folder. SETTINGS are the server's own limits.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from deploykit.cli.main import main
from deploykit.core.errors import BadInput, DeviceLost, OutOfMemory
from deploykit.serving import processes, serve, server
from deploykit.serving.workers import front, parent, signals
from tests.support.fake_engine import FakeEngine

POISON, MEMORY, LOST, HANG, DTYPE, FEWER = FAULTS = (-1, -2, -3, -4, -5, -6)
HOLD = Path("hold")
SETTINGS = {
    "FAULT_CONNECT_S": (front, "CONNECT_S"),
    "FAULT_DELAY_S": (parent, "DELAY_S"),
    "FAULT_ECHO_S": (signals, "ECHO_S"),
    "FAULT_WATCH_S": (parent, "WATCH_S"),
    "FAULT_LINGER_S": (server, "LINGER_S"),
    "FAULT_MISSED": (parent, "MOST_MISSED"),
    "FAULT_SOON_S": (server, "SOON_S"),
}


def setting(name: str) -> float:
    return float(os.environ.get(name, "0"))


class Faulty(FakeEngine):
    """A FakeEngine with accidents."""

    lost = False
    ran = 0

    def close(self):
        Path("closing").touch()
        time.sleep(setting("FAULT_CLOSE_S"))
        Path("ran").write_text(str(self.ran))
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
        self.ran += int((feeds["x"][:, 0] >= 100).sum())
        if DTYPE in asked:
            y = y.astype(np.float64)
        return {"y": y[:-1] if FEWER in asked else y}


def open_engines(_file, options, _shared=None):
    """As the real one: engines of a file that was checked."""
    if "FAULT_OPENS" in os.environ:
        Path(f"opened.{os.getpid()}").touch()
        if len(list(Path().glob("opened.*"))) > setting("FAULT_OPENS"):
            raise BadInput("m.onnx: cannot be opened once more")
    if "FAULT_LOAD" in os.environ:
        raise OutOfMemory("cuda:0: out of memory: 9.0 GiB needed, 1.0 GiB free of 2.0 GiB")
    return [
        Faulty(
            width=int(setting("FAULT_WIDTH")) or 4,
            latency_s=setting("FAULT_LATENCY_S"),
            max_batch=int(setting("FAULT_ROWS")) or None,
        )
        for _ in range(options.instances)
    ]


if __name__ == "__main__":
    serve.check_readable = lambda file: file
    serve.open_engines = open_engines
    processes._why_shared = lambda *_: ""
    for name, (module, constant) in SETTINGS.items():
        if name in os.environ:
            setattr(module, constant, type(getattr(module, constant))(os.environ[name]))
    main()
