"""An artefact on its way to its place: staged, judged, then kept or rejected.

In: where it shall stand. Out: `Made`. What fails its gate stands beside it as `NAME.rejected.EXT`,
and what stood at the place before is as it was.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.core.artefact import Manifest, write_manifest
from deploykit.core.errors import GateFailed
from deploykit.core.files import sha256
from deploykit.core.machine import tool_versions

if TYPE_CHECKING:
    from deploykit.measure.parity import Parity
    from deploykit.measure.stats import Drop, Interval

Progress = Callable[[str, float], None]  # what happens now, share done 0..1

PARITY_BATCHES = (1, 2, 7, 32)


@dataclass(frozen=True)
class Made:
    """An artefact that a verb wrote, and what was checked on the way."""

    path: Path
    manifest: Manifest
    parity: Parity | None = None
    accuracy: Interval | None = None
    drop: Drop | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "manifest": self.manifest.to_dict(),
            "parity": self.parity.to_dict() if self.parity else None,
            "accuracy": self.accuracy.to_dict() if self.accuracy else None,
            "drop": self.drop.to_dict() if self.drop else None,
            "notes": list(self.notes),
        }


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A path in a temporary folder beside `out`, on the same disk: keeping it is a rename."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        yield Path(folder) / out.name


def keep(tmp: Path, made: Made) -> Made:
    """Put the staged file at `made.path`, its manifest after it."""
    tmp.replace(made.path)
    write_manifest(made.path, made.manifest)
    return made


def reject(tmp: Path, made: Made) -> Made:
    """Put the staged file beside `made.path` under a name that says it was rejected."""
    beside = made.path.with_name(f"{made.path.stem}.rejected{made.path.suffix}")
    return keep(tmp, replace(made, path=beside))


def keep_if_equal(tmp: Path, made: Made, parity: Parity) -> Made:
    if parity.passed:
        return keep(tmp, made)
    made = reject(tmp, made)
    try:
        parity.raise_if_over()
    except GateFailed as exc:
        raise GateFailed(
            f"{exc.message}; the file is kept as {made.path}", hint=exc.hint, result=made
        ) from None
    return made


def onnx_manifest(
    path: Path,
    sources: Sequence[str],
    *,
    tools: Sequence[str],
    checks: dict[str, Any],
    built_on: dict[str, str] | None = None,
) -> Manifest:
    from deploykit.transforms import graph

    summary = graph.summarise(graph.load_graph(path))
    return Manifest(
        format="onnx",
        inputs=summary.inputs,
        outputs=summary.outputs,
        precision=summary.precision,
        sha256=sha256(path),
        made_from=tuple(sources),
        made_with=tool_versions(*tools),
        built_on=built_on or {},
        checks=checks,
    )
