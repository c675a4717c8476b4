"""`make bench`: run the benchmarks below and write each result, with what made it, into results/.

python benchmarks/run.py [NAME ...]
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

from child import header

HERE = Path(__file__).resolve().parent
BENCHMARKS = {"start": "start.py", "serve_mnist": "serve_mnist.py"}


def main() -> int:
    from deploykit.core.machine import this_machine

    wanted = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in wanted if name not in BENCHMARKS]
    if unknown:
        known = ", ".join(BENCHMARKS)
        print(f"error: no benchmark '{unknown[0]}'; one of: {known}", file=sys.stderr)
        return 2
    machine = this_machine()
    place = f"{machine.cpu} {machine.usable_cores} cores".lower()
    place = re.sub(r"[^a-z0-9]+", "-", place).strip("-")
    for name in wanted:
        print(f"== {name}", flush=True)
        sys.argv = [f"benchmarks/{BENCHMARKS[name]}"]  # which the header names
        head = header(name)
        command = [sys.executable, BENCHMARKS[name]]
        done = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, text=True, check=True)
        out = HERE / "results" / f"{name}_{place}_{datetime.date.today().isoformat()}.md"
        out.write_text(f"{head}\n{done.stdout}", encoding="utf-8")
        print(f"{done.stdout}\nwrote {out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
