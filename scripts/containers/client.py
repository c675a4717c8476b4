"""Ask a server over HTTP and gRPC with tritonclient, and compare with what the model answered.

python -m scripts.containers.client MODEL SAMPLES.npz     (inputs NAME, outputs "expected.NAME")
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http

ATOL = 1e-4  # of logits near 1: another CPU's kernels, or qemu's, sum in another order
PREFIX = "expected."


def main() -> None:
    model, path = sys.argv[1:]
    with np.load(path) as file:
        arrays = dict(file)
    expected = {key.removeprefix(PREFIX): arrays.pop(key) for key in list(arrays) if PREFIX in key}
    for library, port in ((tritonclient.http, 8000), (tritonclient.grpc, 8001)):
        client: Any = library.InferenceServerClient(f"127.0.0.1:{port}")
        assert client.is_server_ready()
        inputs = []
        for name, array in arrays.items():
            given = library.InferInput(name, array.shape, "FP32")
            given.set_data_from_numpy(array)
            inputs.append(given)
        answer = client.infer(model, inputs)
        for name, array in expected.items():
            np.testing.assert_allclose(answer.as_numpy(name), array, rtol=0, atol=ATOL)
        client.close()
    sys.stdout.write(f"{len(expected)} outputs are right over HTTP and gRPC\n")


if __name__ == "__main__":
    main()
