"""NVIDIA's JetPack releases: what a Jetson's L4T release brings, TensorRT above all.

The L4T release is what a board reports (`# R36 (release), REVISION: 4.3` is 36.4.3); the JetPack
name is derived from it, never the reverse, since some JetPack releases came with several. Sources:
NVIDIA's archive of JetPack downloads and the release notes of meta-tegra (docs/jetson.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class JetPack:
    """One release. `l4t` is its first L4T release; it reaches to the next row of the same major."""

    version: str
    l4t: str
    python: str
    tensorrt: str
    compute_capabilities: tuple[str, ...]  # 7.2 is Xavier, 8.7 Orin, 11.0 Thor


_5 = ("3.8", "8.5.2", ("7.2", "8.7"))
_6 = ("3.10", "10.3.0", ("8.7",))
_7_1 = ("3.12", "10.13.3", ("11.0",))
_7_2 = ("3.12", "10.16.2", ("8.7", "11.0"))
JETPACKS = (
    JetPack("5.1", "35.2.1", *_5),
    JetPack("5.1.1", "35.3.1", *_5),
    JetPack("5.1.2", "35.4.1", *_5),
    JetPack("5.1.3", "35.5.0", *_5),
    JetPack("5.1.4", "35.6.0", *_5),
    JetPack("5.1.5", "35.6.1", *_5),
    JetPack("5.1.6", "35.6.4", *_5),
    JetPack("6.0", "36.2.0", "3.10", "8.6.2", ("8.7",)),  # 36.2.0 was a preview
    JetPack("6.1", "36.4.0", *_6),
    JetPack("6.2", "36.4.3", *_6),
    JetPack("6.2.1", "36.4.4", *_6),
    JetPack("6.2.2", "36.5.0", *_6),
    JetPack("7.0", "38.2.0", *_7_1),
    JetPack("7.1", "38.4.0", *_7_1),
    JetPack("7.2", "39.0", *_7_2),  # 39.0 was early access
    JetPack("7.2.1", "39.2.1", *_7_2),
)


def release_numbers(release: str) -> tuple[int, ...]:
    """Return `36.4` as (36, 4, 0), at least three numbers, to compare; () for anything else."""
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})*", release):
        return ()
    found = tuple(map(int, release.split(".")))
    return found + (0,) * (3 - len(found))


def find_jetpack(l4t: str | None) -> JetPack | None:
    """Return the JetPack release of an L4T release, or the last one before it of the same major.

    Return None if `l4t` is not a release, has an unknown major, or is older than the table.
    """
    wanted = release_numbers(l4t or "")
    rows = [each for each in JETPACKS if release_numbers(each.l4t)[:1] == wanted[:1]]
    return next((each for each in reversed(rows) if release_numbers(each.l4t) <= wanted), None)


def jetpack_name(l4t: str | None) -> str | None:
    """Return the JetPack version of an L4T release; past the table's end, `6.2.2 or later`."""
    row = find_jetpack(l4t)
    if row is None:
        return None
    last = [each for each in JETPACKS if each.l4t.split(".")[0] == row.l4t.split(".")[0]][-1]
    newer = row is last and release_numbers(l4t or "") > release_numbers(row.l4t)
    return f"{row.version} or later" if newer else row.version


def jetpack_of(version: str) -> JetPack | None:
    """Return the row of a JetPack version, such as `6.2.1`."""
    return next((each for each in JETPACKS if each.version == version), None)
