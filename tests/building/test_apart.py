"""Builds in a process of their own, as on boards where CPU and GPU share memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import deploykit as dk
from deploykit.building.builder import BuildResult, Shapes
from deploykit.building.tensorrt.build import workspace_that_fits
from deploykit.building.tensorrt.prove import build_engine
from deploykit.core.artefact import Artefact
from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported
from deploykit.core.memory import BuildMemory
from deploykit.core.profile import load_profile
from deploykit.core.subprocesses import run_apart
from tests.support.runtimes.gpu_machine import gpu_machine

ORIN = "jetson-orin-nano-8gb"
CHILD = """
import sys
from tests.support.runtimes.fake_tensorrt import Behaviour, FakeTensorRt
sys.modules["tensorrt"] = FakeTensorRt(
    does=Behaviour(version="10.3.0", strong_error={error!r})
)
sys.modules["cuda"] = None
from deploykit.core.subprocesses import main
main()
"""
GIB = 1 << 30


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(
        "deploykit.core.subprocesses.module_command", lambda _module, number: [*command, number]
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


def build(model: Path, out: Path, on_progress: Any = None, profile: str = ORIN) -> BuildResult:
    return build_engine(Artefact.open(model), out, load_profile(profile), Shapes(), on_progress)


def test_a_shared_memory_builds_in_another_process_and_reports_progress(
    monkeypatch: pytest.MonkeyPatch, model: Path, out: Path
) -> None:
    child(monkeypatch, CHILD.format(error=None))
    phases: list[str] = []
    built = build(model, out, lambda phase, _share: phases.append(phase))
    assert "tensorrt" not in sys.modules
    assert out.exists()
    assert built.built_on["tensorrt"] == "10.3.0"
    assert {"parsing", "Building engine", "built"} <= set(phases)


def test_an_error_there_is_the_error_here(
    monkeypatch: pytest.MonkeyPatch, model: Path, out: Path
) -> None:
    child(monkeypatch, CHILD.format(error="no tactics within workspace limit"))
    with pytest.raises(Unsupported, match="no kernel fits into the workspace") as caught:
        build(model, out)
    assert caught.value.hint == "a larger `workspace_bytes` in the profile"
    assert not out.exists()


def test_a_process_that_reported_an_error_is_not_interrupted(
    monkeypatch: pytest.MonkeyPatch, model: Path, out: Path, tmp_path: Path
) -> None:
    """An interrupt then is a traceback among the messages of a device."""
    end = f"import time; time.sleep(0.3); open({str(tmp_path / 'ended')!r}, 'w')"
    child(monkeypatch, CHILD.format(error="no tactics within workspace limit") + end)
    with pytest.raises(Unsupported):
        build(model, out)
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    ("end", "error", "says"),
    [
        ("os.kill(os.getpid(), 9)", OutOfMemory, "the system ended it"),
        ("os._exit(7)", DeploykitError, "ended with code 7"),
        ("os.kill(os.getpid(), 11)", DeploykitError, "ended with code -11"),
    ],
)
def test_a_build_that_is_killed_is_an_error_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, model: Path, out: Path, end: str, error: type, says: str
) -> None:
    child(monkeypatch, f"import os; {end}")
    with pytest.raises(error, match=says) as caught:
        build(model, out)
    assert type(caught.value) is error


def test_an_interrupted_caller_stops_the_build(
    monkeypatch: pytest.MonkeyPatch, model: Path, out: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "stopped"
    child(
        monkeypatch,
        f"""
import signal, sys, time
from multiprocessing.connection import Connection
try:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGINT}})
    pipe = Connection(int(sys.argv[1]))
    pipe.send(("progress", "x", 0.1))
    time.sleep(60)
except KeyboardInterrupt:
    open({str(mark)!r}, "w").close()
""",
    )

    def stop(phase: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(model, out, stop)
    assert mark.exists()


def test_an_interrupt_during_the_imports_of_the_build_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The child interrupts itself where Ctrl-C may hit it: before it can answer."""
    early = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
    child(monkeypatch, early + "from deploykit.core.subprocesses import main; main()")
    with pytest.raises(KeyboardInterrupt):
        run_apart("x", len, ())
    assert capfd.readouterr().err == ""


def test_a_discrete_gpu_builds_in_this_process(
    monkeypatch: pytest.MonkeyPatch, model: Path, out: Path
) -> None:
    child(monkeypatch, "raise SystemExit(9)")
    with pytest.raises(DeploykitError) as caught:
        build(model, out, profile="l4")
    assert "code 9" not in caught.value.message


def test_shared_memory_holds_three_copies_of_the_weights_and_the_builder() -> None:
    need = BuildMemory(GIB, GIB, 0, shared=True)
    assert workspace_that_fits(need, 5 * GIB, "m") == GIB
    assert workspace_that_fits(need, 5 * GIB - 1, "m") == GIB - 1
    with pytest.raises(Unsupported, match="4,096 MiB of GPU memory for the builder"):
        workspace_that_fits(need, 4 * GIB, "m")
    assert workspace_that_fits(BuildMemory(GIB, GIB, 0), 2 * GIB, "m") == GIB


def test_build_and_proof_are_on_the_gpu_of_that_number(
    monkeypatch: pytest.MonkeyPatch, affine_onnx: Path, tmp_path: Path
) -> None:
    with gpu_machine(tmp_path, monkeypatch) as does:
        made = dk.build(affine_onnx, "l4", shapes=Shapes(device=1))
        assert made.manifest.evidence.parity is not None
        assert set(does.seen["devices"]) == {1}
