"""Objects that users name: `pkg.mod:name`, `./file.py:name`, and recipes among them."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploykit.core.errors import BadInput, MissingExtra, NotFound, Overloaded
from deploykit.core.files import folder, import_object
from deploykit.core.recipe import find_bundled, list_recipes, load_recipe


def write(path: Path, code: str) -> Path:
    path.write_text(code, encoding="utf-8")
    return path


POINT = """
from __future__ import annotations
from dataclasses import dataclass

value = 42


@dataclass
class Point:
    x: int
"""


def test_a_module_or_a_file_and_a_name_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert import_object("json:dumps") is json.dumps
    path = write(tmp_path / "mine.py", POINT)
    monkeypatch.chdir(tmp_path)
    for reference in (f"{path}:value", "./mine.py:value", "mine.py:value"):
        assert import_object(reference) == 42
    point: Any = import_object(f"{path}:Point")
    assert pickle.loads(pickle.dumps(point(3))) == point(3)


FORM = "is not of the form pkg.mod:name or ./file.py:name"


@pytest.mark.parametrize(
    ("reference", "says", "hint"),
    [
        *((reference, FORM, "") for reference in ("", "json", "json:", ":x", "json:dumps.x")),
        ("./m.pt:Net", FORM, ""),
        ("no_such_module_here:x", "no module 'no_such_module_here'", "named by its path"),
        ("json.nothing:x", "no module 'json.nothing'", "named by its path"),
        ("json:Dumps", "json has no 'Dumps'", "did you mean dumps?"),
        ("./nothing.py:x", "no such file", ""),
    ],
)
def test_what_is_not_there_or_of_another_form_is_refused(
    reference: str, says: str, hint: str
) -> None:
    with pytest.raises(BadInput) as caught:
        import_object(reference)
    assert isinstance(caught.value, NotFound) == (says != FORM)
    assert says in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def (", "SyntaxError"),
        ("import a_module_it_lacks", "a_module_it_lacks"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", r"it called exit\(3\)"),
        ("class Odd(BaseException): pass\nraise Odd('mine')", "Odd: mine"),
        ("def __getattr__(name): raise OSError('lazy')", "OSError: lazy"),
        ("def __getattr__(name): raise AttributeError(name) from OSError('b')", "by OSError: b"),
    ],
)
@pytest.mark.parametrize("form", ["file", "module"])
def test_an_exception_in_users_code_is_bad_input_and_its_module_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str, form: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(tmp_path / "failing_code.py", code)
    for name in ("failing_code", "_deploykit_file_failing_code"):  # of the test before
        sys.modules.pop(name, None)
    where = str(path) if form == "file" else "failing_code"
    with pytest.raises(BadInput, match=f"importing it failed: .*{says}") as caught:
        import_object(f"{where}:x")
    assert not isinstance(caught.value, NotFound)
    if not code.startswith("def __getattr__"):
        assert not [name for name in sys.modules if name.endswith("failing_code")]


LAZY = """
def __getattr__(name):
    try:
        import torch
    except ImportError as exc:
        raise ModuleNotFoundError('lazy') from exc
"""


@pytest.mark.parametrize("code", ["import torch", LAZY], ids=["at once", "lazily"])
def test_code_that_needs_an_extra_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match="torch is not installed"):
        import_object(f"{write(tmp_path / 'mine.py', code)}:x")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("from deploykit.core.errors import Overloaded\nraise Overloaded('busy')", Overloaded),
        ("raise KeyboardInterrupt", KeyboardInterrupt),
        ("from deploykit.cli.main import _terminate\n_terminate()", SystemExit),  # of SIGTERM
    ],
)
def test_an_error_of_deploykit_ctrl_c_and_sigterm_pass_through(
    tmp_path: Path, code: str, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        import_object(f"{write(tmp_path / 'mine.py', code)}:x")


TINY = '''\
"""A recipe of one's own."""
from deploykit.core.recipe import Recipe
from deploykit.core.tensors import parse_spec

RECIPE = Recipe(
    build=lambda: "a module", data=None, inputs=(parse_spec("x:float32[N,4]"),),
    outputs=(parse_spec("y:float32[N,2]"),), loss=None, metric=None, metric_name="top-1",
    epochs=1, batch_size=2, learning_rate=0.1,
)
OTHER = RECIPE
NUMBER = 3
'''


def test_list_holds_the_shipped_recipes_and_imports_none() -> None:
    found = list_recipes()
    assert "mnist-cnn" in found
    assert {path.parent for path in found.values()} == {folder("models")}
    code = (
        "import sys\nfrom deploykit.core.recipe import list_recipes\nassert list_recipes()\n"
        "print([name for name in sys.modules if name in ('torch', 'numpy')"
        " or name.startswith('_deploykit_file')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    "name",
    ["nothing", "", "mnist_cnn", "MNIST-CNN", "mnist-cnn ", "../models/mnist-cnn", "./mine.py"],
)
def test_a_recipe_name_in_a_checkpoint_can_name_only_bundled_recipes(name: str) -> None:
    """A checkpoint holds its recipe's name: `find_bundled` is the gate before any code runs."""
    with pytest.raises(NotFound, match="no recipe") as caught:
        find_bundled(name)
    assert "mnist-cnn" in str(caught.value.hint)


def test_a_users_recipe_is_a_file_with_any_name_in_it_or_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = write(tmp_path / "tiny.py", TINY)
    assert load_recipe(str(tiny)).build() == "a module"
    assert load_recipe(f"{tiny}:OTHER").epochs == 1
    monkeypatch.syspath_prepend(str(tiny.parent))
    assert load_recipe("tiny:RECIPE").batch_size == 2
    monkeypatch.delitem(sys.modules, "tiny")
    with pytest.raises(BadInput, match="is a int; it must be a deploykit Recipe"):
        load_recipe(f"{tiny}:NUMBER")
    with pytest.raises(NotFound, match=r"tiny\.py has no 'RECIPE'"):
        load_recipe(str(write(tiny, "x = 1")))
    with pytest.raises(NotFound, match="no recipe 'nothing'"):
        load_recipe("nothing")
