"""A server for test_shutdown.py: one FakeEngine, held in each call until a file appears.

Its second argument, if any, is for how long a SIGTERM counts as one with the next. Prints the port
when ready, and the number of dropped requests at the end.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from deploykit.serving import server
from deploykit.serving.options import ServeOptions
from deploykit.serving.workers import signals
from tests.support.fake_engine import FakeEngine


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Held(FakeEngine):
    """Says `busy` when it is called after the warm-up, then waits for the file."""

    warm = False

    def __call__(self, feeds):
        if self.warm:
            say("busy")
            while not Path(sys.argv[1]).exists():
                time.sleep(0.001)
        return super().__call__(feeds)


def ready(_host: str, port: int, _grpc_port: int | None) -> None:
    engine.warm = True
    say(port)


server.LINGER_S, server.SOON_S = 1.0, 60.0  # the tests' machine may stand still for long
signals.ECHO_S = float(sys.argv[2]) if len(sys.argv) > 2 else signals.ECHO_S
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever started the tests
engine = Held()
try:
    options = ServeOptions(http_port=0, max_batch=1)
    dropped = server.run(server.Server({"m": engine}, options), ready)
except KeyboardInterrupt:
    sys.exit(130)
say("dropped", dropped)
