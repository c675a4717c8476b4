"""Find a model on a server over HTTP: a connection of its own for each question."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote

from deploykit.core.errors import BadInput, NotFound, first_line
from deploykit.measure.load.check import error_text, one_line
from deploykit.measure.load.server_side import Stage, stages_in_metrics, stages_of

TIMEOUT_S = 10.0
MOST_BYTES = 16 << 20  # of an answer before the run


def not_oip(url: str, why: str) -> BadInput:
    return BadInput(
        f"{url}: is not an Open Inference Protocol server ({why})",
        hint="http:// takes the port of its HTTP interface, 8000 by default; gRPC is grpc://",
    )


class HttpQuestions:
    """What a server says over HTTP, a connection for each question."""

    def __init__(self, url: str, host: str, address: str, port: int) -> None:
        self.url, self.host, self.address, self.port = url, host, address, port

    def model_names(self) -> list[str] | None:
        status, body = self._ask("POST", "/v2/repository/index")
        index = _json(body) if status == 200 else None
        if isinstance(index, list) and all(isinstance(item, dict) for item in index):
            ready = [item for item in index if item.get("state", "READY") == "READY"]
            return list(dict.fromkeys(str(item.get("name")) for item in ready))
        if "name" not in self.about():
            raise not_oip(self.url, f"/v2/repository/index: {status}: {error_text(body)}")
        return None

    def metadata(self, model: str) -> dict[str, Any]:
        path = model_path(model)
        status, body = self._ask("GET", path)
        if status == 404:
            raise NotFound(f"{self.url}: no model '{model}': {error_text(body)}")
        found = _json(body) if status == 200 else None
        if not isinstance(found, dict) or not isinstance(found.get("inputs"), list):
            raise not_oip(self.url, f"{path} answered {status}")
        return found

    def about(self) -> dict[str, Any]:
        status, body = self._ask("GET", "/v2")
        found = _json(body) if status == 200 else None
        return found if isinstance(found, dict) else {}

    def config(self, model: str) -> dict[str, Any]:
        status, body = self._ask("GET", f"{model_path(model)}/config")
        found = _json(body) if status == 200 else None
        return found if isinstance(found, dict) else {}

    def stages(self, model: str) -> dict[str, Stage]:
        status, body = self._ask("GET", f"{model_path(model)}/stats")
        found = _json(body) if status == 200 else None
        stats = found.get("model_stats") if isinstance(found, dict) else None
        first = stats[0] if isinstance(stats, list) and stats else None
        if not isinstance(first, dict):
            return {}
        stages = stages_of(first.get("inference_stats"), first.get("response_stats"))
        if "compute" in stages:
            status, body = self._ask("GET", "/metrics")  # of deploykit's servers, with more stages
            if status == 200:
                stages |= stages_in_metrics(body.decode(errors="replace"), model)
        return stages

    def _ask(self, verb: str, path: str) -> tuple[int, bytes]:
        """One request. Raises BadInput when there is no HTTP answer."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=TIMEOUT_S)
        try:
            connection.request(verb, path, None, {"Host": self.host, "Connection": "close"})
            response = connection.getresponse()
            return response.status, response.read(MOST_BYTES)
        except TimeoutError as exc:
            raise BadInput(f"{self.url}: {path}: no answer within {TIMEOUT_S:g} s") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise not_oip(self.url, f"{path}: {one_line(first_line(exc))}") from exc
        finally:
            connection.close()


def model_path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}"


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
