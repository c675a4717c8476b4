"""SIGTERM in the middle of load: what was accepted is answered, over HTTP and gRPC."""

from __future__ import annotations

import pytest

from tests.support.campaign import rounds

pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")

from tests.support.serving.terminated import one_round


@pytest.mark.parametrize("seed", range(rounds(3, 50)))
def test_no_accepted_request_is_lost(seed: int) -> None:
    assert one_round(seed) > 0
