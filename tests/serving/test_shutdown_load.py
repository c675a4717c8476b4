"""SIGTERM under load: every accepted request is answered, over HTTP and gRPC."""

from __future__ import annotations

import pytest

from tests.support.campaign import rounds

pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")

from tests.support.serving.terminated import one_round


@pytest.mark.parametrize("seed", range(rounds(3, 50)))
def test_sigterm_under_load_loses_no_accepted_request(seed: int) -> None:
    assert one_round(seed) > 0
