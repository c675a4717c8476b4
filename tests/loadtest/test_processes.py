"""Several processes of a load generator: they begin together or not at all, and share two pipes."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence

import pytest

import deploykit as dk
from deploykit.loadtest import generator as processes
from deploykit.loadtest.check import AnswerCheck
from deploykit.loadtest.result import SendPlan

PLAN = SendPlan("127.0.0.1", 9, [b""], AnswerCheck(()), 1, array("d"), 0.0, 0.1, 0.1, b"")


def test_where_one_process_cannot_begin_the_others_do_not_wait_for_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    broken = SendPlan("127.0.0.1", 9, [b""], AnswerCheck(()), 1, ["x"], 0.0, 0.1, 0.1, b"")  # type: ignore[arg-type]
    with pytest.raises(dk.DeploykitError, match="its process ended with code 1"):
        processes.run_processes([PLAN, broken])
    assert "TypeError" in capfd.readouterr().err  # of the broken one, a bug


def test_the_pipes_stay_open_until_no_thread_can_pass_them_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another file would get the number of a closed one, and a child inherit it."""
    still_open = []

    def start_late(
        _what: str, _run: object, _plan: object, *_: int, inherit: Sequence[int], **_more: object
    ) -> None:
        assert os.read(inherit[1], 8) == b""  # the other end was closed: Ctrl-C
        still_open.append([os.fstat(number).st_nlink for number in inherit])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "run_apart", start_late)
    monkeypatch.setattr(processes, "_start_together", interrupt)
    with pytest.raises(KeyboardInterrupt):
        processes.run_processes([PLAN, PLAN])
    assert still_open == [[1, 1], [1, 1]]
