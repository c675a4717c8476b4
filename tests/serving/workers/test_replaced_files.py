"""A model's file that is replaced under several workers: in use in all, or in none and reported."""

from __future__ import annotations

from http.client import HTTPConnection
from pathlib import Path

from tests.support.serving.faults import REAL, Process, request, until
from tests.support.serving.reloading import model, replace
from tests.support.serving.worker_processes import ask, connections


def test_a_wrong_file_is_reported_once_and_the_next_right_one_is_in_use_everywhere(
    tmp_path: Path,
) -> None:
    path = model(tmp_path / "m.onnx", 1.0)

    def facts(client: HTTPConnection) -> tuple[str, str]:
        found = ask(client, "GET", "/v2/models/m")[1]["parameters"]
        return found["notes"].partition(" of one engine")[0], found["generation"]

    def answer(client: HTTPConnection) -> float:
        status, found = ask(client, "POST", "/v2/models/m/infer", request(1.0))
        assert status == 200, found
        return found["outputs"][0]["data"][0]

    with (
        Process(tmp_path, "--workers", "2", command=REAL, engine=f"m={path}") as server,
        connections(server) as clients,
    ):
        replace(model(tmp_path / "new.onnx", 1.0, width=5), path)
        until(lambda: {facts(each) for each in clients} == {("the inputs", "1")})
        assert {answer(each) for each in clients} == {2.0}
        replace(model(tmp_path / "new.onnx", 2.0), path)
        until(lambda: {facts(each) for each in clients} == {("", "2")})
        assert {answer(each) for each in clients} == {3.0}
        server.popen.terminate()
        assert server.wait() == 0
    stages = ("was rejected, the previous engine stays in use", "was replaced and is in use")
    for stage in stages:
        assert len([line for line in server.log_lines() if stage in line]) == 1
