"""Compare this checkout with an earlier one: start-up, serving, and the verbs on real models.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before [--rounds 5] [--seconds 3] [--huge] [--out FILE]

Both sides run with this interpreter and its packages, each from its own folder, in turn within each
round; the order turns by one each round. A ratio is taken round by round, after/before, with its
95 % interval over the rounds. Serving needs wrk and h2load (Debian: wrk, nghttp2-client); the two
servers of a round are fresh processes, one after the other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "serve"))  # parts of other benchmarks
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import zoo_speed
from bodies import ENCODINGS, grpc_frame, grpc_message
from child import ROOT, Ran, header, run
from clients import h2load, wrk
from graphs import MODELS, write_resnet18
from peers import INFER, asked
from processes import free_port, started

CONNECTIONS = (1, 32, 128)
CALIBRATION_SAMPLES = 64
MIB = 2**20

Figures = dict[str, list[tuple[float, float]]]  # what -> (before, after) of each round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout of the earlier commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="of each load")
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
            measures.append(
                ("Serving", lambda side: serve(side, model, options.seconds), options.rounds)
            )
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
    from deploykit.measure.statistics import ratio

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


def serve(side: Path, model: Path, seconds: int) -> dict[str, float]:
    """Requests per second by protocol and connections; time to the first answer, and memory."""
    port, grpc_port = free_port(), free_port()
    rows = MODELS["tiny"].rows()
    ask = ENCODINGS["v2 binary"](rows)
    command = [sys.executable, "-m", "deploykit", "serve", "--engine", f"m={model}"]
    command += ["--http-port", str(port), "--grpc-port", str(grpc_port), "--max-batch", "32"]
    found: dict[str, float] = {}
    with started(command, lambda: asked(port, ask) is not None, cwd=side) as server:
        ready_mib = server.held_mib()
        wrk(port, ask, max(CONNECTIONS), 1)
        for count in CONNECTIONS:
            found[f"HTTP, {count} connections, requests/s"] = wrk(port, ask, count, seconds).per_s
        message = grpc_message(rows)
        answer_bytes = _grpc_answer_bytes(grpc_port, message)
        for count in CONNECTIONS:
            sample = h2load(grpc_port, INFER, grpc_frame(message), count, seconds, answer_bytes)
            found[f"gRPC, {count} connections, requests/s"] = sample.per_s
        found["first answer, s"] = server.ready_s
        found["memory when ready, MiB"] = ready_mib
        found["memory after the load, MiB"] = server.held_mib()
    return found


def _grpc_answer_bytes(port: int, message: bytes) -> int:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return len(grpc_frame(channel.unary_unary(INFER)(message, timeout=30)))


def verbs(side: Path, folder: Path, weights: str, arch: str, data: Path) -> dict[str, float]:
    """Seconds and peak memory of export, quantize, build and compare on ResNet-18."""
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
        "build --profile cpu": ("build", source, "--profile", "cpu", "-o", made),
    }
    return _timed(side, steps)


def _timed(side: Path, steps: dict[str, tuple[object, ...]]) -> dict[str, float]:
    found = {}
    for what, words in steps.items():
        ran = _ran(side, "-m", "deploykit", *words, "--json")
        found[f"{what}, s"] = ran.seconds
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
