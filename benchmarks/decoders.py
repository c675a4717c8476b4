"""What decodes a JPEG for the server: CPU time, Python's lock, and pixels that differ.

`python benchmarks/decoders.py` prints a table; decoders that are not installed are left out
(`pip install simplejpeg "PyTurboJPEG<2" opencv-python-headless`, `apt-get install libturbojpeg0`).
"CPU": decoding to RGB and resizing with Pillow. "lock": the longest that another thread waited for
Python's lock while the decoding thread had a core, which the load of the machine does not change.
"differs": the most that a pixel of the small image differs from Pillow's, of 255.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = ((224, 224), (427, 640), (3000, 4000))
SIDE = 224  # what it is resized to
CPU_S, WAIT_S = 1.0, 4.0
Decode = Callable[[bytes], np.ndarray]


def jpeg(height: int, width: int) -> bytes:
    """Smooth shapes with some noise, as a photo has: about 1 bit for each pixel."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    smooth = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(smooth + rng.integers(-6, 7, smooth.shape), 0, 255).astype(np.uint8)
    data = io.BytesIO()
    Image.fromarray(noisy).save(data, "JPEG", quality=85)
    return data.getvalue()


def resized(pixels: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def pillow(data: bytes, gap: int | None = None) -> np.ndarray:
    """`gap`: let libjpeg decode at the smallest scale that leaves so many times SIDE (`draft`)."""
    image = Image.open(io.BytesIO(data), formats=("JPEG",))
    if gap is not None:
        image.draft("RGB", (gap * SIDE, gap * SIDE))
    return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def decoders() -> dict[str, Decode]:
    found: dict[str, Decode] = {"Pillow": pillow}
    found |= {f"Pillow, scaled, {gap}x": partial(pillow, gap=gap) for gap in (1, 2, 4)}
    with contextlib.suppress(ImportError):
        import simplejpeg

        found["simplejpeg"] = lambda data: resized(simplejpeg.decode_jpeg(data))
    with contextlib.suppress(ImportError, RuntimeError):
        import turbojpeg

        turbo = turbojpeg.TurboJPEG()
        found["PyTurboJPEG"] = lambda data: resized(turbo.decode(data, turbojpeg.TJPF_RGB))
    with contextlib.suppress(ImportError):
        import cv2

        rgb = cv2.IMREAD_COLOR_RGB
        found["OpenCV"] = lambda data: resized(cv2.imdecode(np.frombuffer(data, np.uint8), rgb))
    with contextlib.suppress(ImportError, RuntimeError):  # an operator that its torch does not have
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg

        def torchvision(data: bytes) -> np.ndarray:
            read = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return resized(decode_jpeg(read, ImageReadMode.RGB).permute(1, 2, 0).numpy())

        found["torchvision"] = torchvision
    return found


def cpu_ms(decode: Decode, data: bytes) -> float:
    decode(data)
    begin_s, count = time.thread_time(), 0
    while time.thread_time() - begin_s < CPU_S:
        decode(data)
        count += 1
    return (time.thread_time() - begin_s) / count * 1e3


def lock_ms(decode: Decode, data: bytes) -> float:
    done = threading.Event()
    thread = threading.Thread(target=lambda: [decode(data) for _ in iter(done.is_set, True)])
    thread.start()
    ours, theirs = threading.get_native_id(), thread.native_id
    assert theirs is not None
    longest, end_s, nap_ms = 0.0, time.perf_counter() + WAIT_S, 0.5
    before = (time.perf_counter() * 1e3, *scheduled_ms(ours), *scheduled_ms(theirs))
    while time.perf_counter() < end_s:
        time.sleep(nap_ms / 1e3)
        after = (time.perf_counter() * 1e3, *scheduled_ms(ours), *scheduled_ms(theirs))
        gap, ran, queued, theirs_ran, _ = (b - a for a, b in zip(before, after, strict=True))
        longest, before = max(longest, min(gap - nap_ms - ran - queued, theirs_ran)), after
    done.set()
    thread.join()
    return longest


def scheduled_ms(thread: int) -> tuple[float, float]:
    """How long a thread has run, and waited for a core."""
    ran, queued, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    return int(ran) / 1e6, int(queued) / 1e6


def main() -> None:
    sys.setswitchinterval(0.0005)  # the server's
    print(f"Python {sys.version.split()[0]}, Pillow {Image.__version__}\n")
    print(
        "| JPEG | decoder | CPU ms | lock, longest ms | differs |\n| --- | --- | --: | --: | --: |"
    )
    for height, width in SIZES:
        data = jpeg(height, width)
        name, exact = f"{width}x{height}, {len(data) / 1024:.0f} KiB", pillow(data).astype(np.int16)
        for decoder, decode in decoders().items():
            off = np.abs(decode(data) - exact).max()
            times = f"{cpu_ms(decode, data):.2f} | {lock_ms(decode, data):.2f}"
            print(f"| {name} | {decoder} | {times} | {off} |", flush=True)


if __name__ == "__main__":
    main()
