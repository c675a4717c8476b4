"""Faults made on purpose on a GPU: what our CUDA layer answers, and that nothing hangs.

    python -m scripts.gpu.faults [NAME ...]

Each fault has a process of its own, as some end the context of theirs. Prints JSON: what each was
answered with. Exit 1 if one was answered otherwise than it must be. Those that need a kernel need
torch with CUDA and are named as skipped without it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

LIMIT_S = 120
_BEGIN = """
import os, signal, sys, time
from deploykit.core.errors import DeploykitError, DeviceLost, OutOfMemory
from deploykit.engines.cuda.driver import CudaDevice
cuda = CudaDevice(0)
"""
# Each prints what happened on its last line; the second value is what that must be.
FAULTS: dict[str, tuple[str, str]] = {
    "memory-full": (
        """
held, size = [], cuda.memory()[0] // 2
while size >= 1 << 20:
    try:
        held.append(cuda.allocate(size))
    except OutOfMemory:
        size //= 2
try:
    cuda.allocate(cuda.memory()[1])
except OutOfMemory as exc:
    refused = "needed" in exc.message
for address in held:
    cuda.free(address)
cuda.free(cuda.allocate(1 << 20))
print("refused with sizes, then works" if refused else "no sizes")
""",
        "refused with sizes, then works",
    ),
    "freed-twice": (
        """
address = cuda.allocate(1 << 20)
cuda.free(address)
try:
    cuda.free(address)
    print("accepted")
except DeploykitError as exc:
    print("refused")
cuda.free(cuda.allocate(1 << 20))
""",
        "refused",
    ),
    "fork": (
        """
child = os.fork()
if child == 0:
    try:
        cuda.allocate(1 << 20)
        os._exit(0)
    except DeploykitError:
        os._exit(9)
    except BaseException:
        os._exit(8)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
cuda.free(cuda.allocate(1 << 20))
print({9: "refused in the child, the parent works"}.get(code, f"the child ended with {code}"))
""",
        "refused in the child, the parent works",
    ),
    "wild-pointer": (
        """
import torch
table = torch.zeros(4, device="cuda")
try:
    _ = table[torch.tensor([10**9], device="cuda")]  # an assertion in the kernel
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    cuda.check()
    print("the device still answers")
except DeviceLost:
    print("device lost")
""",
        "device lost",
    ),
}
_SIGNALLED = """
stream, event = cuda.open_stream(), cuda.open_event()
nbytes = 64 << 20
host, device = cuda.pin(nbytes), cuda.allocate(nbytes)
print("ready", flush=True)
while True:
    cuda.copy_in(device, host, nbytes, stream)
    cuda.record(event, stream)
    cuda.wait(event)
"""
NEEDS_TORCH = ("wild-pointer",)


def run(code: str, wanted: str) -> dict[str, Any]:
    command = [sys.executable, "-c", _BEGIN + code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "answer": f"no end in {LIMIT_S} s"}
    said = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    return {"ok": said[-1] == wanted, "answer": said[-1][:300], "code": done.returncode}


def signalled(number: int) -> dict[str, Any]:
    """A process in the middle of copies gets the signal: it must end by it, soon."""
    process = subprocess.Popen(
        [sys.executable, "-c", _BEGIN + _SIGNALLED], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        return {"ok": False, "answer": f"did not start: {process.wait()}"}
    time.sleep(0.1)
    started = time.monotonic()
    process.send_signal(number)
    try:
        code = process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return {"ok": False, "answer": "did not end in 20 s"}
    finally:
        process.stdout.close()
    seconds = time.monotonic() - started
    return {"ok": code in (-number, 1, 130), "answer": f"ended with {code}", "seconds": seconds}


def has_torch() -> bool:
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names or [*FAULTS, "sigterm", "sigint"]
    found: dict[str, dict[str, Any]] = {}
    torch = has_torch() if set(names) & set(NEEDS_TORCH) else True
    for name in names:
        if name in NEEDS_TORCH and not torch:
            found[name] = {"ok": None, "answer": "skipped: no torch that sees a GPU"}
        elif name.startswith("sig"):
            found[name] = signalled(int(getattr(signal, name.upper())))
        else:
            found[name] = run(*FAULTS[name])
    sys.stdout.write(json.dumps(found) + "\n")
    wrong = [f"{name}: {each['answer']}" for name, each in found.items() if each["ok"] is False]
    if wrong:
        sys.stderr.write(f"error: {'; '.join(wrong)}\n")
    return int(bool(wrong))


if __name__ == "__main__":
    os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "0")
    sys.exit(main())
