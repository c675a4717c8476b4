"""Run the command line with one more runtime, precision, task and bundle than the tables have.

`python new_rows.py COMMAND ...` is the `deploykit` of somebody who added the rows below and the
functions that they name, and nothing else. The runtime reads its own format: ONNX behind 4 bytes.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__)
MAGIC = b"WRAP"
RUNTIME = f"""Runtime(
    "wrapped",
    "Wrapped Runtime",
    extra="wrapped",
    modules=("onnx",),
    packages=("onnx",),
    opens=("wrapped",),
    engine="{HERE.stem}:open_engine",
    builder="{HERE.stem}:build_engine",
    suffix=".wrapped",
    magic=(0, {MAGIC!r}),
)"""
PRECISION = """Precision(
    "int8-stored", "int8", 8, WEIGHTS, onnx_type="INT8", max_stored=127, min_opset=13
)"""
TASK = f"""Kind(
    "rate",
    takes=("image",),
    outputs=("scores",),
    head="{HERE.stem}:add_head",
    answer="{HERE.stem}:star_rows",
    options=(),
)"""
BUNDLE = f"""    "parcel": "{HERE.stem}:write_parcel","""
PROFILE = """summary = "The CPU through the wrapped runtime"
runtime = "wrapped"
device = "cpu"
architecture = "any"
precisions = ["fp32", "int8"]
"""


def open_engine(source: Any, _device: str, threads: int | None, _trust: bool) -> Any:
    from deploykit.engines.onnxruntime.engine import OnnxRuntimeEngine

    plain = Path(source).with_name(f".{Path(source).name}.plain")
    plain.write_bytes(Path(source).read_bytes().removeprefix(MAGIC))
    engine = OnnxRuntimeEngine(plain, "cpu", threads)
    plain.unlink()
    engine.runtime = "wrapped 1.0"
    return engine


def build_engine(model: Any, out: Path, target: Any, _shapes: Any, _on_progress: Any) -> Any:
    from deploykit.building.builder import BuildResult

    out.write_bytes(MAGIC + model.path.read_bytes())
    return BuildResult({"runtime": "wrapped 1.0", "device": "cpu", "profile": target.name})


def add_head(request: Any) -> Any:
    """One number for each image becomes a share of five stars."""
    from deploykit.core.tensors import TensorSpec

    def stars(values: Any) -> Any:
        return (values.flatten(1).sigmoid(),)

    return request.head(stars, [0], [TensorSpec("scores", "float32", ("N", 1))])


def star_rows(_task: Any, outputs: Any, _placed: Any, _mask: str) -> list[dict[str, Any]]:
    return [{"stars": 5 * float(row[0])} for row in outputs["scores"]]


def write_parcel(folder: Path, contents: Any) -> None:
    contents.copy_model(folder / f"{contents.name}.onnx")
    (folder / "README.md").write_text(f"{contents.name} for {contents.profile.name}\n")


def _with_row(name: str, row: str, table: str = "ALL = (") -> None:
    """Import the module `name` with `row` in its table."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    code = Path(spec.origin).read_text(encoding="utf-8")
    head = next(line for line in code.splitlines() if line.startswith(table))
    code = code.replace(f"{head}\n", f"{head}\n{row}\n", 1)
    module = ModuleType(name)
    module.__path__ = [str(Path(spec.origin).parent)]
    sys.modules[name] = module
    exec(compile(code, spec.origin, "exec"), vars(module))


def add_rows() -> None:
    _with_row("deploykit.core.runtime", f"{RUNTIME},")
    _with_row("deploykit.core.precision", f"{PRECISION},")
    _with_row("deploykit.core.task", f"{TASK},")
    _with_row("deploykit.deploying", BUNDLE, "WRITERS = {")


if __name__ == "__main__":
    add_rows()
    from deploykit.cli.main import main

    main()
