"""Two load generators in processes of their own: wrk for HTTP, h2load for gRPC. Closed loop.

In: a port, a prepared request, a number of connections, seconds. Out: `Sample`. One thread each, as
the client shares the servers' cores; latency is the client's own.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bodies import Ask
from reasons import NotMeasuredError

POST = Path(__file__).resolve().parent / "post.lua"
SETTLING = 0.2  # the share of a slow server's run that is left out at its start


@dataclass(frozen=True)
class Sample:
    """One run of a generator. `errors`: answers other than 200, and connections that broke."""

    per_s: float
    p50_ms: float
    p99_ms: float
    errors: int


def wrk(
    port: int,
    ask: Ask,
    connections: int,
    seconds: float,
    *,
    slow: bool = False,
    threads: int = 1,
) -> Sample:
    """Load `ask` over `connections`. `slow`: see `steady_per_s`. Raises NotMeasuredError."""
    with tempfile.NamedTemporaryFile() as body:
        body.write(ask.body)
        body.flush()
        headers = [f"{name}={value}" for name, value in ask.headers.items()]
        url = f"http://127.0.0.1:{port}{ask.path}"
        options = [f"-t{threads}", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "60s"]
        command = ["wrk", *options, "-s", str(POST), url, "--", body.name]
        said = _run([*command, "times" if slow else "no-times", *headers], seconds)
    return wrk_sample(said, seconds)


def wrk_sample(said: str, seconds: float) -> Sample:
    """From the line that post.lua prints. Raises NotMeasuredError."""
    line = next((line for line in said.splitlines() if line.startswith('{"requests"')), None)
    if line is None:
        raise NotMeasuredError(f"wrk: {_last(said)}")
    found = json.loads(line)
    answered = found["requests"] - found["refused"]
    if answered == 0:
        raise NotMeasuredError(f"wrk: none of {found['requests']} requests was answered with 200")
    per_s = answered / (found["duration_us"] / 1e6)
    if found["times_s"]:
        per_s = steady_per_s(found["times_s"], SETTLING * seconds, seconds) or per_s
    return Sample(
        per_s,
        found["p50_us"] / 1e3,
        found["p99_us"] / 1e3,
        found["refused"] + found["errors"],
    )


def steady_per_s(times_s: Sequence[float], begin_s: float, end_s: float) -> float | None:
    """Answers per second of a server that answers in bursts, one for each batch.

    Counted from the end of one burst to the end of another: a window with edges of its own would
    count a burst more or less. A burst ends before a gap at least as long as the mean one. None:
    there are not two such ends between `begin_s` and `end_s`.
    """
    times = np.sort(np.asarray(times_s, dtype=np.float64))
    times = times[(times >= begin_s) & (times <= end_s)]
    if len(times) < 3 or times[0] == times[-1]:
        return None
    gaps = np.diff(times, append=end_s)
    ends = np.flatnonzero(gaps >= np.diff(times).mean())
    if len(ends) < 2:
        return None
    first, last = ends[0], ends[-1]
    return float((last - first) / (times[last] - times[first]))


def h2load(
    port: int,
    path: str,
    frame: bytes,
    connections: int,
    seconds: float,
    answer_bytes: int,
    *,
    slow: bool = False,
) -> Sample:
    """Load a gRPC method: a stream at a time on each connection, as many connections as callers.

    `answer_bytes`: how long each answer's frame is; a refusal is an empty one with status 200, so
    that nothing else tells it from a success. `slow`: see `steady_per_s`. Raises NotMeasuredError.
    """
    with tempfile.TemporaryDirectory() as folder:
        body, log = Path(folder) / "body", Path(folder) / "log"
        body.write_bytes(frame)
        options = ["-t1", f"-c{connections}", "-m1", "-D", f"{seconds:g}", "-d", str(body)]
        headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        url = f"http://127.0.0.1:{port}{path}"
        said = _run(["h2load", *options, *headers, f"--log-file={log}", url], seconds)
        written = log.read_text() if log.is_file() else ""
        return h2load_sample(said, written, answer_bytes, slow=slow)


def h2load_sample(said: str, log: str, answer_bytes: int, *, slow: bool = False) -> Sample:
    """From what h2load prints and its log: a line of start (us), status and time (us) a request.

    `slow`: see `steady_per_s`. Raises NotMeasuredError.
    """
    rate = re.search(r"finished in .*?, ([\d.]+) req/s", said)
    done = re.search(r"requests: .*?(\d+) done, (\d+) succeeded", said)
    data = re.search(r"traffic: .*\((\d+)\) data", said)
    if not (rate and done and data):
        raise NotMeasuredError(f"h2load: {_last(said)}")
    answered = int(data[1]) // answer_bytes
    if answered == 0 or not log:
        raise NotMeasuredError(f"h2load: none of {done[1]} requests was answered")
    errors = int(done[1]) - min(answered, int(done[2]))
    per_s = float(rate[1]) * (1 - errors / int(done[1]))
    lines = [line.split("\t") for line in log.splitlines()]
    start_s, taken_s = np.array([(int(line[0]), int(line[2])) for line in lines]).T / 1e6
    if slow and not errors:
        ends_s = start_s + taken_s - start_s.min()
        per_s = steady_per_s(ends_s, SETTLING * ends_s.max(), ends_s.max()) or per_s
    p50_ms, p99_ms = np.percentile(taken_s, [50, 99]) * 1e3
    return Sample(per_s, float(p50_ms), float(p99_ms), errors)


def _run(command: Sequence[str], seconds: float) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + 90, check=False
        )
    except FileNotFoundError:
        raise NotMeasuredError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise NotMeasuredError(f"{command[0]} did not end") from None
    if done.returncode:
        raise NotMeasuredError(f"{command[0]}: {_last(done.stdout + done.stderr)}")
    return done.stdout


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
