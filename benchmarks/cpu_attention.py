"""What attention's form costs a BERT on a CPU, float32 and INT8, in short slices in turn.

    OMP_NUM_THREADS=1 python benchmarks/cpu_attention.py OUT.md

A BERT-mini (4 layers, 256 wide, 4 heads) with seeded weights. `torch`: the graph as torch's
exporter writes it. `deploykit`: as deploykit exports it. `fused`: that one with its attentions in
one operator by onnxscript's rules, and no other fusion. `optimizer`: what ONNX Runtime's
`transformers.optimizer` makes of the older exporter's graph; it finds no attention in the others.
`int8-dynamic` is ours, `quantize_dynamic` ONNX Runtime's. Seconds and ratios as in `cpu_int8.py`.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort
import torch
from cpu_int8 import SLICES, race, session
from quantizers import evaluate, quiet

import deploykit as dk
from deploykit.onnx_graph.graph import Graph
from deploykit.quantization.dynamic import to_dynamic
from deploykit.runtimes.torch.operators import with_torchvision

SIZES = ((1, 128), (8, 128), (1, 384))
WORDS = 3000


def bert(attention: str) -> Any:
    import transformers

    with_torchvision(partial(getattr, transformers, "BertModel"))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
    )
    config._attn_implementation = attention
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def feeds(batch: int, length: int) -> dict[str, np.ndarray]:
    words = np.random.default_rng(0).integers(1, WORDS, (batch, length))
    return {"input_ids": words, "attention_mask": np.ones_like(words)}


def export(out: Path) -> Path:
    example = {name: torch.from_numpy(each) for name, each in feeds(2, 16).items()}
    dk.export(bert("sdpa"), example, out=out, dynamic_axes={name: {1: "T"} for name in example})
    return out


def older(out: Path) -> Path:
    """The older exporter's graph, as it comes: ONNX Runtime's optimizer goes by its patterns."""
    example, axes = feeds(2, 16), {0: "N", 1: "T"}
    model = bert("eager")
    run = model.forward
    model.forward = lambda ids, mask: run(input_ids=ids, attention_mask=mask)[0]
    torch.onnx.export(
        model,
        tuple(map(torch.from_numpy, example.values())),
        out,
        dynamo=False,
        input_names=[*example],
        output_names=["y"],
        dynamic_axes=dict.fromkeys((*example, "y"), axes),
    )
    return out


def fuse(source: Path, out: Path) -> Path:
    """The attentions of `source` as one operator each."""
    from onnxscript import ir
    from onnxscript.rewriter.ort_fusions import mha, sdpa

    model = ir.load(source)
    ir.passes.common.ShapeInferencePass()(model)
    sdpa.fuse_sdpa(model, apply_shape_inference=True)
    mha.fuse_mha2(model)
    ir.passes.common.RemoveUnusedNodesPass()(model)
    model.opset_imports["com.microsoft"] = 1
    ir.save(model, out)
    return out


def optimize(source: Path, out: Path) -> Path:
    from onnxruntime.transformers import optimizer

    found = optimizer.optimize_model(
        str(source), model_type="bert", num_heads=4, hidden_size=256, opt_level=0
    )
    found.save_model_to_file(str(out))
    return out


def quantize_dynamic(source: Path, out: Path) -> Path:
    from onnxruntime import quantization

    bare = onnx.load(source)  # its quantizers stop at the shapes that an exporter wrote
    del bare.graph.value_info[:]
    onnx.save(bare, out)
    more = {"DefaultTensorType": onnx.TensorProto.FLOAT}
    quantization.quantize_dynamic(out, out, per_channel=True, extra_options=more)
    return out


def written(folder: Path) -> dict[str, Path]:
    """Each graph by the name of its row."""
    number = iter(range(100))

    def place() -> Path:
        return folder / f"{next(number)}.onnx"

    with mock.patch("deploykit.exporters.finish.simplify_attention"):
        paths = {"torch": export(place())}
    paths["deploykit"] = export(place())
    paths["deploykit, fused"] = fuse(paths["deploykit"], place())
    paths["older exporter"] = older(place())
    paths["older exporter, optimizer"] = optimize(paths["older exporter"], place())
    for name in ("torch", "deploykit", "deploykit, fused"):
        paths[f"{name}, int8-dynamic"] = place()
        to_dynamic(Graph.open(paths[name])).save(paths[f"{name}, int8-dynamic"])
    for name in ("deploykit", "older exporter", "older exporter, optimizer"):
        paths[f"{name}, quantize_dynamic"] = quantize_dynamic(paths[name], place())
    return paths


def rows(folder: Path) -> list[str]:
    with quiet():
        paths = written(folder)
    ours = {name: "optimizer" not in name and "quantize_" not in name for name in paths}
    sessions = {name: session(path, fused=not ours[name]) for name, path in paths.items()}
    kinds = {}
    for name, path in paths.items():
        found = Counter(node.op_type for node in onnx.load(path).graph.node)
        kinds[name] = sum(count for kind, count in found.items() if "Attention" in kind)
    lines = []
    for batch, length in SIZES:
        given = feeds(batch, length)
        wanted = sessions["torch"].run(None, given)[0]
        seconds = race(sessions, given)
        for name, mine in seconds.items():
            ratios = sorted(a / b for a, b in zip(seconds["torch"], mine, strict=True))
            edge, middle = len(ratios) // 8, ratios[len(ratios) // 2]
            sqnr, _ = evaluate(wanted, sessions[name].run(None, given)[0])
            lines.append(
                f"| {batch} | {length} | {name} | {kinds[name]} | {middle:.2f} ({ratios[edge]:.2f} "
                f"to {ratios[-1 - edge]:.2f}) | {sorted(mine)[len(mine) // 2] * 1e3:.2f} | {sqnr} |"
            )
    return lines


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/cpu_attention.py OUT.md")
    torch.set_num_threads(1)
    made_with = (
        "`OMP_NUM_THREADS=1 python benchmarks/cpu_attention.py OUT.md`; Python "
        f"{platform.python_version()}, onnx {onnx.__version__}, onnxruntime {ort.__version__}, "
        f"torch {torch.__version__}. {SLICES} slices in turn in one process, processor seconds of "
        "one thread; the machine had other work."
    )
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            "# Attention on a CPU",
            "",
            made_with,
            "",
            "| batch | tokens | graph | attention operators | times torch's speed | ms | SQNR dB |",
            "| --: | --: | --- | --: | --: | --: | --: |",
            *rows(Path(folder)),
        ]
    print("\n".join(lines))
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
