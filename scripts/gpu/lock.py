"""Does a thread that waits for the GPU leave Python's lock to the others?

    python -m scripts.gpu.lock

One thread waits for copies that take a while, this one counts. Prints JSON; exit 1 where this
thread was held: cuda-bindings below 12.9.1 keep the lock in `cudaEventSynchronize`. Other work on
the machine may hold it, too: one wait in which it was free is enough.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from deploykit.engines.cuda.driver import CudaDevice

COPIES, NBYTES = 40, 256 << 20
LEAST = 1000  # turns of an empty loop; 378 to 1 was seen between both, with a sleep in each turn
WAITS = 10  # at most


def main() -> int:
    cuda = CudaDevice(0)
    for _ in range(WAITS):
        found = watch(cuda)
        held = found["waited_s"] > 0.05 and found["turns"] < LEAST
        if not held:
            break
    sys.stdout.write(json.dumps(found) + "\n")
    if held:
        sys.stderr.write(f"error: {found['turns']} turns of a loop while another thread waited\n")
    return int(held)


def watch(cuda: CudaDevice) -> dict[str, float]:
    """The seconds of a wait, and how often this thread went through a loop meanwhile."""
    nbytes = min(NBYTES, cuda.memory()[0] // 4)
    stream, event = cuda.open_stream(), cuda.open_event()
    host, device = cuda.pin(nbytes), cuda.allocate(nbytes)
    for _ in range(COPIES):
        cuda.copy_in(device, host, nbytes, stream)
    cuda.record(event, stream)
    ready = threading.Event()
    seconds = 0.0

    def wait() -> None:
        nonlocal seconds
        cuda.use()
        ready.set()
        started = time.perf_counter()
        cuda.wait(event)
        seconds = time.perf_counter() - started

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    turns = 0
    while thread.is_alive():
        turns += 1
    thread.join()
    cuda.unpin(host)
    cuda.free(device)
    cuda.close_event(event)
    cuda.close_stream(stream)
    return {"waited_s": seconds, "turns": turns, "copied_bytes": COPIES * nbytes}


if __name__ == "__main__":
    sys.exit(main())
