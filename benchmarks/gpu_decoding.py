"""JPEGs to 224x224 by Pillow, as the server decodes them, and by nvJPEG: images per second.

Used by `gpu_serve.py`. Pillow on one core and on all of them, each thread its own images; nvJPEG by
`torchvision.io.decode_jpeg` on the GPU, one image or 32 in a call, resized there, with the pixels
in the computer's memory at the end as a server needs them, and without that copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from decoders import SIDE, SIZES, jpeg, pillow

from deploykit.core.errors import first_line
from deploykit.core.machine import usable_cores

BATCH = 32
Row = dict[str, Any]


def rows(seconds: float) -> Iterator[Row]:
    """One of each way and size. A way that cannot run here has the reason in "why"."""
    for height, width in SIZES:
        data = jpeg(height, width)
        for way in (*on_cpu(data, seconds), *nvjpeg(data, seconds)):
            yield {"jpeg": f"{width}x{height}", "bytes": len(data), **way}


def on_cpu(data: bytes, seconds: float) -> Iterator[Row]:
    yield {"way": "Pillow, one core", "per_s": rate(partial(pillow, data), 1, seconds)}
    cores = usable_cores()
    with ThreadPoolExecutor(cores) as pool:

        def everywhere() -> None:
            list(pool.map(pillow, [data] * 4 * cores))

        yield {"way": f"Pillow, {cores} threads", "per_s": rate(everywhere, 4 * cores, seconds)}


def nvjpeg(data: bytes, seconds: float) -> Iterator[Row]:
    try:
        decode = on_gpu(data)
        exact = pillow(data).astype(np.int16)
        off = int(np.abs(decode(1, copy=True)[0].astype(np.int16) - exact).max())
    except (ImportError, RuntimeError, OSError) as exc:
        yield {"way": "nvJPEG", "per_s": None, "why": first_line(exc)}
        return
    for count in (1, BATCH):
        for copy in (True, False):
            where = "to the computer's memory" if copy else "left on the GPU"
            found = rate(partial(decode, count, copy=copy), count, seconds)
            yield {"way": f"nvJPEG, {count} a call, {where}", "per_s": found, "differs": off}


def on_gpu(data: bytes) -> Callable[..., Any]:
    """Raises RuntimeError where torch sees no GPU."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    if not torch.cuda.is_available():
        raise RuntimeError("this torch sees no GPU")
    read = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def decode(count: int, *, copy: bool) -> Any:
        images = decode_jpeg([read] * count, mode=ImageReadMode.RGB, device="cuda")
        small = torch.nn.functional.interpolate(
            torch.stack(images).float(), (SIDE, SIDE), mode="bilinear", antialias=True
        )
        pixels = small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        if copy:
            return pixels.cpu().numpy()
        torch.cuda.synchronize()
        return pixels

    return decode


def rate(call: Callable[[], object], images: int, seconds: float) -> float:
    """Images per second: the median of calls after one that warms up."""
    call()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return images / statistics.median(taken)
