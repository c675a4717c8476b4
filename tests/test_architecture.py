"""The house rules, read off every file's syntax tree: floors, heavy imports, cycles, sizes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from deploykit.core.runtime import ALL as RUNTIMES

PACKAGE = Path(__file__).resolve().parent.parent / "deploykit"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)

FLOORS = {"core": 1, "runtimes": 2, "onnx_graph": 2, "api": 4, "cli": 5}
ROOMS = {
    "training",
    "exporters",
    "quantization",
    "builders",
    "measure",
    "pipelines",
    "planning",
    "serving",
    "bundling",
    "cluster",
}
# import -> files and folders that may hold it; see docs/architecture.md
OWNERS = {
    **{
        module: {
            f"{room}/{each.name}{end}" for room in ("runtimes", "builders") for end in (".py", "/")
        }
        for each in RUNTIMES
        for module in each.modules
    },
    "torch": {"runtimes/torch/", "training/", "exporters/"},
    "timm": {"runtimes/torch/presets.py"},
    "safetensors": {"runtimes/torch/safetensors.py"},
    "PIL": {"runtimes/data/images.py"},
    "tokenizers": {"runtimes/tasks/texts.py"},
    "onnx": {"onnx_graph/", "quantization/", "exporters/"},
    "onnxruntime": {
        "runtimes/onnxruntime/engine.py",
        "builders/onnxruntime.py",
        "quantization/calibrate.py",
    },
    "sklearn": {"training/classes.py"},
    "tensorrt": {"runtimes/tensorrt/", "builders/tensorrt/module.py", "builders/tensorrt/build.py"},
    "tensorrt_rtx": {"builders/tensorrt/module.py"},
    "cuda": {"runtimes/cuda/driver.py"},
    "httptools": {"serving/server.py", "serving/http/head.py"},
    "uvloop": {"serving/server.py"},
    "orjson": {"serving/"},
    "hpack": {"serving/http2/", "measure/load/grpc.py"},
    "google": {"serving/oip/protobuf.py", "onnx_graph/storage.py"},
    "pynvml": {"runtimes/devices.py"},
    "prometheus_client": {"serving/observe/prometheus.py"},
    "opentelemetry": {"serving/observe/tracing.py"},
    "ray": {"cluster/"},
    "starlette": {"cluster/serve.py"},
    "typer": {"cli/"},
}
# room -> lines that it may have, sub-folders, docstrings and blank lines included
BUDGETS = {
    rooms.replace("/`, `", "+").strip("`/"): int(lines.replace(",", ""))
    for rooms, lines in re.findall(
        r"^\| (`\w+/`(?:, `\w+/`)*) \| ([\d,]+) \| ",
        (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
}
BUDGETS[""] = sum(BUDGETS.values()) + 158  # the whole package, with the list of public names
SHARED = {  # public names that two modules have on purpose
    "build": "the verb, and each builder's own step of it; always called on its module",
    "build_engine": "what each runtime's row in `core/runtime.py` names as its builder",
    "check": "the TensorRT builder's step, and `target.check`, which gives it a profile's values",
    "encode": "a reply as JSON and as protobuf: the protocols' modules have the same steps",
    "main": "the entry of a process: `python -m`",
    "open_engine": "what each runtime's row in `core/runtime.py` names as its opener",
    "plan": "the verb, and the protocol's step that decides how a request is read, on its module",
    "quantizable": "the nodes that the writer in the same module, `qdq` or `dynamic`, quantises",
    "read": "a file of the module's format: `report.read`, `safetensors.read`, `files.read`",
    "write": "a file of the module's format: `report.write`, `storage.write`; a bundle of its kind",
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
COMMAND = re.compile(r"\b(deploykit|docker|pip|git|python) \S")
LONG: set[str] = set()  # functions over 60 lines

# the rooms of serving/, lowest first: a file imports from rooms that stand before its own
SERVING = [
    "options",
    "batching",
    "oip",
    "shared_memory",
    "observe",
    "models",
    "web",
    "transport",
    "workers",
    "http",
    "http2",
    "grpc",
    "hosted",
    "server",
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
    """`c` of `a.b.c`; empty for what has no name. For all calls, `ast.unparse` takes seconds."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


MODULES = {module_of(path): path for path in FILES}


@cache
def imports_of(path: Path, *, top_level: bool = False, typing: bool = False) -> frozenset[str]:
    """Modules that a file imports: with `from a import b`, `a.b` where that is a module of ours.

    `top_level`: only what importing the file runs; neither functions nor `if TYPE_CHECKING`.
    `typing`: also what stands below `if TYPE_CHECKING`.
    """
    found: set[str] = set()
    pending: list[ast.AST] = [tree_of(path)]
    while pending:
        node = pending.pop()
        if not typing and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        if top_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
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


def floor_of(module: str) -> tuple[int, str]:
    """The floor of a module of ours and its room; 0 for the package's own two files."""
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else ""
    return (3 if room in ROOMS else FLOORS.get(room, 0)), room


# one test goes through all files: a test for each of 280 files costs more than what it finds out


def test_imports_go_downwards_only() -> None:
    wrong = []
    for path in FILES:
        floor, room = floor_of(module_of(path))
        for module in imports_of(path) if floor else ():
            if not module.startswith("deploykit."):  # `deploykit` alone: its __version__
                continue
            other_floor, other_room = floor_of(module)
            if other_floor > floor:
                wrong.append(f"{name_of(path)} imports upward: {module}")
            elif other_floor == floor and other_room != room:
                wrong.append(f"{name_of(path)} imports sideways: {module}")
    assert wrong == []


def test_the_rooms_of_serving_form_a_line() -> None:
    wrong = []
    for path in sorted((PACKAGE / "serving").rglob("*.py")):
        if path == PACKAGE / "serving" / "__init__.py":
            continue
        room = module_of(path).split(".")[2]
        known = set(SERVING[: SERVING.index(room) + 1]) - SERVING_STRANGERS.get(room, set())
        wrong += [
            f"{name_of(path)} imports {module}, which {room} must not know"
            for module in imports_of(path, typing=True)
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
            name_of(path) == owner
            or (owner[-1] in "/*" and name_of(path).startswith(owner.rstrip("*")))
            for owner in owners
        )
    ]
    assert wrong == []


def test_numpy_is_imported_inside_functions_in_api_and_cli_and_never_in_core() -> None:
    floors = {path: floor_of(module_of(path))[0] for path in FILES}
    assert [
        name_of(path)
        for path, floor in floors.items()
        if floor not in (2, 3) and "numpy" in imports_of(path, top_level=floor != 1)
    ] == []


def test_core_imports_the_standard_library_only() -> None:
    import sys

    for path in (PACKAGE / "core").glob("*.py"):
        for module in imports_of(path):
            top = module.split(".")[0]
            known = top in sys.stdlib_module_names or top in {"deploykit", "tomli", "tomllib"}
            assert known, f"{name_of(path)} imports {module}"


def test_no_import_cycles_even_for_types() -> None:
    graph = {
        module: imports_of(path, top_level=True, typing=True) & set(MODULES) - {module}
        for module, path in MODULES.items()
    }
    graph["deploykit"] = set()  # it re-exports the verbs for type checkers, as that is its purpose
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module in done:
            return
        for other in sorted(graph[module]):
            visit(other, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_no_function_is_over_60_lines() -> None:
    """Those in `LONG` are known; the list only shrinks."""
    long = {
        f"{name_of(path)}:{node.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or node.lineno) - node.lineno + 1 > 60
    }
    assert long <= LONG


def test_no_file_is_over_400_lines() -> None:
    lines = {name_of(path): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > 400} == {}


def test_no_name_stands_for_two_things() -> None:
    """Public classes and functions at the top of two modules: those in SHARED alone."""
    names = Counter(
        node.name
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if not node.name.startswith("_")
        if isinstance(node, ast.ClassDef) or not name_of(path).startswith("cli/")  # named as verbs
    )
    assert sorted(name for name, count in names.items() if count > 1) == sorted(SHARED)


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


@pytest.mark.parametrize("room", BUDGETS)
def test_no_room_has_more_lines_than_its_budget(room: str) -> None:
    folders = [PACKAGE / name for name in room.split("+")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert lines <= BUDGETS[room]


def test_every_room_has_a_budget() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert {room for each in BUDGETS if each for room in each.split("+")} == rooms


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


def test_every_output_of_a_verb_passes_one_place() -> None:
    """`api/outputs.py` keeps users' files: no other verb asks whether a path can be written."""
    used = {"check_writable", "make_folder"}
    found = [
        name_of(path)
        for path in FILES
        if name_of(path).startswith("api/")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and used & {each.name for each in node.names}
    ]
    assert found == ["api/outputs.py"]


def test_one_place_starts_python() -> None:
    """`core/apart.py` keeps the current folder off the path, where `python -m` puts it."""

    def names_python(path: Path) -> bool:
        attributes = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute))
        return any(ast.unparse(each) == "sys.executable" for each in attributes)

    assert [name_of(path) for path in FILES if names_python(path)] == ["core/apart.py"]


def test_only_output_prints() -> None:
    def prints(path: Path) -> bool:
        called = (node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
        return any(isinstance(name, ast.Name) and name.id == "print" for name in called)

    assert [name_of(path) for path in FILES if prints(path)] == ["cli/output.py"]


@pytest.mark.parametrize("path", sorted((PACKAGE.parent / "models").glob("*.py")), ids=str)
def test_recipes_are_short_and_know_the_core_and_what_gives_them_data(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 200
    ours = {name for name in imports_of(path) if name.split(".")[0] == "deploykit"}
    known = ("deploykit.core", "deploykit.runtimes.data", "deploykit.training.data")
    assert all(name.startswith(known) for name in ours)


TESTS = Path(__file__).resolve().parent
PROGRAMS = (
    "support/",
    "containers/",
    "gpu/",
    "nvidia/",
)  # folders of helpers, and of programs that users run


IMPORTS_A_TEST = re.compile(r"^ *(?:from|import) tests\b.*\b(?:test_\w+|conftest)\b.*", re.M)


def name_of_test(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def test_no_file_imports_a_test() -> None:
    """What two of them need is in tests/support."""
    found = {path: IMPORTS_A_TEST.findall(path.read_text("utf-8")) for path in TESTS.rglob("*.py")}
    assert {name_of_test(path): lines for path, lines in found.items() if lines} == {}


def test_folders_of_tests_hold_only_tests() -> None:
    names = [name_of_test(path) for path in TESTS.rglob("*.py")]
    others = [name for name in names if not name.startswith(PROGRAMS)]
    assert [n for n in others if not n.rpartition("/")[2].startswith(("test_", "conftest."))] == []
