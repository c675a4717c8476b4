"""Put a module made of Python in the place of one of NVIDIA's, and leave nothing behind.

In: the name of a module, and what stands for it, or None for "not installed". Out: the time of the
block. A file of ours that imports such a module at its top keeps what it found there, and Python
keeps the file: so it is imported anew inside the block, and after it is what it was before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# a module -> our files with `require` of it at their top, and what is inside it
HOLDERS = {
    "tensorrt": ("deploykit.engines.tensorrt.open",),
    "cuda": ("deploykit.engines.cuda.driver", "cuda.bindings", "cuda.bindings.driver"),
}


@contextmanager
def replaced(name: str, module: Any) -> Iterator[None]:
    """`sys.modules[name]` is `module` inside the block."""
    kept = {each: _taken(each) for each in (name, *HOLDERS.get(name, ()))}
    sys.modules[name] = module
    try:
        yield
    finally:
        for each, before in kept.items():
            _taken(each)
            if before is not None:
                _put(each, before)


def _taken(name: str) -> Any:
    """The module, out of `sys.modules` and out of its package; None where it was not imported."""
    package, _, last = name.rpartition(".")
    if package and package in sys.modules:
        vars(sys.modules[package]).pop(last, None)
    return sys.modules.pop(name, None)


def _put(name: str, module: Any) -> None:
    package, _, last = name.rpartition(".")
    sys.modules[name] = module
    if package:
        setattr(sys.modules[package], last, module)
