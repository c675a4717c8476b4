"""What a further worker of `serve --workers` takes: memory, and CPU time for each request.

    python benchmarks/worker_memory.py MODEL.onnx [--workers 1,2,3] [--requests 60]

MODEL has one input of numbers whose axes are fixed but for the batch. "PSS": of the server and all
its workers; pages that several of them map count once. "own": what each of them alone holds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from deploykit.core.artefact import Artefact
from deploykit.core.tensors import PROTOCOL_NAMES


def rollup_mib(pid: int, field: str) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(rf"^{field}:\s+(\d+)", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") * 1e3


def request(model: Path) -> tuple[bytes, dict[str, str]]:
    """One row of noise in the binary form of the protocol, and its headers."""
    manifest = Artefact.open(model).manifest
    assert manifest is not None, "MODEL has no manifest"
    (spec,) = manifest.inputs
    shape = [1 if isinstance(axis, str) else axis for axis in spec.shape]
    row = np.random.default_rng(0).integers(0, 255, shape).astype(spec.dtype).tobytes()
    item = {"name": spec.name, "shape": shape, "datatype": PROTOCOL_NAMES[spec.dtype]}
    document = {
        "inputs": [{**item, "parameters": {"binary_data_size": len(row)}}],
        "parameters": {"binary_data_output": True},
    }
    head = json.dumps(document).encode()
    return head + row, {"Inference-Header-Content-Length": str(len(head))}


def measure(model: Path, workers: int, count: int) -> tuple[float, list[float], float]:
    """PSS, what each process has of its own, and CPU ms for a request, of all processes."""
    body, headers = request(model)
    options = ["--http-port", "0", "--grpc-port=none", "--threads", "1", "--workers", str(workers)]
    command = [sys.executable, "-m", "deploykit", "serve", f"m={model}", *options]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=pipe, stderr=nothing, text=True) as server:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["http"]
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
        pids = [server.pid, *map(int, children.split())]
        before_ms = sum(map(cpu_ms, pids))
        for _ in range(count):  # a connection for each: the kernel divides them
            connection = http.client.HTTPConnection(address)
            connection.request("POST", "/v2/models/m/infer", body, headers)
            reply = connection.getresponse()
            reply.read()
            assert reply.status == 200
            connection.close()
        spent_ms = (sum(map(cpu_ms, pids)) - before_ms) / count
        pss = sum(rollup_mib(pid, "Pss") for pid in pids)
        own = [rollup_mib(pid, "Private_Dirty") for pid in pids]
        server.terminate()
    return pss, own, spent_ms


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--workers", default="1,2,3")
    parser.add_argument("--requests", type=int, default=60)
    given = parser.parse_args()
    print("| workers | PSS, MiB | one more | own, MiB | CPU ms for a request |")
    print("| --: | --: | --: | --- | --: |")
    last = None
    for workers in map(int, given.workers.split(",")):
        pss, own, spent_ms = measure(given.model, workers, given.requests)
        more = "" if last is None else f"{pss - last:.1f}"
        each = ", ".join(f"{mib:.0f}" for mib in own)
        print(f"| {workers} | {pss:.1f} | {more} | {each} | {spent_ms:.1f} |", flush=True)
        last = pss


if __name__ == "__main__":
    main()
