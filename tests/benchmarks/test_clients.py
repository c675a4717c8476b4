"""Samples from what wrk and h2load print, and rates of servers that answer in bursts."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from bodies import ENCODINGS
from clients import h2load_sample, steady_per_s, wrk, wrk_sample
from reasons import NotMeasuredError

TRIES = 5  # of runs of 1 s, in which a machine may stand still
ROWS = np.array([[0.125, 0.3, 1.0]], np.float32)


def line(**changes: object) -> str:
    times = {"duration_us": 2_000_000, "p50_us": 250, "p99_us": 1500, "times_s": []}
    return json.dumps({"requests": 1000, "refused": 0, "errors": 0, **times, **changes})


def test_wrk_counts_answers_with_success_only() -> None:
    said = f"Running 2s test\n  Requests/sec: 500\n{line(refused=100, errors=3)}\n"
    sample = wrk_sample(said, 2.0)
    assert sample.per_s == pytest.approx(450)
    assert (sample.p50_ms, sample.p99_ms, sample.errors) == (0.25, 1.5, 103)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("unable to connect to 127.0.0.1:9 Connection refused\n", "Connection refused"),
        (line(requests=7, refused=7), "none of 7 requests"),
        ("", "it said nothing"),
    ],
)
def test_wrk_without_an_answer_is_not_a_figure(said: str, why: str) -> None:
    with pytest.raises(NotMeasuredError, match=why):
        wrk_sample(said, 2.0)


def test_wrk_takes_the_rate_of_a_slow_server_between_bursts() -> None:
    bursts = [round(0.5 * turn, 3) for turn in range(1, 12) for _ in range(32)]
    assert wrk_sample(line(times_s=bursts), 5.8).per_s == pytest.approx(64)


@pytest.mark.parametrize(("begin_s", "end_s"), [(0.0, 8.2), (0.3, 8.0), (0.7, 8.45)])
def test_a_steady_rate_does_not_depend_on_where_a_run_begins_and_ends(
    begin_s: float, end_s: float
) -> None:
    times = [0.55 * turn + 1e-4 * row for turn in range(1, 20) for row in range(32)]
    assert steady_per_s(times, begin_s, end_s) == pytest.approx(32 / 0.55, rel=1e-6)
    assert steady_per_s([1.0, 1.0, 1.0], 0.0, 2.0) is None  # too few


H2LOAD = """
finished in 2.00s, 1500.00 req/s, 300.00KB/s
requests: 3000 total, 3000 started, 3000 done, 3000 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 3000 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 600.00KB (614400) total, 100KB (102400) headers (space savings 90.00%), 146KB (150000) data
"""
LOG = "".join(f"{1_000_000 + i * 667}\t200\t{400 + i % 100}\n" for i in range(3000))


def test_h2load_reads_rate_and_percentiles_and_counts_refusals_of_grpc_by_missing_bytes() -> None:
    sample = h2load_sample(H2LOAD, LOG, 50)
    figures = (sample.per_s, sample.p50_ms, sample.p99_ms, sample.errors)
    assert figures == pytest.approx((1500, 0.45, 0.498, 0), abs=0.002)
    sample = h2load_sample(H2LOAD.replace("150000", "100000"), LOG, 50)  # they have status 200
    assert (sample.errors, sample.per_s) == (1000, pytest.approx(1000))
    nothing = H2LOAD.replace("3000 done, 3000 succeeded", "0 done, 0 succeeded")
    with pytest.raises(NotMeasuredError, match="none of 0"):
        h2load_sample(nothing.replace("(150000)", "(0)"), "", 50)


class Echo(BaseHTTPRequestHandler):
    """200 and the body; 503 for a body that is empty. Notes the headers it got."""

    protocol_version = "HTTP/1.1"
    seen: dict[str, str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).seen = dict(self.headers)
        self.send_response(200 if body else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
@pytest.mark.parametrize("slow", [False, True])
def test_wrk_sends_the_body_and_reports_the_answers(port: int, slow: bool) -> None:
    ask = ENCODINGS["v2 binary"](ROWS)
    for _ in range(TRIES):
        with contextlib.suppress(NotMeasuredError):
            sample = wrk(port, ask, 2, 1, slow=slow)
            if not sample.errors:
                break
    assert sample.errors == 0
    assert sample.per_s > 0
    assert 0 < sample.p50_ms <= sample.p99_ms
    assert (
        Echo.seen["Inference-Header-Content-Length"]
        == ask.headers["Inference-Header-Content-Length"]
    )
    with pytest.raises(NotMeasuredError, match="answered with 200"):
        wrk(port, ENCODINGS["raw"](ROWS[:0]), 1, 1, slow=slow)
