"""Fixtures: the answers of a batcher, and an event loop that a test turns by hand."""

from __future__ import annotations

import pytest

from tests.support.serving.loops import Answers, Loop


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def loop() -> Loop:
    return Loop()
