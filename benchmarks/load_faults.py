"""Whether the load generator sees its own faults, and finds none where there are none.

    cc -O2 -o /tmp/load_native benchmarks/load_native.c -lm
    python benchmarks/load_faults.py /tmp/load_native [--clean 20] [--seconds 3]

A native server answers after 1 ms. Each fault is put into a generator's process of its own; what
the run says of it is printed. A run without a fault follows, as often as asked. Takes three
minutes, and needs a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "serve"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from child import header
from processes import free_port

from deploykit.core.subprocesses import run_apart
from deploykit.loadtest.client import Client
from deploykit.loadtest.result import summarise
from deploykit.loadtest.schedule import Load, RunRecord, SendPlan
from deploykit.loadtest.target import RemoteModel, find_model, make_requests
from tests.gpu.guard import workplace

RATE, CONNECTIONS, SERVICE_US = 300.0, 4, 1000


def slow(name: str, seconds: float, every: int = 1, busy: bool = False) -> Callable[[Client], None]:
    """Take `seconds` more in each `every`-th call of a method."""

    def inject(client: Client) -> None:
        method, calls = getattr(client, name), [0]

        def slower(*words: Any) -> Any:
            calls[0] += 1
            if calls[0] % every == 0:
                until = time.perf_counter() + seconds
                while busy and time.perf_counter() < until:
                    pass
                time.sleep(0 if busy else seconds)
            return method(*words)

        setattr(client, name, slower)

    return inject


def stopped(seconds: float, every_s: float) -> Callable[[Client], None]:
    """SIGSTOP for `seconds` in each `every_s`, by a process outside."""

    def inject(_client: Client) -> None:
        script = (
            "import os,sys,time,signal\n"
            "pid, stop_s, every_s = int(sys.argv[1]), *map(float, sys.argv[2:])\n"
            "while os.getppid() == pid:\n"
            "    time.sleep(every_s - stop_s)\n"
            "    if os.getppid() != pid: break\n"
            "    os.kill(pid, signal.SIGSTOP)\n"
            "    time.sleep(stop_s); os.kill(pid, signal.SIGCONT)\n"
        )
        words = [str(os.getpid()), str(seconds), str(every_s)]
        subprocess.Popen([sys.executable, "-c", script, *words])

    return inject


def rivals(count: int) -> Callable[[Client], None]:
    """Other processes on the generator's core, which it is bound to."""

    def inject(_client: Client) -> None:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        for _ in range(count):
            script = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100000))"
            subprocess.Popen([sys.executable, "-c", script])

    return inject


def thread_of_python(_client: Client) -> None:
    """Another thread that keeps Python's lock as long as it may."""

    def spin() -> None:
        while True:
            sum(range(200_000))

    threading.Thread(target=spin, daemon=True).start()


def coarse_timer(client: Client) -> None:
    """Wait in steps of 10 ms, as a coarse timer does."""
    wait = client._wait

    def coarse(now: float) -> Any:
        time.sleep(0.01 - time.perf_counter() % 0.01)
        return wait(now)

    client._wait = coarse  # type: ignore[method-assign]


OPEN: dict[str, Callable[[Client], None]] = {
    "1 ms asleep for each answer": slow("_free", 0.001),
    "1 ms asleep before each sending": slow("_write", 0.001),
    "0.7 ms busy for each answer": slow("_free", 0.0007, busy=True),
    "20 ms busy for each 50th answer": slow("_free", 0.02, every=50, busy=True),
    "SIGSTOP for 200 ms each second": stopped(0.2, 1.0),
    "SIGSTOP for 30 ms each 300 ms": stopped(0.03, 0.3),
    "2 busy processes on its core": rivals(2),
    "a thread that keeps Python's lock": thread_of_python,
    "a timer of 10 ms": coarse_timer,
}
CLOSED = {name: fault for name, fault in OPEN.items() if name != "20 ms busy for each 50th answer"}


def generate(plan: SendPlan, fault: str, _progress: object = None) -> RunRecord:
    """One run, in a process of its own, as `run_plan` has it."""
    client = Client(plan)
    gc.collect()
    gc.disable()
    if fault:
        OPEN[fault](client)
    return client.run()


def run(remote: RemoteModel, loop: str, fault: str, seconds: float) -> tuple[str, ...]:
    load = Load(RATE if loop == "open" else None, CONNECTIONS, 0.5, seconds)
    if loop == "open":
        load = Load(RATE, 256, 0.5, seconds)
    plan = remote.plan(make_requests(remote), load, load.due_s(seed=0))
    import load_faults  # by its name: the other process cannot import `__main__`

    outcome = run_apart("a run", load_faults.generate, plan, fault)
    found: tuple[str, ...] = summarise(load, [outcome])["limits"]
    return found


@contextmanager
def serving(native: str) -> Iterator[str]:
    """The native server, stopped at the end, also where this process is killed."""
    port = free_port()
    with workplace("load-faults-"):
        server = subprocess.Popen([native, "serve", str(port), str(SERVICE_US)])
        time.sleep(0.5)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("native")
    parser.add_argument("--clean", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--no-faults", action="store_true")
    options = parser.parse_args(words)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])  # of the processes of its own
    print(header("The load generator's own faults"))
    print("| loop | fault | what the run says |\n|---|---|---|")
    with serving(options.native) as url:
        remote = find_model(url, "m")
        seen = tried = false = 0
        for loop, faults in (("open", OPEN), ("closed", CLOSED)):
            for fault in () if options.no_faults else faults:
                limits = run(remote, loop, fault, options.seconds)
                seen, tried = seen + bool(limits), tried + 1
                print(f"| {loop} | {fault} | {'; '.join(limits) or 'NOTHING'} |", flush=True)
        for number in range(options.clean):
            loop = ("open", "closed")[number % 2]
            if limits := run(remote, loop, "", options.seconds):
                false += 1
                print(f"| {loop} | none | {'; '.join(limits)} |", flush=True)
    marked = f"{false} of {options.clean} clean runs were marked"
    print(f"\n{seen} of {tried} faults were seen; {marked}.")


if __name__ == "__main__":
    main()
