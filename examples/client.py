"""Send one binary request to a served model, with only the standard library and NumPy.

    deploykit serve --engine mnist=model.int8.onnx
    python examples/client.py http://127.0.0.1:8000 mnist

Sends one zero image; shows how the Open Inference Protocol appends bytes to its JSON header.
"""

from __future__ import annotations

import json
import sys
import urllib.request

import numpy as np


def infer(url: str, model: str, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Send one float32 input and return the outputs by name."""
    tensor = {
        "name": name,
        "datatype": "FP32",
        "shape": list(array.shape),
        "parameters": {"binary_data_size": array.nbytes},
    }
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    request = urllib.request.Request(
        f"{url}/v2/models/{model}/infer",
        data=header + np.ascontiguousarray(array, "<f4").tobytes(),
        headers={"Inference-Header-Content-Length": str(len(header))},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        body = answer.read()
        size = int(answer.headers["Inference-Header-Content-Length"])
    outputs, at = {}, size
    for output in json.loads(body[:size])["outputs"]:
        end = at + output["parameters"]["binary_data_size"]
        outputs[output["name"]] = np.frombuffer(body[at:end], "<f4").reshape(output["shape"])
        at = end
    return outputs


if __name__ == "__main__":
    server, served = sys.argv[1:3]
    with urllib.request.urlopen(f"{server}/v2/models/{served}", timeout=30) as metadata:
        first = json.loads(metadata.read())["inputs"][0]
    shape = [1 if size == -1 else size for size in first["shape"]]
    for key, values in infer(server, served, first["name"], np.zeros(shape, np.float32)).items():
        sys.stdout.write(f"{key}: {values.tolist()}\n")
