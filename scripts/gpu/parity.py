"""Two artefacts on the same inputs, each on its own device: how far is the second from the first?

    python -m scripts.gpu.parity typed.onnx plan.trt --precision fp16

Out, as JSON: the signal to noise ratio of the worst output at the worst batch, and the largest
error. Exit 1 below what the precision must reach. `deploykit compare` has one device for both.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from deploykit.core.errors import DeploykitError
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import load
from deploykit.evaluation.parity import compare_engines

# What a GPU must keep of the same graph's answer on a CPU. One rounding leaves 6 dB a bit of the
# mantissa: TF32, in which a GPU multiplies float32, and float16 have 10, bfloat16 7; a network of
# some fifty layers costs 15 to 20 dB of it. INT8 and FP8 differ where a value sits between two
# steps and the sums before it were made in another order.
LEAST_DB = {"fp32": 40.0, "fp16": 40.0, "bf16": 22.0, "int8": 20.0, "fp8": 20.0}
STEPS = 24  # of axis T


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--devices", default="cpu,cuda")
    parser.add_argument("--batches", default="1,3,8")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    device_a, device_b = options.devices.split(",")
    least_db = LEAST_DB[options.precision.partition("-")[0]]
    batches = [int(batch) for batch in options.batches.split(",")]
    try:
        with load(options.a, device_a) as a, load(options.b, device_b) as b:
            feeds = [random_feeds(a.inputs, {"N": n, "T": STEPS}, n) for n in batches]
            parity = compare_engines(a, b, feeds, max_error=sys.float_info.max)
            devices = f"{a.runtime} {a.device} -> {b.runtime} {b.device}"
    except DeploykitError as exc:
        sys.stderr.write(f"error: {exc.message}\n")
        return 2
    sqnr_db = min(row.sqnr_db for row in parity.rows)
    found = {
        "sqnr_db": sqnr_db if math.isfinite(sqnr_db) else None,
        "max_error": max(row.error for row in parity.rows),
        "least_db": least_db,
        "devices": devices,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    if not all(row.finite for row in parity.rows) or sqnr_db < least_db:
        sys.stderr.write(f"error: {sqnr_db:.1f} dB, {least_db:g} are needed ({devices})\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
