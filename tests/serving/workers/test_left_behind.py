"""What is left of a server whose processes are killed: nothing, neither files nor memory."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from deploykit.serving.workers import group
from deploykit.serving.workers.group import Hooks, Member, ServerGroup
from tests.support.fake_engine import FakeEngine
from tests.support.installed import needs
from tests.support.runtimes.large_model import write_model
from tests.support.serving.faults import LIMIT_S, REAL, Process, until
from tests.support.serving.worker_processes import is_running, kill, workers

needs("onnxruntime")


def ours(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if "deploykit" in name}  # noqa: PTH208


@pytest.mark.parametrize("count", ["2", "shared:2"])
def test_kill_9_of_every_process_in_turn_and_of_the_parent_leaves_nothing(
    tmp_path: Path, count: str
) -> None:
    memory = Path("/dev/shm")
    before, path = ours(memory), write_model(tmp_path / "m.onnx")
    env = {"TMPDIR": str(tmp_path)}
    with Process(tmp_path, "--workers", count, command=REAL, engine=f"m={path}", env=env) as server:
        assert len(ours(tmp_path)) == 1
        pids = workers(server)
        for victim in pids:
            kill(server, victim)
            until(
                lambda: len(workers(server)) == len(pids) and server.gauge("deploykit_workers") == 2
            )
            until(lambda: server.status("/v2/health/ready") == 200)
        assert len(ours(tmp_path)) == 1
        pids = workers(server)
        server.popen.kill()
        server.wait()
        until(lambda: not any(map(is_running, pids)))
    assert ours(tmp_path) == set()
    until(lambda: ours(memory) <= before)  # other tests may have some for a moment


def test_a_worker_that_closes_its_engines_for_long_is_not_killed(tmp_path: Path) -> None:
    """It was after 5 s, and its answered requests counted as lost: exit code 1."""
    with Process(tmp_path, "--workers", "2", env={"FAULT_CLOSE_S": "6"}) as server:
        server.popen.terminate()
        assert server.wait() == 0


def test_a_worker_ends_once_its_parent_has_closed_all_its_files() -> None:
    """The kernel closes them one after another: the link may be before the lock of the weights."""

    async def lose() -> None:
        ends = [socket.socketpair() for _ in range(2)]
        member = Member(1, 1, ends[0][0], ends[1][0], ends[0][0], None, 0)
        drained = asyncio.Event()
        hooks = Hooks(cast("Any", None), drained.set, drained.set)
        joining = asyncio.ensure_future(member.join(hooks))
        member._parent = os.getppid()  # one that still runs
        ends[0][1].close()
        await asyncio.sleep(0.1)
        assert not drained.is_set()
        member._parent = 0
        await asyncio.wait_for(drained.wait(), LIMIT_S)
        await joining
        asyncio.get_running_loop().remove_reader(ends[1][0])
        for each in (ends[0][0], *ends[1]):
            each.close()

    asyncio.run(lose())


def test_no_signal_interrupts_what_a_worker_cleans_up_once_its_server_has_ended() -> None:
    """The kernel may deliver that of the parent's end after the worker has seen it and drained."""

    class Leaving(ServerGroup):
        ends_process = Member.ends_process

    server = Server({"m": FakeEngine()}, ServeOptions(http_port=0, grpc_port=None), None, Leaving())
    assert server.run(lambda *_: server.stop()) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_second_signal_does_not_interrupt_the_end_of_a_worker() -> None:
    signal.signal(signal.SIGTERM, group._end)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
