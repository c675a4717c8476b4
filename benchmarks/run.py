"""`make bench`: run every benchmark here and write each result, with what made it, into results/.

In: nothing. Out: `results/NAME_MACHINE_DATE.md`. Absolute figures are this machine's; the ratios
inside one file are what to compare.

    python benchmarks/run.py [NAME ...]
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = {
    "start": ["start.py"],
    "serve_mnist": ["serve_mnist.py"],
}


def main() -> int:
    from deploykit.core.machine import this_machine

    wanted = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in wanted if name not in BENCHMARKS]
    if unknown:
        print(
            f"error: no benchmark '{unknown[0]}'; one of: {', '.join(BENCHMARKS)}", file=sys.stderr
        )
        return 2
    machine = this_machine()
    short = re.sub(r"[^a-z0-9]+", "-", f"{machine.cpu} {machine.usable_cores} cores".lower()).strip(
        "-"
    )
    date = datetime.date.today().isoformat()
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    (HERE / "results").mkdir(exist_ok=True)
    for name in wanted:
        command = BENCHMARKS[name]
        print(f"== {name}", flush=True)
        done = subprocess.run(
            [sys.executable, *command], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True
        )
        load = os.getloadavg()[0]
        text = (
            f"# {name}\n\n`python benchmarks/{' '.join(command)}`, {date}, "
            f"load average {load:.1f} at the end\n\n"
            f"{machine.cpu}, {machine.usable_cores} cores, {machine.system}, "
            f"{', '.join(machine.cpu_features)}; Python {machine.python}; {versions}\n\n"
            f"{done.stdout}"
        )
        out = HERE / "results" / f"{name}_{short}_{date}.md"
        out.write_text(text, encoding="utf-8")
        print(done.stdout)
        print(f"wrote {out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
