"""The GPU test's own machinery, on any machine: how a step's end is called, what is planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts.gpu import builds, carry, leak, run, server, session
from scripts.gpu.steps import PYTHON, ROOT, Result, Step, figures, run_step
from scripts.nvidia import fetch
from tests.support.campaign import rounds

MIB = leak.MIB


def step(code: str, *, limit_s: float = 60, title: str = "x", after: str = "") -> Step:
    command = [PYTHON, "-c", code]
    return Step("part", title, command, limit_s, after=after, refusal=1, measures=title == "x")


@pytest.mark.parametrize(
    ("code", "status", "why"),
    [
        ("print('{\"ms\": 1.5}')", "passed", ""),
        ("print('Not run: torch')", "skipped", "nothing was measured: Not run: torch"),
        ("pass", "skipped", "nothing was measured: exit 0"),
        ("raise SystemExit('error: it broke')", "refused", "it broke"),
        ("import sys; print('error: no'); sys.exit(2)", "failed", "no"),
        ("import sys; print('first'); print('last'); sys.exit(4)", "failed", "last"),
        ("import os; os.kill(os.getpid(), 11)", "failed", "killed by SIGSEGV"),
    ],
)
def test_the_result_of_a_step_has_a_status(
    code: str, status: str, why: str, tmp_path: Path
) -> None:
    result = run_step(step(code), 60, tmp_path)
    assert (result.status, result.why) == (status, why)
    assert result.figures == ({"ms": 1.5} if status == "passed" else {})
    assert (tmp_path / "part-x.log").is_file()


def test_step_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """The grandchild, in a session of its own, holds the pipes open: reading takes its minute."""
    code = (
        "import subprocess, sys, time\n"
        "words = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "subprocess.Popen(words, start_new_session=True)\n"
        "print('{\"rows\": 1}'); print('{\"rows\": 2}')\n"
        "time.sleep(60)"
    )
    result = run_step(step(code), 3, tmp_path)
    assert (result.status, result.why) == ("failed", "killed after 3 s")
    assert result.figures == {"rows": 2}  # of the rows that it wrote until then
    assert result.seconds < 50


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 50
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_kill_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    """Of a run that is killed with SIGKILL, with a step whose child has a session of its own."""
    told = tmp_path / "told"
    child = "import time; time.sleep(60)"
    code = (
        "import os, pathlib, subprocess, sys, time\n"
        f"words = [sys.executable, '-c', {child!r}]\n"
        "child = subprocess.Popen(words, start_new_session=True)\n"
        f"told = pathlib.Path({str(told)!r})\n"
        "place = os.environ['TMPDIR']\n"
        "told.with_suffix('.part').write_text(f'{os.getpid()} {child.pid} {place}')\n"
        "told.with_suffix('.part').rename(told)\n"
        "time.sleep(60)"
    )
    whole = (
        "from pathlib import Path\n"
        "from scripts.gpu.guard import workplace\n"
        "from scripts.gpu.steps import PYTHON, Step, run_step\n"
        "with workplace('killed-') as work:\n"
        f"    run_step(Step('p', 't', [PYTHON, '-c', {code!r}], 60), 60, Path({str(tmp_path)!r}))\n"
    )
    runner = subprocess.Popen([PYTHON, "-c", whole], cwd=ROOT)
    try:
        until(told.is_file)
    finally:
        runner.kill()
        runner.wait()
    *pids, folder = told.read_text().split()
    until(lambda: not any(alive(pid) for pid in pids) and not Path(folder).exists())


def test_a_failure_is_recorded_and_the_other_steps_run(tmp_path: Path) -> None:
    steps = [
        step("raise SystemExit(2)", title="a"),
        step("pass", title="b", after="a"),
        step("pass", title="c"),
        Step("part", "d", [], 1, skip="not here"),
    ]
    results = run.run_all(iter(steps), 60, tmp_path)
    assert [result.status for result in results] == ["failed", "skipped", "passed", "skipped"]
    assert results[1].why == "a did not pass"
    document = json.loads((tmp_path / "summary.json").read_text())
    assert document["counts"] == {"passed": 1, "failed": 1, "refused": 0, "skipped": 2}
    assert "| part | d | skipped | 0 | not here |" in (tmp_path / "summary.md").read_text()


def test_figures_are_those_that_prove_something() -> None:
    rows = [{"sqnr_db": 40.0, "error": 1e-4}, {"sqnr_db": None, "error": 2e-4}]
    document = {"path": "x", "parity": {"max_error": 1, "rows": rows}, "accuracy": {"value": 0.9}}
    assert figures(json.dumps(document)) == {"error": 2e-4, "sqnr_db": 40.0, "accuracy": 0.9}
    assert figures("....\n3 passed, 1 failed in 2 s") == {"passed": 3, "failed": 1}
    assert figures("") == {}


def planned(parts: Sequence[str], tmp_path: Path) -> list[Step]:
    return list(run.planned(parts, [], [], 10, tmp_path, tmp_path))


def test_every_suite_selects_tests_of_its_runtime_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no GPU is, each is skipped for its runtime; all they name is in the checkout."""
    monkeypatch.setattr(run, "absent", lambda runtime: f"no {runtime}")
    for part, (runtime, words) in run.SUITES.items():
        *_, found = planned([part], Path())
        assert found.skip == (f"no {runtime}" if runtime else "")
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))


@pytest.mark.parametrize(
    ("part", "status", "code"),
    [
        ("plans", "skipped", run.LACKING),
        ("build", "skipped", run.LACKING),
        ("torch", "skipped", 0),
        ("plans", "passed", 0),
        ("plans", "failed", 1),
    ],
)
def test_a_gpu_whose_tensorrt_or_cuda_was_skipped_is_no_success(
    part: str, status: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    passed, failed = (Result(Step("ort", "x", [], 1), end) for end in ("passed", "failed"))
    asked = Result(Step(part, "x", [], 1), status, why="not installed")
    assert run.exit_code([passed, asked]) == code
    assert run.exit_code([failed, asked]) == 1
    assert ("error: " in capsys.readouterr().err) == (code == run.LACKING)


def test_every_option_of_build_has_a_step_and_a_replay(tmp_path: Path) -> None:
    found = list(builds.steps(tmp_path, ""))
    assert [each.title for each in found[:3]] == ["make the model", "fp32", "fp32: replay"]
    plans = [each.command[each.command.index("-o") + 1] for each in found[1::2]]
    assert len(set(plans)) == len(plans) == len(builds.OPTIONS)
    (only,) = builds.steps(tmp_path, "not installed")
    assert only.skip == "not installed"
    builds.make(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"cnn.onnx", "calib.npz"}


@pytest.mark.parametrize("program", ["faults", "lock"])
def test_faults_and_lock_run_on_our_own_cuda_driver(tmp_path: Path, program: str) -> None:
    """All faults but what needs a kernel, and `fork`, which our driver takes no notice of."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    try:
        source = (ROOT / "tests/support/runtimes/fakecuda.c").read_text(encoding="utf-8")
        fetch.library(tmp_path / "libcuda.so.1", source)
    except fetch.Unobtainable as exc:
        pytest.skip(str(exc))
    words, small = {
        "faults": (["memory-full", "sigterm"], {}),
        "lock": ([], {"FAKECUDA_TOTAL": str(4 << 20), "FAKECUDA_WAIT_MS": "100"}),
    }[program]
    done = subprocess.run(
        [PYTHON, "-m", f"scripts.gpu.{program}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **small, "LD_LIBRARY_PATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    if words:
        assert [each["ok"] for each in json.loads(done.stdout).values()] == [True] * 2


LOSING = """
import os
from scripts.gpu import leak
lost = []
print(leak.grew(leak.watch(lambda _: lost.append(os.urandom(1 << 18)), 200)))
"""


def test_a_leak_of_one_buffer_per_call_is_found_and_an_engine_on_the_cpu_has_none() -> None:
    """In processes of their own: this one may hold freed memory that takes in 50 MiB unseen."""
    assert leak.growth([5, 6, 7, 8, 9]) == 2
    assert leak.growth([9, 5, 5, 5, 5]) == 0  # from the top of the warm-up
    assert leak.growth([5, None, 7, 8]) is None
    command = [sys.executable, "-c", LOSING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("this process grew by")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    options = ["--calls", str(rounds(200, 2000)), "--openings", "10"]
    command = [sys.executable, "-m", "scripts.gpu.leak", "onnxruntime-cpu", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["calls"]["rss_bytes"]) == 10


METRICS = """# TYPE nv_gpu_memory_used_bytes gauge
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 1.5e+09
nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 150000000000
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5
"""


def test_what_matters_comes_first_and_each_step_has_a_limit(tmp_path: Path) -> None:
    found = list(session.planned(tmp_path, tmp_path))
    parts = [step.part for step in found]
    assert parts[:6] == ["probe", "train", "train", "train", "cuda", "session"]
    assert (parts[-2], found[-1].title) == ("faults", "a server under load")
    assert "TensorRT" not in " ".join(step.title for step in found if not step.skip)
    assert all(0 < step.limit_s <= 120 for step in found if not step.skip)


def test_a_bundle_is_unpacked_with_its_last_part_and_a_damaged_part_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "module.py").write_bytes(os.urandom(2500))
    archive = tmp_path / "site.tar.gz"
    with carry.tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "site", "site")
    sent, dest = carry.split(archive, tmp_path / "out", "base", part_bytes=1024), tmp_path / "dest"
    notes = [carry.unpack(folder, dest) for folder in reversed(sent)]
    assert notes[0] == "base: still missing: base.part.01 base.part.02"
    assert notes[-1] == f"base: unpacked to {dest / 'site'}"
    content = (tmp_path / "site" / "module.py").read_bytes()
    assert (dest / "site" / "module.py").read_bytes() == content
    assert not list((dest / "parts").iterdir())
    (part,) = sent[0].glob("*.part.*")
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="damaged on its way"):
        carry.unpack(sent[0], tmp_path / "other")


def test_gpu_figures_of_the_server_are_compared_with_nvidia_smi() -> None:
    ours = server.gauges(METRICS)
    assert ours == {"nv_gpu_memory_used_bytes": 1.5e9, "nv_gpu_memory_total_bytes": 1.5e11}
    assert server.differences(ours, {**ours, "nv_gpu_memory_used_bytes": 2.5e9}) == []
    (wrong,) = server.differences(ours, {**ours, "nv_gpu_memory_used_bytes": 1.5e10})
    assert wrong.startswith("nv_gpu_memory_used_bytes: 1500000000.0 in /metrics")
    assert len(server.differences({}, ours)) == 1
    assert server.differences({}, {}) == []
