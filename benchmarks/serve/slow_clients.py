"""Whether clients that never finish hurt one that does.

In: a number of slow clients. Out, as Markdown: requests/s and latency of one good client, quiet and
under attack, in turn; the ratio of the p99.

    python benchmarks/serve/slow_clients.py [--clients 500] [--seconds 5] [--rounds 5]

A third of the slow clients send a header byte by byte, a third a body byte by byte, a third ask and
read the answer byte by byte, each a byte every half second; whom the server shuts out comes again
after as long. They live in a process of their own. The good client is wrk with one connection on
the CNN of `peers.py`. The server is `deploykit serve` with its defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bodies import ENCODINGS, Ask
from child import header
from clients import Sample, wrk
from graphs import MODELS
from peer_list import OURS, PEERS, command_of, environment_of
from peers import asked
from processes import free_port, started

PAUSE_S = 0.5
SETTLE_S = 2.0  # until all slow clients are connected and each has sent some bytes
KINDS = ("header", "body", "reader")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        asyncio.run(attack(options.attack, options.clients))
        return
    model = MODELS["tiny"]
    with tempfile.TemporaryDirectory() as folder:
        file = model.write(Path(folder) / "tiny.onnx")
        port, peer = free_port(), PEERS[OURS]
        ask = ENCODINGS["v2 binary"](model.rows())
        threads = os.cpu_count() or 1
        command = command_of(peer, Path(sys.executable), file, port, threads, free_port())
        quiet: list[Sample] = []
        under: list[Sample] = []
        seen: Counter[str] = Counter()
        with started(
            command, lambda: asked(port, ask) is not None, environment=environment_of(peer)
        ):
            wrk(port, ask, 1, 1)
            for _ in range(options.rounds):
                quiet.append(wrk(port, ask, 1, options.seconds))
                with attacked(port, options.clients, seen):
                    under.append(wrk(port, ask, 1, options.seconds))
    print(header("Slow clients"))
    print(table(options.clients, quiet, under, seen))


@contextlib.contextmanager
def attacked(port: int, clients: int, seen: Counter[str]) -> Iterator[None]:
    """Slow clients until the block ends; `seen` then counts what befell them."""
    command = [sys.executable, __file__, "--attack", str(port), "--clients", str(clients)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # all are connected
        yield
    finally:
        said, _ = process.communicate(input="end\n", timeout=30)
        seen.update(json.loads(said))


async def attack(port: int, clients: int) -> None:
    """The slow clients' process: says when they are connected; a line on stdin ends it."""
    ask = ENCODINGS["v2 binary"](MODELS["tiny"].rows())
    whole = request(port, ask)
    seen: Counter[str] = Counter()
    tasks = [
        asyncio.create_task(_slow(port, KINDS[turn % len(KINDS)], whole, turn, seen))
        for turn in range(clients)
    ]
    await asyncio.sleep(SETTLE_S)
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(seen))


def request(port: int, ask: Ask) -> bytes:
    lines = [f"POST {ask.path} HTTP/1.1", f"Host: 127.0.0.1:{port}"]
    lines += [f"{name}: {value}" for name, value in ask.headers.items()]
    lines += [f"Content-Length: {len(ask.body)}", "", ""]
    return "\r\n".join(lines).encode() + ask.body


async def _slow(port: int, kind: str, whole: bytes, turn: int, seen: Counter[str]) -> None:
    """One slow client, again and again."""
    head = whole.index(b"\r\n\r\n") + 4
    at_once = {"header": 0, "body": head, "reader": len(whole)}[kind]
    await asyncio.sleep(turn % 50 / 50 * PAUSE_S)  # not all at one moment
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64)
        except OSError:
            seen["refused"] += 1
            await asyncio.sleep(PAUSE_S)
            continue
        seen["connected"] += 1
        try:
            writer.write(whole[:at_once])
            for at in range(at_once, len(whole)):
                writer.write(whole[at : at + 1])
                await asyncio.sleep(PAUSE_S)
                if reader.at_eof() or writer.is_closing():
                    break
            while await reader.read(1):
                await asyncio.sleep(PAUSE_S)
        except OSError:
            pass
        finally:
            writer.close()
        seen["shut out"] += 1
        await asyncio.sleep(PAUSE_S)


def table(clients: int, quiet: list[Sample], under: list[Sample], seen: Counter[str]) -> str:
    def row(name: str, samples: list[Sample]) -> str:
        per_s, p50_ms, p99_ms = (
            statistics.median(getattr(sample, part) for sample in samples)
            for part in ("per_s", "p50_ms", "p99_ms")
        )
        errors = sum(sample.errors for sample in samples)
        return f"| {name} | {per_s:,.0f} | {p50_ms:.2f} | {p99_ms:.2f} | {errors} |"

    times = [b.p99_ms / a.p99_ms for a, b in zip(quiet, under, strict=True)]
    return (
        f"One good client, medians of {len(quiet)} rounds:\n\n"
        "| | requests/s | p50 ms | p99 ms | errors |\n|---|--:|--:|--:|--:|\n"
        f"{row('quiet', quiet)}\n{row(f'beside {clients} slow clients', under)}\n\n"
        f"p99: {statistics.median(times):.2f} times as long ({min(times):.2f}–{max(times):.2f}). "
        f"The slow clients connected {seen['connected']} times, were refused {seen['refused']} "
        f"times and shut out {seen['shut out']} times.\n"
    )


if __name__ == "__main__":
    main()
