"""Commands hand `locals()` to their function, where mypy sees nothing: the names are its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import deploykit as dk
from deploykit.cli import deploy, make, plan, prove, serve

CALLS: dict[Callable[..., None], Any] = {
    make.train: dk.train,
    make.export: dk.export,
    make.quantize: dk.quantize,
    plan.plan: dk.plan,
    prove.compare: dk.compare,
    serve.load: dk.load_test,
    deploy.bundle: dk.bundle,
}
OWN = {
    "as_json",
    "compare_devices",
    "axis",
    "fail_on_regression",
    "token_file",
}  # which the commands do not pass on as they are


@pytest.mark.parametrize("command", CALLS, ids=lambda command: command.__name__)
def test_a_command_gives_what_its_function_takes(command: Callable[..., None]) -> None:
    given = inspect.signature(command).parameters.keys() - OWN
    assert given <= inspect.signature(CALLS[command]).parameters.keys()
