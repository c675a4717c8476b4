"""The seconds that `--to auto` may take: no step begins that would end after them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from deploykit.core.errors import BadInput


class OutOfTime(BadInput):
    """What is left of the budget does not do for the next step."""


@dataclass(frozen=True)
class Budget:
    """`seconds` on `clock`, from `began` on. Raises BadInput where they are not above 0."""

    began: float
    seconds: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        check_seconds(self.seconds)

    @property
    def end(self) -> float:
        return self.began + self.seconds

    def check(self, needed_s: float = 0.0) -> None:
        """Raise OutOfTime where `needed_s` more would end after the budget, or it has ended."""
        now = self.clock()
        if now >= self.end or now + needed_s > self.end:
            raise OutOfTime(
                f"`budget_s` {self.seconds:g}: too short to try one candidate, "
                f"after {now - self.began:.3g} s of preparing",
                hint="give more seconds (600 is the default) or fewer samples, or name a precision",
            )

    def pace(self, share: float) -> Pace:
        """For steps that may take this share of what is left."""
        now = self.clock()
        return Pace(now + share * max(self.end - now, 0.0), self.clock)

    def steps(self) -> Callable[[int], None]:
        """To call before each of equal steps, with how many are left; raises OutOfTime.

        They are expected to take as long as the shortest so far.
        """
        began: list[float] = []  # one for each step

        def check(left: int) -> None:
            began.append(self.clock())
            took_s = (later - earlier for earlier, later in itertools.pairwise(began))
            self.check(left * min(took_s, default=0.0))

        return check


def check_seconds(seconds: float) -> None:
    """Raise BadInput for a budget that is not above 0."""
    if not seconds > 0:
        raise BadInput(f"`budget_s` must be above 0 seconds, got {seconds}")


class Pace:
    """Whether one more step would end after `until`, if it took as long as the longest so far."""

    def __init__(self, until: float, clock: Callable[[], float]) -> None:
        self.until, self.clock = until, clock
        self.last = clock()
        self.longest_s = 0.0

    def out_of_time(self) -> bool:
        """Ask before each step."""
        now = self.clock()
        self.longest_s, self.last = max(self.longest_s, now - self.last), now
        return now + self.longest_s > self.until or now >= self.until
