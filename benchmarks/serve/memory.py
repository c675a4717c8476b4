"""How much memory a group of processes holds, read from /proc.

Pages that the group shares count once; those of files (a library's code) count whole even where
strangers have the same file open, so that a server's figure does not depend on who else runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S{4} ([0-9a-f]+) \S+ \d+ *(.*)")
_NOT_FILES = ("[", "/dev/", "/memfd:", "/SYSV", "anon_inode:")


def held_mib(pids: Iterable[int], proc: Path = Path("/proc")) -> float:
    """Of processes that may have ended meanwhile: those hold nothing."""
    own_kib = 0
    files_kib: dict[tuple[str, str], int] = {}
    for pid in pids:
        try:
            rollup = (proc / f"{pid}/smaps_rollup").read_text()
            smaps = (proc / f"{pid}/smaps").read_text()
        except OSError:
            continue
        own_kib += sum(kib for name, kib in _fields(rollup) if name in ("Pss_Anon", "Pss_Shmem"))
        for mapping, kib in file_pages_kib(smaps).items():
            files_kib[mapping] = max(kib, files_kib.get(mapping, 0))
    return (own_kib + sum(files_kib.values())) / 1024


def file_pages_kib(smaps: str) -> dict[tuple[str, str], int]:
    """Resident pages of files by (path, offset), without those that the process has changed."""
    found: dict[tuple[str, str], int] = {}
    mapping = None
    for line in smaps.splitlines():
        if match := _MAPPING.fullmatch(line):
            offset, path = match.groups()
            file = path and not path.startswith(_NOT_FILES)
            mapping = (path, offset) if file else None
        elif mapping is not None:
            for name, kib in _fields(line):
                sign = {"Rss": 1, "Anonymous": -1}.get(name, 0)
                found[mapping] = found.get(mapping, 0) + sign * kib
    return found


def _fields(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            yield name, int(words[0])
