"""Call an engine many times and see whether memory grows.

    python -m scripts.gpu.leak onnxruntime-cuda [--calls 10000] [--openings 30]

In: a runtime of the conformance suite. Out, as JSON: this process's memory and the GPU's before,
during and after, and the largest growth once warm. First `calls` calls of batches that change, then
`openings` times open, call, close. Exit 1 when memory grew past its bound, 3 where the runtime is
not on this machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.runtimes.cases import AFFINE, LARGEST_BATCH, MASK, OPENERS, Case, absent

MIB = 1 << 20
# Growth that is none: the allocators of C and Python settle within these after the warm-up, while
# one lost buffer of 1 KiB a call is 9.8 MiB in 10,000.
BOUND_RSS_BYTES, BOUND_GPU_BYTES = 6 * MIB, 4 * MIB
_LOOKS = 10
_WARM = 3  # the first looks, in which pools and caches fill


def rss_bytes() -> int:
    """This process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def gpu_bytes() -> int | None:
    """Memory in use on GPU 0 by everyone, as its driver counts it; None without a GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    command = [smi, "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return int(said) * MIB if said.isdigit() else None


def watch(step: Callable[[int], object], count: int) -> dict[str, Any]:
    """Run step(0) ... step(count - 1); memory at `_LOOKS` equal distances, and what it grew by."""
    looks: list[tuple[int, int | None]] = []
    for number in range(count):
        step(number)
        if (number + 1) * _LOOKS // count > len(looks):
            gc.collect()
            looks.append((rss_bytes(), gpu_bytes()))
    rss, gpu = [look[0] for look in looks], [look[1] for look in looks]
    return {
        "steps": count,
        "rss_bytes": rss,
        "gpu_bytes": gpu,
        "rss_growth_bytes": growth(rss),
        "gpu_growth_bytes": growth(gpu),
    }


def growth(looks: Sequence[int | None]) -> int | None:
    """The last look less the highest of the warm-up, at least 0; None where one is not known."""
    known = [look for look in looks if look is not None]
    if len(known) < len(looks) or len(known) <= _WARM:
        return None
    return max(0, known[-1] - max(known[:_WARM]))


def grew(part: dict[str, Any]) -> str:
    """What grew past its bound; empty if nothing did."""
    rss, gpu = part["rss_growth_bytes"] or 0, part["gpu_growth_bytes"] or 0
    texts = []
    if rss > BOUND_RSS_BYTES:
        texts.append(f"this process grew by {rss / MIB:.1f} MiB")
    if gpu > BOUND_GPU_BYTES:
        texts.append(f"memory in use on the GPU grew by {gpu / MIB:.0f} MiB")
    return " and ".join(texts)


def measure(runtime: str, calls: int, openings: int) -> dict[str, Any]:
    """Both parts: calls of one engine, then engines opened and closed."""
    case = AFFINE if runtime == "fake" else MASK
    feeds = [case.feeds(batch) for batch in (1, 7, 8, 33, LARGEST_BATCH)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with OPENERS[runtime](folder, case) as engine:
            called = watch(lambda number: engine(feeds[number % len(feeds)]), calls)
        opened = watch(
            lambda number: _open(runtime, folder / str(number), case, feeds[1]), openings
        )
    texts = [
        f"{what}: {text}"
        for what, part in (("calls", called), ("openings", opened))
        if (text := grew(part))
    ]
    return {"runtime": runtime, "calls": called, "openings": opened, "grew": "; ".join(texts)}


def _open(runtime: str, folder: Path, case: Case, feeds: Any) -> None:
    folder.mkdir()
    with OPENERS[runtime](folder, case) as engine:
        engine(feeds)
    shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runtime", choices=OPENERS)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--openings", type=int, default=30)
    options = parser.parse_args()
    if reason := absent(options.runtime):
        sys.stderr.write(f"error: {options.runtime}: {reason}\n")
        return 3
    found = measure(options.runtime, options.calls, options.openings)
    sys.stdout.write(json.dumps(found) + "\n")
    if found["grew"]:
        sys.stderr.write(f"error: {options.runtime}: {found['grew']}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
