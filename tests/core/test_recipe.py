from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.core import files as paths
from deploykit.core.errors import BadInput, NotFound
from deploykit.core.recipe import find_bundled, list_recipes, load_recipe

TINY = '''\
"""A recipe of one's own."""
from deploykit.core.recipe import Recipe
from deploykit.core.tensors import parse_spec

RECIPE = Recipe(
    build=lambda: "a module",
    data=lambda path: None,
    inputs=(parse_spec("x:float32[N,4]"),),
    outputs=(parse_spec("y:float32[N,2]"),),
    loss=lambda outputs, labels: 0.0,
    metric=lambda outputs, labels: 1.0,
    metric_name="top-1",
    epochs=1,
    batch_size=2,
    learning_rate=0.1,
)
OTHER = RECIPE
NUMBER = 3
'''


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(TINY, encoding="utf-8")
    return path


def test_list_holds_the_shipped_recipes_with_their_first_line() -> None:
    found = {info.name: info for info in list_recipes()}
    assert "mnist-cnn" in found
    for info in found.values():
        assert info.summary
        assert "\n" not in info.summary
        assert info.path.parent == paths.folder("models")
        assert info.to_dict() == {
            "name": info.name,
            "summary": info.summary,
            "path": str(info.path),
        }


def test_listing_imports_no_recipe() -> None:
    code = (
        "import sys\nfrom deploykit.core.recipe import list_recipes\nassert list_recipes()\n"
        "print([name for name in sys.modules if name in ('torch', 'numpy')"
        " or name.startswith('_deploykit_file')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "",
        "mnist_cnn",
        "MNIST-CNN",
        "mnist-cnn ",
        "mnist-cnn.py",
        "../models/mnist-cnn",
        "./mine.py",
        "os:system",
        "/etc/passwd",
    ],
)
def test_a_recipe_name_in_a_checkpoint_can_name_only_bundled_recipes(name: str) -> None:
    """A checkpoint holds its recipe's name: `find_bundled` is the gate before any code runs."""
    with pytest.raises(NotFound, match="no recipe") as caught:
        find_bundled(name)
    assert "mnist-cnn" in str(caught.value.hint)


def test_a_users_recipe_is_a_file_with_any_name_in_it_or_a_module(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_recipe(str(tiny)).build() == "a module"
    assert load_recipe(f"{tiny}:OTHER").epochs == 1
    monkeypatch.syspath_prepend(str(tiny.parent))
    assert load_recipe("tiny:RECIPE").batch_size == 2
    monkeypatch.delitem(sys.modules, "tiny")


def test_other_objects_are_refused_as_recipes(tiny: Path) -> None:
    with pytest.raises(BadInput, match="is a int; it must be a deploykit Recipe"):
        load_recipe(f"{tiny}:NUMBER")
    tiny.write_text("x = 1", encoding="utf-8")
    with pytest.raises(NotFound, match=r"tiny\.py has no 'RECIPE'"):
        load_recipe(str(tiny))
    with pytest.raises(NotFound, match="no recipe 'nothing'"):
        load_recipe("nothing")


@pytest.mark.torch
def test_shipped_recipes_load() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    for info in list_recipes():
        assert load_recipe(info.name).inputs
