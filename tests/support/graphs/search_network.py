"""A made-up network: sensitivity adds up over the narrow nodes, and so does the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deploykit.core.errors import BadInput
from deploykit.core.evidence import SearchStep
from deploykit.quantization.search import Level, Outcome, Verdict, search

Made = tuple[str, frozenset[str]]  # precision, nodes kept in float32


def bits(precision: str) -> int:
    return 8 if "8" in precision else 16


LIMIT = 1.0  # the sensitivity that passes


@dataclass
class Network:
    """`harms` by precision and node. A node takes 10 ms wide; narrow, as `narrow_s` says."""

    harms: Mapping[str, Mapping[str, float]]
    narrow_s: Mapping[str, float] = field(default_factory=lambda: {"int8": 0.002, "fp16": 0.005})
    now: float = 0.0
    judged: list[Made] = field(default_factory=list)
    ranked: list[str] = field(default_factory=list)
    refused: frozenset[str] = frozenset()

    def level(self, precision: str) -> Level[Made]:
        harms = self.harms[precision]

        def make(wide: frozenset[str]) -> Made:
            if precision in self.refused:
                raise BadInput("nothing to quantize")
            return precision, wide

        def sensitivity(name: str) -> float:
            self.now += 1
            self.ranked.append(name)
            return harms[name]

        return Level(
            precision,
            bits(precision),
            tuple(harms),
            make,
            self.cost_s,
            sensitivity,
            lambda _: 0.008,
        )

    def cost_s(self, made: Made) -> float:
        precision, wide = made
        every = len(self.harms[precision])
        return 0.01 * len(wide) + self.narrow_s[precision] * (every - len(wide))

    def judge(self, made: Made) -> Verdict:
        self.now += 10
        self.judged.append(made)
        precision, wide = made
        drop = sum(
            sensitivity for name, sensitivity in self.harms[precision].items() if name not in wide
        )
        return Verdict(drop <= LIMIT, drop, f"drop {drop:.2f}")

    def search(
        self, *, budget_s: float = math.inf, on_step: Callable[[SearchStep], object] | None = None
    ) -> Outcome[Made]:
        levels = [self.level(precision) for precision in self.harms]
        every = len(next(iter(self.harms.values())))
        return search(
            levels,
            self.judge,
            float32_cost_s=0.01 * every,
            budget_s=budget_s,
            clock=lambda: self.now,
            on_step=on_step,
        )


def harms(count: int, bad: Mapping[int, float] | None = None) -> dict[str, float]:
    """Nodes n0, n1, ... that do no sensitivity, but for the `bad` ones."""
    return {f"n{number}": (bad or {}).get(number, 0.0) for number in range(count)}


FAILS = {0: 9.0}
