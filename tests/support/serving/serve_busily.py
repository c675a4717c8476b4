"""A server for test_shutdown_load.py: HTTP and gRPC, 5 ms a batch of up to 8.

Prints both ports when ready; at the end how many requests were dropped, and how many accepted.
"""

from __future__ import annotations

import sys
import time

from deploykit.serving.batching.batcher import Batcher
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server, run
from tests.support.fake_engine import FakeEngine


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Busy(FakeEngine):
    def __call__(self, feeds):
        time.sleep(0.005)
        return super().__call__(feeds)


accepted = 0
submit = Batcher.submit


def counted(self, request):
    global accepted
    submit(self, request)
    accepted += 1


Batcher.submit = counted
dropped = run(
    Server({"m": Busy()}, ServeOptions(http_port=0, grpc_port=0, max_batch=8)),
    lambda _host, http_port, grpc_port: say(http_port, grpc_port),
)
say("dropped", dropped, "accepted", accepted)
