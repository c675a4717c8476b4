"""Whether two TensorRT engines are the same build, told from their manifests.

In: two manifests. Out: what differs, in words. TensorRT times kernels and so promises no equal
bytes; two builds that found all times in one timing cache choose the same kernels, and that is what
can be held to account.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deploykit.core.artefact import Manifest

READ, LEFT = "timing_cache_read_sha256", "timing_cache_sha256"
_MOST = 5  # layers that are named


@dataclass(frozen=True)
class Builds:
    """`equal`: the same bytes, or else the same layers with the same kernels, from one graph.

    None where the layers of either are not known. `differences`: what differs, in words.
    `same_times`: both found every kernel timed in the same cache, so they have to be equal.
    """

    equal: bool | None
    same_bytes: bool
    same_times: bool
    differences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "differences": list(self.differences)}

    @property
    def text(self) -> str:
        if self.same_bytes:
            return "the same engine, byte for byte"
        said = "whether the layers are the same is not known"
        if self.equal is not None:
            said = "the same layers and kernels" if self.equal else "different builds"
        times = "" if self.same_times else " (not timed from one and the same timing cache)"
        return "; ".join([f"{said}{times}", *self.differences])


def compare_builds(a: Manifest, b: Manifest) -> Builds:
    """What differs between the builds of `a` and `b`."""
    same_bytes = bool(a.sha256) and a.sha256 == b.sha256
    times = {built.get(key) for built in (a.built_on, b.built_on) for key in (READ, LEFT)}
    found = [*_facts(a.built_on, b.built_on)]
    if a.made_from[-1:] != b.made_from[-1:]:
        found.append("built from different graphs")
    left, right = _layers(a), _layers(b)
    layers = [*_unlike(left, right)] if left and right else []
    known = same_bytes or bool(left and right)
    equal = same_bytes or (not layers and a.made_from[-1:] == b.made_from[-1:])
    return Builds(
        equal=equal if known else None,
        same_bytes=same_bytes,
        same_times=len(times) == 1 and None not in times,
        differences=(*found, *layers),
    )


def _facts(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[str]:
    for key in sorted({*a, *b} - {READ, LEFT, "model", "onnx_sha256"}):
        if a.get(key) != b.get(key):
            yield f"{key}: {a.get(key, 'not known')}, {b.get(key, 'not known')}"


def _layers(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """Precision and kernel of each layer by name; empty where they were not read back."""
    layers = manifest.checks.get("layers")
    return {
        str(layer.get("name")): (str(layer.get("precision")), str(layer.get("tactic", "")))
        for layer in (layers if isinstance(layers, list) else ())
        if isinstance(layer, dict)
    }


def _unlike(a: Mapping[str, tuple[str, str]], b: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    alone = [name for name in (*a, *b) if (name in a) != (name in b)]
    other = [name for name in a if name in b and a[name] != b[name]]
    if alone:
        yield f"{len(alone)} layers in one of them only: {_named(alone)}"
    for name in other[:_MOST]:
        yield f"layer '{name}': {' '.join(a[name]).strip()}, {' '.join(b[name]).strip()}"
    if len(other) > _MOST:
        yield f"and {len(other) - _MOST} layers more"


def _named(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:_MOST])
