"""What decodes a JPEG for the server: CPU time, and how long other threads wait meanwhile.

`python benchmarks/decoders.py` prints a table; decoders that are not installed are left out
(`pip install simplejpeg PyTurboJPEG`). "waits": p99 of how late a thread that sleeps for 1 ms wakes
up while two threads decode. "hashing" in place of it holds no lock: the machine.
"""

from __future__ import annotations

import hashlib
import io
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

SIZES = ((224, 224), (427, 640), (3000, 4000))
SIDE = 224  # what it is resized to
CPU_S, WAIT_S = 1.0, 2.0
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


def pillow(data: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(data), formats=("JPEG",)).convert("RGB")
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def hashing(_: bytes) -> np.ndarray:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2000)
    return np.empty(0)


def decoders() -> dict[str, Decode]:
    found: dict[str, Decode] = {"Pillow": pillow}
    try:
        import simplejpeg

        found["simplejpeg"] = lambda data: resized(simplejpeg.decode_jpeg(data))
    except ImportError:
        pass
    try:
        import turbojpeg

        turbo = turbojpeg.TurboJPEG()
        found["PyTurboJPEG"] = lambda data: resized(turbo.decode(data, turbojpeg.TJPF_RGB))
    except (ImportError, RuntimeError):
        pass
    return {**found, "hashing": hashing}


def cpu_ms(decode: Decode, data: bytes) -> float:
    decode(data)
    begin_s, count = time.thread_time(), 0
    while time.thread_time() - begin_s < CPU_S:
        decode(data)
        count += 1
    return (time.thread_time() - begin_s) / count * 1e3


def wait_ms(decode: Decode, data: bytes) -> float:
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            decode(data)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    late, end_s = [], time.perf_counter() + WAIT_S
    while (now_s := time.perf_counter()) < end_s:
        time.sleep(0.001)
        late.append(time.perf_counter() - now_s - 0.001)
    done.set()
    for thread in threads:
        thread.join()
    return float(np.quantile(late, 0.99)) * 1e3


def main() -> None:
    sys.setswitchinterval(0.0005)  # the server's
    print(f"Python {sys.version.split()[0]}, Pillow {Image.__version__}\n")
    print("| JPEG | decoder | CPU ms | waits, p99 ms |\n| --- | --- | --: | --: |")
    for height, width in SIZES:
        data = jpeg(height, width)
        name = f"{width}x{height}, {len(data) / 1024:.0f} KiB"
        for decoder, decode in decoders().items():
            print(
                f"| {name} | {decoder} | {cpu_ms(decode, data):.2f} | {wait_ms(decode, data):.2f} |"
            )


if __name__ == "__main__":
    main()
