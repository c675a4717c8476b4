"""Requests per second of a Ray bundle with 1, 2 and 4 replicas, on a cluster of one machine.

    python -m benchmarks.ray_replicas [--seconds N]      (needs: pip install 'ray[serve]' psutil)

Out, as Markdown: a row for each number of replicas. `compute`: a model that keeps one core busy for
0.1 s per request, so that the machine's cores are the limit. `wait`: an engine that waits 0.4 s per
batch of up to 4 rows and leaves the cores alone, as one on a GPU does. The client is closed-loop,
32 connections, and shares the machine with Ray's proxy, front and replicas.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path

from deploykit.loadtest.load import load_test
from tests.support.bundling.cluster import slow_bundle, two_nodes

REPLICAS = (1, 2, 4)
CONNECTIONS = 32
WAITING = """
from deploykit.deploying.ray_app import ray_application


def replica():
    from deploykit.serving.hosted import HostedApp
    from deploykit.serving.options import ServeOptions
    from tests.support.fake_engine import FakeEngine

    engines = [FakeEngine(latency_s=0.4, max_batch=4)]
    return HostedApp({"slow": engines}, ServeOptions(max_batch=4))


app = ray_application(replica)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    seconds = parser.parse_args().seconds
    print("| engine | replicas | requests/s (95 %) | of one | p50 ms | not ok | load average |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for kind in ("wait", "compute"):
        first = 0.0
        for replicas in REPLICAS:
            with tempfile.TemporaryDirectory() as folder:
                bundle = slow_bundle(Path(folder))
                if kind == "wait":
                    (bundle / "app.py").write_text(WAITING, encoding="utf-8")
                first = measure(kind, bundle, replicas, seconds, first)
    return 0


def measure(kind: str, bundle: Path, replicas: int, seconds: float, first: float) -> float:
    """Print one row; returns the requests per second of one replica."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    with two_nodes(cpus=4) as nodes:
        nodes.serve(bundle, port, fronts=2, replicas=replicas, cpus=1)
        url = f"http://127.0.0.1:{port}"
        load_test(url, concurrency=CONNECTIONS, duration_s=2)
        result = load_test(url, concurrency=CONNECTIONS, duration_s=seconds)
    rate = result.achieved_per_s
    between = f"{rate.value:.0f} ({rate.low:.0f} to {rate.high:.0f})"
    share = f"{rate.value / first:.2f}" if first else "1.00"
    p50 = result.latency.p50_ms.value if result.latency.p50_ms else 0.0
    bad = result.sent - result.ok
    row = (kind, replicas, between, share, f"{p50:.0f}", bad, f"{os.getloadavg()[0]:.1f}")
    print("| " + " | ".join(map(str, row)) + " |", flush=True)
    return first or rate.value


if __name__ == "__main__":
    sys.exit(main())
