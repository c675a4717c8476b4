"""Does a thread that waits for the GPU leave Python's lock to the others?

    python -m tests.gpu.lock

One thread waits for copies that take a while, this one counts. Prints JSON; exit 1 where this
thread was held: cuda-bindings below 12.9.1 keep the lock in `cudaEventSynchronize`.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from deploykit.runtimes.cuda.driver import CudaDevice

COPIES, NBYTES = 40, 256 << 20
LEAST = 1000  # turns of an empty loop; 378 to 1 was seen between both, with a sleep in each turn


def main() -> int:
    cuda = CudaDevice(0)
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
    found = {"waited_s": seconds, "turns": turns, "copied_bytes": COPIES * nbytes}
    sys.stdout.write(json.dumps(found) + "\n")
    if seconds > 0.05 and turns < LEAST:
        sys.stderr.write(f"error: {turns} turns of a loop while another thread waited\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
