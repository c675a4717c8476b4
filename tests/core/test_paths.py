from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploykit.core.errors import BadInput, MissingExtra, NotFound
from deploykit.core.files import folder, import_object


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(path: Path, code: str) -> Path:
    path.write_text(code, encoding="utf-8")
    return path


def test_data_folders_are_there() -> None:
    assert (folder("profiles") / "cpu.toml").is_file()
    assert any(folder("models").glob("*.py"))


def test_module_and_name() -> None:
    import json

    assert import_object("json:dumps") is json.dumps
    assert import_object("os.path:join") is __import__("os").path.join


def test_file_and_name(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", "value = 42")
    assert import_object(f"{path}:value") == 42


def test_relative_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mine.py", "value = 42")
    monkeypatch.chdir(tmp_path)
    assert import_object("./mine.py:value") == 42
    assert import_object("mine.py:value") == 42


def test_classes_of_a_file_can_be_pickled_and_are_dataclasses(tmp_path: Path) -> None:
    code = (
        "from __future__ import annotations\n"
        "import pickle\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Point:\n    x: int\n"
    )
    point = import_object(f"{write(tmp_path / 'point.py', code)}:Point")
    assert callable(point)
    import pickle

    assert pickle.loads(pickle.dumps(point(3))) == point(3)


@pytest.mark.parametrize(
    "reference",
    ["", "json", "json:", ":x", "json:dumps.x", "json:du mps", "json:1", "mine.py", "./m.pt:Net"],
)
def test_other_forms_are_refused(reference: str) -> None:
    with pytest.raises(BadInput, match=r"pkg\.mod:name or \./file\.py:name"):
        import_object(reference)


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("no_such_module_here:x", "no module 'no_such_module_here'"),
        ("json.nothing:x", r"no module 'json\.nothing'"),
        ("json:nothing", "json has no 'nothing'"),
        ("./nothing.py:x", "no such file"),
    ],
)
def test_what_is_not_there_is_not_found(reference: str, says: str) -> None:
    with pytest.raises(NotFound, match=says):
        import_object(reference)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def (", "SyntaxError"),
        ("import a_module_it_lacks", "a_module_it_lacks"),
        ("from json import nothing", "nothing"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("{}['key']", "KeyError"),
        ("raise RuntimeError('mine')", "RuntimeError: mine"),
        ("open('/no/such/file')", "FileNotFoundError"),
        ("import sys; sys.exit(3)", r"it called exit\(3\)"),
        ("class Odd(BaseException): pass\nraise Odd('mine')", "Odd: mine"),
        ("def __getattr__(name): raise OSError('lazy')", "OSError: lazy"),
        ("def __getattr__(name): raise ImportError('a') from OSError('b')", "caused by OSError: b"),
        ("def __getattr__(name): raise AttributeError(name) from OSError('b')", "by OSError: b"),
        ("def __getattr__(name): exit()", r"it called exit\(None\)"),
    ],
)
@pytest.mark.parametrize("form", ["file", "module"])
def test_an_exception_in_users_code_is_bad_input(
    package: Path, code: str, says: str, form: str
) -> None:
    path = write(package / "failing_code.py", code)
    sys.modules.pop("failing_code", None)  # of the test before
    where = str(path) if form == "file" else "failing_code"
    with pytest.raises(BadInput, match=f"importing it failed: .*{says}") as caught:
        import_object(f"{where}:x")
    assert not isinstance(caught.value, NotFound)


def test_a_name_that_is_spelled_wrong_is_answered_with_the_right_one() -> None:
    with pytest.raises(NotFound, match="json has no 'Dumps'") as caught:
        import_object("json:Dumps")
    assert caught.value.hint == "did you mean dumps?"


def test_an_extra_that_a_lazy_attribute_needs_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers does, which imports a model's file when it is first asked for."""
    monkeypatch.setitem(sys.modules, "torch", None)
    code = (
        "def __getattr__(name):\n"
        "    try:\n        import torch\n"
        "    except ImportError as exc:\n        raise ModuleNotFoundError('lazy') from exc\n"
    )
    with pytest.raises(MissingExtra, match="torch is not installed"):
        import_object(f"{write(package / 'lazy.py', code)}:x")


def test_code_that_failed_is_not_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "twice.py", "1 / 0")
    with pytest.raises(BadInput):
        import_object(f"{path}:x")
    assert not [name for name in sys.modules if name.endswith("twice")]


def test_code_that_needs_an_extra_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    path = write(tmp_path / "mine.py", "import torch")
    with pytest.raises(MissingExtra, match="torch is not installed") as caught:
        import_object(f"{path}:x")
    assert caught.value.exit_code == 3


def test_an_error_of_deploykit_passes_through_unchanged(tmp_path: Path) -> None:
    code = "from deploykit.core.errors import Overloaded\nraise Overloaded('busy')"
    from deploykit.core.errors import Overloaded

    with pytest.raises(Overloaded, match="busy"):
        import_object(f"{write(tmp_path / 'mine.py', code)}:x")


def test_ctrl_c_and_sigterm_pass_through(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        import_object(f"{path}:x")
    code = "from deploykit.cli.main import _terminate\n_terminate()"
    with pytest.raises(SystemExit) as ended:
        import_object(f"{write(tmp_path / 'ended.py', code)}:x")
    assert ended.value.code == 143
