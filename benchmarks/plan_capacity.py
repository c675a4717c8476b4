#!/usr/bin/env python3
"""How many requests per second one replica carries within a p99: what `plan` says, and a load test.

    python benchmarks/plan_capacity.py [--seconds 15] [--steps 7] [--only TEXT] [--onnx]
    python benchmarks/plan_capacity.py --own [--seconds 2]

Engines that sleep for a known time take no core, so that other work on the machine changes little
(`chrt -f 20` before the command, and it changes nearly nothing). Each is served in a process of its
own; `--onnx` adds the MNIST CNN behind `deploykit serve`, with the times that `deploykit bench`
measures, which needs a quiet machine. The highest rate of an open loop that holds the bound is
found by bisection, without what `plan` says. Prints Markdown.

`--own` measures the server's own time for a call, which `plan` adds: engines that use the caches
for a known time on the event loop's thread, in closed loops, so that calls follow each other.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import math
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "serve")]

from child import DEPLOYKIT, deploykit, header  # noqa: E402
from mnist_graph import write_mnist  # noqa: E402
from processes import Running, free_port, started  # noqa: E402

from deploykit.core.errors import DeploykitError  # noqa: E402
from deploykit.loadtest.client import Load, SendPlan, run_plans  # noqa: E402
from deploykit.loadtest.load import summarise  # noqa: E402
from deploykit.loadtest.server import find_server  # noqa: E402
from deploykit.loadtest.target import RemoteModel, find_model, make_requests  # noqa: E402
from deploykit.planning.plan import (  # noqa: E402
    BYTE_S,
    QUANTILE,
    REQUEST_S,
    capacity,
    served_s,
)
from scripts.gpu.guard import workplace  # noqa: E402

WARM_UP_S, DRAIN_S, CONNECTIONS = 1.0, 2.0, 512
CPU = "server's CPU us per request"
RUNS = 30  # of a call, whose median counts
BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Case:
    """`width`: float32 values of a request. `overlaps`: as the server runs the engine.

    `base_ms` and `row_ms`: of a sleeping engine; None: the ONNX model.
    """

    name: str
    bound_ms: float
    max_batch: int
    base_ms: float | None = None
    row_ms: float = 0.0
    width: int = 64
    overlaps: bool = True
    replicas: int = 1
    computes: bool = False


CASES = (
    Case("4 ms, one at a time", 20, 1, 4),
    Case("10 ms for up to 8", 35, 8, 10),
    Case("5 ms and 2 ms each, up to 8", 50, 8, 5, 2),
    Case("5 ms and 2 ms each, up to 8, 600 kB", 50, 8, 5, 2, 150_528),
    Case("5 ms and 2 ms each, up to 8, two replicas", 50, 8, 5, 2, replicas=2),
    Case("1.5 ms for up to 4, on the server's own thread", 8, 4, 1.5, overlaps=False),
)
ONNX = Case("the MNIST CNN", 10, 32, width=784, overlaps=False)


def serve_one(
    port: int, max_batch: int, base_ms: float, row_ms: float, width: int, computes: bool
) -> None:
    """Write the times of calls as JSON, then serve. The engine sleeps or, if asked, computes."""
    from deploykit.core.tensors import TensorSpec
    from deploykit.serving.options import ServeOptions
    from deploykit.serving.server import Server, run
    from tests.support.fake_engine import FakeEngine

    memory = np.zeros(1 << 20, np.float32)

    class Timed(FakeEngine):
        steady = True

        def __call__(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            x = feeds["x"]
            length_s = (base_ms + len(x) * row_ms) / 1e3
            if computes:
                until = time.perf_counter() + length_s
                while time.perf_counter() < until:
                    np.add(memory, 1, out=memory)
            else:
                # PR_SET_TIMERSLACK of this thread: its waits then end when they are due
                ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
                time.sleep(length_s)
            return {"y": x[:, :10] * np.float32(2)}

    engine = Timed(width=width)
    engine.outputs = (TensorSpec("y", "float32", ("N", 10)),)
    rows = np.zeros((max_batch, width), np.float32)
    times_s = {}
    for size in {1, max_batch}:
        taken_s = []
        for _ in range(RUNS):
            began = time.perf_counter()
            engine({"x": rows[:size]})
            taken_s.append(time.perf_counter() - began)
        times_s[size] = statistics.median(taken_s)
    Path(sys.argv[-1]).write_text(json.dumps(times_s))
    options = ServeOptions(http_port=port, max_batch=max_batch)
    run(Server({"m": engine}, options), lambda *_: None)


def is_ready(url: str) -> bool:
    try:
        find_model(find_server(url), None)
    except DeploykitError:
        return False
    return True


@contextlib.contextmanager
def replica(case: Case, folder: Path) -> Iterator[tuple[RemoteModel, Running, dict[int, float]]]:
    """A server, ready, with the seconds of a call by batch."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    times = folder / f"{port}.json"
    if case.base_ms is None:
        model = write_mnist(folder / "mnist.onnx")
        words = [*DEPLOYKIT, "serve", model, "--http-port", port, "--grpc-port=none"]
        words += ["--max-batch", case.max_batch]
    else:
        words = [sys.executable, __file__, "--serve", port, case.max_batch, case.base_ms]
        words += [case.row_ms, case.width, int(case.computes), times]
    with started([str(word) for word in words], lambda: is_ready(url)) as running:
        if case.base_ms is None:
            found = benched(folder / "mnist.onnx", folder / "report")
        else:
            found = {int(n): each for n, each in json.loads(times.read_text()).items()}
        yield find_model(find_server(url), None), running, found


def benched(model: Path, report: Path) -> dict[int, float]:
    """The median call by batch, as `bench` measures it."""
    batches = ",".join(map(str, BATCHES))
    ran = deploykit("bench", model, "--batches", batches, "--quick", "--force", "-o", report)
    document = json.loads((report / "report.json").read_text()) if ran.code == 0 else {}
    points = [
        each
        for each in document.get("points", ())
        if each["sessions"] == 1 and each["latency"]["p50_ms"] is not None
    ]
    if not points:
        raise SystemExit(f"bench: {ran.error}")
    label = points[0]["label"]
    return {
        each["batch"]: each["latency"]["p50_ms"]["value"] / 1e3
        for each in points
        if each["label"] == label
    }


def plan_of(remote: RemoteModel, load: Load, due_s: Sequence[float] | None) -> SendPlan:
    requests = make_requests(remote)
    return SendPlan(remote.server, requests.messages, requests.check, load, due_s)


def p99_ms(
    remotes: Sequence[RemoteModel], rate: float, seconds: float, seed: int
) -> tuple[float, tuple[str, ...], int]:
    """The 99th percentile over all replicas, why the generator was late, and the requests.

    Requests go to the replicas at random, so that each sees Poisson arrivals.
    """
    load = Load(rate, CONNECTIONS, WARM_UP_S, seconds, DRAIN_S)
    random = np.random.default_rng(seed)
    due_s = np.sort(random.uniform(0, load.end_s, random.poisson(rate * load.end_s)))
    to = random.integers(len(remotes), size=len(due_s))
    plans = [
        plan_of(remote, load, due_s[to == number].tolist()) for number, remote in enumerate(remotes)
    ]
    outcomes = run_plans(plans)
    taken_s = [
        end_s - start_s if status == 200 else math.inf
        for each in outcomes
        for start_s, end_s, status in zip(each.starts_s, each.ends_s, each.statuses, strict=True)
        if start_s >= WARM_UP_S
    ]
    limits: tuple[str, ...] = summarise(load, outcomes)["limits"]
    ordered = sorted(taken_s)
    late = ordered[math.ceil(QUANTILE * len(ordered)) - 1] if ordered else 0.0
    return late * 1e3, limits, len(ordered)


def measured(
    case: Case, remotes: Sequence[RemoteModel], high: float, seconds: float, steps: int
) -> tuple[float, int]:
    """The highest rate within the bound, and how often the generator was late.

    Other work on the machine only makes latencies longer: a rate is too high if it is twice.
    """
    low, marked = 0.0, 0
    for step in range(steps):
        rate = (low + high) / 2
        holds = False
        for again in range(2):
            found_ms, limits, _ = p99_ms(remotes, rate, seconds, step + again * steps)
            marked += bool(limits)
            holds = holds or found_ms <= case.bound_ms
            if holds:
                break
        low, high = (rate, high) if holds else (low, rate)
    return (low + high) / 2, marked


def row(case: Case, seconds: float, steps: int) -> str:
    with workplace("plan-capacity-") as folder, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(replica(case, folder)) for _ in range(case.replicas)]
        remotes = [remote for remote, _, _ in servers]
        size = 4 * (case.width + 10)
        times_s = {n: statistics.fmean(each[n] for _, _, each in servers) for n in servers[0][2]}
        found = capacity(
            1.0,
            case.bound_ms / 1e3,
            {n: served_s(each) for n, each in times_s.items()},
            request_s=REQUEST_S + BYTE_S * size,
            overlaps=case.overlaps,
        )
        if found.rate_each_per_s is None:
            raise SystemExit(f"{case.name}: {found.why}")
        most = case.replicas * max(n / each for n, each in times_s.items())
        rate, marked = measured(case, remotes, most, seconds, steps)
        predicted = case.replicas * found.rate_each_per_s
        busy_s = sum(running.cpu_s() for _, running, _ in servers)
        *_, requests = p99_ms(remotes, rate, seconds, steps)
        busy_s = sum(running.cpu_s() for _, running, _ in servers) - busy_s
    ms = ", ".join(f"{n}: {each * 1e3:.3g}" for n, each in sorted(times_s.items()))
    return (
        f"| {case.name} | {ms} | {case.bound_ms:g} | {predicted:,.0f} | {rate:,.0f} | "
        f"{predicted / rate - 1:+.1%} | {busy_s / requests * 1e6:.0f} | {marked} |"
    )


def own(seconds: float) -> None:
    """Print what the server takes for a call besides the engine's time, as it counts that."""
    print(header("What the server takes for a call, besides the engine"))
    print("| engine ms | requests a call | server us a call | `plan` | marked |")
    print("| --: | --: | --: | --: | --- |")
    for base_ms, most in itertools.product((0, 0.1, 0.4, 1.5), (1, 8)):
        case = Case("", 0, most, base_ms, computes=True)
        with workplace("plan-capacity-") as folder, replica(case, folder) as found:
            remote = found[0]
            closed = Load(None, 2 * most, WARM_UP_S, seconds, DRAIN_S)
            plan = plan_of(remote, closed, None)
            before = counted(remote)
            outcomes = run_plans([plan])
            calls, requests, engine_s = counted(remote) - before
        all_s = max(end_s for each in outcomes for end_s in each.ends_s)
        size = requests / calls
        us = (all_s - engine_s) / calls * 1e6
        each_s = engine_s / calls
        said = served_s(each_s) - each_s + size * (REQUEST_S + BYTE_S * 4 * (case.width + 10))
        marked = "; ".join(summarise(closed, outcomes)["limits"])
        print(
            f"| {each_s * 1e3:.2f} | {size:.1f} | {us:.0f} | {said * 1e6:.0f} | {marked} |",
            flush=True,
        )


def counted(remote: RemoteModel) -> np.ndarray:
    """Calls, requests and the engine's seconds so far, by the server's statistics."""
    url = f"{remote.server.url}/v2/models/m/stats"
    with urllib.request.urlopen(url) as answer:
        (model,) = json.load(answer)["model_stats"]
    found = [(each["batch_size"], each["compute_infer"]) for each in model["batch_stats"]]
    return np.array(
        [
            sum(each["count"] for _, each in found),
            sum(size * each["count"] for size, each in found),
            sum(each["ns"] for _, each in found) / 1e9,
        ]
    )


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        port, max_batch, base_ms, row_ms, width, computes, _ = sys.argv[2:]
        what = float(base_ms), float(row_ms), int(width), computes == "1"
        serve_one(int(port), int(max_batch), *what)
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--onnx", action="store_true")
    parser.add_argument("--own", action="store_true")
    options = parser.parse_args()
    if options.own:
        own(options.seconds)
        return
    print(header("What `plan` says that a replica carries, against a load test"))
    print(f"| engine | ms by batch | p99 within ms | `plan` | load test | error | {CPU} | marked |")
    print("| --- | --- | --: | --: | --: | --: | --: | --: |")
    for case in (*CASES, *[ONNX] * options.onnx):
        if options.only in case.name:
            print(row(case, options.seconds, options.steps), flush=True)


if __name__ == "__main__":
    main()
