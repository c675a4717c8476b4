"""Type stubs of NVIDIA's Python bindings, one folder per version of TensorRT, for mypy.

    python -m scripts.nvidia.stubs .rig/stubs 10.3.0 11.4.0.106
    MYPYPATH=.rig/stubs/10.3.0 mypy --strict ...

In: versions. Out: FOLDER/VERSION with the stub packages `tensorrt_bindings` and `tensorrt`. The
real bindings are imported with libraries that only have the names they link to, so neither TensorRT
nor a GPU is needed. What pybind11-stubgen writes does not parse; `repaired` makes it valid and says
what it leaves open. Stubs are made anew on each machine, never committed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import keyword
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.nvidia import fetch

VERSIONS = ("10.3.0", "10.16.1.11", "11.4.0.106")  # JetPack 6's, the last 10.x, the newest
STUBGEN = ("pybind11-stubgen==3.0.0", "typing_extensions>=4.12")
MODULE = "tensorrt_module"  # of `module_class`
_LINKED = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
_OPTIONAL = (  # what TensorRT answers when it fails; the bindings' signatures do not say so
    "build_serialized_network",
    "create_execution_context",
    "deserialize_cuda_engine",
)
_CALLED_BACK = ("notify_shape", "process_debug_tensor")  # TensorRT calls these of our classes
_INSTEAD = (
    (r"(?m)(?<!^)(?<![\w.])bool\b", "builtins.bool"),  # as `bool` is a DataType in that module
    (r"\btyping\.SupportsInt\b", "int"),  # else a method that TensorRT calls must take all of them
    (r"\btyping\.SupportsFloat\b", "float"),
)
_MORE = {  # protocols of Python's that the classes have and no signature shows
    "IHostMemory": "def __buffer__(self, flags: int, /) -> memoryview: ...",
    "Dims": "def __iter__(self) -> collections.abc.Iterator[int]: ...",
}


def setup(folder: Path, version: str) -> Path:
    """Make `folder`/`version` unless it is up to date. Raises Unobtainable where that cannot be."""
    out = folder.resolve() / version
    stamp = _stamp(version)
    if fetch.made_with(out) == stamp:
        return out
    fetch.check_machine()
    tools = _tools(folder.resolve())
    with fetch.whole(out, stamp) as work:
        site, raw = work / "site", work / "raw"
        cuda = 13 if _numbers(version) >= (10, 13) else 12
        fetch.install(site, f"tensorrt-cu{cuda}-bindings=={version}")
        for name in ("nvinfer", "nvonnxparser", "nvinfer_plugin"):
            body = "".join(f"long {name}(void) {{ return 0; }}\n" for name in _LINKED)
            path = site / "tensorrt_bindings" / f"lib{name}.so.{_numbers(version)[0]}"
            fetch.library(path, body if name == "nvinfer" else "")
        command = [sys.executable, "-W", "ignore", "-m", "pybind11_stubgen", "tensorrt_bindings"]
        done = subprocess.run(
            [*command, "-o", str(raw), "--ignore-all-errors"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (site, tools)))},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
            raise fetch.Unobtainable(f"pybind11-stubgen of {version}: {last}")
        _write(raw / "tensorrt_bindings", work)
        for used in (site, raw):
            shutil.rmtree(used)
    return out


def repaired(text: str) -> str:
    """Valid stubs of what pybind11-stubgen wrote, without the documentation in them.

    Sequences of numbers are taken where `Dims` are, as pybind11 converts them; None where it is the
    default; a type that it could not name, or that is not given, is Any.
    """
    for pattern, instead in _INSTEAD:
        text = re.sub(pattern, instead, text)
    lines = [_valid(line) if re.match(r"\s*def ", line) else line for line in text.splitlines()]
    tree = _Repair().visit(ast.parse("\n".join(lines)))
    future = [node for node in tree.body if ast.unparse(node).startswith("from __future__")]
    others = [node for node in tree.body if node not in future]
    tree.body = [*future, *ast.parse("import builtins, collections.abc, typing").body, *others]
    return f"# mypy: ignore-errors\n{ast.unparse(ast.fix_missing_locations(tree))}\n"


def module_class(bindings: str) -> str:
    """The stub of a class whose members are those of the module `tensorrt`.

    A module is no type, so code that is handed one (`nv: Any`) would not be checked.
    """
    lines = ["import typing", "import tensorrt_bindings.tensorrt as t", "class Module:"]
    lines += ["    __version__: str"]
    for node in ast.parse(bindings).body:
        if isinstance(node, ast.ClassDef):
            lines.append(f"    {node.name} = t.{node.name}")
        elif isinstance(node, ast.FunctionDef):
            lines.append(f"    {node.name}: typing.Any")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Name):
            lines.append(f"    {ast.unparse(node.target)}: t.{ast.unparse(node.annotation)}")
    return "\n".join([*lines, ""])


def _stamp(version: str) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return f"{version} {STUBGEN} {sys.version_info[:2]} {digest}\n"


def _tools(folder: Path) -> Path:
    tools = folder / "stubgen"
    stamp = f"{STUBGEN} {sys.version_info[:2]}\n"
    if fetch.made_with(tools) != stamp:
        with fetch.whole(tools, stamp) as work:
            fetch.install(work, *STUBGEN)
    return tools


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _write(raw: Path, out: Path) -> None:
    (out / "tensorrt_bindings").mkdir()
    (out / "tensorrt").mkdir()
    for path in sorted(raw.glob("*.pyi")):
        fixed = repaired(path.read_text(encoding="utf-8"))
        (out / "tensorrt_bindings" / path.name).write_text(fixed, encoding="utf-8")
    package = "from tensorrt_bindings import *\n\n__version__: str\n"
    (out / "tensorrt" / "__init__.pyi").write_text(package, encoding="utf-8")
    bindings = (out / "tensorrt_bindings" / "tensorrt.pyi").read_text(encoding="utf-8")
    (out / f"{MODULE}.pyi").write_text(module_class(bindings), encoding="utf-8")


def _valid(line: str) -> str:
    """A `def` line that parses: no keyword as a name, and no parameter without a default after one.

    The line's end, `: ...` or a colon before a docstring, stays.
    """
    line = re.sub(r"(?<=[(, ])([a-z]+)(?=: )", lambda m: m[1] + "_" * keyword.iskeyword(m[1]), line)
    head, sign, tail = line.partition(" = None")
    if sign:
        return head + sign + re.sub(r"(, \w+: [\w.]+)(?=[,)])", r"\1 = ...", tail)
    return line


class _Repair(ast.NodeTransformer):
    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.body = _without_text(node.body)
        node.body += ast.parse(_MORE.get(node.name, "")).body
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        given = node.args
        plain = [*given.posonlyargs, *given.args]
        defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults))
        pairs = zip(plain, [*defaults, *given.defaults], strict=True)
        others = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        static = any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
        for number, (arg, default) in enumerate([*pairs, *others]):
            if arg.annotation is None and number == 0 and arg.arg in ("self", "cls") and not static:
                continue
            back = node.name in _CALLED_BACK
            arg.annotation = _named(arg.annotation) if back else _accepted(arg.annotation, default)
        node.returns = _named(node.returns)
        if node.name in _OPTIONAL:
            node.returns = _either(node.returns, "None")
        node.body = ast.parse("...").body
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = _named(node.annotation)
        return node

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.generic_visit(node)
        node.body = _without_text(node.body)
        return node


def _without_text(body: list[ast.stmt]) -> list[ast.stmt]:
    """`body` without docstrings."""
    kept = [
        node
        for node in body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    return kept or ast.parse("...").body


def _named(annotation: ast.expr | None) -> ast.expr:
    unknown = annotation is None or ast.unparse(annotation) == "..."
    return _type("typing.Any") if unknown or annotation is None else annotation


def _accepted(annotation: ast.expr | None, default: ast.expr | None) -> ast.expr:
    """What pybind11 takes for a parameter: more than the type that it names."""
    taken = _named(annotation)
    text = ast.unparse(taken)
    if text in ("Dims", "Permutation"):
        taken = _either(taken, "collections.abc.Sequence[int]")
    elif text.startswith("list["):
        taken = _type(text.replace("list[", "collections.abc.Sequence[", 1))
    none = isinstance(default, ast.Constant) and default.value is None
    return _either(taken, "None") if none and text != "typing.Any" else taken


def _either(one: ast.expr, other: str) -> ast.expr:
    return _type(f"{ast.unparse(one)} | {other}")


def _type(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="*", default=list(VERSIONS))
    options = parser.parse_args()
    for version in options.versions:
        try:
            sys.stdout.write(f"MYPYPATH={setup(options.folder, version)}\n")
        except fetch.Unobtainable as exc:
            sys.stdout.write(f"skipped: type stubs of TensorRT {version}: {exc}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
