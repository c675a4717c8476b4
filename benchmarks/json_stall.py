"""How long `/v2/health/live` waits while a client sends JSON of the most values, again and again.

`python benchmarks/json_stall.py` prints a line for each kind of number.
"""

from __future__ import annotations

import http.client
import multiprocessing
import threading
import time
from typing import Any

from deploykit.core.json_value import MOST_JSON_VALUES
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from tests.support.fake_engine import FakeEngine

SECONDS = 10
WIDTH = MOST_JSON_VALUES - 100


def serve(ports: Any) -> None:
    options = ServeOptions(grpc_port=None)
    Server({"m": FakeEngine(width=WIDTH)}, options).run(lambda _h, port, _g: ports.put(port))


def send(port: int, body: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        connection.request("POST", "/v2/models/m/infer", body)
        assert connection.getresponse().read()


def main() -> None:
    ports: Any = multiprocessing.Queue()
    multiprocessing.Process(target=serve, args=(ports,), daemon=True).start()
    port = ports.get(timeout=60)
    for value in ("1", "0.123456789"):
        tensor = '{"name":"x","datatype":"FP32","shape":[1,%d],"data":[%s]}'
        body = '{"inputs":[' + tensor % (WIDTH, ",".join([value] * WIDTH)) + "]}"
        client = multiprocessing.Process(target=send, args=(port, body), daemon=True)
        client.start()
        waits_s: list[float] = []
        connection, end_s = (
            http.client.HTTPConnection("127.0.0.1", port),
            time.monotonic() + SECONDS,
        )
        while time.monotonic() < end_s:
            began_s = time.perf_counter()
            connection.request("GET", "/v2/health/live")
            connection.getresponse().read()
            waits_s.append(time.perf_counter() - began_s)
            threading.Event().wait(0.002)
        client.kill()
        p50, p99, most = (
            1e3 * sorted(waits_s)[int(q * (len(waits_s) - 1))] for q in (0.5, 0.99, 1)
        )
        print(f"{len(body) >> 10} KiB: p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {most:.0f} ms")


if __name__ == "__main__":
    main()
