"""The inference path that HTTP and gRPC share: each outcome is counted once."""

from __future__ import annotations

import pytest

from tests.support.serving.grpc_cases import frames, infer_bytes
from tests.support.serving.running import infer_json, running
from tests.support.serving.warming import Lengths

OUTCOME = 'deploykit_requests_total{model="m",outcome="%s",version="1"} %d'


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_input_above_its_buckets_is_counted_once_as_a_bad_request(protocol: str) -> None:
    with running({"m": Lengths()}, grpc_port=0, buckets={"T": (2,)}) as server:
        if protocol == "http":
            reply = server.ask("POST", "/v2/models/m/infer", infer_json([1] * 4, [1, 4]))
            assert (reply.status, "axis T is 4" in reply.json["error"]) == (400, True)
        else:
            with frames(server.server.grpc_port) as client:
                answer = client.call(1, infer_bytes(width=4))
                assert answer.status == 3
                assert "axis T is 4" in answer.headers["grpc-message"]
        metrics = server.ask("GET", "/metrics").body.decode()
    assert OUTCOME % ("bad_request", 1) in metrics
    assert OUTCOME % ("success", 0) in metrics
