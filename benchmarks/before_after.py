"""Compare this checkout with an earlier one: start-up, serving, and the verbs on real models.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before [--rounds 5] [--seconds 1] [--huge] [--out FILE]

Both sides run with this interpreter and its packages, each from its own folder, in turn within each
round; the order turns by one each round. A ratio is taken round by round, after/before, with its
95 % interval over the rounds. Serving needs wrk and h2load (Debian: wrk, nghttp2-client): the two
servers of a round are fresh processes that both stay up, and are loaded in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "serve"))  # parts of other benchmarks
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import zoo_speed
from bodies import ENCODINGS, Ask, grpc_frame, grpc_message
from child import ROOT, Ran, header, run
from clients import Sample, h2load, wrk
from graphs import MODELS, write_resnet18
from peers import INFER, asked
from processes import free_port, started

CONNECTIONS = (1, 32, 128)
SLICES = 4  # of each load in a round
CALIBRATION_SAMPLES = 64
MIB = 2**20

Figures = dict[str, list[tuple[float, float]]]  # what -> (before, after) of each round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout of the earlier commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=1, help="of each slice of a load")
    parser.add_argument("--only", default="start,serve,verbs", help="some of these")
    parser.add_argument("--huge", action="store_true", help="a 2.7 GB model too; needs 24 GiB")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sides = (options.before.resolve(), ROOT)
    parts = options.only.split(",")
    text = header("This checkout against an earlier one")
    commits = [_commit(side) for side in sides]
    text += f"\nBefore: {commits[0]}. After: {commits[1]}. {options.rounds} rounds, in turn.\n"
    with tempfile.TemporaryDirectory(prefix="before-after-") as name:
        folder = Path(name)
        measures: list[tuple[str, Callable[[Path], dict[str, float]], int]] = []
        if "start" in parts:
            measures.append(("Start-up", start_up, max(options.rounds, 15)))
        if "serve" in parts:
            model = MODELS["tiny"].write(folder / "tiny.onnx")
            served = serve(sides, model, options.seconds, options.rounds)
            text += f"\n## Serving\n\n{table(served)}\n"
            if options.out:
                options.out.write_text(text, encoding="utf-8")
        if "verbs" in parts:
            files = _resnet(folder)
            measures.append(("ResNet-18", lambda side: verbs(side, folder, *files), options.rounds))
        if options.huge:
            source = _huge(folder)
            measures.append(("A 2.7 GB model", lambda side: huge(side, folder, *source), 1))
        for title, measure, rounds in measures:
            text += f"\n## {title}\n\n{table(run_in_order(measure, sides, rounds))}\n"
            if options.out:
                options.out.write_text(text, encoding="utf-8")
    print(text)
    return 0


def run_in_order(
    measure: Callable[[Path], dict[str, float]], sides: tuple[Path, Path], rounds: int
) -> Figures:
    """Figures of both sides; where there are several rounds, one before them warms the disk."""
    found: Figures = {}
    for number in range(rounds + (rounds > 1)):
        order = sides if number % 2 else sides[::-1]
        taken = {side: measure(side) for side in order}
        print(f"round {number}: {taken}", file=sys.stderr, flush=True)
        if number or rounds == 1:
            before, after = (taken[side] for side in sides)
            for what, value in before.items():
                found.setdefault(what, []).append((value, after[what]))
    return found


def table(figures: Figures) -> str:
    from deploykit.evaluation.statistics import ratio

    lines = [
        "| | before | after | after / before (95 %) | rounds |",
        "| --- | --: | --: | --: | --: |",
    ]
    for what, pairs in figures.items():
        before, after = zip(*pairs, strict=True)
        times = f"{after[0] / before[0]:.3f}"
        if len(pairs) > 1:
            found = ratio(after, before)
            times = f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
        medians = (f"{float(np.median(side)):,.4g}" for side in (before, after))
        lines.append(f"| {what} | {' | '.join(medians)} | {times} | {len(pairs)} |")
    return "\n".join(lines)


def start_up(side: Path) -> dict[str, float]:
    commands = {
        "`import typer`, ms": ("-c", "import typer"),
        "`import deploykit`, ms": ("-c", "import deploykit"),
        "`deploykit --help`, ms": ("-m", "deploykit", "--help"),
        "`deploykit export --help`, ms": ("-m", "deploykit", "export", "--help"),
    }
    return {what: _ran(side, *words).seconds * 1e3 for what, words in commands.items()}


def serve(sides: tuple[Path, Path], model: Path, seconds: int, rounds: int) -> Figures:
    """Requests per second by protocol and connections; time to the first answer, and memory."""
    rows = MODELS["tiny"].rows()
    ask, message = ENCODINGS["v2 binary"](rows), grpc_message(rows)
    found: Figures = {}
    for number in range(rounds):
        taken: dict[Path, dict[str, float]] = {}
        with contextlib.ExitStack() as stack:
            loads = {}
            for side in sides if number % 2 else sides[::-1]:
                port, grpc_port = free_port(), free_port()
                command = [sys.executable, "-m", "deploykit", "serve", "--engine", f"m={model}"]
                command += ["--http-port", str(port), "--grpc-port", str(grpc_port)]
                ready = partial(_answers, port, ask)
                server = stack.enter_context(
                    started([*command, "--max-batch", "32"], ready, cwd=side)
                )
                taken[side] = {"first answer, s": server.ready_s}
                taken[side]["memory when ready, MiB"] = server.held_mib()
                wrk(port, ask, max(CONNECTIONS), 1)
                answer = _grpc_answer_bytes(grpc_port, message)
                grpc_ask = partial(h2load, grpc_port, INFER, grpc_frame(message))
                loads[side] = (partial(wrk, port, ask), partial(_grpc_load, grpc_ask, answer))
            for turn, count in enumerate(CONNECTIONS * SLICES):
                for protocol, name in enumerate(("HTTP", "gRPC")):
                    for side in sides if turn % 2 else sides[::-1]:
                        what = f"{name}, {count} connections, requests/s"
                        per_s = loads[side][protocol](count, seconds).per_s / SLICES
                        taken[side][what] = taken[side].get(what, 0.0) + per_s
        print(f"round {number}: {taken}", file=sys.stderr, flush=True)
        for what, value in taken[sides[0]].items():
            found.setdefault(what, []).append((value, taken[sides[1]][what]))
    return found


def _answers(port: int, ask: Ask) -> bool:
    return asked(port, ask) is not None


def _grpc_load(
    load: Callable[[int, float, int], Sample], answer_bytes: int, count: int, seconds: float
) -> Sample:
    return load(count, seconds, answer_bytes)


def _grpc_answer_bytes(port: int, message: bytes) -> int:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return len(grpc_frame(channel.unary_unary(INFER)(message, timeout=30)))


def verbs(side: Path, folder: Path, weights: str, arch: str, data: Path) -> dict[str, float]:
    """Seconds, CPU time and peak memory of export, quantize, build and compare on ResNet-18."""
    source = folder / "resnet18.onnx"
    exported = folder / "exported.onnx"
    if not source.exists():
        write_resnet18(source)
    made = folder / "out.onnx"
    steps = {
        "export": ("export", weights, "--arch", arch, "--input", zoo_speed.RESNET, "-o", exported),
        "quantize --to fp16": ("quantize", source, "--to", "fp16", "--calib", data, "-o", made),
        "quantize --to int8": ("quantize", source, "--to", "int8", "--calib", data, "-o", made),
        "quantize --to auto": (
            *("quantize", source, "--to", "auto", "--calib", data, "--data", data),
            *("--runtime", "onnxruntime", "--max-drop", "1", "-o", made),
        ),
        "build --profile cpu": ("build", source, "--profile", "cpu", "-o", made),
        "build --precision int8": (
            *("build", source, "--profile", "cpu", "--precision", "int8"),
            *("--calib", data, "-o", made),
        ),
    }
    return _timed(side, steps)


def huge(side: Path, folder: Path, weights: Path, data: Path) -> dict[str, float]:
    source, made = folder / "huge.onnx", folder / "huge.out.onnx"
    arch = f"{ROOT / 'tests' / 'support' / 'zoo' / 'models.py'}:LinearStack"
    steps = {
        "export": ("export", weights, "--arch", arch, "--input", "x:float32[N,8192]", "-o", source),
        "quantize --to fp16": ("quantize", source, "--to", "fp16", "--calib", data, "-o", made),
        "quantize --to int8": ("quantize", source, "--to", "int8", "--calib", data, "-o", made),
    }  # a build for a CPU holds at most 2 GiB
    return _timed(side, steps)


def _timed(side: Path, steps: dict[str, tuple[object, ...]]) -> dict[str, float]:
    found = {}
    for what, words in steps.items():
        ran = _ran(side, "-m", "deploykit", *words, "--json")
        found[f"{what}, s"] = ran.seconds
        found[f"{what}, CPU s"] = ran.cpu_s
        found[f"{what}, peak MiB"] = ran.peak_bytes / MIB
    return found


def _ran(side: Path, *words: object) -> Ran:
    ran = run([sys.executable, *words], cwd=side)
    if ran.code not in (0, 1):  # 1: a gate was not met; random weights do not decide what it takes
        raise SystemExit(f"{side}: {words}: exit {ran.code}: {ran.error}")
    return ran


def _resnet(folder: Path) -> tuple[str, str, Path]:
    """Weights, what builds the module, and labelled random images."""
    files = zoo_speed.prepared("resnet18", folder, samples=8)
    random = np.random.default_rng(0)
    data = folder / "images.npz"
    images = random.random((CALIBRATION_SAMPLES, 3, 224, 224), dtype=np.float32)
    np.savez(data, x=images, labels=np.arange(CALIBRATION_SAMPLES) % 10)
    return files["model"], files["arch"], data


def _huge(folder: Path) -> tuple[Path, Path]:
    ran = run([sys.executable, "-c", zoo_speed.WRITE_HUGE, folder])
    if ran.code:
        raise SystemExit(f"writing the weights: {ran.error}")
    return folder / "huge.safetensors", folder / "huge.npz"


def _commit(side: Path) -> str:
    return run(["git", "describe", "--always", "--dirty"], cwd=side).out.strip()


if __name__ == "__main__":
    sys.exit(main())
