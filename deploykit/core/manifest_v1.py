"""Read manifests of version 1, whose `checks` were free text keys, as those of version 2."""

from __future__ import annotations

from typing import Any

from deploykit.core.errors import BadInput

_RENAMED_STEP = {"wide": "float32_nodes", "text": "why"}


def upgrade(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The document of version 2 that says the same. Raises BadInput for one that is damaged."""
    checks = values.get("checks")
    if not isinstance(checks, dict):
        raise BadInput(f"{where}: 'checks' must be an object")
    try:
        evidence = _evidence(checks)
        built_on = dict(values.get("built_on") or {})
        compatible = built_on.pop("version_compatible", "") == "yes"
        if values.get("format") == "tensorrt":
            evidence["build"] = {
                "profile": built_on.get("profile", ""),
                "flags": checks.get("flags") or [],
                "version_compatible": compatible,
            }
        built_on = built_on if isinstance(values.get("built_on"), dict) else values["built_on"]
    except (TypeError, KeyError, ValueError, AttributeError) as exc:
        raise BadInput(f"{where}: its 'checks' are damaged: {exc!r}") from exc
    return {**values, "manifest": 2, "built_on": built_on, "evidence": evidence}


def _evidence(checks: dict[str, Any]) -> dict[str, Any]:
    nested = checks.get("quantized") or checks.get("typing")
    quantize = checks.get("quantize")
    search = checks.get("search")
    return {
        "parity": checks.get("parity"),
        "accuracy": _evaluation(checks.get("judgement")),
        "precision": _read_back(checks) if "mismatches" in checks else None,
        "quantize": {
            "to": quantize["to"],
            "other_nodes": quantize["rest"],
            "runtime": quantize["runtime"],
        }
        if quantize
        else None,
        "calibration": _calibration(quantize),
        "search": _search(search) if search else None,
        "training": _training(checks),
        "source": checks.get("source"),
        "export": _export(checks),
        "preflight": _preflight(checks),
        "source_graph": _evidence(nested) if nested else None,
        "golden": checks.get("golden"),
        "weights": checks.get("data"),
        "notes": checks.get("notes") or [],
    }


def _evaluation(found: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if found is None else {**found, "why": found["reason"]}


def _read_back(checks: dict[str, Any]) -> dict[str, Any]:
    keys = ("layers", "shares", "time_shares")
    return {**{key: checks.get(key) for key in keys}, "wider": checks["mismatches"] or []}


def _calibration(quantize: dict[str, Any] | None) -> dict[str, Any] | None:
    if not quantize or not quantize.get("calibrator"):
        return None
    return {
        "passed": True,
        "why": "",
        "method": quantize["calibrator"],
        "samples": quantize["calibration_samples"],
        "data_sha256": "",
    }


def _search(found: dict[str, Any]) -> dict[str, Any]:
    steps = [
        {_RENAMED_STEP.get(key, key): value for key, value in step.items()}
        for step in found["steps"]
    ]
    return {
        **found,
        "passed": found["precision"] != "float32",
        "why": found["text"],
        "float32_nodes": found["wide"],
        "steps": steps,
    }


def _training(checks: dict[str, Any]) -> dict[str, Any] | None:
    test = checks.get("test")
    if test is None:
        return None
    return {
        "recipe": checks["recipe"],
        "metric": test["metric"],
        "samples": test["n"],
        "score": {key: test[key] for key in ("value", "low", "high")},
        "figures": checks["training"],
    }


def _export(checks: dict[str, Any]) -> dict[str, Any] | None:
    export = checks.get("export")
    return None if export is None else {**export, "preprocess": checks.get("preprocess")}


def _preflight(checks: dict[str, Any]) -> dict[str, Any] | None:
    problems = checks.get("preflight")
    if problems is None:
        return None
    return {"profile": (checks.get("export") or {}).get("profile") or "", "problems": problems}
