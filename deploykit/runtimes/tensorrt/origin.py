"""Remember which engines that bring code along this user built or named here.

A version compatible plan contains host code and a plugin is a library: opening either runs code.
The manifest next to them proves nothing, as whoever made the plan wrote that too. So `build` adds
their SHA-256 to a list in the user's cache folder. A signature in the manifest would need a secret
in the same folder, and a new signature whenever evidence is added to the manifest.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from deploykit.core.errors import DeploykitError
from deploykit.core.files import cache_folder, make_folder
from deploykit.core.manifest import Manifest

# a link could lead to any list of hashes that the user has, and opening a FIFO would wait
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def built_here(manifest: Manifest) -> bool:
    """Whether opening the engine runs no code, or only what `record_build` has recorded."""
    digests = _digests_of_code(manifest)
    return not digests or digests <= _read()


def record_build(manifest: Manifest) -> bool:
    """Record an engine that was just built, and its plugins. Returns `built_here` afterwards.

    False where the list cannot be written, or where others can write to it.
    """
    if built_here(manifest):
        return True
    lines = "\n".join(["", *sorted(_digests_of_code(manifest)), ""])  # ends a line that was cut
    try:
        path = list_path()
        make_folder(path.parent)
        flags = _FLAGS | os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
            file.write(lines)
    except (OSError, RuntimeError, DeploykitError):  # RuntimeError: the user has no home folder
        return False
    return built_here(manifest)


def list_path() -> Path:
    """The list of this user's builds on this machine: one SHA-256 per line."""
    return cache_folder() / "built-here.sha256"


def _digests_of_code(manifest: Manifest) -> set[str]:
    """The SHA-256 of the plan and its plugins; none where opening them runs no code."""
    if not (manifest.version_compatible or manifest.plugins):
        return set()
    return {manifest.sha256.lower(), *manifest.plugins.values()}


def _read() -> set[str]:
    """The recorded digests; none from a file that another user owns or could have written."""
    try:
        with os.fdopen(os.open(list_path(), _FLAGS), encoding="ascii") as file:
            info = os.fstat(file.fileno())
            own = info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            return set(file.read().split()) if own and stat.S_ISREG(info.st_mode) else set()
    except (OSError, RuntimeError, ValueError):
        return set()
