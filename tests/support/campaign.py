"""How long fuzz and soak tests run: a short slice in `make test`, a campaign in `make test-all`."""

from __future__ import annotations

import os

import pytest

CAMPAIGN = os.environ.get("DK_CAMPAIGN") == "1"
only_in_a_campaign = pytest.mark.skipif(not CAMPAIGN, reason="takes minutes: make test-all")


def rounds(short: int, campaign: int) -> int:
    """How many rounds a fuzzer runs. Both begin with the same seed, so that a failure repeats."""
    return campaign if CAMPAIGN else short
