"""Compare `bench --scenario` with MLPerf's LoadGen, on the same stand-in engine.

    pip install mlcommons-loadgen
    python benchmarks/loadgen_check.py

LoadGen runs in a child process. The engine of both takes a time drawn from the same log-normal
distribution, and notes how long each call took in truth, which other load on the machine lengthens.
The percentile of each is divided by the same percentile of its own engine's notes, and these two
factors are compared. `--json OUT` writes the rows. Exits with 1
where they differ by more than 5 %, or one run is valid and the other is not.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.benchmarking import scenarios
from deploykit.engines.engine import Arrays, Engine

SHORTEST_S, SPREAD, QUERIES = 2e-3, 0.3, 100_000
FEEDS: Arrays = {}
MOST = 0.05


class LogNormal(Engine):
    """A call sleeps, then spins, to the end of a time that is drawn beforehand."""

    inputs = outputs = ()
    device, runtime = "cpu", "stand-in"

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.took: list[float] = []
        self.seconds = iter((SHORTEST_S + 1e-3 * rng.lognormal(0, SPREAD, QUERIES)).tolist())

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:  # noqa: ARG002 - a stand-in
        begun = time.perf_counter()
        end = begun + next(self.seconds)
        time.sleep(max(0.0, end - time.perf_counter() - 2e-4))
        while time.perf_counter() < end:
            pass
        self.took.append(time.perf_counter() - begun)
        return {}

    def close(self) -> None: ...


def loadgen(scenario: str, seconds: float, rate: float, slo_ms: float, folder: Path) -> None:
    """In the child: one run of LoadGen, which writes its summary into `folder`."""
    import queue
    import threading

    import mlperf_loadgen as lg

    engine, pending = LogNormal(), queue.SimpleQueue()

    def work() -> None:
        while (samples := pending.get()) is not None:
            engine(FEEDS)
            lg.QuerySamplesComplete([lg.QuerySampleResponse(each.id, 0, 0) for each in samples])

    worker = threading.Thread(target=work)
    worker.start()
    settings = lg.TestSettings()
    settings.scenario = {
        scenarios.SINGLE: lg.TestScenario.SingleStream,
        scenarios.MULTI: lg.TestScenario.MultiStream,
        scenarios.SERVER: lg.TestScenario.Server,
    }[scenario]
    settings.mode = lg.TestMode.PerformanceOnly
    settings.min_duration_ms = round(seconds * 1000)
    settings.min_query_count = settings.max_query_count = 0
    settings.single_stream_expected_latency_ns = settings.multi_stream_expected_latency_ns = (
        1_000_000
    )
    settings.multi_stream_samples_per_query = 8
    settings.server_target_qps, settings.server_target_latency_ns = rate, round(slo_ms * 1e6)
    output = lg.LogOutputSettings()
    output.outdir, output.copy_summary_to_stdout = str(folder), False
    logs = lg.LogSettings()
    logs.log_output, logs.enable_trace = output, False
    system = lg.ConstructSUT(pending.put, lambda: None)
    library = lg.ConstructQSL(8, 8, lambda _: None, lambda _: None)
    lg.StartTestWithLogSettings(system, library, settings, logs, "")
    pending.put(None)
    worker.join()
    np.save(folder / "took.npy", engine.took)
    lg.DestroyQSL(library)
    lg.DestroySUT(system)


def theirs(scenario: str, seconds: float, rate: float = 1.0, slo_ms: float = 1.0) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--child",
            scenario,
            str(seconds),
            str(rate),
            str(slo_ms),
        ]
        subprocess.run([*command, folder], check=True)
        text = (Path(folder) / "mlperf_log_summary.txt").read_text("utf-8")
        took = np.load(Path(folder) / "took.npy")
    estimates = re.findall(r"Early stopping ([\d.]+)th percentile estimate: (\d+)", text)
    found = {f"p{float(q):g}": int(ns) / 1e6 for q, ns in estimates}
    p99 = re.search(r"^99.00 percentile latency \(ns\)\s*: (\d+)", text, re.M)
    queries = re.search(r"queries? \((\d+)\)|Processed (\d+)", text)
    return {
        **found,
        "took": took,
        "raw p99": int(p99[1]) / 1e6 if p99 else None,
        "valid": "Early stopping satisfied: Yes" in text,
        "late": "Performance constraints satisfied : NO" in text,
        "queries": int(queries[1] or queries[2]) if queries else None,
    }


def ours(scenario: str, q: float, seconds: float) -> tuple[dict[str, Any], np.ndarray]:
    """The result, and what the engine noted of the same calls."""
    engine = LogNormal()
    found = scenarios.run_stream(q, engine, FEEDS, scenarios.SAMPLES[scenario], seconds)
    return found, np.array(engine.took[-found["queries"] :])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=5)
    options = parser.parse_args()
    if options.child:
        scenario, seconds, rate, slo_ms, folder = options.child
        loadgen(scenario, float(seconds), float(rate), float(slo_ms), Path(folder))
        return 0
    rows, seconds = [], options.seconds
    for scenario, name in ((scenarios.SINGLE, "p90"), (scenarios.MULTI, "p99")):
        q = float(name[1:])
        (a, took), b = ours(scenario, q, seconds), theirs(scenario, seconds)
        both = a["value"] is not None and name in b
        factor = (a["value"] or 0) / scenarios.early_stopping_ms(took, q)
        other = b.get(name, 0) / scenarios.early_stopping_ms(b["took"], q)
        what = f"{scenario}, {name} by the engine's own"
        rows.append((what, factor, other, both, b["valid"] == both))
    short = (
        ours(scenarios.MULTI, 99.0, 0.1)[0],
        theirs(scenarios.MULTI, 0.1),
    )
    valid = short[0]["value"] is not None
    rows.append(
        (
            "multi-stream, 0.1 s",
            short[0]["value"],
            short[1].get("p99"),
            False,
            valid == short[1]["valid"],
        )
    )
    for rate in (100.0, 500.0):  # a third of what the stand-in answers, and more than all
        slo_ms = 30.0
        gaps = np.random.default_rng(2).exponential(1 / rate, round(rate * max(seconds, 8)))
        most = scenarios.most_above(len(gaps), 99)
        found = scenarios.replay([LogNormal()], FEEDS, np.cumsum(gaps), slo_ms / 1e3, most)
        holds = int((found > slo_ms / 1e3).sum()) <= most
        b = theirs(scenarios.SERVER, max(seconds, 8), rate, slo_ms)
        what = f"server, {rate:g}/s within {slo_ms:g} ms: {'holds' if holds else 'fails'}"
        rows.append((what, None, None, False, holds == (b["valid"] and not b["late"])))
    failed = False
    print("| run | ours | LoadGen | difference | same validity |\n| --- | --: | --: | --: | --- |")
    for what, mine, other, strict, agree in rows:
        apart = mine / other - 1 if mine and other else None
        failed |= not agree or (strict and (apart is None or abs(apart) > MOST))
        cells = ["-" if each is None else f"{each:.4g}" for each in (mine, other)]
        shown = "-" if apart is None else f"{apart:+.1%}"
        print(f"| {what} | {cells[0]} | {cells[1]} | {shown} | {'yes' if agree else 'NO'} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
