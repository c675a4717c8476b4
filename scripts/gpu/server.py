"""A server on the GPU under load, and its GPU figures next to those of nvidia-smi.

    python -m scripts.gpu.server FOLDER [--device cuda] [--seconds 10]

Starts `deploykit serve` with the small CNN of the tests, then `deploykit load`; prints JSON. Exit 1
where a request failed, where the server does not end with 0 on SIGTERM, or where `/metrics` and
nvidia-smi disagree on the GPU's memory by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from scripts.gpu import builds
from scripts.gpu.steps import PYTHON

READY_S = 90
_SHARE = 0.05
_GAUGES = {"nv_gpu_memory_total_bytes": "memory.total", "nv_gpu_memory_used_bytes": "memory.used"}


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and server.poll() is None:
        try:
            fetch(f"{url}/v2/health/ready")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"error: the server was not ready in {READY_S} s (exit {server.poll()})")


def gauges(text: str) -> dict[str, float]:
    """The first GPU's, of Prometheus' text."""
    found = {}
    for name in _GAUGES:
        match = re.search(rf"^{name}{{[^}}]*}} ([0-9.e+]+)$", text, re.MULTILINE)
        if match:
            found[name] = float(match[1])
    return found


def smi() -> dict[str, float]:
    """The same as nvidia-smi tells them; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = f"--query-gpu={','.join(_GAUGES.values())}"
    command = ["nvidia-smi", "--id=0", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    cells = [cell.strip() for cell in done.stdout.split(",")]
    known = zip(_GAUGES, cells, strict=False)
    return {name: float(cell) * (1 << 20) for name, cell in known if cell.isdigit()}


def differences(ours: dict[str, float], theirs: dict[str, float]) -> list[str]:
    return [
        f"{name}: {ours.get(name)} in /metrics, {value:.0f} of nvidia-smi"
        for name, value in theirs.items()
        if abs(ours.get(name, 0.0) - value) > _SHARE * theirs["nv_gpu_memory_total_bytes"]
    ]


def measure(url: str, seconds: float) -> dict[str, Any]:
    command = [PYTHON, "-m", "deploykit", "load", url, "--concurrency", "16", "--json"]
    with subprocess.Popen([*command, "--duration", str(seconds)], stdout=subprocess.PIPE) as load:
        time.sleep(seconds / 2)
        ours, theirs = gauges(fetch(f"{url}/metrics")), smi()
        said = load.communicate()[0]
    found = json.loads(said) if load.returncode == 0 else {}
    numbers = {key: value for key, value in found.items() if type(value) in (int, float)}
    wrong = differences(ours, theirs) + (["the load test failed"] if load.returncode else [])
    per_s = found["ok"] / found["duration_s"] if found else 0.0
    return {"requests_per_s": per_s, **numbers, **ours, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    builds.make(options.folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [PYTHON, "-m", "deploykit", "serve", f"cnn={options.folder / 'cnn.onnx'}"]
    command += ["--device", options.device, "--http-port", str(port), "--grpc-port=none"]
    server = subprocess.Popen(command)
    try:
        wait_until_ready(url, server)
        found = measure(url, options.seconds)
        server.terminate()
        code = server.wait(30)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    wrong = [*found.pop("wrong"), *([f"the server ended with {code}"] if code else [])]
    sys.stdout.write(json.dumps(found) + "\n")
    if wrong:
        sys.stderr.write(f"error: {'; '.join(wrong)}\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
