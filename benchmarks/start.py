"""What a start costs: `deploykit --help` as a whole process, a bare interpreter, a server.

In: nothing. Out, as Markdown: wall time of both in turn, and of a server's way to readiness on a
small model, with its memory and whether torch is in it.

    python benchmarks/start.py [--runs 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mnist_graph import write_mnist

PROGRAM = str(Path(sys.executable).with_name("deploykit"))


def wall_ms(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - started) * 1e3


def serve(model: Path) -> tuple[float, float, bool]:
    """Seconds from the process's start to its ready line, MiB then, whether torch is in it."""
    started = time.perf_counter()
    command = [PROGRAM, "serve", "--engine", str(model), "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        ready_s = time.perf_counter() - started
        status = Path(f"/proc/{process.pid}/status").read_text()
        kib = int(status.partition("VmRSS:")[2].split()[0])
        torch = "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
        process.terminate()
    return ready_s, kib / 1024, torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "deploykit --help": [PROGRAM, "--help"],
        "deploykit profiles": [PROGRAM, "profiles"],
        "deploykit export --help": [PROGRAM, "export", "--help"],
    }
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(runs + 1):
        for name, command in commands.items():
            taken = wall_ms(command)
            if number:  # the first of each warms the file cache
                samples[name].append(taken)
    print("| command | min ms | median ms | max ms | runs |\n|---|--:|--:|--:|--:|")
    for name, values in samples.items():
        middle = statistics.median(values)
        print(
            f"| `{name}` | {min(values):.0f} | {middle:.0f} | {max(values):.0f} | {len(values)} |"
        )
    with tempfile.TemporaryDirectory() as folder:
        model = write_mnist(Path(folder) / "mnist.onnx")
        starts = [serve(model) for _ in range(6)][1:]
    ready, memory = (statistics.median(column) for column in list(zip(*starts, strict=True))[:2])
    with_torch = any(start[2] for start in starts)
    print(
        f"\nA server of a small CNN: ready {ready:.2f} s after the start of its process, "
        f"{memory:.0f} MiB resident then (medians of {len(starts)}); "
        f"torch {'IS' if with_torch else 'is not'} loaded."
    )


if __name__ == "__main__":
    main()
