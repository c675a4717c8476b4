"""Past one core: our worker processes beside as many of mosec and FastAPI, and how far ours scale.

Rates, latencies and the processor time of one request (all processes of the server, user and
system, which other programs on the machine cannot hide), as Markdown. Needs wrk and the packages of
`make venv`; the peers are installed from PyPI, each into a venv of its own.

    python benchmarks/serve/workers.py [--workers 1,2] [--connections 1,32,128] [--rounds 6]
        [--seconds 2] [--client-threads 1] [--own-cores] [--only NAME,...] [--out FILE]
        [--cache FOLDER]

Every server in turn and in fresh processes, the order turned by one each round. `stand-in`: our
server with an engine of no cost. On fewer cores than workers and client threads together the client
takes its part of the workers' cores. `--own-cores` gives N workers and their client N cores and the
client N threads, so that one worker shares its core too, and the rates show how the server scales.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # parts of other benchmarks
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # the deploykit beside us

from bodies import ENCODINGS, Ask
from child import header
from clients import Sample, wrk
from graphs import MODELS
from peer_list import HERE, Peer, command_of, environment_of, python_of
from peers import asked
from processes import Running, free_port, started
from reasons import NotMeasuredError

from deploykit.evaluation.statistics import ratio

WARM_UP_S = 1
BAR_CPU_US, BAR_MOSEC, BAR_FASTAPI, BAR_SCALING = 35, 1.25, 7, 0.85
BAR_CONNECTIONS = 32  # from which on the bars count


@dataclass(frozen=True)
class Server:
    """`make` gives its command for a port; `kind` and `workers` say who is compared with whom."""

    kind: str
    workers: int
    encoding: str
    make: Callable[[int], list[str]]
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.workers} worker{'s' * (self.workers > 1)}"


@dataclass(frozen=True)
class Load:
    """One load on one server. `cpu_us`: processor time of the server for each request."""

    sample: Sample
    cpu_us: float


Loads = dict[tuple[str, int, int], dict[int, Load]]  # kind, workers, connections -> by round


def main() -> int:
    options = _options()
    rows = MODELS["tiny"].rows()
    loads: Loads = {}
    reasons: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = MODELS["tiny"].write(Path(folder) / "tiny.onnx")
        servers = _servers(options, model, reasons)
        for turn in range(options.rounds):
            first = turn % len(servers)
            for server in servers[first:] + servers[:first]:
                print(f"round {turn + 1}: {server.name}", file=sys.stderr, flush=True)
                try:
                    _measure(server, rows, options, turn, loads)
                except NotMeasuredError as exc:
                    reasons[server.name] = f"{exc} (round {turn + 1})"
    text = _head(options) + _table(loads) + _verdict(loads)
    text += "".join(f"- {name}: not measured: {why}\n" for name, why in reasons.items())
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


def _servers(options: argparse.Namespace, model: Path, reasons: dict[str, str]) -> list[Server]:
    found = []
    for count in options.workers:
        script = str(HERE / "servers" / "stand_in.py")
        stand_in = _command(sys.executable, script, workers=count)
        if "stand-in" in options.only:
            found.append(Server("stand-in", count, "v2 binary", stand_in, {}))
        for kind in ("deploykit", "mosec", "fastapi"):
            if kind in options.only:
                _add(found, Peer.of(kind, count), model, options, reasons)
    return found


def _add(
    found: list[Server],
    peer: Peer,
    model: Path,
    options: argparse.Namespace,
    reasons: dict[str, str],
) -> None:
    try:
        python = python_of(peer, options.cache)
    except NotMeasuredError as exc:
        reasons[str(peer)] = str(exc)
        return
    threads = peer.workers if options.own_cores else os.cpu_count() or 1

    def make(port: int) -> list[str]:
        return command_of(peer, python, model, port, threads, free_port())

    kind = peer.name.partition("-")[0]
    found.append(Server(kind, peer.workers, peer.encoding, make, environment_of(peer)))


def _command(*words: str, workers: int) -> Callable[[int], list[str]]:
    return lambda port: [*words, str(port), str(workers)]


def _measure(
    server: Server, rows: np.ndarray, options: argparse.Namespace, turn: int, loads: Loads
) -> None:
    port, ask = free_port(), ENCODINGS[server.encoding](rows)
    ready = lambda: asked(port, ask) is not None  # noqa: E731 - one expression
    threads = server.workers if options.own_cores else options.client_threads
    with (
        _cores(server.workers if options.own_cores else None),
        started(server.make(port), ready, environment=server.environment) as running,
    ):
        with contextlib.suppress(NotMeasuredError):
            wrk(port, ask, max(options.connections), WARM_UP_S, threads=threads)
        for count in options.connections:
            key = server.kind, server.workers, count
            load = _load(running, port, ask, count, options.seconds, threads)
            loads.setdefault(key, {})[turn] = load


@contextlib.contextmanager
def _cores(count: int | None) -> Iterator[None]:
    """Run on the first `count` cores, with all processes started meanwhile."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def _load(
    running: Running, port: int, ask: Ask, connections: int, seconds: int, threads: int
) -> Load:
    before_s = running.cpu_s()
    sample = wrk(port, ask, connections, seconds, threads=min(threads, connections))
    cpu_s = running.cpu_s() - before_s
    return Load(sample, cpu_s / (sample.per_s * seconds) * 1e6)


def _head(options: argparse.Namespace) -> str:
    cores, threads = os.cpu_count(), options.client_threads
    where = f"{cores} engine threads in all. HTTP by wrk with {threads} thread(s) on the same cores"
    if options.own_cores:
        where = "N cores and engine threads for N workers, and wrk N threads on these cores"
    return (
        f"{header('Worker processes')}\nA small CNN (`tiny`), float32, batches to 32; each server "
        f"has {where}. {options.rounds} rounds of "
        f"{options.seconds} s, medians (lowest to highest). CPU: of all processes of the server, "
        "for each request.\n\n"
    )


def _table(loads: Loads) -> str:
    head = "| server | connections | requests/s | p50 ms | p99 ms | CPU us | errors |\n"
    lines = [head, "|---|--:|--:|--:|--:|--:|--:|\n"]
    for (kind, workers, connections), by_round in sorted(loads.items()):
        found = list(by_round.values())
        cells = [
            f"{kind}, {workers}",
            str(connections),
            _spread([each.sample.per_s for each in found], ",.0f"),
            f"{statistics.median(each.sample.p50_ms for each in found):.2f}",
            f"{statistics.median(each.sample.p99_ms for each in found):.2f}",
            _spread([each.cpu_us for each in found], ".1f"),
            str(sum(each.sample.errors for each in found)),
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines) + "\n"


def _spread(values: Sequence[float], form: str) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def _verdict(loads: Loads) -> str:
    lines = []
    counts = sorted({connections for _, _, connections in loads})
    numbers = sorted({workers for _, workers, _ in loads})
    for connections in counts:
        for workers in numbers:
            ours = ("deploykit", workers, connections)
            for kind, bar in (("mosec", BAR_MOSEC), ("fastapi", BAR_FASTAPI)):
                lines += _times(loads, ours, (kind, workers, connections), f"asked: {bar}")
        best = ("deploykit", max(numbers), connections)
        if best[1] > 1:
            lines += _times(loads, best, ("fastapi", 1, connections), "")
        for workers in numbers[1:]:
            one, several = (("deploykit", n, connections) for n in (1, workers))
            lines += _times(loads, several, one, "")
            one, several = (("stand-in", n, connections) for n in (1, workers))
            lines += _times(loads, several, one, f"asked: {BAR_SCALING * workers:.2f}")
    return "".join(lines) + f"\nAsked of the CPU time of one request: {BAR_CPU_US} us.\n"


def _times(
    loads: Loads, ours: tuple[str, int, int], theirs: tuple[str, int, int], bar: str
) -> list[str]:
    """One line: how many times as many requests, paired by round, with the 95 % interval."""
    mine, others = loads.get(ours, {}), loads.get(theirs, {})
    both = sorted(mine.keys() & others.keys())
    if len(both) < 2:
        return []
    a, b = ([found[turn].sample.per_s for turn in both] for found in (mine, others))
    times = ratio(a, b)
    names = [f"{kind} with {workers}" for kind, workers, _ in (ours, theirs)]
    asked_for = f" ({bar})" if bar and ours[2] >= BAR_CONNECTIONS else ""
    line = (
        f"- {ours[2]} connections: {names[0]} answers {times.value:.2f}x "
        f"({times.low:.2f} to {times.high:.2f}) as many requests as {names[1]}{asked_for}\n"
    )
    return [line]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=_numbers, default=(1, 2))
    parser.add_argument("--connections", type=_numbers, default=(1, 32, 128))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=2, help="of each load; whole ones")
    parser.add_argument("--client-threads", type=int, default=1)
    parser.add_argument("--own-cores", action="store_true", help="N workers and client: N cores")
    parser.add_argument("--only", type=_names, default=_names("deploykit,mosec,fastapi,stand-in"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "deploykit-peers")
    parser.add_argument("--out", type=Path, help="write the Markdown here too")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
