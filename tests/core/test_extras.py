from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from deploykit.core.errors import MissingExtra, Unsupported
from deploykit.core.extras import EXTRAS, install_command, install_hint, installed, require

Install = Callable[[str], None]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package named onnxscript with the given code before all others."""

    def install(code: str) -> None:
        (tmp_path / "onnxscript.py").write_text(code, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setitem(sys.modules, "onnxscript", None)  # which is undone, imported or not
        del sys.modules["onnxscript"]

    return install


def test_installed_package_is_imported() -> None:
    import json.decoder

    assert require("json.decoder") is json.decoder


@pytest.mark.parametrize("module", ["tensorrt", "tensorrt.plugin"])
def test_missing_package_says_what_to_type(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    top = module.partition(".")[0]
    for name in (top, module):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingExtra, match=f"{top} is not installed") as caught:
        require(module)
    assert caught.value.exit_code == 3
    assert install_command(EXTRAS[top]) in str(caught.value.hint)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import a_module_it_lacks", "No module named 'a_module_it_lacks'"),
        ("raise ImportError('libfoo.so.9: cannot open')", "libfoo.so.9: cannot open"),
        ("raise OSError('wrong ELF class')", "wrong ELF class"),
    ],
)
def test_broken_package_is_not_called_missing(broken: Install, code: str, says: str) -> None:
    broken(code)
    with pytest.raises(Unsupported, match=f"onnxscript is installed but .*{says}") as caught:
        require("onnxscript")
    assert not isinstance(caught.value, MissingExtra)


def test_module_that_an_installed_package_lacks_is_not_a_missing_package(broken: Install) -> None:
    broken("")
    with pytest.raises(Unsupported, match="onnxscript is installed but") as caught:
        require("onnxscript.part")
    assert not isinstance(caught.value, MissingExtra)


def test_every_extra_named_is_one_that_the_package_declares() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert set(EXTRAS.values()) <= set(re.findall(r"^([a-z]+) = \[", section, re.MULTILINE))


def test_jetson_users_learn_where_tensorrt_comes_from() -> None:
    assert "JetPack" in install_hint("tensorrt")


def test_installed_imports_nothing(broken: Install) -> None:
    broken("raise RuntimeError")
    assert installed("onnxscript")
    assert not installed("a_module_nobody_has")


LOSES = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    pass
"""
RENAMES = LOSES.replace("pass", "raise ImportError('no numpy') from None")


@pytest.mark.parametrize("code", [LOSES, RENAMES], ids=["lost", "renamed"])
def test_ctrl_c_while_a_package_loads_is_not_lost(broken: Install, code: str) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    broken(code)
    with pytest.raises(KeyboardInterrupt):
        require("onnxscript")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_second_ctrl_c_does_not_wait_for_a_package_to_load(broken: Install, tmp_path: Path) -> None:
    end = tmp_path / "end"
    twice = 2 * "signal.raise_signal(signal.SIGINT)\n"
    broken(f"import pathlib, signal\n{twice}pathlib.Path({str(end)!r}).touch()")
    with pytest.raises(KeyboardInterrupt):
        require("onnxscript")
    assert not end.exists()


def test_handlers_are_as_before_when_no_signal_came(broken: Install) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    broken("")
    require("onnxscript")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_ignored_signal_stays_ignored_while_a_package_loads(broken: Install) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        broken(LOSES)
        require("onnxscript")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_imports_without_touching_signals(broken: Install) -> None:
    broken("")
    loaded = []
    thread = threading.Thread(target=lambda: loaded.append(require("onnxscript")))
    thread.start()
    thread.join()
    assert [module.__name__ for module in loaded] == ["onnxscript"]


def test_an_extra_is_installed_from_where_deploykit_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    from deploykit.core import extras

    origin = {"direct_url.json": '{"url": "file:///a/deploykit-1-py3-none-any.whl"}'}
    release: dict[str, str] = {}
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path)
    assert install_command("cpu") == f"pip install -e '{tmp_path}[cpu]'"
    for files, want in (
        (origin, "pip install 'deploykit[cpu] @ file:///a/deploykit-1-py3-none-any.whl'"),
        (release, "pip install 'deploykit[cpu]'"),
    ):
        installation = type(
            "Installation", (), {"read_text": lambda _, name, of=files: of.get(name)}
        )
        monkeypatch.setattr(extras, "_CHECKOUT", tmp_path / "site-packages")
        monkeypatch.setattr(metadata, "distribution", lambda _, it=installation: it())
        assert install_command("cpu") == want


def test_only_one_place_decides_how_an_extra_is_installed() -> None:
    """Until a release, no package index has `deploykit[...]`."""
    root = Path(__file__).parents[2]
    files = [
        *(root / "deploykit").rglob("*.py"),
        *(root / "docs").rglob("*.md"),
        root / "README.md",
    ]
    named = {
        each.relative_to(root).as_posix()
        for each in files
        if "deploykit[" in each.read_text(encoding="utf-8")
    }
    assert named == {"deploykit/core/extras.py"}
