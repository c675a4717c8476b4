"""`deploykit train`, `export`, `quantize` and `build`: the commands that write models."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from deploykit.cli import output, tables
from deploykit.cli.commands import FORCE, JSON, OUT, api_arguments, described
from deploykit.cli.output import Part, Progress
from deploykit.cli.prove import axis_sizes
from deploykit.core.precision import OTHER_NODES, QUANTIZED
from deploykit.core.runtime import TARGET_RUNTIMES
from deploykit.core.task import KINDS

_WRITTEN = (*QUANTIZED, "auto")
_BUILT = ("fp32", *_WRITTEN)
if TYPE_CHECKING:  # at run time typer reads the choices
    LowPrecision = str
    AnyPrecision = str
    OtherPrecision = str
    TargetRuntime = str
    TaskKind = str
else:
    LowPrecision = Literal[_WRITTEN]
    AnyPrecision = Literal[_BUILT]
    OtherPrecision = Literal[OTHER_NODES]
    TargetRuntime = Literal[TARGET_RUNTIMES]
    TaskKind = Literal[tuple(KINDS)]

_ACCURACY = """
--calib FILE.npz|DIR   Calibration data, for int8, fp8 and auto
--data FILE.npz|DIR    Labelled data to measure accuracy on
--metric top1|perplexity|MODULE:FUNCTION  How accuracy is computed; a function of yours is
        pkg.mod:name or ./file.py:name [top1]
--max-drop SHARE       Largest accuracy drop, at its upper bound; 0.01 is a percentage point [0.01]
"""


@described(f"""
RECIPE                 mnist-cnn, cats-dogs, char-lstm, resnet18-transfer, vgg16-transfer, ./mine.py
        or pkg.mod:RECIPE
-o --out FILE.pt|DIR   The checkpoint to write; the folder, with --compare-devices
{FORCE}
--data FILE|DIR        Training data, for a recipe that does not bring its own
--save-splits DIR      Write calibration.npz and test.npz into this folder
Training:
--epochs N             Passes over the data [the recipe's]
--batch-size N         Samples per step [the recipe's]
--learning-rate RATE   The optimiser's step, to tune a recipe on data of your own [the recipe's]
--patience N           Stop after N epochs without a better score on the validation data, and keep
        the best epoch's weights [never]
--weights FILE         Weights to start from; for the transfer recipes, those of the backbone
--unfreeze RATE        Train the backbone too, at this share of the learning rate [frozen]
--augment/--no-augment  Change the images at random as the recipe declares: crop, flip, colour …
        [as the recipe says: mnist-cnn alone does]
--seed N               Seed for the weights, the order of the data and their augmentation
Speed:
--device               Where to train
--amp                  Mixed precision; fp16 scales the loss [on a GPU: bf16 if it has that, else
        fp16]
--tf32/--no-tf32       Multiply float32 in TF32 on GPUs that have it
--compile              Compile the model with torch.compile
--fsdp                 With torchrun: spread the weights over the processes (FSDP2)
Record:
--checkpoint FILE.ckpt  Save the whole state here after each epoch; the same command resumes from it
--tensorboard DIR      Write event files for TensorBoard
--compare-devices      Time training on this machine's CPU and GPU instead
{JSON}""")
def train(
    recipe: str,
    out: Path,
    force: bool = False,
    data: Path | None = None,
    save_splits: Path | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    patience: int | None = None,
    weights: Path | None = None,
    unfreeze: float | None = None,
    augment: bool | None = None,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    amp: Literal["off", "bf16", "fp16"] | None = None,
    tf32: bool = True,
    compile: bool = False,  # noqa: A002 - torch's own name for it
    fsdp: bool = False,
    checkpoint: Path | None = None,
    tensorboard: Path | None = None,
    compare_devices: bool = False,
    as_json: bool = False,
) -> None:
    """Train a recipe and write a checkpoint that can be exported.

    --compare-devices trains nothing: it times steps on the CPU and a GPU, in each precision, with
    three batch sizes, and writes report.json, report.md and report.html into the folder that -o
    names. It uses only --data, --batch-size, --augment, --compile and --force.

    torchrun --nproc-per-node 2 -m deploykit train … trains with two processes: each batch is
    shared among them, on GPUs one each.

    Example: deploykit train mnist-cnn -o model.pt
    """
    given = api_arguments(locals())
    if given.pop("compare_devices"):
        from deploykit.training.compare_devices import compare_devices as time_devices
        from deploykit.training.compare_devices import device_rows
        from deploykit.training.options import TrainingOptions

        options = TrainingOptions(batch_size=batch_size, augment=augment, compile=compile)
        line = output.command_line()
        with Progress("train --compare-devices") as progress:
            table = time_devices(
                recipe, out, options, data=data, force=force, command=line, on_progress=progress
            )
        shown: list[Part] = [device_rows(table), *table.verdict, f"wrote {table.folder}"]
        output.show(table, shown, as_json=as_json)
        return
    from deploykit.training import train as training

    first = os.environ.get("RANK", "0") == "0"  # one of torchrun's processes prints
    try:
        with Progress("train") as progress:
            result = training.train(**given, on_progress=progress)
    except KeyboardInterrupt:
        kept = checkpoint is not None and checkpoint.exists()
        cure = f"the same command goes on from {checkpoint}" if kept else "no epoch was kept"
        hint = "" if checkpoint else "; --checkpoint FILE.ckpt keeps each"
        if first:
            output.note(f"interrupted: {cure}{hint}")
        raise
    if first:
        output.show(result, tables.made(result), as_json=as_json)


@described(f"""
MODEL                  A .pt, .pth, .ckpt, .pt2, .safetensors or TorchScript file, or a Hugging Face
        folder
{OUT}
{FORCE}
--profile PROFILE      The hardware target: sets the opset and reports operators that it lacks
--preprocess imagenet|FILE.toml  Put scaling and normalisation into the graph, which then takes
        uint8 images
--samples FILE.npz|DIR  Inputs to compare on; a few are kept with the model [random]
--max-error X          Largest max |a-b| / max |a| [0.0001, more where float32 itself gives more]
Task:
--task                 Put what the model is for into the file: images or text in, labels, boxes,
        a mask or an embedding out
--labels FILE          Names of the classes, one per line [the model's own]
--threshold X          Lowest score of a box in the answer [0.25]
--iou X                Overlap from which two boxes of a class count as one [0.7]
--boxes N              Largest number of boxes per image [300]
--tokenizer FILE       A tokenizer.json [the one next to the model]
--max-length N         Largest number of tokens per text [the model's]
--pooling mean|cls     How to make an embedding of a text's tokens [as sentence-transformers' file]
Model:
--arch NAME|MODULE:CALLABLE  What builds the module when the file holds only weights: a name of
        torchvision's such as resnet18, timm:NAME, pkg.mod:Net or ./file.py:Net; for
        a checkpoint of your own recipe, the recipe's file
--input SPEC           'NAME:DTYPE[AXES]' for each input, such as 'image:float32[N,3,224,224]'.
        A number is a fixed size; a letter is an axis of any size: N is the batch, other
        letters or names (T, H, W) are yours to choose; T<=512 has a largest size
--batch dynamic|N      Size of the batch axis; dynamic is any
--allow-pickle         Run code that the file contains. Only if you trust it
Exporter:
--opset N              ONNX operator set, 18 to 23 [20, or what the profile needs]
{JSON}""")
def export(
    model: Path,
    out: Path | None = None,
    force: bool = False,
    profile: str | None = None,
    preprocess: str | None = None,
    samples: Path | None = None,
    max_error: float | None = None,
    task: TaskKind | None = None,
    labels: Path | None = None,
    threshold: float | None = None,
    iou: float | None = None,
    boxes: int | None = None,
    tokenizer: Path | None = None,
    max_length: int | None = None,
    pooling: str | None = None,
    arch: str | None = None,
    inputs: list[str] | None = None,
    batch: str = "dynamic",
    allow_pickle: bool = False,
    opset: int | None = None,
    as_json: bool = False,
) -> None:
    """Export a PyTorch model to ONNX and check the outputs.

    Example: deploykit export net.pt --arch ./net.py:Net --input 'image:float32[N,3,224,224]'
    """
    given = api_arguments(locals()) | {"inputs": inputs or ()}
    from deploykit.exporting import export as exporting

    with output.shown_on_failure(as_json, tables.made), Progress("export") as progress:
        result = exporting.export(**given, on_progress=progress)
    following = f"  next       deploykit serve {shlex.quote(str(result.path))}"
    output.show(result, [*tables.made(result), "", following], as_json=as_json)


@described(f"""
MODEL                  An .onnx file
--to                   The precision; auto searches up to 10 minutes for the fastest one that
        keeps the accuracy
{OUT}
{FORCE}
Accuracy:{_ACCURACY}--batch N              Samples per call; without data, rows of the random inputs
--axis NAME=SIZE       Without data: size of a dynamic axis of the random inputs; may be repeated
        [several at which the model runs]
Target:
--runtime              What will run the file; each wants INT8 nodes at other places
        [the profile's, or tensorrt]
--profile PROFILE      The hardware target: must support the precision; auto predicts its latency
--other-nodes          Precision of the nodes that are not quantized
{JSON}""")
def quantize(
    model: Path,
    to: LowPrecision,
    out: Path | None = None,
    force: bool = False,
    calib: Path | None = None,
    data: Path | None = None,
    metric: str | None = None,
    max_drop: float | None = None,
    batch: int | None = None,
    axis: list[str] | None = None,
    runtime: TargetRuntime | None = None,
    profile: str | None = None,
    other_nodes: OtherPrecision = "fp32",
    as_json: bool = False,
) -> None:
    """Lower an ONNX model's precision and measure the lost accuracy.

    Example: deploykit quantize model.onnx --to int8 --calib train.npz --data test.npz
    """
    given = api_arguments(locals()) | {"axis": axis_sizes("axis", ",".join(axis or ()))}
    from deploykit.quantization import quantize as precision

    with output.shown_on_failure(as_json, tables.made), Progress(f"quantize --to {to}") as progress:
        result = precision.quantize(**given, on_progress=progress)
    output.show(result, tables.made(result), as_json=as_json)
    if result.search is not None and result.search.interrupted:
        raise KeyboardInterrupt  # the best file so far is kept, the search is not complete


@described(f"""
MODEL                  An .onnx file
--profile PROFILE|FILE.toml|auto  The hardware target; NAME@MODE for a power mode, auto for this
        machine
--precision            Quantize first, as `quantize --to` does [the model's]
{OUT}
{FORCE}
--check                Only test whether NVIDIA's builder accepts the model; keep no engine
Accuracy:{_ACCURACY}
Sizes:
--batch MIN,OPT,MAX    Sizes of the batch axis: smallest, usual and largest, or one [1,8,32];
                       without TensorRT, those at which the file is compared
--axis NAME=MIN,OPT,MAX  Sizes of another dynamic axis, or one; may be repeated
TensorRT:
--dla CORE             DLA core of a Jetson; the GPU runs what the DLA cannot
--version-compatible   The engine also runs in later TensorRT of the same major version, 10's in 11
--hardware-compatible  The engine also runs on these other GPUs
--plugin LIB           Library of TensorRT plugins that the model needs; may be repeated
--device cuda|cuda:N   The GPU to build on
--no-tf32              Multiply float32 in float32, not in TF32
{JSON}""")
def build(
    model: Path,
    profile: str = "auto",
    precision: AnyPrecision | None = None,
    out: Path | None = None,
    force: bool = False,
    check: bool = False,
    calib: Path | None = None,
    data: Path | None = None,
    metric: str | None = None,
    max_drop: float | None = None,
    batch: str | None = None,
    axes: list[str] | None = None,
    dla: int | None = None,
    version_compatible: bool = False,
    hardware_compatible: Literal["ampere-plus", "same-compute-capability"] | None = None,
    plugins: list[Path] | None = None,
    device: str = "cuda",
    no_tf32: bool = False,
    as_json: bool = False,
) -> None:
    """Build an engine for a hardware target and check its outputs.

    Example: deploykit build model.onnx --profile l4 --precision fp16
    """
    given = api_arguments(locals())
    from deploykit.building import build as making
    from deploykit.building.builder import Shapes
    from deploykit.deploying.device import gpu_number

    shapes = Shapes(
        batch=batch,
        axes=axes or (),
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,
        dla=dla,
        plugins=plugins or (),
        device=gpu_number(device),
        tf32=not no_tf32,
    )
    if check:
        from deploykit.building.tensorrt import check_build

        with Progress(f"build for {profile}") as progress:
            checked = check_build(model, profile, shapes=shapes, on_progress=progress)
        output.show(checked, tables.checked(checked), as_json=as_json)
        checked.raise_if_refused()
        return
    names = ("precision", "calib", "data", "metric", "max_drop", "out", "force")
    options = {name: given[name] for name in names}
    with (
        output.shown_on_failure(as_json, tables.made),
        Progress(f"build for {profile}") as progress,
    ):
        result = making.build(model, profile, **options, shapes=shapes, on_progress=progress)
    output.show(result, tables.made(result), as_json=as_json)
