"""What the parent asks of its workers, and which of them it takes to hang."""

from __future__ import annotations

import asyncio
import os
from typing import Any, cast

import pytest

from deploykit.core.errors import Overloaded
from deploykit.serving.workers import parent as hub
from deploykit.serving.workers.process import Forked


class Silent:
    """The link of a worker that does not answer."""

    def send(self, *_: object) -> None: ...


def test_many_changes_at_once_do_not_make_a_slow_worker_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each counted as if it were another second: a client with 30 regions had it killed."""
    monkeypatch.setattr(hub, "REPORT_S", 0.01)
    worker = Forked(1, os.getpid(), 0, cast("Any", None), 0.0, cast("Any", Silent()), ready=True)

    async def change() -> list[Any]:
        found = hub.Hub({worker.pid: worker}, 1, lambda _: None)
        asked = [found._ask_all("do", "register", (str(n),)) for n in range(100)]
        return [answer for answers in await asyncio.gather(*asked) for answer in answers]

    assert {type(each) for each in asyncio.run(change())} == {Overloaded}
    assert (worker.missed, worker.waiting) == (0, {})
