"""`make tests` gives what failed a second run, and no more than that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.again import MOST, again

FAILS = "def test_a():\n    assert False\n"
ONCE = """
from pathlib import Path
def test_a():
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        assert False
"""


def cache(folder: Path, *failed: str) -> Path:
    kept = folder / "v/cache/lastfailed"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(dict.fromkeys(failed, True)))
    return folder


def test_a_test_that_fails_twice_fails(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(FAILS)
    assert again(1, cache(tmp_path, f"{tmp_path}/test_x.py::test_a")) == 1


def test_a_test_that_fails_once_is_named_and_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{tmp_path}/test_x.py::test_a"
    (tmp_path / "test_x.py").write_text(ONCE)
    assert again(1, cache(tmp_path, name)) == 1  # the first run
    assert again(1, tmp_path) == 0
    assert capsys.readouterr().out.endswith(f"passed alone. Find out why:\n  {name}\n")


@pytest.mark.parametrize("code", [2, 3, 4, 5, 137])
def test_a_run_that_did_not_reach_its_end_gets_none(tmp_path: Path, code: int) -> None:
    (tmp_path / "test_x.py").write_text("def test_a(): pass\n")
    assert again(code, cache(tmp_path, f"{tmp_path}/test_x.py::test_a")) == code


@pytest.mark.parametrize("count", [0, MOST + 1])
def test_many_failures_are_no_accident(tmp_path: Path, count: int) -> None:
    path = tmp_path / "test_x.py"
    path.write_text("import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_a(n): pass\n")
    assert again(1, cache(tmp_path, *(f"{path}::test_a[{n}]" for n in range(count)))) == 1
