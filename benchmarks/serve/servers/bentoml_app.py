"""BentoML: a raw tensor in, a raw tensor out, through an ASGI application mounted in a service.

    python bentoml_app.py MODEL PORT THREADS

BentoML batches what its own typed routes take, which for an array is JSON; that was slower here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import bentoml
import numpy as np
from fastapi import FastAPI, Request, Response
from session import open_session

app = FastAPI()


@bentoml.service(
    workers=1,
    traffic={"timeout": 60},
    logging={"access": {"enabled": False}},
    metrics={"enabled": False},
)
@bentoml.asgi_app(app)
class Model:
    def __init__(self) -> None:
        self.session = open_session(os.environ["MODEL"], int(os.environ["THREADS"]))
        self.shape = (-1, *self.session.get_inputs()[0].shape[1:])

    @app.post("/infer")
    async def infer(self, request: Request) -> Response:
        rows = np.frombuffer(await request.body(), np.float32).reshape(self.shape)
        (found,) = self.session.run(["y"], {"x": rows})
        return Response(found.tobytes(), media_type="application/octet-stream")


def main() -> None:
    model, port, threads = sys.argv[1:4]
    os.environ |= {"MODEL": model, "THREADS": threads, "BENTOML_DO_NOT_TRACK": "True"}
    here = Path(__file__).parent
    command = Path(sys.executable).parent / "bentoml"
    words = ["serve", "bentoml_app:Model", "--working-dir", str(here), "--host", "127.0.0.1"]
    os.execv(command, [str(command), *words, "--port", port])


if __name__ == "__main__":
    main()
