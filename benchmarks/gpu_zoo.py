"""`deploykit bench` of five models on an NVIDIA GPU against the tuned CPU.

    python benchmarks/gpu_zoo.py [--models resnet50,lstm] [--out out/gpu-zoo] [--limit-s 570]
    python benchmarks/gpu_zoo.py --rehearse     small, the CPU in the GPU's place: no figure counts

Models are made here with random weights; nothing is downloaded. Each is exported, converted to
fp16, and timed by `deploykit bench`: ONNX Runtime on the GPU in fp32 and fp16, PyTorch there, and
the CPU in the fastest settings that a search finds. OUT/MODEL has its report as HTML, Markdown and
JSON: crossover, roofline with the ceilings that a probe measured, energy by NVML, what `plan` says
of this GPU; gpu_zoo.md and .json sum them up. They are written after each model, and one that fails
or hangs stops no other. Exit 0 when no step failed, else 1; 2 for what is wrong in the options, 3
without a GPU or a runtime for it.

Two calls of ten minutes, by estimate: `--models resnet50,vgg16` (8), and the other three (7).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/

from deploykit.core.errors import DeploykitError, GateFailed
from deploykit.core.files import make_folder, read_json, write_json, write_text
from deploykit.core.machine import this_machine
from scripts.gpu.guard import workplace
from scripts.gpu.run import NOTHING, has_gpu, run_all, use_site
from scripts.gpu.steps import LOADED_S, PYTHON, Result, Step
from tests.support.runtimes.cases import absent

HERE = str(Path(__file__).resolve())
SAMPLES = 32  # that fp16 is proven on
MAKE_S, STEPS = 120, 128  # of axis T
NAME = "gpu_zoo"


@dataclass(frozen=True)
class Plan:
    """Batch sizes, and the seconds that one model may take: most of it the search on the CPU."""

    batches: tuple[int, ...]
    limit_s: float
    small: tuple[int, ...] = (1, 4)


PLANS: Mapping[str, Plan] = {
    "resnet50": Plan((1, 8, 32), 280, (1,)),
    "vgg16": Plan((1, 8), 280, (1,)),
    "mnist-cnn": Plan((1, 32, 512), 150),
    "lstm": Plan((1, 32, 512), 150),
    "bert-tiny": Plan((1, 32, 256), 150),
}


def planned(names: Sequence[str], work: Path, out: Path, rehearse: bool) -> Iterator[Step]:
    """Of each model: make, then bench what was made."""
    for name in names:
        plan = PLANS[name]
        made = f"{name}: make"
        make_s, bench_s = (LOADED_S, LOADED_S) if rehearse else (MAKE_S, plan.limit_s)
        yield Step(NAME, made, [PYTHON, HERE, "--make", name, str(work)], make_s)
        program = ["scripts.gpu.cpu_as_gpu"] if rehearse else ["deploykit"]
        words = [PYTHON, "-m", *program, "bench", *_engines(name, work), "--device", "cuda"]
        batches = plan.small if rehearse else plan.batches
        words += ["--batches", ",".join(map(str, batches))]
        words += ["--seconds", "1" if rehearse else "1.5"]
        words += ["-o", str(out / name), "--force"]
        yield Step(NAME, f"{name}: bench", words, bench_s, after=made)


def _engines(name: str, work: Path) -> list[str]:
    """What there is: a gate may have refused fp16."""
    fp32, half = work / f"{name}.onnx", work / f"{name}.fp16.onnx"
    document = read_json(work / f"{name}.json") if (work / f"{name}.json").exists() else {}
    words = [str(path) for path in (half, work / f"{name}.safetensors") if path.exists()]
    words += ["--baseline", str(fp32)]
    if any("T" in spec.rpartition("[")[2] for spec in document.get("inputs", ())):
        words += ["--axis", f"T={STEPS}"]
    return words + (["--arch", document["arch"]] if document else [])


def make(name: str, folder: Path) -> None:
    """Write NAME.safetensors, .onnx, .fp16.onnx where its gate passes, and NAME.json."""
    import deploykit as dk
    from tests.support.zoo.members import prepare

    files = prepare(member(name), folder, samples=SAMPLES)
    exported = dk.export(
        files.model, out=folder / f"{name}.onnx", arch=files.arch, inputs=list(files.inputs)
    )
    note = ""
    try:
        dk.quantize(exported.path, "fp16", folder / f"{name}.fp16.onnx", calib=files.calib)
    except GateFailed as exc:
        note = f"no fp16 file: {exc.message}"
    found = {"arch": files.arch, "inputs": files.inputs, "parameters": files.parameters}
    write_json(folder / f"{name}.json", {**found, "note": note})
    sys.stdout.write(f"{json.dumps({'parameters': files.parameters, 'note': note})}\n")


def member(name: str) -> Any:
    """A member of the zoo; ResNet-50 is ResNet-18's, and the digits' network needs no digits."""
    import numpy as np

    from tests.support.zoo.members import ZOO

    if name == "resnet50":
        return replace(ZOO["resnet18"], name=name, arch=f"{HERE}:resnet50")
    if name != "mnist-cnn":
        return ZOO[name]

    def sample(count: int, seed: int) -> Mapping[str, np.ndarray]:
        random = np.random.default_rng(seed)
        return {"image": random.random((count, 1, 28, 28), np.float32)}

    untrained: Any = lambda *_: None  # noqa: E731 - one expression
    return replace(ZOO[name], sample=sample, tune=untrained, needs=(), labelled=None)


def resnet50() -> Any:
    from tests.support.zoo.models import register_torchvision

    register_torchvision()
    from torchvision.models import get_model

    return get_model("resnet50", weights=None)


def collect(out: Path, results: Sequence[Result], rehearse: bool) -> None:
    """Write gpu_zoo.json and .md of the reports that there are so far."""
    places = {name: out / name / "report.json" for name in PLANS}
    reports = {name: read_json(path) for name, path in places.items() if path.is_file()}
    machine = this_machine()
    document = {
        "rehearsal": rehearse,
        "machine": machine.to_dict(),
        "models": (models := {name: summary(report) for name, report in reports.items()}),
        "plan_error": (error := plan_error(models)),
        "steps": [each.to_dict() for each in results],
    }
    write_json(out / f"{NAME}.json", document)
    gpus = ", ".join(f"{gpu.name} (driver {gpu.driver})" for gpu in machine.gpus) or "no GPU"
    lines = ["# Models on the GPU against the tuned CPU", ""]
    if rehearse:
        lines += ["**A rehearsal: small sizes, the CPU in the GPU's place. No figure counts.**", ""]
    lines += [f"{gpus}; {machine.usable_cores} cores of {machine.cpu}", ""]
    for name, found in models.items():
        lines += markdown(name, found)
    lines += ["## What `plan` says of this GPU", "", sentence_on(error), ""]
    lines += ["| part | step | result | s | figures |", "| --- | --- | --- | --: | --- |"]
    write_text(out / f"{NAME}.md", "\n".join([*lines, *(each.row for each in results)]) + "\n")


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader compares: of each point its rate, latency and energy; the rest as reported."""
    energy = {(each["label"], each["batch"]): each["joules"] for each in report["energy"]}
    said = {(each["label"], each["batch"]): each for each in report["predicted"]}
    points = []
    for point in report["points"]:
        key = point["label"], point["batch"]
        plan = said.get(key, {})
        p50 = point["latency"]["p50_ms"]
        compute = (point["compute"] or {}).get("p50_ms")
        points.append(
            {
                **{name: point[name] for name in ("label", "batch", "device", "runtime", "marks")},
                "per_s": point["throughput_per_s"],
                "p50_ms": p50 and p50["value"],
                "compute_ms": compute and compute["value"],
                "joules": energy.get(key),
                "plan_ms": plan.get("predicted_ms"),
                "plan_error": plan.get("error"),
            }
        )
    names = ("verdict", "crossovers", "not_measured", "throttled", "invalid")
    ceilings = {name: report[name].get("ceilings", {}) for name in ("roofline", "gpu_roofline")}
    return {**{name: report[name] for name in names}, "ceilings": ceilings, "points": points}


def left_out(out: Path, names: Sequence[str]) -> list[str]:
    """Columns on the GPU that are in no report, with the reason; also printed."""
    found = [
        f"{name}: {gap['what']}: {gap['why']}"
        for name in names
        if (path := out / name / "report.json").is_file()
        for gap in read_json(path)["not_measured"]
        if gap["what"].endswith("on the GPU")
    ]
    sys.stderr.write("".join(f"error: {each}\n" for each in found))
    return found


def plan_error(models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Of all points on a GPU that have a prediction; None where there is none."""
    sizes = sorted(
        abs(point["plan_error"])
        for model in models.values()
        for point in model["points"]
        if point["device"] != "cpu" and point["plan_error"] is not None
    )
    if not sizes:
        return None
    return {"points": len(sizes), "median": statistics.median(sizes), "largest": sizes[-1]}


def sentence_on(error: Mapping[str, Any] | None) -> str:
    if error is None:
        return "Not measured: no point on a GPU has a prediction."
    return (
        f"Off by a median of {error['median']:.0%} over {error['points']} points, at most "
        f"{error['largest']:.0%}. A plan is of TensorRT, the points are of ONNX Runtime."
    )


def markdown(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    said = [each for each in found["verdict"] if not each.startswith("Not measured: ")]
    yield f"## {name}"
    yield ""
    yield f"[The report]({name}/report.html). {' '.join(said)}"
    yield ""
    yield "| setup | batch | inferences/s | p50 ms | compute ms | mJ each | plan's error |"
    yield "| --- | --: | --: | --: | --: | --: | --: |"
    for point in found["points"]:
        cells = [
            point["label"] + (" ✗" if point["marks"] else ""),
            str(point["batch"]),
            f"{point['per_s']['value']:,.4g}",
            shown(point["p50_ms"], ".3g"),
            shown(point["compute_ms"], ".3g"),
            shown(point["joules"] and 1e3 * point["joules"], ".3g"),
            shown(point["plan_error"], "+.0%"),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for which, ceilings in found["ceilings"].items():
        where = "GPU" if which == "gpu_roofline" else "CPU"
        values = ", ".join(f"{key} {value:,.4g}" for key, value in ceilings.items())
        yield f"- ceilings of the {where}: {values or 'not measured'}"
    for gap in found["not_measured"]:
        yield f"- not measured: {gap['what']}: {gap['why']}"
    yield ""


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def lacking() -> str:
    """Why nothing can be measured here, or ""."""
    if not has_gpu():
        return f"{NOTHING} (--rehearse shows that the command works)"
    return absent("onnxruntime-cuda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(PLANS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out"), "gpu-zoo"))
    parser.add_argument("--limit-s", type=float, default=570, help="for all of it")
    parser.add_argument("--site", type=Path, help="a folder of packages, before all others")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--make", nargs=2, metavar=("MODEL", "FOLDER"), help="one step, alone")
    options = parser.parse_args()
    use_site(options.site)
    if options.make:
        make(options.make[0], Path(options.make[1]))
        return 0
    names = options.models.split(",")
    if unknown := [name for name in names if name not in PLANS]:
        parser.error(f"no model {unknown[0]}; one of: {', '.join(PLANS)}")
    if not options.rehearse and (why := lacking()):
        sys.stderr.write(f"error: {why}\n")
        return 3
    try:
        out = make_folder(options.out.resolve())
        logs = make_folder(out / "logs")
        for name in names:
            (out / name / "report.json").unlink(missing_ok=True)  # an earlier run's
        with workplace("gpu-zoo-") as work:
            results = run_all(
                planned(names, work, out, options.rehearse),
                options.limit_s,
                out,
                logs,
                lambda so_far: collect(out, so_far, options.rehearse),
            )
    except (DeploykitError, OSError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    return int(any(each.status == "failed" for each in results) or bool(left_out(out, names)))


if __name__ == "__main__":
    sys.exit(main())
