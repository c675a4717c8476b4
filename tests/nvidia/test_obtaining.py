"""What a machine that cannot have the rig, or the stubs, is told; and the repair of the stubs."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from scripts.nvidia import fetch, rig, stubs, typed


def test_what_cannot_be_obtained_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for module in (rig, stubs, typed):
        monkeypatch.setattr("sys.argv", [module.__name__, str(tmp_path)])
        assert module.main() == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 + 2 * len(stubs.VERSIONS)
    assert all("needs Linux on x86-64" in line for line in said if line.startswith("skipped"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(fetch.Unobtainable, match="no C compiler"):
        fetch.compiler()


def test_the_error_of_pip_is_the_reason_and_nothing_remains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No index, no network: what an offline machine is like."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(fetch, "check_machine", lambda: None)
    with pytest.raises(fetch.Unobtainable, match=r"pip: No matching distribution found for tens"):
        rig.setup(tmp_path / "rig")
    assert [path.name for path in (tmp_path / "rig").iterdir()] == [".gitignore"]
