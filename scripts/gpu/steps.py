"""One step of the GPU test: a process with a time limit, and what became of it.

In: a command. Out: `Result`, never an exception: a step that hangs is killed with all that it
started, one that crashes has its last line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = sys.executable
LOADED_S = 3600  # the limit of a rehearsal's step, whose cores others may use
_SHOWN = 6  # figures of a row


@dataclass(frozen=True)
class Step:
    """`skip`: why it cannot run here. `after`: the title of a step that must have passed.

    `refusal`: the exit code with which a gate says no, which is an answer and no failure; 0 for
    none. `measures`: it prints what it measured, as JSON; without that nothing was.
    """

    part: str
    title: str
    command: Sequence[str]
    limit_s: float
    skip: str = ""
    after: str = ""
    refusal: int = 0
    measures: bool = False

    @property
    def log(self) -> str:
        """The name of its log, without the ending."""
        return re.sub(r"[^\w.-]+", "-", f"{self.part}-{self.title}").strip("-")


@dataclass(frozen=True)
class Result:
    """`status`: passed, failed, refused (by a gate) or skipped. `figures`: numbers it printed."""

    step: Step
    status: str
    seconds: float = 0.0
    why: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.status}: {self.step.part}: {self.step.title} ({self.seconds:.0f} s){why}"

    @property
    def row(self) -> str:
        """Of the Markdown table."""
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in self.figures.items())
        text = (self.why or numbers).replace("|", "\\|")
        step = self.step
        return f"| {step.part} | {step.title} | {self.status} | {self.seconds:.0f} | {text} |"

    def to_dict(self) -> dict[str, Any]:
        return {
            "part": self.step.part,
            "title": self.step.title,
            "command": list(self.step.command),
            "status": self.status,
            "seconds": round(self.seconds, 1),
            "why": self.why,
            "figures": self.figures,
        }


def run_step(step: Step, limit_s: float, out: Path) -> Result:
    """Run `step` for `limit_s` at most; what it wrote goes to a file of its name in `out`."""
    if step.skip:
        return Result(step, "skipped", why=step.skip)
    started = time.monotonic()
    process = subprocess.Popen(
        list(step.command),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},  # what a killed step has found is not lost
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
        over = ""
    except subprocess.TimeoutExpired:
        _kill(process)
        stdout, stderr = process.communicate()
        over = f"killed after {limit_s:.0f} s"
    except BaseException:
        _kill(process)
        raise
    seconds = time.monotonic() - started
    (out / f"{step.log}.log").write_text(f"{stdout}\n{stderr}", encoding="utf-8")
    if over:
        return Result(step, "failed", seconds, over, figures(stdout))
    if process.returncode != 0:
        refused = step.refusal and process.returncode == step.refusal
        why = reason(stdout, stderr, process.returncode)
        return Result(step, "refused" if refused else "failed", seconds, why, figures(stdout))
    found = figures(stdout)
    if found.get("skipped") and not found.get("passed"):  # pytest calls that a success
        return Result(step, "skipped", seconds, skips(stdout), found)
    if step.measures and not report(stdout):
        return Result(
            step, "skipped", seconds, f"nothing was measured: {reason(stdout, stderr, 0)}"
        )
    return Result(step, "passed", seconds, "", found)


def skips(stdout: str) -> str:
    """The reasons that pytest's summary gives, each once."""
    lines = re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", stdout, re.MULTILINE)
    return "; ".join(dict.fromkeys(lines))[:300] or "every test was skipped"


def _kill(process: subprocess.Popen[str]) -> None:
    """End the process and what it started, in other sessions too, as torchrun's processes are."""
    family = [process.pid]
    for pid in family:  # which grows
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            family += map(int, children.split())
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def reason(stdout: str, stderr: str, code: int) -> str:
    """Its `error:` line, else its last line, else the signal or code it ended with."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in [*stdout.splitlines(), *stderr.splitlines()] if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (named or lines[-1:] or [f"exit {code}"])[-1][:300]


def figures(stdout: str) -> dict[str, Any]:
    """The first numbers at the top level of the JSON it printed last, or pytest's counts."""
    if found := report(stdout):
        numbers = {k: v for k, v in flat(found).items() if type(v) in (int, float)}
        return dict(list(numbers.items())[:_SHOWN])
    last = "".join(stdout.strip().splitlines()[-1:])
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", last)
    return {name: int(count) for count, name in counts}


def report(stdout: str) -> dict[str, Any]:
    """The JSON object that it printed last, or as a whole; empty if it printed none."""
    for text in (stdout, *reversed(stdout.strip().splitlines())):
        with contextlib.suppress(ValueError):
            found = json.loads(text)
            if isinstance(found, dict):
                return found
    return {}


def flat(document: dict[str, Any]) -> dict[str, Any]:
    """The document's own values, and the numbers that say what was proven."""
    found = dict(document)
    if isinstance(parity := document.get("parity"), dict) and parity.get("rows"):
        ratios = [row["sqnr_db"] for row in parity["rows"] if row["sqnr_db"] is not None]
        found["error"] = max(row["error"] or 0 for row in parity["rows"])
        found |= {"sqnr_db": min(ratios)} if ratios else {}
    for name in ("drop", "accuracy"):
        if isinstance(part := document.get(name), dict):
            value = part.get(name, part.get("value"))
            found[name] = value["value"] if isinstance(value, dict) else value
    for name in ("calls", "openings"):
        if isinstance(part := document.get(name), dict):
            found |= {f"{name}.{key}": part[key] for key in part if "growth" in key}
    return found
