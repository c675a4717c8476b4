"""Every model of the zoo through the command line: exported, quantized, and shown to NVIDIA.

In: nothing; the models are made here (`tests/zoo`), nothing is downloaded. Out, as Markdown: a
table of exports, a table of precisions, and with `--speed` and `--huge` the bounds on time and
memory. A model that fails has its reason in its row, and the next one follows. `--out FILE` writes
what is there so far after each model. For the last column `tensorrt` must be importable.

    python benchmarks/zoo.py [--only NAME,...] [--to fp16,int8,auto] [--samples 64] [--out FILE]
    python benchmarks/zoo.py --only none --speed --huge
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from child import Ran, deploykit, file_bytes, header, run

MEMBERS = (
    "mnist-cnn",
    "lstm",
    "encoder",
    "encoder-masked",
    "resnet18",
    "vgg16",
    "mobilenet-v3-small",
    "efficientnet-b0",
    "convnext-tiny",
    "vit-b-16",
    "swin-t",
    "bert-tiny",
    "detector",
    "overflow",
    "bad-int8",
)
NVIDIA = importlib.util.find_spec("tensorrt") is not None

EXPORTS = (
    "model",
    "parameters",
    "export s",
    "peak RSS MB",
    "exporter",
    "opset",
    "nodes",
    "size MB",
    "largest error",
    "result",
)
PRECISIONS = (
    "model",
    "to",
    "result",
    "SQNR dB",
    "agreement",
    "drop pp",
    "nodes by type",
    "size MB",
    "s",
    "peak RSS MB",
    "notes",
)
NVIDIA_SAYS = "NVIDIA parser + builder"


@dataclass
class Tables:
    """The rows so far, and the parts of text that follow the tables."""

    exports: list[list[str]] = field(default_factory=list)
    precisions: list[list[str]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        more = [NVIDIA_SAYS] if NVIDIA else []
        texts = []
        if self.exports:
            texts += ["## Export", table([*EXPORTS, *more], self.exports)]
        if self.precisions:
            texts += ["## Precisions", table([*PRECISIONS, *more], self.precisions)]
        return "\n\n".join([*texts, *self.parts]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(MEMBERS), help="names, or none")
    parser.add_argument("--to", default="fp16,int8,auto")
    parser.add_argument("--samples", type=int, default=64, help="to calibrate on")
    parser.add_argument("--speed", action="store_true", help="the bounds on time and memory")
    parser.add_argument("--rounds", type=int, default=5, help="of the interleaved comparisons")
    parser.add_argument("--huge", action="store_true", help="a 2.7 GB model; needs 24 GiB")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the files there")
    options = parser.parse_args()
    names = [] if options.only == "none" else options.only.split(",")
    if unknown := set(names) - set(MEMBERS):
        print(f"error: no model {unknown.pop()}; one of: {', '.join(MEMBERS)}", file=sys.stderr)
        return 2
    tables, top = Tables(), header("The zoo") if options.out else ""

    def save() -> None:
        if options.out:
            options.out.write_text(f"{top}\n{tables.markdown()}", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="zoo-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            one_model(name, folder, options, tables)
            save()
            if options.folder is None:  # VGG-16 alone leaves 2.5 GB
                for path in folder.iterdir():
                    path.unlink()
        if options.speed or options.huge:
            import zoo_speed

            for title, measure in zoo_speed.chosen(speed=options.speed, huge=options.huge):
                say(title)
                tables.parts.append(f"## {title}\n\n{measure(folder, options.rounds)}")
                save()
    print(tables.markdown())
    return 0


def one_model(name: str, folder: Path, options: argparse.Namespace, tables: Tables) -> None:
    """Add the rows of one model."""
    say(name)
    made = prepare(name, folder, options.samples)
    files = made.document
    if "model" not in files:
        why = files.get("missing") or made.error
        tables.exports.append(padded([name], [f"skipped: {why}"], EXPORTS))
        return
    exported = folder / f"{name}.onnx"
    ran = export(files, exported)
    facts = deploykit("inspect", exported, "--json").document if ran.code == 0 else {}
    tables.exports.append(export_row(name, files, ran, facts, exported))
    if ran.code != 0:
        return
    for to in filter(None, options.to.split(",")):
        say(f"{name} --to {to}")
        out = folder / f"{name}.{to}.onnx"
        words: list[object] = ["--to", to, "-o", out, "--calib", files["calib"], "--json"]
        if files["data"]:
            words += ["--data", files["data"]]
        ran = deploykit("quantize", exported, *words)
        tables.precisions.append(precision_row(name, to, ran, out))


def prepare(name: str, folder: Path, samples: int) -> Ran:
    """The model's weights and data, made by a process of its own: its memory is not ours."""
    return run(
        [sys.executable, "-m", "tests.support.zoo.members", name, folder, "--samples", samples]
    )


def export(files: dict[str, Any], out: Path) -> Ran:
    inputs = [word for spec in files["inputs"] for word in ("--input", spec)]
    return deploykit(
        "export", files["model"], "-o", out, "--arch", files["arch"], *inputs, "--json"
    )


def export_row(
    name: str, files: dict[str, Any], ran: Ran, facts: dict[str, Any], out: Path
) -> list[str]:
    start = [name, f"{files['parameters']:,}", f"{ran.seconds:.1f}", mb(ran.peak_bytes)]
    if ran.code != 0:
        return padded(start, [f"exit {ran.code}: {cell(ran.error)}"], EXPORTS)
    evidence = ran.document["manifest"]["evidence"]
    done = evidence["export"] or {}
    details = facts.get("details", {})
    opset = details.get("opset", {})
    exporter = done.get("exporter", "?")
    fallback = done.get("fallback")
    return [
        *start,
        exporter,
        str(opset.get("ai.onnx", opset.get("", "?"))),
        str(details.get("nodes", "?")),
        mb(file_bytes(out)),
        f"{max(row['error'] for row in ran.document['parity']['rows']):.1e}",
        f"fell back: {cell(fallback)}" if fallback else "equal at every batch",
        *nvidia(out),
    ]


def precision_row(name: str, to: str, ran: Ran, out: Path) -> list[str]:
    """What `quantize` said; of a rejected file the figures, and the reason."""
    end = [f"{ran.seconds:.1f}", mb(ran.peak_bytes)]
    document = ran.document
    if "manifest" not in document:
        refused = [name, to, f"exit {ran.code}: {cell(ran.error)}"]
        return [*refused, *[""] * 5, *end, "", *([""] if NVIDIA else [])]
    evaluation = document.get("evaluation") or {}
    mix = document["manifest"]["precision"]
    return [
        name,
        to,
        "passed" if ran.code == 0 else f"exit {ran.code}: {cell(ran.error)}",
        sqnr(evaluation),
        interval(evaluation.get("agreement"), "%"),
        interval((evaluation.get("drop") or {}).get("drop"), ""),
        ", ".join(f"{kind} {count}" for kind, count in mix.items()),
        mb(file_bytes(out)) if ran.code == 0 else "",
        *end,
        cell("; ".join(document.get("notes", []))),
        *(nvidia(out) if ran.code == 0 else [""] if NVIDIA else []),
    ]


def nvidia(path: Path) -> list[str]:
    """What NVIDIA's parser and builder say of a file; nothing where they are not installed."""
    if not NVIDIA:
        return []
    ran = run([sys.executable, "-m", "tests.support.zoo.nvidia", path])
    document = {}
    for line in ran.out.splitlines():  # the native library writes on stdout too
        if line.startswith("{"):
            document = Ran(0, 0, 0, line, "").document
    if not document:
        return [f"failed: {cell(ran.error)}"]
    if document["accepted"]:
        about = f"{document['library']}, {document['layers']} layers, {document['build_s']:.1f} s"
        return [f"accepted ({about})"]
    return [f"refused: {cell(document['why'])}"]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def padded(start: list[str], end: list[str], head: tuple[str, ...]) -> list[str]:
    """A row with `start` on the left and `end` on the right, the result's column."""
    return [*start, *[""] * (len(head) - len(start) - len(end)), *end, *([""] if NVIDIA else [])]


def interval(found: dict[str, float] | None, unit: str) -> str:
    """A share and its 95 % interval, in percent or percentage points."""
    if not found:
        return ""
    value, low, high = (f"{found[key] * 100:.2f}" for key in ("value", "low", "high"))
    return f"{value}{unit and ' ' + unit}, {low} to {high}"


def sqnr(evaluation: dict[str, Any]) -> str:
    value = evaluation.get("sqnr_db")
    return f"{value:.1f}" if value is not None else "equal or none" if evaluation else ""


def mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.2f}" if size_bytes < 1e7 else f"{size_bytes / 1e6:,.0f}"


def cell(text: object) -> str:
    """Text that stays in its cell: one line, no bars, not longer than a reader wants."""
    words = [Path(word).name if word.startswith("/") else word for word in str(text).split()]
    line = " ".join(words).replace("|", "\\|")
    return line if len(line) <= 160 else f"{line[:157]}..."


def say(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
