from __future__ import annotations

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from tests.support.fake_engine import FakeEngine


def test_records_every_batch_it_ran() -> None:
    engine = FakeEngine(width=2)
    for batch in (3, 1):
        engine({"x": np.zeros((batch, 2), np.float32)})
    assert engine.batches == [3, 1]


def test_refuses_a_batch_above_its_largest() -> None:
    engine = FakeEngine(width=2, max_batch=2)
    with pytest.raises(BadInput, match="batch 3 is above 2"):
        engine({"x": np.zeros((3, 2), np.float32)})
    assert engine.batches == []
