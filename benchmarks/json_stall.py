"""How long the event loop stands still while a thread decodes large JSON: why a process does it.

`python benchmarks/json_stall.py` prints a line for each size.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np
import orjson
import uvloop

from deploykit.core.tensors import TensorSpec
from deploykit.serving.models.offload import ThreadOffload
from deploykit.serving.oip import json
from deploykit.serving.oip.request import signature

SIZES_MB = (1, 10, 30, 64)
SPECS = [TensorSpec("x", "float32", ("N", "W"))]
MODEL = signature(SPECS, SPECS, 32, 1 << 30)


def make_body(size_mb: int) -> bytes:
    numbers = np.random.default_rng(0).random(size_mb * 1_000_000 // 20).tolist()
    entry = {"name": "x", "datatype": "FP32", "shape": [1, len(numbers)], "data": numbers}
    return orjson.dumps({"inputs": [entry]})


async def main() -> None:
    with ThreadOffload(asyncio.get_running_loop(), 2) as offload:
        for size_mb in SIZES_MB:
            body, done = make_body(size_mb), asyncio.Event()
            begun_s = last_s = time.perf_counter()
            longest_s = 0.0
            offload(lambda body=body: json.decode(body, None, MODEL), lambda _, d=done: d.set())
            while not done.is_set():
                await asyncio.sleep(0.001)
                now_s = time.perf_counter()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
            took_s = last_s - begun_s
            print(f"{len(body) / 1e6:.0f} MB: decoded in {took_s:.2f} s, stall {longest_s:.3f} s")


if __name__ == "__main__":
    uvloop.run(main())
