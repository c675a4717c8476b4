"""What OpenVINO's errors say, without its C++ files and checks, as ours."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from deploykit.core.errors import BadInput, DeploykitError, Unsupported
from deploykit.core.extras import require
from deploykit.core.memory import memory_errors
from deploykit.core.protobuf import damaged

frontend = require("openvino.frontend")

_OF_READERS = [each for name, each in vars(frontend).items() if name.endswith("Failure")]
_FAILURES = (*_OF_READERS, RuntimeError, TypeError, ValueError)
_PLACES = re.compile(r"Exception from src/\S+:\d+:\s*|Check '.*?' failed at src/\S+:\d+:\s*")
_UNKNOWN = re.compile(r"No conversion rule found for operations?: ([^\n]+)")
_CANNOT = re.compile(r"FrontEnd API failed with \w+:\s*")
_NOT_READ = ("can't be parsed", "Unable to read the model")
OTHER_RUNTIME = "ONNX Runtime may run it: build it with the profile 'cpu'"


@contextlib.contextmanager
def openvino_errors(path: Path) -> Iterator[None]:
    """Turn exceptions of OpenVINO into ours that name the file, in one line."""
    try:
        with memory_errors(path, [path]):
            yield
    except _FAILURES as exc:
        raise _error(path, str(exc)) from exc


def _error(path: Path, text: str) -> DeploykitError:
    unknown = _UNKNOWN.search(text)
    if unknown:
        names = ", ".join(name.strip() for name in unknown[1].split(","))
        return Unsupported(f"{path}: OpenVINO has no operator {names}", hint=OTHER_RUNTIME)
    if any(each in text for each in _NOT_READ):
        return damaged(path)
    lines = [line.strip() for line in _CANNOT.sub("", _PLACES.sub("", text)).splitlines()]
    reason = next((line for line in lines if line), "no reason given")
    if "externally stored data" in text:
        return BadInput(f"{path}: its weights cannot be read: {reason}")
    return Unsupported(f"{path}: OpenVINO failed: {reason}", hint=OTHER_RUNTIME)
