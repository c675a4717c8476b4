"""The commands by section. Each is imported and parsed into options when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from deploykit.cli import output
from deploykit.cli.configure import ConfigurableCommand
from deploykit.cli.help import Command, reference, write_sections

# section -> command -> the module that holds it and the first sentence of its help, which the list
# of all commands shows without an import
SECTIONS = {
    "Make": {
        "train": ("make", "Train a recipe and write a checkpoint that can be exported."),
        "export": ("make", "Export a PyTorch model to ONNX and check the outputs."),
        "quantize": ("make", "Lower an ONNX model's precision and measure the lost accuracy."),
        "build": ("make", "Build an engine for a hardware target and check its outputs."),
    },
    "Plan": {
        "plan": ("plan", "Predict memory, latency and throughput on each hardware target."),
    },
    "Prove": {
        "compare": ("prove", "Compare the outputs of two models; exit 1 if they differ too much."),
        "inspect": ("prove", "Show a model's tensors, precisions, operators and origin."),
        "predict": (
            "prove",
            "Answer images or text, or write the outputs for all samples.",
        ),
        "bench": (
            "prove",
            "Measure latency and throughput against the float32 model on the CPU.",
        ),
    },
    "Serve": {
        "serve": ("serve", "Serve models over HTTP and gRPC, with dynamic batching."),
        "load": ("serve", "Measure a running server under load."),
        "health": ("health", "Ask a running server whether it is ready; exit 1 if not."),
    },
    "Deploy": {
        "bundle": ("deploy", "Bundle a model with all that a device or a cluster needs."),
        "boot": (
            "deploy",
            "Build a bundle's engine on this device, check its outputs and serve it.",
        ),
    },
    "Machine": {
        "doctor": ("machine", "Show what this machine has and which commands work on it."),
        "profiles": ("machine", "List the hardware targets with their figures and sources."),
        "demo": ("machine", "Run all steps, from training to serving, on real data."),
    },
}
_MODULES = {name: module for rows in SECTIONS.values() for name, (module, _summary) in rows.items()}


class Commands(Mapping[str, Any]):
    """The commands by name, each built when it is looked up."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = _build(name, _MODULES[name])
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


def _build(name: str, module: str) -> Any:
    function = getattr(import_module(f"deploykit.cli.{module}"), name)
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.command(name, cls=ConfigurableCommand if name in ("serve", "boot") else Command)(function)
    return typer.main.get_command(app)


class Group(TyperGroup):
    """The commands by section."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands: Any = Commands()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        return list(self.commands)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections = {
            title: [(name, summary) for name, (_module, summary) in rows.items()]
            for title, rows in SECTIONS.items()
        }
        write_sections(formatter, sections)
        rows = (each.get_help_record(ctx) for each in self.get_params(ctx))
        write_sections(formatter, {"Options": [row for row in rows if row is not None]})

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as above
        formatter.write(f"\n{output.bold('Example:')} deploykit demo\n")
        formatter.write(f"{output.bold('Documentation:')} {reference()}\n")
