"""Children of this process when Ctrl-C or SIGTERM is sent to all of them, at any moment."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from deploykit.benchmarking.timing import ProcessEngine
from deploykit.core.subprocesses import module_command, run_apart
from tests.support.fake_engine import FakeEngine

INTERRUPTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


def at_start(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have children run `code` before their first own line."""
    (folder / "sitecustomize.py").write_text(code)
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{root}")


def clean_up_slowly(mark: Path, on_progress: object) -> None:
    """Interrupted twice, as by a terminal and then by the parent."""
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.raise_signal(signal.SIGINT)
        mark.touch()


def say_done(_on_progress: object) -> str:
    return "done"


def test_a_signal_does_not_end_what_was_just_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    at_start(tmp_path, monkeypatch, INTERRUPTED)
    with ProcessEngine(FakeEngine) as engine:
        assert engine({"x": np.ones((2, 4), np.float32)})["y"].shape == (2, 4)
    assert capfd.readouterr().err == ""


def test_a_second_interrupt_does_not_break_off_the_clean_up_after_the_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_apart("x", clean_up_slowly, tmp_path / "mark")
    assert (tmp_path / "mark").exists()
    assert capfd.readouterr().err == ""


def test_a_caller_that_ends_before_its_job_is_sent_leaves_no_traceback() -> None:
    job = pickle.dumps((time.sleep, (60,)))
    ours, theirs = Pipe()
    command = module_command("deploykit.core.subprocesses", str(theirs.fileno()))
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
        theirs.close()
        length = len(job).to_bytes(4, "big")  # as `Connection.send` puts it before
        os.write(ours.fileno(), (length + job)[: len(job) // 2])
        ours.close()
        assert process.communicate()[1] == b""


def test_a_child_imports_from_where_its_parent_does_and_not_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        command = module_command("only_here", "a b", "c")
    assert subprocess.check_output(command, text=True) == "__main__ ['a b', 'c']\n"
    for name in ("contextlib", "linecache", "numpy", "runpy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])  # as that of a Python prompt begins
    assert run_apart("x", say_done) == "done"
