"""MLServer: a runtime of our own inside its server, v2 JSON, one process.

python mlserver_app.py MODEL PORT THREADS GRPC_PORT
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from session import open_session


class Model(MLModel):
    async def load(self) -> bool:
        self.session = open_session(self.settings.parameters.uri, int(os.environ["THREADS"]))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        (found,) = self.session.run(["y"], {"x": rows})
        return InferenceResponse(model_name="m", outputs=[NumpyCodec.encode_output("y", found)])


def main() -> None:
    model, port, threads, grpc_port = sys.argv[1:5]
    folder = Path(tempfile.mkdtemp())
    server = {
        "host": "127.0.0.1",
        "http_port": int(port),
        "grpc_port": int(grpc_port),
        "metrics_endpoint": None,
        "parallel_workers": 0,
        "debug": False,
        "use_structured_logging": False,
    }
    bound = {
        "name": "m",
        "implementation": "mlserver_app.Model",
        "max_batch_size": 32,
        "max_batch_time": 0.002,
        "parameters": {"uri": model},
    }
    (folder / "settings.json").write_text(json.dumps(server))
    (folder / "model-settings.json").write_text(json.dumps(bound))
    here = Path(__file__).parent
    os.environ |= {"THREADS": threads, "PYTHONPATH": str(here)}
    command = Path(sys.executable).parent / "mlserver"
    os.execv(command, [str(command), "start", str(folder)])


if __name__ == "__main__":
    main()
