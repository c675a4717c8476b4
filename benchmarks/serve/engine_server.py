"""A server whose engine has a known capacity: it takes a set time for each batch, on no core.

python engine_server.py PORT MAX_BATCH LATENCY_MS QUEUE
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server, run
from tests.support.fake_engine import FakeEngine

port, max_batch, latency_ms, queue = (int(word) for word in sys.argv[1:5])
options = ServeOptions(http_port=port, max_batch=max_batch, queue=queue)
engine = FakeEngine(width=64, latency_s=latency_ms / 1e3)
run(Server({"m": engine}, options), lambda *_: None)
