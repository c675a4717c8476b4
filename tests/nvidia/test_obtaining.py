"""What a machine that cannot have the rig, or the stubs, is told; and the repair of the stubs."""

from __future__ import annotations

import ast
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


@pytest.mark.parametrize(
    ("raw", "valid"),
    [
        ("def f(in: list[int]) -> bool: ...", "in_: collections.abc.Sequence[int]"),
        ("def f(a: W = None, b: int) -> W: ...", "a: W | None=None, b: int=..."),
        ("def f(a: ...) -> None: ...", "a: typing.Any"),
        ("def f(a: Dims) -> Dims: ...", "a: Dims | collections.abc.Sequence[int]) -> Dims"),
        ("def f() -> bool: ...", "-> builtins.bool"),
        ("def f(a: typing.SupportsInt) -> int: ...", "a: int"),
        ("def deserialize_cuda_engine() -> E: ...", "-> E | None"),
        ("class IHostMemory:\n    '''text'''", "def __buffer__"),
    ],
    ids=lambda text: text[:34],
)
def test_stub_is_repaired(raw: str, valid: str) -> None:
    fixed = stubs.repaired(raw)
    ast.parse(fixed)
    assert valid in fixed
    assert "text" not in fixed


def test_a_module_passed_as_an_argument_gets_a_type(tmp_path: Path) -> None:
    package = tmp_path / "deploykit"
    (package / "core").mkdir(parents=True)
    (package / "core" / "extras.py").write_text("def require(module: str) -> ModuleType: ...")
    (package / "a.py").write_text("def f(nv: Any, b: Any) -> Any: ...\n")
    (package / "b.py").write_text('trt = require("tensorrt")\n')
    files = typed.users(tmp_path)
    assert [path.name for path in files] == ["a.py", "b.py"]
    typed.copied(tmp_path, files, tmp_path / "out")
    texts = [path.read_text() for path in sorted((tmp_path / "out" / "deploykit").glob("*.py"))]
    assert "def f(nv: NvidiaModule, b: Any)" in texts[0]
    assert "trt: NvidiaModule = require" in texts[1]
