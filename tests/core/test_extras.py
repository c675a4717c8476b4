from __future__ import annotations

import json.decoder
import re
import signal
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from deploykit.core import extras
from deploykit.core.errors import MissingExtra, Unsupported
from deploykit.core.extras import EXTRAS, install_command, installed, require

Install = Callable[[str], None]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package named onnxscript with the given code before all others."""

    def install(code: str) -> None:
        (tmp_path / "onnxscript.py").write_text(code, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setitem(sys.modules, "onnxscript", None)  # which is undone, imported or not
        del sys.modules["onnxscript"]

    return install


@pytest.mark.parametrize("module", ["tensorrt", "tensorrt.plugin"])
def test_missing_package_says_what_to_type(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    assert require("json.decoder") is json.decoder
    for name in ("tensorrt", module):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingExtra, match="tensorrt is not installed") as caught:
        require(module)
    hint = str(caught.value.hint)
    assert hint.startswith(install_command(EXTRAS["tensorrt"]))
    assert all(each in hint for each in ("[tensorrt-cu12]", "[jetson]", "JetPack"))


@pytest.mark.parametrize(
    ("code", "module", "says"),
    [
        ("import a_module_it_lacks", "onnxscript", "No module named 'a_module_it_lacks'"),
        ("raise ImportError('libfoo.so.9: lost')", "onnxscript", "libfoo.so.9: lost"),
        ("raise OSError('wrong ELF class')", "onnxscript", "wrong ELF class"),
        ("", "onnxscript.part", "onnxscript.part"),
    ],
)
def test_broken_package_is_not_called_missing(
    broken: Install, code: str, module: str, says: str
) -> None:
    broken(code)
    assert installed("onnxscript")  # which imports nothing
    with pytest.raises(Unsupported, match=f"onnxscript is installed but .*{says}") as caught:
        require(module)
    assert not isinstance(caught.value, MissingExtra)


def test_every_extra_named_is_one_that_the_package_declares() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert set(EXTRAS.values()) <= set(re.findall(r"^([a-z]+) = \[", section, re.MULTILINE))


LOSES = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    pass
"""
RENAMES = LOSES.replace("pass", "raise ImportError('no numpy') from None")


@pytest.mark.parametrize("code", [LOSES, RENAMES, ""], ids=["lost", "renamed", "no signal"])
def test_ctrl_c_while_a_package_loads_is_not_lost(broken: Install, code: str) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    broken(code)
    if code:
        with pytest.raises(KeyboardInterrupt):
            require("onnxscript")
    else:
        require("onnxscript")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_second_ctrl_c_does_not_wait_for_a_package_to_load(broken: Install, tmp_path: Path) -> None:
    end = tmp_path / "end"
    twice = 2 * "signal.raise_signal(signal.SIGINT)\n"
    broken(f"import pathlib, signal\n{twice}pathlib.Path({str(end)!r}).touch()")
    with pytest.raises(KeyboardInterrupt):
        require("onnxscript")
    assert not end.exists()


def test_a_thread_and_an_ignored_signal_are_left_alone(broken: Install) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # conftest puts it back
    broken(LOSES)
    require("onnxscript")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    broken("")
    loaded: list[object] = []
    thread = threading.Thread(target=lambda: loaded.append(require("onnxscript")))
    thread.start()
    thread.join()
    assert len(loaded) == 1


def test_an_extra_is_installed_from_where_deploykit_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path)
    assert install_command("cpu") == f"pip install -e '{tmp_path}[cpu]'"
    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path / "site-packages")
    for origin, source in (('{"url": "file:///a/b.whl"}', " @ file:///a/b.whl"), (None, "")):
        kind = type("Installation", (), {"read_text": lambda *_, origin=origin: origin})
        monkeypatch.setattr(metadata, "distribution", lambda _, kind=kind: kind())
        assert install_command("cpu") == f"pip install 'deploykit[cpu]{source}'"


def test_only_one_place_decides_how_an_extra_is_installed() -> None:
    """Until a release, no package index has `deploykit[...]`."""
    files = [
        *(ROOT / "deploykit").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
    ]
    named = [each for each in files if "deploykit[" in each.read_text(encoding="utf-8")]
    assert named == [ROOT / "deploykit/core/extras.py"]
