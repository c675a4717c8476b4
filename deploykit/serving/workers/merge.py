"""Merge the figures of a server's workers. Pure functions.

Counters are added up, including those of workers that have ended; of a gauge, the result is the
value that an operator should see: METRICS says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from deploykit.serving.observe.metrics import METRICS, BucketCounts, Sample

Report = Mapping[str, Any]  # "samples", "statistics" and "status"
Figures = dict[str, Any]

_COUNTED = ("counter", "histogram", "shared")
_LATEST = ("last_ms", "last_inference", "at_s", "at_us", "loaded_s")
_JOIN: Mapping[str, Any] = {"least": min, "most": max, "shared": max}
# in a model's status: of all workers, and added up for those that run
_COUNTS = ("outcomes", "rows", "runs", "idle_us", "last_ms", "request", "stages_us", "batches")
_SUMS = ("engines", "queue", "waiting", "in_flight")


def counters(reports: Sequence[Report]) -> Report:
    """Return the counters, which remain valid after the workers have ended."""
    samples = merge_samples(reports)
    return {
        "samples": [each for each in samples if METRICS[each.name][0] in _COUNTED],
        "statistics": merge_statistics(reports),
        "status": {**merge_status(reports), "ended": True},
    }


def merge_samples(reports: Sequence[Report]) -> list[Sample]:
    """Merge samples of one name and the same labels into one."""
    found: dict[tuple[object, ...], Sample] = {}
    for sample in (each for report in reports for each in report["samples"]):
        key = (sample.name, *sample.labels.items())
        before = found.get(key)
        if before is None:
            found[key] = sample
            continue
        a, b = before.value, sample.value
        if isinstance(a, BucketCounts) and isinstance(b, BucketCounts):
            pairs = zip(a.counts, b.counts, strict=True)
            counts = [(bound, count + more) for (bound, count), (_, more) in pairs]
            found[key] = before._replace(value=BucketCounts(counts, a.total + b.total))
        else:
            join = _JOIN.get(METRICS[sample.name][0], sum)
            found[key] = before._replace(value=join((a, b)))
    return list(found.values())


def merge_statistics(reports: Sequence[Report]) -> Figures:
    """Merge the statistics of the Open Inference Protocol over all workers."""
    models: dict[str, Figures] = {}
    for each in (each for report in reports for each in report["statistics"]["model_stats"]):
        sizes = {batch["batch_size"]: dict(batch) for batch in each["batch_stats"]}
        for times in sizes.values():
            del times["batch_size"]
        found = {**each, "batch_stats": sizes}
        before = models.get(each["name"])
        models[each["name"]] = found if before is None else add(before, found)
    for model in models.values():
        batches = sorted(model["batch_stats"].items())
        model["batch_stats"] = [{"batch_size": size, **times} for size, times in batches]
    return {"model_stats": list(models.values())}


def merge_status(reports: Sequence[Report]) -> Figures:
    """Merge the dashboard's figures of running workers, with the counters of all workers."""
    statuses = [report["status"] for report in reports]
    running = [each for each in statuses if "ended" not in each] or statuses
    first = max(running, key=lambda each: len(each["models"]))  # not every process has pipelines
    processes = [each["process"] for each in running if each["process"]]
    process = None
    if processes:
        process = {key: sum(each[key] for each in processes) for key in processes[0]}
        process["started_s"] = min(each["started_s"] for each in processes)
        process["at_s"] = max(each["at_s"] for each in processes)
    models = []
    for each in first["models"]:
        name = each["name"]
        same, counted = (
            [m for status in found for m in status["models"] if m["name"] == name]
            for found in (running, statuses)
        )
        models.append(
            {
                **each,
                **{key: sum(model[key] for model in same) for key in _SUMS},
                "generation": min(model["generation"] for model in same),
                "notes": list(dict.fromkeys(note for model in same for note in model["notes"])),
                "not_ready": next((m["not_ready"] for m in same if m["not_ready"]), None),
                **reduce(add, [{key: model[key] for key in _COUNTS} for model in counted]),
            }
        )
    return {
        **first,
        "at_us": max(each["at_us"] for each in running),
        "at_s": max(each["at_s"] for each in running),
        "not_ready": next((each["not_ready"] for each in running if each["not_ready"]), None),
        "process": process,
        "models": models,
    }


def add(a: Any, b: Any) -> Any:
    """Add up numbers within the same structure; use the latest time and the first string."""
    if isinstance(a, dict):
        found = {**a, **b}
        for key in a.keys() & b.keys():
            found[key] = max(a[key], b[key]) if key in _LATEST else add(a[key], b[key])
        return found
    if isinstance(a, list):
        return [add(*pair) for pair in zip(a, b, strict=True)]
    return a if isinstance(a, str) else a + b
