"""The house rules, read off every file's syntax tree: arrows, circles, imports, size."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from deploykit.core.runtime import ALL as RUNTIMES

PACKAGE = Path(__file__).resolve().parent.parent / "deploykit"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)
DOCUMENT = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
LINES = 57_629  # of the package, blank lines and docstrings included; whoever merges lowers it

MAY_IMPORT: dict[str, set[str]] = {}  # room -> the rooms that its files may import
for room, others in re.findall(r"^\| `(\w+)` \| (.*?) \|", DOCUMENT, re.MULTILINE):
    if (PACKAGE / room).is_dir():
        below = [MAY_IMPORT[each] for each in re.findall(r"`(\w+)` and below", others)]
        MAY_IMPORT[room] = set(re.findall(r"`(\w+)`", others)).union(*below)
ABOVE_ALL = {"demonstration", "cli"}  # they may import everything
# import -> files and folders that may hold it; see docs/architecture.md
OWNERS = {
    **{
        module: {
            f"{room}/{each.name}{end}" for room in ("engines", "building") for end in (".py", "/")
        }
        for each in RUNTIMES
        for module in each.modules
    },
    "torch": {"engines/torch/", "training/", "exporting/"},
    "timm": {"engines/torch/presets.py"},
    "safetensors": {"engines/torch/files.py"},
    "PIL": {"engines/data/images.py"},
    "tokenizers": {"engines/data/texts.py"},
    "onnx": {
        *("graph/", "quantization/", "exporting/", "planning/probe.py"),
        "evaluation/divergence.py",
    },
    "onnxruntime": {
        *("engines/onnxruntime/engine.py", "building/onnxruntime.py"),
        "quantization/calibrate.py",
    },
    "sklearn": {"training/data.py"},
    "tensorrt": {"engines/tensorrt/", "building/tensorrt.py"},
    "tensorrt_rtx": {"building/tensorrt.py"},
    "cuda": {"engines/cuda/driver.py"},
    "httptools": {"serving/server.py", "serving/http/connection.py"},
    "uvloop": {"serving/server.py"},
    "orjson": {"serving/"},
    "hpack": {"serving/http2.py", "loadtest/grpc.py"},
    "google": {"engines/oip/__init__.py", "graph/parse.py"},
    "pynvml": {"engines/devices.py"},
    "prometheus_client": {"serving/observe/metrics.py"},
    "opentelemetry": {"serving/observe/tracing.py"},
    "ray": {"deploying/ray_app.py", "evaluation/ray_data.py"},
    "starlette": {"deploying/ray_app.py"},
    "typer": {"cli/"},
}
LATE = {"deploykit.building.prove", "deploykit.building.tensorrt"}  # a plan's: not run for a CPU
TYPES = {"OnStart"}  # aliases that stand below `if TYPE_CHECKING`, with types of others
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
COMMAND = re.compile(r"\b(deploykit|docker|pip|git|python) \S")

# the rooms of serving/, lowest first: a file imports from rooms that stand before its own
SERVING = [
    *("options", "batching", "shared_memory", "oip", "observe", "models", "web", "transport"),
    *("workers", "http", "http2", "grpc", "hosted", "server"),
]
SERVING_STRANGERS = {  # what a room does not know, though the order would allow it
    "oip": {"batching", "transport"},
    "transport": {"batching", "oip", "models"},
    "http2": {"http", "oip", "batching", "models"},
    "grpc": {"http"},
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def last_name(function: ast.expr) -> str:
    """Return `c` for `a.b.c`, and "" for what has no name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


MODULES = {module_of(path): path for path in FILES}


@cache
def imports_of(path: Path, *, at_import: bool = False) -> frozenset[str]:
    """Return the modules that a file imports, inside functions and for type checkers too.

    With `from a import b` that is `a.b`, if it is a module of ours. `at_import`: only what runs
    when the file is imported.
    """
    found: set[str] = set()
    pending: list[ast.AST] = [tree_of(path)]
    while pending:
        node = pending.pop()
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        if at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name_of(path)}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else node.module)
        elif isinstance(node, ast.Call) and last_name(node.func).endswith("require"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
        pending += ast.iter_child_nodes(node)
    return frozenset(found)


def room_of(module: str) -> str:
    """Return the room of a module of ours; "" for the package's own two files."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] not in {"__init__", "__main__"} else ""


def test_arrows_between_rooms_point_one_way() -> None:
    assert {room_of(each) for each in MODULES} - {""} == MAY_IMPORT.keys() | ABOVE_ALL
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in FILES
        if (room := room_of(module_of(path))) and room not in ABOVE_ALL
        for module in imports_of(path)
        if module.startswith("deploykit.") and room_of(module) not in {*MAY_IMPORT[room], room}
    ]
    assert wrong == []


def test_no_import_is_part_of_a_circle() -> None:
    graph = {
        module: {each for each in imports_of(path) if each in MODULES} - {module}
        for module, path in MODULES.items()
    }
    graph["deploykit"] = set()  # it names the verbs for type checkers, as that is its purpose
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@cache
def packages_of(module: str) -> frozenset[str]:
    """Return the packages of others that importing a module of ours loads."""
    ours: set[str] = set()
    packages: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in MODULES:
            packages.add(name.split(".")[0])
        elif name not in ours:
            ours.add(name)
            pending += imports_of(MODULES[name], at_import=True)
    return frozenset(packages - set(sys.stdlib_module_names))


def late_imports(tree: ast.AST, late: bool = False) -> Iterator[ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if late and isinstance(node, ast.ImportFrom):
            yield node
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        checker = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        yield from late_imports(node, late or function or checker)


def test_an_import_stands_in_a_function_only_where_it_loads_a_package() -> None:
    wrong = []
    for path in FILES:
        if name_of(path).startswith("cli/") or path.name in {"__init__.py", "__main__.py"}:
            continue
        loaded = packages_of(module_of(path)) | {"numpy"}
        for node in late_imports(tree_of(path)):
            names = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            names = (names or {node.module or ""} & set(MODULES)) - LATE
            seen_by_checkers = {alias.name for alias in node.names} <= TYPES
            if names and not seen_by_checkers and all(packages_of(n) <= loaded for n in names):
                wrong.append(f"{name_of(path)}:{node.lineno} {node.module}")
    assert wrong == []


def test_the_rooms_of_serving_form_a_line() -> None:
    wrong = []
    for path in sorted((PACKAGE / "serving").rglob("*.py")):
        room = (*module_of(path).split("."), "")[2]
        if room not in SERVING:  # the verb, the client and what starts a server
            continue
        known = set(SERVING[: SERVING.index(room) + 1]) - SERVING_STRANGERS.get(room, set())
        wrong += [
            f"{name_of(path)} imports {module}, which {room} must not know"
            for module in imports_of(path)
            if module.startswith("deploykit.serving.") and module.split(".")[2] not in known
        ]
    assert wrong == []


def test_heavy_imports_stay_with_their_owners() -> None:
    wrong = [
        f"{name_of(path)} imports {module}, which belongs to {owners}"
        for path in FILES
        for module in imports_of(path)
        if (owners := OWNERS.get(module.split(".")[0])) is not None
        and not any(
            name_of(path) == owner or (owner[-1] == "/" and name_of(path).startswith(owner))
            for owner in owners
        )
    ]
    assert wrong == []


def test_core_imports_the_standard_library_only() -> None:
    known = {*sys.stdlib_module_names, "deploykit", "tomli", "tomllib"}
    for path in (PACKAGE / "core").glob("*.py"):
        assert {module.split(".")[0] for module in imports_of(path)} <= known, name_of(path)


def test_the_package_has_no_more_lines_than_its_number() -> None:
    assert f"{LINES:,} lines of Python" in DOCUMENT
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES) <= LINES


def test_no_error_outside_the_command_line_spells_a_flag() -> None:
    """An error names the parameter, which `cli/` spells as it is typed; a whole command may."""
    wrong = [
        f"{name_of(path)}:{part.lineno}"
        for path in FILES
        if not name_of(path).startswith("cli/")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Raise) and node.exc is not None
        for part in ast.walk(node.exc)
        if isinstance(part, (ast.Constant, ast.JoinedStr))
        if FLAG.search(text := ast.unparse(part)) and not COMMAND.search(text)
    ]
    assert wrong == []


def test_no_module_has_the_name_of_a_public_verb() -> None:
    import deploykit

    names = {path.stem for path in PACKAGE.iterdir()} - {"__init__", "__main__", "__pycache__"}
    assert not names & set(deploykit._PUBLIC)


def test_every_file_opens_with_what_it_is_for() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    assert [
        name_of(path)
        for path, text in texts.items()
        if (text.strip() and not ast.get_docstring(tree_of(path)))
        or (path.name != "__init__.py" and "from __future__ import annotations" not in text)
    ] == []


def test_only_output_prints() -> None:
    def prints(path: Path) -> bool:
        called = (node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
        return any(isinstance(name, ast.Name) and name.id == "print" for name in called)

    assert [name_of(path) for path in FILES if prints(path)] == ["cli/output.py"]


def test_python_is_started_in_one_place_only() -> None:
    """A child that another file starts could have the current folder on its path."""
    assert [
        name_of(path)
        for path in FILES
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
            for node in ast.walk(tree_of(path))
        )
    ] == ["core/subprocesses.py"]


@pytest.mark.parametrize("path", sorted((PACKAGE.parent / "models").glob("*.py")), ids=str)
def test_recipes_know_the_core_and_what_gives_them_data(path: Path) -> None:
    ours = {name for name in imports_of(path) if name.split(".")[0] == "deploykit"}
    known = ("deploykit.core", "deploykit.engines.data", "deploykit.training.data")
    assert all(name.startswith(known) for name in ours)


TESTS = Path(__file__).resolve().parent
IMPORTS_A_TEST = re.compile(r"^ *(?:from|import) tests\b.*\b(?:test_\w+|conftest)\b.*", re.M)


def test_folders_of_tests_hold_only_tests_and_no_file_imports_one() -> None:
    """What two of them need is in tests/support."""
    for path in TESTS.rglob("*.py"):
        assert not IMPORTS_A_TEST.findall(path.read_text("utf-8")), path
        if TESTS / "support" not in path.parents:
            assert path.name.startswith(("test_", "conftest.")), path
