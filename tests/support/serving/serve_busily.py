"""A server for test_shutdown_load.py: HTTP and gRPC, 5 ms a batch of up to 8.

Prints both ports when ready, and the number of dropped requests at the end.
"""

from __future__ import annotations

import sys
import time

from deploykit.serving.server import ServeOptions, run
from tests.support.fake_engine import FakeEngine


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Busy(FakeEngine):
    def __call__(self, feeds):
        time.sleep(0.005)
        return super().__call__(feeds)


dropped = run(
    {"m": Busy()},
    ServeOptions(http_port=0, grpc_port=0, max_batch=8),
    lambda _host, http_port, grpc_port: say(http_port, grpc_port),
)
say("dropped", dropped)
