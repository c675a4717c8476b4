"""Starts of a bundle without processes: the cache is real, a build copies an engine made before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploykit.core.profile import load_profile
from deploykit.deploying.boot import Boot, Booted, build_and_prove, prove
from deploykit.deploying.device import read_gpu
from deploykit.deploying.folder import read_bundle
from deploykit.deploying.slots import EngineCache


def inline(_what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`run_apart` without another process."""
    options.pop("inherit")
    report = options.pop("on_progress", None) or (lambda _what, _share: None)
    return function(*arguments, report)


def copying(engines: Path) -> Callable[..., Any]:
    """In place of `run_apart`: a build copies the files of `engines`, a proof passes."""

    def run(_what: str, function: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
        if function is read_gpu:
            return read_gpu(*arguments)
        if function is prove:
            return None
        assert function is build_and_prove
        out = arguments[-1]
        for file in sorted(engines.iterdir()):
            shutil.copyfile(file, out.parent / file.name)
        return ()

    return run


def failing(error: BaseException) -> Callable[..., Any]:
    """In place of `run_apart`: a build fails, a proof passes."""

    def run(_what: str, function: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
        if function is build_and_prove:
            raise error
        return read_gpu(*arguments) if function is read_gpu else None

    return run


def boot(bundle: Path, cache: Path, run: Callable[..., Any] = inline, **options: Any) -> Booted:
    """Start as `boot_until_stopped` does, become ready, and end; what would have been served."""
    profile = load_profile(read_bundle(bundle).profile)
    started = Boot(bundle, profile, EngineCache(cache), run=run, **options)
    with started.prepare() as engine:
        assert engine.is_file()
        return started.confirm()
