"""A process on our CUDA driver, `fakecuda.c`.

`test_driver_cases.py` needs one: `test_own_driver.py` runs it there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.nvidia import fetch

ROOT = Path(__file__).resolve().parents[2]
ON_DRIVER = os.environ.get("DEPLOYKIT_TEST_CUDA") == "driver"
collect_ignore = [] if ON_DRIVER else ["test_driver_cases.py"]


@pytest.fixture(scope="session")
def on_driver(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with `arguments` on this driver, with FAKECUDA_ `settings`."""
    folder = tmp_path_factory.mktemp("cuda")
    try:
        fetch.check_machine()
        source = Path(__file__).with_name("fakecuda.c").read_text(encoding="utf-8")
        fetch.library(folder / "libcuda.so.1", source)
    except fetch.Unobtainable as exc:
        pytest.skip(str(exc))

    def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        given = {key: text for key, text in os.environ.items() if not key.startswith("PYTEST_")}
        ours = {f"FAKECUDA_{key}": text for key, text in settings.items()}
        ours |= {"LD_LIBRARY_PATH": str(folder), "DEPLOYKIT_TEST_CUDA": "driver"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**given, **ours},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    return run
