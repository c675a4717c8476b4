"""Our way to the GPU, on a GPU: is it right, does it leak, what do overlap and graphs gain.

    python benchmarks/cuda_path.py [--out FOLDER] [--calls 100000] [--rounds 15]

In: a machine with an NVIDIA GPU, cuda-bindings, and torch with CUDA or onnxruntime-gpu; what is not
there is said to be not run. Out: Markdown on stdout; with FOLDER or $OUT also `cuda_path.json` and
`cuda_path.md` there, after each part. What is compared runs in turn, round by round, in one
process; each ratio has its 95 % interval. Exits 1 when an answer is wrong or memory is lost.

The work is torch's, on the stream and the buffers that `engines/cuda/` hands out: this measures
that file, not TensorRT, and nothing here is a figure for TensorRT.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cuda_bench import Bench, Model, faster_than, feed

from deploykit.core.errors import DeploykitError
from deploykit.core.files import write_together
from deploykit.core.machine import this_machine

LEAK_BYTES = 32 << 20  # of the host's or the GPU's memory: more than that is a leak


def onnxruntime_rows(bench: Bench) -> list[dict[str, Any]]:
    """Kept buffers and graphs of ONNX Runtime's CUDA provider against `session.run`."""
    import tempfile

    import onnx
    from onnx import helper, numpy_helper

    from deploykit.engines.onnxruntime.engine import open_engine

    model = Model("50 small layers", 256, 50, True, (1, 8, 32))
    weights = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32) / 16
    nodes, last = [], "x"
    for n in range(model.layers):
        out = "y" if n == model.layers - 1 else f"r{n}"
        nodes += [
            helper.make_node("MatMul", [last, "w"], [f"m{n}"]),
            helper.make_node("Relu", [f"m{n}"], [out]),
        ]
        last = out
    ends = [
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 256])] for name in "xy"
    ]
    graph = helper.make_graph(nodes, "g", *ends, [numpy_helper.from_array(weights, "w")])
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        path.write_bytes(file.SerializeToString())
        for batch in model.batches:
            x = feed(model, batch, 0)
            with open_engine(path, "cuda") as plain, open_engine(path, "cuda", graphs=[batch]) as g:
                wanted = plain.session.run(["y"], x)[0]
                for name, engine in (("kept buffers", plain), ("graphs", g)):
                    for _ in range(5):
                        answer = engine(x)["y"]
                    found, fast_s, slow_s = bench.compare(
                        lambda e=engine, x=x: [e(x) for _ in range(200)] and None,
                        lambda p=plain, x=x: [p.session.run(["y"], x) for _ in range(200)] and None,
                        200,
                    )
                    rows.append(
                        {
                            "gain of": name,
                            "batch": batch,
                            **faster_than(found, fast_s, slow_s),
                            "largest error": float(np.abs(answer - wanted).max()),
                            "notes": list(engine.notes),
                        }
                    )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "nothing\n"
    keys = list(rows[0])
    lines = ["| " + " | ".join(keys) + " |", "|" + " --- |" * len(keys)]
    lines += ["| " + " | ".join(cell(row.get(key)) for key in keys) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return "; ".join(cell(item) for item in value)
    return str(value)


def versions() -> dict[str, str]:
    import importlib.metadata

    found = {"python": platform.python_version()}
    for name in ("cuda-bindings", "torch", "onnxruntime-gpu", "onnxruntime", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def measure(
    calls: int, rounds: int, save: Callable[[Mapping[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Everything that can be run here; under `not run` why the rest is not.

    `save` gets what there is after each part: a machine that is lent may go at any time.
    """
    found: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "versions": versions(),
        "gpus": [gpu.to_dict() for gpu in this_machine().gpus],
        "cpu": this_machine().cpu,
        "load": os.getloadavg()[0],
        "not run": {},
    }
    try:
        from deploykit.engines.cuda.driver import CudaDevice

        cuda = CudaDevice(0)
    except (DeploykitError, KeyError) as exc:  # KeyError: no extra of ours brings it yet
        found["not run"]["all"] = f"no usable CUDA: {exc}"
        return found
    device = cuda.describe()
    found["device"] = vars(device)
    torch = cuda_torch()
    bench = Bench(cuda, torch, calls, rounds)
    if isinstance(torch, str):
        found["not run"]["engines/cuda"] = torch
    else:
        for name in ("correctness", "leak", "gains", "overhead"):
            print(f"{name} ...", file=sys.stderr, flush=True)
            found[name] = getattr(bench, name)()
            save(found)
    print("onnxruntime ...", file=sys.stderr, flush=True)
    try:
        found["onnxruntime"] = onnxruntime_rows(bench)
    except DeploykitError as exc:
        found["not run"]["onnxruntime"] = f"{exc.message} ({exc.hint})"
    return found


def cuda_torch() -> Any:
    """The module torch if it has CUDA, else why there is none."""
    try:
        import torch
    except ImportError as exc:
        return f"torch: {exc}"
    return torch if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


def failures(found: Mapping[str, Any]) -> list[str]:
    wrong = [row for row in found.get("correctness", ()) if row["wrong"]]
    said = [f"{row['wrong']} of {row['calls']} answers wrong: {row['model']}" for row in wrong]
    for key, value in found.get("leak", {}).items():
        if "bytes" in key and value > LEAK_BYTES:
            said.append(f"{key}: {value / 2**20:.0f} MiB in {found['leak']['calls']} calls")
    return said


def markdown(found: Mapping[str, Any]) -> str:
    parts = [
        "# The CUDA path, measured\n",
        f"`{found['command']}`, load average {found['load']:.1f} at the start\n",
        f"{found.get('device', {}).get('name', 'no GPU')}, {found['cpu']}; "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        + "\n",
    ]
    parts += [f"**Not run: {what}**: {why}\n" for what, why in found["not run"].items()]
    parts += [f"**FAILED**: {text}\n" for text in failures(found)]
    titles = {
        "correctness": "Answers of overlapped and captured calls",
        "gains": "What overlap and graphs gain (times as fast; µs a call)",
        "overhead": "A call of ours over the bare loop of CUDA's calls",
        "onnxruntime": "ONNX Runtime, CUDA provider, over session.run",
    }
    for key, title in titles.items():
        if key in found:
            parts.append(f"## {title}\n\n{table(found[key])}")
    if "leak" in found:
        parts.append(f"## Memory\n\n{table([found['leak']])}")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"))
    parser.add_argument("--calls", type=int, default=100_000, help="of the leak check")
    parser.add_argument("--rounds", type=int, default=15, help="of each comparison")
    options = parser.parse_args()

    def save(found: Mapping[str, Any]) -> None:
        if options.out is not None:
            document = json.dumps(found, indent=2) + "\n"
            files = {"cuda_path.md": markdown(found), "cuda_path.json": document}
            write_together(Path(options.out), files)

    found = measure(options.calls, options.rounds, save)
    print(markdown(found))
    save(found)
    return 1 if failures(found) else 0


if __name__ == "__main__":
    sys.exit(main())
