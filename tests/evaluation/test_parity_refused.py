"""Models that cannot be compared are refused, with what differs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.engines.data.samples import random_feeds
from deploykit.evaluation.parity import compare_engines
from tests.support.fake_engine import FakeEngine, Function

FEEDS = [random_feeds(FakeEngine().inputs, {"N": 1}, seed=1)]


def same(_: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {}


@pytest.mark.parametrize(
    ("inputs", "output", "what"),
    [
        ("image:float32[N,4]", "y:float32[N,4]", "new has an input 'image', old has none"),
        ("x:float32[N,4]", "logits:float32[N,4]", "new has an output 'logits', old has none"),
        ("x:float16[N,4]", "y:float32[N,4]", r"input 'x' is x:float32\[N,4\] in old, x:float16"),
        ("x:float32[N,4,1]", "y:float32[N,4]", r"input 'x' is .* x:float32\[N,4,1\] in new"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_difference(
    inputs: str, output: str, what: str
) -> None:
    with pytest.raises(BadInput, match=what):
        compare_engines(FakeEngine(), Function(same, inputs, output), FEEDS, names=("old", "new"))


def test_an_output_that_only_the_reference_has_is_refused() -> None:
    a = Function(same, "x:float32[N,4]", "y:float32[N,4]", "z:float32[N,4]")
    with pytest.raises(BadInput, match="old has an output 'z', new has none"):
        compare_engines(a, FakeEngine(), FEEDS, names=("old", "new"))


def test_no_inputs_is_no_comparison() -> None:
    with pytest.raises(BadInput, match="no inputs to compare on"):
        compare_engines(FakeEngine(), FakeEngine(), [])
