"""NVIDIA PyTriton: Triton's own C++ front end, HTTP and gRPC, in front of a Python function.

python pytriton_app.py MODEL PORT THREADS GRPC_PORT
"""

from __future__ import annotations

import logging
import sys

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig
from session import open_session

MODEL, PORT, THREADS, GRPC_PORT = sys.argv[1:5]
logging.basicConfig(level=logging.WARNING)
session = open_session(MODEL, int(THREADS))
shape = session.get_inputs()[0].shape[1:]


@batch
def infer(x: np.ndarray) -> list[np.ndarray]:
    return session.run(["y"], {"x": x})


config = TritonConfig(
    http_address="127.0.0.1",
    http_port=int(PORT),
    grpc_address="127.0.0.1",
    grpc_port=int(GRPC_PORT),
    allow_metrics=False,
    exit_timeout_secs=1,
)
with Triton(config=config) as triton:
    triton.bind(
        model_name="m",
        infer_func=infer,
        inputs=[Tensor(name="x", dtype=np.float32, shape=shape)],
        outputs=[Tensor(name="y", dtype=np.float32, shape=session.get_outputs()[0].shape[1:])],
        config=ModelConfig(
            max_batch_size=32, batcher=DynamicBatcher(max_queue_delay_microseconds=2000)
        ),
    )
    triton.serve()
