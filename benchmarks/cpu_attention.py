"""What attention's form costs a BERT on a CPU, float32 and INT8, in short slices in turn.

    OMP_NUM_THREADS=1 python benchmarks/cpu_attention.py OUT.md

A BERT-mini (4 layers, 256 wide, 4 heads) with seeded weights. `torch`: the graph as torch's
exporter writes it. `deploykit`: as deploykit exports it. `fused`: that one with its attentions in
one operator by onnxscript's rules, and no other fusion. `optimizer`: what ONNX Runtime's
`transformers.optimizer` makes of the older exporter's graph; it finds no attention in the others.
`int8-dynamic` is ours, `quantize_dynamic` ONNX Runtime's. Seconds and ratios: `slices.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import torch
from quantizers import evaluate, quiet
from slices import cells, main, race, session

import deploykit as dk
from deploykit.engines.torch.files import with_torchvision
from deploykit.graph.graph import Graph
from deploykit.quantization.dynamic import to_dynamic

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

    with mock.patch("deploykit.exporting.onnx.simplify_attention"):
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


def rows(folder: Path) -> Iterator[str]:
    with quiet():
        paths = written(folder)
    ours = {name: "optimizer" not in name and "quantize_" not in name for name in paths}
    sessions = {name: session(path, fused=not ours[name]) for name, path in paths.items()}
    kinds = {}
    for name, path in paths.items():
        found = Counter(node.op_type for node in onnx.load(path).graph.node)
        kinds[name] = sum(count for kind, count in found.items() if "Attention" in kind)
    for batch, length in SIZES:
        given = feeds(batch, length)
        wanted = sessions["torch"].run(None, given)[0]
        seconds = race(sessions, given)
        for name in seconds:
            sqnr, _ = evaluate(wanted, sessions[name].run(None, given)[0])
            speed = cells(seconds, "torch", name)
            yield f"| {batch} | {length} | {name} | {kinds[name]} | {speed} | {sqnr} |"


HEAD = (
    "| batch | tokens | graph | attention operators | times torch's speed | ms | SQNR dB |",
    "| --: | --: | --- | --: | --: | --: | --: |",
)

if __name__ == "__main__":
    main("cpu_attention.py", "Attention on a CPU", HEAD, rows)
