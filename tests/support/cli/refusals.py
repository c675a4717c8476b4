"""A refusal as the commands owe it to a file made to do harm."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.support.cli.command import Run

LIMIT_S = 5.0  # of this process: what the machine does besides does not count

Maker = Callable[[Path], Path]


def refused(run: Run, *arguments: object, naming: str) -> str:
    began = time.process_time()
    ran = run(*arguments)
    assert ran.code == 2, (ran.out, ran.err)
    assert naming in ran.error()
    assert time.process_time() - began < LIMIT_S
    return ran.err
