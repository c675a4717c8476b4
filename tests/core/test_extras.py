from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploykit.core.errors import MissingExtra, Unsupported
from deploykit.core.extras import EXTRAS, install_hint, installed, require

Install = Callable[[str], None]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package named onnxscript with the given code before all others."""

    def install(code: str) -> None:
        (tmp_path / "onnxscript.py").write_text(code, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "onnxscript", raising=False)

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
    assert f"pip install 'deploykit[{EXTRAS[top]}]'" in str(caught.value.hint)


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
    declared = importlib.metadata.metadata("deploykit").get_all("Provides-Extra") or []
    assert set(EXTRAS.values()) <= set(declared)


def test_jetson_users_learn_where_tensorrt_comes_from() -> None:
    assert "JetPack" in install_hint("tensorrt")


def test_installed_imports_nothing(broken: Install) -> None:
    broken("raise RuntimeError")
    assert installed("onnxscript")
    assert not installed("a_module_nobody_has")
