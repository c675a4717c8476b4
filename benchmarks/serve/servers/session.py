"""The same ONNX Runtime session for every server of the comparison.

python session.py MODEL THREADS FILE    only the session: runs it, makes FILE and stays
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

MAX_BATCH = 32


def open_session(model: str, threads: int) -> ort.InferenceSession:
    """A CPU session with `threads` threads that do not spin; input "x", output "y"."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def main() -> None:
    session = open_session(sys.argv[1], int(sys.argv[2]))
    shape = session.get_inputs()[0].shape[1:]
    for batch in (1, MAX_BATCH):
        session.run(["y"], {"x": np.zeros((batch, *shape), np.float32)})
    Path(sys.argv[3]).touch()
    signal.pause()


if __name__ == "__main__":
    main()
