"""`make containers-test`: both Dockerfiles linted, built and run, without a container engine.

    python -m scripts.containers.run [--only lint,x86,arm64,wheels] [--no-write]

As root on Debian, with its mirror and PyPI; twenty minutes the first time. In: this checkout. Out:
benchmarks/results/containers_MACHINE_DATE.md. Exit 1 if something did not hold, 3 if this machine
lacks a program. Not shown: a GPU, NVIDIA's bases, TensorRT, a Jetson.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import deploykit as dk
from deploykit.core.machine import this_machine
from scripts.containers import rig
from scripts.containers.wheels import resolve_all
from tests.support.bundles import proven_model
from tests.support.onnx_zoo import mnist_like

STARTS = 5
READY_S = 3.0  # issue: from a cached engine, on the CPU path
SIZE_BYTES = 250e6
FIRST_BOOT_S = 900.0


class Results:
    """What was checked: rows of the table, and whether each held."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, bool]] = []

    def add(self, what: str, seen: str, held: bool = True) -> None:
        self.rows.append((what, seen, held))
        sys.stdout.write(f"{'ok    ' if held else 'FAILED'} {what}: {seen}\n")
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/ as it is")
    options = parser.parse_args()
    if why := rig.lacking():
        sys.stderr.write(f"error: {why}\n")
        return 3
    results = Results()
    for part in options.only.split(","):
        PARTS[part](results)
    if not options.no_write:
        write(results, options.only)
    return 0 if all(held for _, _, held in results.rows) else 1


def lint(results: Results) -> None:
    """Hadolint at its strictest threshold, and compose.yaml by a strict parser; both of PyPI."""
    command = [rig.tool("hadolint"), "--failure-threshold", "info"]
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True)
    files = ["Dockerfile.x86", "Dockerfile.jetson"]
    done = subprocess.run(
        [*command, *files], cwd=rig.ROOT, capture_output=True, text=True, check=False
    )
    name = f"{version.stdout.split()[-1]} --failure-threshold info"
    results.add(f"hadolint {name}", done.stdout.strip() or "clean", done.returncode == 0)
    place = rig.WORK / "compose-spec"
    install = [rig.tool("pip"), "install", "--quiet", "--upgrade", "--target", place]
    subprocess.run([*install, "compose-spec"], check=True)
    words = ["-m", "pytest", "-q", "-p", "no:randomly", "tests/deploying/test_docker.py"]
    done = subprocess.run(
        [sys.executable, *words, "-k", "parser_of_the_compose_specification"],
        cwd=rig.ROOT,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    seen = done.stdout.strip().splitlines()[-1]
    held = done.returncode == 0 and "skipped" not in seen
    results.add("`compose.yaml` of three targets, parser of the Compose specification", seen, held)


def x86(results: Results) -> None:
    """Dockerfile.x86 of this checkout, for the CPU, on a base without a Python."""
    base = rig.base_image("amd64")
    arguments = {"BASE": base, "EXTRAS": "cpu,serve", "TENSORRT": ""}
    seconds = rig.build(rig.ROOT / "Dockerfile.x86", "amd64", rig.ROOT, "x86", arguments, "")
    results.add("`Dockerfile.x86` built by buildah", f"{seconds:.0f} s, target serve")
    with rig.opened("x86") as image, content() as (model, samples):
        configuration(results, image)
        mb = image.size_bytes / 1e6
        seen = f"{mb:.0f} MB with Debian and Python ({du(image)} on disk)"
        results.add("size without CUDA layers, <= 250 MB", seen, image.size_bytes <= SIZE_BYTES)
        argv = image.command("serve", "/bundle/model.onnx", "--host", "0.0.0.0")
        times = serve(results, image, argv, model.parent, samples, STARTS)
        seen = f"median {statistics.median(times):.2f} s, longest {max(times):.2f} s of {STARTS}"
        results.add("x86: start to ready, <= 3 s", seen, max(times) <= READY_S)
    boot(results, "Dockerfile.x86", "amd64", arguments)


def arm64(results: Results) -> None:
    """Dockerfile.jetson as arm64 under qemu-user; the base has a Python, as NVIDIA's have."""
    rig.enable_qemu()
    base = rig.base_image("arm64")
    arguments = {"BASE": base, "EXTRAS": "cpu,serve", "TENSORRT": "none", "JETPACK": "6.2"}
    dockerfile = rig.ROOT / "Dockerfile.jetson"
    seconds = rig.build(dockerfile, "arm64", rig.ROOT, "jetson", arguments, "serve")
    results.add("`Dockerfile.jetson` built as arm64", f"{seconds:.0f} s under qemu, target serve")
    with rig.opened("jetson") as image, content() as (model, samples):
        configuration(results, image)
        results.add("arm64: size", f"{image.size_bytes / 1e6:.0f} MB with Debian and Python")
        argv = image.command("serve", "/bundle/model.onnx", "--host", "0.0.0.0")
        times = serve(results, image, argv, model.parent, samples, 1)
        results.add("arm64: start to ready under qemu", f"{times[0]:.1f} s")
        commands(results, image, model)
    boot(results, "Dockerfile.jetson", "arm64", arguments)


def configuration(results: Results, image: rig.Image) -> None:
    """What an engine reads of the image, and that torch is not in it."""
    config = image.config
    seen = {
        "user": config["User"].split(":")[0] == str(rig.UID),
        "volume": "/engines" in config["Volumes"],
        "health check": config["Healthcheck"]["Test"] == ["CMD", "deploykit", "health"],
        "stop signal": config["StopSignal"] == "SIGTERM",
        "labels": config["Labels"]["org.opencontainers.image.version"] == dk.__version__,
        "no authority or index of the builder": not any(
            "CERT" in each or "INDEX" in each for each in config["Env"]
        ),
        "owner of /engines": (image.folder / "engines").stat().st_uid == rig.UID,
        "no torch": not list(image.folder.glob("opt/venv/lib/python3*/site-packages/torch")),
        "no pip": not list(image.folder.glob("opt/venv/lib/python3*/site-packages/pip")),
    }
    wrong = [name for name, right in seen.items() if not right]
    what = f"{image.architecture}: configuration and files of the image"
    results.add(what, f"wrong: {', '.join(wrong)}" if wrong else ", ".join(seen), not wrong)


def du(image: rig.Image) -> str:
    done = subprocess.run(["du", "-sm", image.folder], capture_output=True, text=True, check=True)
    return f"{done.stdout.split()[0]} MiB"


@contextmanager
def content() -> Iterator[tuple[Path, Path]]:
    """A small model and samples with its own answers, in a folder that everybody may read."""
    with tempfile.TemporaryDirectory(prefix="containers-test-", dir=rig.WORK) as name:
        folder = Path(name)
        folder.chmod(0o755)
        model = proven_model(folder / "model.onnx", mnist_like())
        samples = folder / "samples.npz"
        with dk.load(model) as engine:
            generator = np.random.default_rng(0)
            feeds = {
                spec.name: generator.random((3, *spec.shape[1:]), dtype=np.float32)
                for spec in engine.inputs
            }
            expected = {f"expected.{name}": array for name, array in engine(feeds).items()}
        np.savez(samples, **feeds, **expected)
        yield model, samples


@contextmanager
def engines() -> Iterator[Path]:
    """An empty volume, with the owner that a new volume of the image has."""
    with tempfile.TemporaryDirectory(prefix="engines-", dir=rig.WORK) as name:
        os.chown(name, rig.UID, rig.UID)
        yield Path(name)


@contextmanager
def running(
    image: rig.Image, argv: list[str], bundle: Path | None, volume: Path
) -> Iterator[tuple[rig.Process, float]]:
    """A server in the image and the seconds until it says that it is ready."""
    binds = {"/engines": (volume, "rw,nosuid,nodev")}
    if bundle is not None:
        binds["/bundle"] = (bundle, "ro")
    log = rig.WORK / "server.log"
    process = rig.Process(image, argv, binds, log)
    try:
        line = process.line()
        while '"event": "ready"' not in line:
            line = process.line()
        process.ready = line
        yield process, time.monotonic() - process.started
    finally:
        process.kill()


def serve(
    results: Results, image: rig.Image, argv: list[str], bundle: Path, samples: Path, starts: int
) -> list[float]:
    """Start the server `starts` times, check the last one; the seconds until each was ready."""
    times = []
    for at in range(starts):
        with engines() as volume, running(image, argv, bundle, volume) as (process, seconds):
            times.append(seconds)
            if at == starts - 1:
                hardened(results, process)
                answers(results, process, "model", samples)
    return times


def hardened(results: Results, process: rig.Process) -> None:
    status = Path(f"/proc/{process.pid}/status").read_text()
    fields = dict(row.split(":\t", 1) for row in status.splitlines() if ":\t" in row)
    writes = [process.execute("touch", place, inside=True) for place in ("/x", "/opt/venv/x")]
    links = process.execute("cat", "/proc/net/dev").stdout
    seen = {
        "uid 10001": fields["Uid"].split()[0] == str(rig.UID),
        "no groups of root": "0" not in fields["Groups"].split(),
        "no capabilities": int(fields["CapEff"], 16) == 0,
        "no new privileges": fields["NoNewPrivs"] == "1",
        "read-only root": all("Read-only file system" in done.stderr for done in writes),
        "/engines writable": not process.execute("touch", "/engines/x", inside=True).returncode,
        "loopback alone": [row.split(":")[0].strip() for row in links.splitlines()[2:]] == ["lo"],
    }
    wrong = [name for name, right in seen.items() if not right]
    what = f"{process.image.architecture}: a hardened container"
    results.add(what, f"wrong: {', '.join(wrong)}" if wrong else ", ".join(seen), not wrong)


def answers(results: Results, process: rig.Process, model: str, samples: Path) -> None:
    """What tritonclient gets, the health check, and the end by SIGTERM."""
    arch = process.image.architecture
    command = (sys.executable, "-m", "scripts.containers.client", model, samples)
    done = process.execute(*command)
    text = done.stdout.strip() or done.stderr.strip()[-300:]
    results.add(f"{arch}: tritonclient", text, done.returncode == 0)
    check = process.image.config["Healthcheck"]["Test"][1:]
    done = process.execute(*check, inside=True)
    text = (done.stdout or done.stderr).strip()
    results.add(f"{arch}: the health check, inside", text, done.returncode == 0)
    code = process.stop()
    results.add(f"{arch}: SIGTERM to process 1", f"exit {code}", code == 0)


def commands(results: Results, image: rig.Image, model: Path) -> None:
    """The other commands of the light runtime, each in the hardened image."""
    golden = next(model.parent.glob("*.golden.npz"))
    for words in (
        ("doctor",),
        ("inspect", "/bundle/model.onnx"),
        ("predict", "/bundle/model.onnx", f"/bundle/{golden.name}", "-o", "/engines/answers.npz"),
        ("compare", "/bundle/model.onnx"),
        ("bench", "/bundle/model.onnx", "--quick", "-o", "/engines/report"),
    ):
        with engines() as volume:
            binds = {"/engines": (volume, "rw"), "/bundle": (model.parent, "ro")}
            process = rig.Process(image, image.command(*words), binds, rig.WORK / "command.log")
            code = process.wait()
            last = process.log.read_text().strip().splitlines()[-1:] if code else []
            seen = f"exit {code} {' '.join(last)}".strip()
            results.add(f"{image.architecture}: deploykit {words[0]}", seen, code == 0)


def boot(results: Results, name: str, arch: str, arguments: dict[str, str]) -> None:
    """The image of a bundle: its first start and a second one from the cached engine."""
    if importlib.util.find_spec("deploykit.deploying.boot") is None:
        results.add(f"{arch}: first boot of a bundle", "not run: there is no `deploykit boot`")
        return
    with content() as (model, samples):
        bundle = model.parent / "bundle"
        dk.bundle(model, "cpu", out=bundle)
        if arch == "amd64":  # as it is, with the packages that it pins
            only = {"BASE": arguments["BASE"]}
            seconds = rig.build(bundle / "Dockerfile", arch, bundle, "bundle", only, "")
        else:
            context = build_context(model.parent / "context", bundle)
            seconds = rig.build(rig.ROOT / name, arch, context, "bundle", arguments, "bundle")
        with rig.opened("bundle") as image, engines() as volume:
            size = f"{seconds:.0f} s, {image.size_bytes / 1e6:.0f} MB"
            results.add(f"{arch}: image of a bundle built", size)
            with running(image, image.command(), None, volume) as (process, first):
                hardened(results, process)
                answers(results, process, "model", samples)
            with running(image, image.command(), None, volume) as (process, second):
                answers(results, process, "model", samples)
            if arch == "amd64":
                update(results, image, bundle, volume)
        held = arch != "amd64" or second <= READY_S
        results.add(f"{arch}: first boot to ready", f"{first:.1f} s", first <= FIRST_BOOT_S)
        results.add(f"{arch}: second boot to ready, cached engine", f"{second:.2f} s", held)


def update(results: Results, image: rig.Image, bundle: Path, volume: Path) -> None:
    """A new version on the same volume, back to the engine before it, and forth again."""
    new = bundle.with_name("new")
    dk.bundle(bundle / "model" / "model.onnx", "cpu", out=new, batch="1,2,4")
    for words, wanted in (
        ((), "build"),
        (("--rollback",), "previous"),
        ((), "previous"),
        (("--retry",), "cache"),
    ):
        with running(image, image.command(*words), new, volume) as (process, _):
            engine = json.loads(process.ready)["engine"]
            seen = f"serves from: {engine['source']}, {engine['slot'][0]} ({engine['why'][:60]})"
            held = engine["source"] == wanted and process.stop() == 0
        what = f"{image.architecture}: a new version, boot {' '.join(words)}".strip()
        results.add(what, seen, held)


def build_context(folder: Path, bundle: Path) -> Path:
    """The content of a bundle with this checkout in place of the packages that it pins."""
    shown = (rig.ROOT / ".dockerignore").read_text().splitlines()
    for name in (row[1:] for row in shown if row.startswith("!")):
        for source in (rig.ROOT / name, bundle / name):
            if source.is_dir() and name != "wheels":
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.is_file() and name != "requirements.lock":
                folder.mkdir(exist_ok=True)
                shutil.copyfile(source, folder / name)
    return folder


def wheels(results: Results) -> None:
    """Which wheels pip finds for aarch64 Pythons that were not run here."""
    for python, extras, seen, held in resolve_all():
        results.add(f"aarch64, Python {python}: wheels of [{extras}] resolve", seen, held)


def write(results: Results, only: str) -> None:
    machine = this_machine()
    date = datetime.datetime.now(datetime.timezone.utc).date()
    rows = "\n".join(
        f"| {what} | {seen} | {'yes' if held else '**no**'} |" for what, seen, held in results.rows
    )
    part = "" if only == ",".join(PARTS) else f" --only {only}"
    text = f"""# containers

`python -m scripts.containers.run{part}` (`make containers-test`), {date}. No GPU, no NVIDIA image,
no Jetson: Debian 12 stands in for each base, qemu-user 7.2 for the arm64 processor.

{machine.cpu}, {machine.physical_cores} cores, {machine.system}; Python {machine.python};
{rig.buildah("--version")}; deploykit {dk.__version__}

| what | seen | held |
|---|---|---|
{rows}
"""
    slug = "-".join(machine.cpu.lower().split()) + f"-{machine.physical_cores}-cores"
    out = rig.ROOT / "benchmarks" / "results" / f"containers_{slug}_{date}.md"
    out.write_text(text, encoding="utf-8")


PARTS: dict[str, Callable[[Results], None]] = {
    "lint": lint,
    "x86": x86,
    "arm64": arm64,
    "wheels": wheels,
}

if __name__ == "__main__":
    sys.exit(main())
