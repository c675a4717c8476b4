"""LitServe: a raw tensor in, a raw tensor out.

python litserve_app.py MODEL PORT THREADS
"""

import sys
from typing import Annotated

import litserve
import numpy as np
from fastapi import Body, Response
from session import open_session

# LitServe reads the annotation of `decode_request`, so that it must not be a text.
Tensor = Annotated[bytes, Body(media_type="application/octet-stream")]


class Model(litserve.LitAPI):
    def setup(self, device: str) -> None:  # noqa: ARG002
        self.session = open_session(sys.argv[1], int(sys.argv[3]))
        self.shape = self.session.get_inputs()[0].shape[1:]

    def decode_request(self, request: Tensor) -> np.ndarray:
        return np.frombuffer(request, np.float32).reshape(self.shape)

    def batch(self, inputs: list) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.session.run(["y"], {"x": x})[0]

    def unbatch(self, output: np.ndarray) -> list:
        return list(output)

    def encode_response(self, output: np.ndarray) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    server = litserve.LitServer(
        Model(max_batch_size=32, batch_timeout=0.002, api_path="/infer"),
        accelerator="cpu",
        timeout=False,
    )
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[2]),
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
