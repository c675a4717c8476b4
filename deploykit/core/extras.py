"""Optional packages: import one, or say which extra of deploykit installs it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType

from deploykit.core.errors import MissingExtra, Unsupported, first_line
from deploykit.core.runtime import ALL

EXTRAS: Mapping[str, str] = {
    **{module: each.extra for each in ALL for module in each.modules},
    "tensorrt_rtx": "tensorrt",
    "onnxscript": "export",
    "safetensors": "export",
    "transformers": "huggingface",
    "sklearn": "train",
    "tensorboard": "tensorboard",
    "torchvision": "transfer",
    "timm": "timm",
    "PIL": "images",
    "tokenizers": "text",
    "opentelemetry": "trace",
    "ray": "ray",
    "starlette": "ray",
    **dict.fromkeys(
        ("google", "hpack", "httptools", "orjson", "prometheus_client", "uvloop"), "serve"
    ),
}
_PACKAGES: Mapping[str, str] = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "google": "protobuf",
    "prometheus_client": "prometheus-client",
}
_NOTES: Mapping[str, str] = {
    "onnxruntime": "; with an NVIDIA GPU: {gpu}",
    "tensorrt": "; [tensorrt-cu12] for a driver below 580; on a Jetson it comes with JetPack, the "
    "rest with [jetson]",
    "cuda": "; [tensorrt-cu12] for a driver below 580, [jetson] on a Jetson",
}
_CHECKOUT = Path(__file__).resolve().parents[2]


def check_installed(*modules: str) -> None:
    """Raise MissingExtra for the first module that is not installed. Imports none."""
    for module in modules:
        if not installed(module):
            raise missing(module.partition(".")[0])


def require(module: str) -> ModuleType:
    """Import `module`, one of EXTRAS or a module inside it.

    Raises MissingExtra if its package is not installed, Unsupported if it does not load.
    Ctrl-C and SIGTERM take effect after the import, a second one at once.
    """
    top = module.partition(".")[0]
    if top == "onnxruntime":  # 1.29 and later send telemetry to Microsoft from another thread
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        with _signals_afterwards():
            return importlib.import_module(module)
    except (ImportError, OSError) as exc:
        if isinstance(exc, ModuleNotFoundError) and exc.name == top:
            raise missing(top) from exc
        raise Unsupported(
            f"{top} is installed but cannot be loaded: {first_line(exc)}", hint=install_hint(top)
        ) from exc


def missing(*modules: str) -> MissingExtra:
    """Return the error for missing `modules`, all in EXTRAS, and the command to install them."""
    names = ", ".join(_PACKAGES.get(each, each) for each in modules)
    verb = "is" if len(modules) == 1 else "are"
    return MissingExtra(f"{names} {verb} not installed", hint=install_hint(*modules))


def install_hint(*modules: str) -> str:
    """Return one command that installs all of `modules`, and a note on each extra."""
    notes = {EXTRAS[each]: _NOTES.get(each, "") for each in reversed(modules)}  # the first's note
    command = install_command(",".join(reversed(notes)))
    return command + "".join(reversed(notes.values())).format(gpu=install_command("gpu"))


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from the checkout or wheel in use, else by name.

    No package index has deploykit before its first release.
    """
    import json  # late: only an error message needs them
    from importlib import metadata

    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{_CHECKOUT}[{extra}]')}"
    url = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        origin = metadata.distribution("deploykit").read_text("direct_url.json")  # PEP 610
        url = json.loads(origin or "{}").get("url", "")
    return f"pip install 'deploykit[{extra}]{f' @ {url}' if url else ''}'"


def installed(module: str) -> bool:
    """Return whether `module` could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


@contextlib.contextmanager
def _signals_afterwards() -> Iterator[None]:
    """Defer the first Ctrl-C or SIGTERM of the block to its end.

    A native module that is loading loses the exception of a signal handler, or turns it into an
    ImportError. Signals with the system's default or ignored stay as they are.
    """
    received, main = list[int](), threading.current_thread() is threading.main_thread()
    found = ((each, signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM) if main)
    handlers = {number: handler for number, handler in found if callable(handler)}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def defer(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        restore()

    for number in handlers:
        signal.signal(number, defer)
    try:
        yield
    finally:
        restore()
        if received:
            handlers[signal.Signals(received[0])](received[0], None)
