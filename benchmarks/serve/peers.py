"""deploykit's server beside other Python servers: same models, same runtime, same client.

In: nothing; the peers are installed from PyPI, each into a venv of its own. Out, as Markdown:
rates, latencies, ratios with 95 % intervals, memory and seconds to readiness.

    python benchmarks/serve/peers.py [--only NAME,...] [--rounds 5] [--seconds 3]
        [--connections 1,32,128] [--models tiny,mnist,resnet18] [--out FILE] [--cache FOLDER]

Each round starts every server in turn, asks it for one answer that must equal the session's own,
loads it, and ends it before the next one starts: an idle server's threads and memory disturb
nobody, none has to be stopped and woken, and each round has fresh processes. The order turns by one
each round. Needs wrk and h2load (Debian: wrk, nghttp2-client) and the packages of `make venv`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.metadata
import math
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # parts of other benchmarks
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # the deploykit beside us

import grpc
from bodies import ENCODINGS, JSON_LENGTH, Ask, answer, grpc_answer, grpc_frame, grpc_message
from child import header
from clients import Sample, h2load, wrk
from graphs import MODELS, Model, ceiling
from peer_list import HERE, PEERS, Peer, command_of, environment_of, python_of
from processes import Running, free_port, started
from reasons import NotMeasuredError
from servers.session import open_session
from tables import Cell, Results, markdown

BARE = "bare session"
WARM_UP_S = 1
TURNS = 6
INFER = "/inference.GRPCInferenceService/ModelInfer"
TOLERANCE = 1e-3  # of the largest value: batches and builds of a kernel differ in the last bits


@dataclass(frozen=True)
class Bench:
    """What is the same for every server of one model."""

    model: Model
    file: Path
    threads: int
    connections: tuple[int, ...]
    seconds: int
    rows: np.ndarray
    expected: np.ndarray  # the session's own answer to `rows`, flat

    def seconds_at(self, connections: int, best_per_s: float) -> int:
        """Long enough for TURNS answers on each connection at the session's own rate."""
        return max(self.seconds, math.ceil(TURNS * connections / best_per_s))


def main() -> int:
    options = _options()
    names = options.only.split(",") if options.only else list(PEERS)
    unknown = [name for name in names if name not in PEERS]
    unknown += [name for name in options.models.split(",") if name not in MODELS]
    if unknown:
        print(f"error: '{unknown[0]}' is none of: {', '.join([*PEERS, *MODELS])}", file=sys.stderr)
        return 2
    pythons: dict[str, Path] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            pythons[name] = python_of(PEERS[name], options.cache)
        except NotMeasuredError as exc:
            reasons[name] = str(exc)
    text = _head(options)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            model = MODELS[name]
            counts = options.connections or model.connections
            file = model.write(Path(folder) / f"{name}.onnx")
            rows = model.rows()
            session = open_session(str(file), options.threads)
            expected = session.run(["y"], {"x": rows})[0].ravel()
            bench = Bench(model, file, options.threads, counts, options.seconds, rows, expected)
            results = compare(bench, pythons, names, dict(reasons), options.rounds)
            text += "\n" + markdown(results)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


def compare(
    bench: Bench, pythons: dict[str, Path], names: list[str], reasons: dict[str, str], rounds: int
) -> Results:
    """Every server in turn, `rounds` times over; one that failed twice is left out from then on."""
    failures: Counter[str] = Counter()
    titles = {name: f"{PEERS[name]}; {PEERS[name].encoding}" for name in names}
    results = Results(
        bench.model.name, {**titles, BARE: "the bare session, no server"}, reasons=reasons
    )
    for turn in range(rounds):
        session = open_session(str(bench.file), bench.threads)
        results.ceilings.append(ceiling(session, bench.model))
        del session
        _measure_bare(bench, results)
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            if name not in pythons or failures[name] == 2:
                continue
            print(f"{bench.model.name}, round {turn + 1}: {name}", file=sys.stderr, flush=True)
            try:
                _measure(bench, PEERS[name], pythons[name], results, turn)
            except NotMeasuredError as exc:
                failures[name] += 1
                results.reasons[name] = f"{exc} (round {turn + 1})"
                print(f"  {exc}", file=sys.stderr, flush=True)
    return results


def _measure(bench: Bench, peer: Peer, python: Path, results: Results, turn: int) -> None:
    port = free_port()
    grpc_port = free_port()
    ask = ENCODINGS[peer.encoding](bench.rows)
    best = max(results.ceilings[turn].values())
    command = command_of(peer, python, bench.file, port, bench.threads, grpc_port)
    with started(
        command, lambda: asked(port, ask) is not None, environment=environment_of(peer)
    ) as server:
        _check(bench, asked(port, ask), peer.encoding)
        ready_mib = server.held_mib()
        with contextlib.suppress(NotMeasuredError):  # nothing answered in so short a time
            wrk(port, ask, max(bench.connections), WARM_UP_S)
        for count in bench.connections:
            asked(port, ask)  # what the last load left in the queue comes first
            sample = wrk(port, ask, count, bench.seconds_at(count, best), slow=bench.model.slow)
            _keep(results, Cell(peer.name, "HTTP", count), turn, sample)
        _check(bench, asked(port, ask), peer.encoding)
        if peer.grpc:
            _measure_grpc(bench, peer.name, grpc_port, results, turn)
        _keep_footprint(results, peer.name, server, ready_mib)


def _measure_grpc(bench: Bench, name: str, port: int, results: Results, turn: int) -> None:
    message = grpc_message(bench.rows)
    best = max(results.ceilings[turn].values())
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            said = channel.unary_unary(INFER)(message, timeout=30)
        except grpc.RpcError as exc:
            raise NotMeasuredError(f"gRPC: {exc.code().name}: {exc.details()}") from exc
    _check(bench, grpc_answer(said), "gRPC")
    frame, answer_bytes = grpc_frame(message), len(grpc_frame(said))
    for count in bench.connections:
        sample = h2load(
            port,
            INFER,
            frame,
            count,
            bench.seconds_at(count, best),
            answer_bytes,
            slow=bench.model.slow,
        )
        _keep(results, Cell(name, "gRPC", count), turn, sample)


def _measure_bare(bench: Bench, results: Results) -> None:
    """A process that only holds the session and ran it at the largest batch a server forms."""
    with tempfile.TemporaryDirectory() as folder:
        ran = Path(folder) / "ran"
        script = HERE / "servers" / "session.py"
        words = [sys.executable, str(script), str(bench.file), str(bench.threads), str(ran)]
        with started(words, ran.exists) as process:
            mib = process.held_mib()
            _keep_footprint(results, BARE, process, mib)


def _keep(results: Results, cell: Cell, turn: int, sample: Sample) -> None:
    samples = results.samples.setdefault(cell, [])
    samples += [None] * (turn - len(samples))
    samples.append(sample)


def _keep_footprint(results: Results, name: str, server: Running, ready_mib: float) -> None:
    results.ready_s.setdefault(name, []).append(server.ready_s)
    results.ready_mib.setdefault(name, []).append(ready_mib)
    results.loaded_mib.setdefault(name, []).append(server.held_mib())


def asked(port: int, ask: Ask) -> np.ndarray | None:
    """One answer, flat; None: not (yet) one with status 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        try:
            connection.request("POST", ask.path, ask.body, dict(ask.headers))
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException):
            return None
        if response.status != 200:
            return None
        return answer(ask.encoding, response.getheader(JSON_LENGTH), body)


def _check(bench: Bench, found: np.ndarray | None, how: str) -> None:
    if found is None:
        raise NotMeasuredError(f"{how}: no answer with status 200")
    if found.shape != bench.expected.shape:
        raise NotMeasuredError(f"{how}: {found.size} values, not {bench.expected.size}")
    error = float(np.abs(found - bench.expected).max() / np.abs(bench.expected).max())
    if not error <= TOLERANCE:
        raise NotMeasuredError(f"{how}: off by {error:.2g} of the largest value")


def _head(options: argparse.Namespace) -> str:
    text = header("Servers beside each other")
    return (
        f"{text}\nONNX Runtime {importlib.metadata.version('onnxruntime')} in every one, "
        f"{options.threads} threads, no spinning; batches to 32, with a delay of 2 ms in the peers "
        f"that batch, none in deploykit. HTTP by wrk, gRPC by h2load, one thread each, on the same "
        f"{os.cpu_count()} cores. {options.rounds} rounds of {options.seconds} s with fresh "
        'processes in each; figures are medians of the rounds. "deploykit is": how many times as '
        "many requests it answers, paired by round, with the 95 % interval.\n"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help=f"some of: {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="of each load; whole ones")
    parser.add_argument("--connections", type=_counts, help="default: 1,32,128, resnet18 8,32")
    parser.add_argument("--models", default="tiny,mnist,resnet18")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every session")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "deploykit-peers")
    parser.add_argument("--out", type=Path, help="write the Markdown here too")
    return parser.parse_args()


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
