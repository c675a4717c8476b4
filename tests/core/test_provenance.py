"""Provenance: what a measurement depends on besides the machine; what is unknown is left out."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deploykit.core.machine import provenance


def cpus(root: Path, **files: str) -> Path:
    folder = root / "sys/devices/system/cpu"
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_clocks_are_read_over_all_cpus(tmp_path: Path) -> None:
    root = cpus(
        tmp_path,
        cpufreq__policy0__scaling_governor="performance\n",
        cpufreq__policy0__scaling_min_freq="800000\n",
        cpufreq__policy0__scaling_max_freq="3500000\n",
        cpufreq__policy4__scaling_governor="powersave\n",
        cpufreq__policy4__scaling_max_freq="4200000\n",
        intel_pstate__no_turbo="1\n",
    )
    assert provenance(root, root)["clocks"] == {
        "governor": "performance, powersave",
        "min_mhz": 800.0,
        "max_mhz": 4200.0,
        "turbo": "off",
    }


@pytest.mark.parametrize("text", ["", "garbage", "-1", "²"], ids=repr)
def test_clocks_that_are_not_known_are_left_out(tmp_path: Path, text: str) -> None:
    root = cpus(tmp_path, cpufreq__policy0__scaling_max_freq=text, cpufreq__boost=text)
    assert "clocks" not in provenance(root, root)


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", *who, "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on PATH")
def test_the_commit_of_the_folder_is_named(tmp_path: Path) -> None:
    assert "project" not in provenance(tmp_path)
    git(tmp_path, "init", "-q")
    assert "project" not in provenance(tmp_path)  # no commit yet
    (tmp_path / "a.txt").write_text("1")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-qm", "One")
    assert provenance(tmp_path)["project"] == {"commit": git(tmp_path, "rev-parse", "HEAD")}


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on PATH")
def test_a_filter_that_a_checkout_names_is_not_run(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("1")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-qm", "One")
    (tmp_path / ".gitattributes").write_text("*.txt filter=own\n")
    git(tmp_path, "config", "filter.own.clean", f"touch {tmp_path / 'ran'}; cat")
    (tmp_path / "a.txt").write_text("2")
    assert "commit" in provenance(tmp_path)["project"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on PATH")
def test_a_checkout_s_own_program_is_not_started(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("1")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-qm", "One")
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    trap.chmod(0o755)
    git(tmp_path, "config", "core.fsmonitor", str(trap))
    assert "commit" in provenance(tmp_path)["project"]
    assert not (tmp_path / "started").exists()


def test_without_git_nothing_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "project" not in provenance()


def test_the_variables_of_numeric_libraries_are_kept_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    found = provenance()
    assert found["environment"]["OMP_NUM_THREADS"] == "3"
    assert "hidden" not in str(found)
    assert found["affinity"][0].isdigit()
    assert found["host"]
