"""Attacks on the real `deploykit serve`: does it still answer a health check every 20 ms?

    python -m benchmarks.serve.attacks_http [--only WORD] [--seconds 5]

Out, as Markdown: for each attack the longest health answer, how much of it the event loop's thread
computed, the time that other programs had the cores meanwhile, the memory when ready, at most and
after the clients had left, what the clients got, and whether a bound was broken: no stall above
0.2 s but for cores that others used, `deploykit_held_bytes` back at 0, files closed, no traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.serve.attack_http_clients import BODIES
from benchmarks.serve.attack_http_files import FILES
from benchmarks.serve.attack_http_lines import LINES
from benchmarks.serve.attack_http_probe import HealthProbe, Seen, rss_mib
from benchmarks.serve.attack_http_setup import LIMIT_BYTES, Attacked, models
from tests.support.serving.faults import REAL, Process, until

STALL_MS = 200.0
KINDS = {"Sums over all clients": BODIES, "Head of line": LINES, "Replaced files": FILES}
HEAD = (
    "| attack | stall (computed; no core), ms | memory, MiB | answers | verdict |\n"
    "| --- | --: | --: | --- | --- |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="of attacks whose name has this word")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    for title, attacks in KINDS.items():
        chosen = [each for each in attacks if options.only in each.__name__]
        if chosen:
            print(f"\n## {title}\n\n{HEAD}", flush=True)
        for attack in chosen:
            print(row(attack, options.seconds), flush=True)


def row(attack: Callable[[Attacked], str], seconds: float) -> str:
    """Run one attack on a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        first, *others = models(Path(folder))
        more = [word for each in others for word in ("--engine", each)]
        limits = ("--max-held-bytes", str(LIMIT_BYTES), "--timeout-ms", "5000")
        options = (*limits, "--grpc-port", "0", "--shared-memory", *more)
        with Process(Path(folder), *options, command=REAL, engine=first) as server:
            attacked = Attacked(server, Path(folder), seconds)
            attacked.infer()
            files = server.holds()[0]
            with contextlib.ExitStack() as stack:
                attacked.stack = stack
                with HealthProbe(server.port, server.popen.pid) as probe:
                    try:
                        answers = attack(attacked)
                    except OSError as exc:
                        answers = f"the attack failed: {exc}"
            assert probe.seen is not None
            problems = _problems(attacked, probe.seen, files)
            after = rss_mib(server.popen.pid)
    seen = probe.seen
    return (
        f"| {(attack.__doc__ or '').splitlines()[0].rstrip('.')} "
        f"| {seen.stall_ms:,.0f} ({seen.computed_ms:,.0f}; {seen.no_core_ms:,.0f}) "
        f"| {seen.ready_mib:,.0f}, {seen.peak_mib:,.0f}, {after:,.0f} "
        f"| {answers} | {'; '.join(problems) or 'held'} |"
    )


def _problems(attacked: Attacked, seen: Seen, files: int) -> list[str]:
    server, found = attacked.server, []
    stall_ms = seen.own_ms if attacked.accepts else seen.kept_ms
    if stall_ms > STALL_MS:
        found.append(f"**stalled** for {stall_ms:,.0f} ms")
    if seen.failures and attacked.accepts:
        found.append(f"**{seen.failures} of {seen.answers} health checks failed**")
    if server.popen.poll() is not None:
        return [*found, f"**the server ended** ({server.popen.returncode})"]
    with contextlib.suppress(AssertionError):
        until(lambda: server.gauge("deploykit_held_bytes") == 0, 12)
        until(lambda: server.holds()[0] <= files + attacked.more_files, 12)
    held, now = server.gauge("deploykit_held_bytes"), server.holds()[0]
    if held:
        found.append(f"**{held:,.0f} bytes stay counted**")
    if now > files + attacked.more_files:
        found.append(f"**{now - files} files stay open**")
    traces = [line for line in server.log_lines() if "Traceback" in line]
    if traces:
        found.append(f"**{len(traces)} tracebacks**: {traces[0][-200:]}")
    if not attacked.infer():
        found.append("**no good answer afterwards**")
    time.sleep(0.2)
    return found


if __name__ == "__main__":
    main()
