"""A made-up network: sensitivity adds up over the narrow nodes, and so does the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deploykit.core.errors import BadInput
from deploykit.core.evidence import SearchStep
from deploykit.quantization.search import Budget, Level, Outcome, Verdict, search

Made = tuple[str, frozenset[str]]  # precision, nodes kept in float32


def bits(precision: str) -> int:
    return 8 if "8" in precision else 16


LIMIT = 1.0  # the sensitivity that passes


@dataclass
class Network:
    """`sensitivities` by precision and node. A node takes 10 ms in float32, else `narrow_s`."""

    sensitivities: Mapping[str, Mapping[str, float]]
    narrow_s: Mapping[str, float] = field(default_factory=lambda: {"int8": 0.002, "fp16": 0.005})
    now: float = 0.0
    evaluated: list[Made] = field(default_factory=list)
    ranked: list[str] = field(default_factory=list)
    refused: frozenset[str] = frozenset()

    def level(self, precision: str) -> Level[Made]:
        sensitivities = self.sensitivities[precision]

        def make(float32_nodes: frozenset[str]) -> Made:
            if precision in self.refused:
                raise BadInput("nothing to quantize")
            return precision, float32_nodes

        def sensitivity(name: str) -> float:
            self.now += 1
            self.ranked.append(name)
            return sensitivities[name]

        return Level(
            precision,
            bits(precision),
            tuple(sensitivities),
            make,
            self.cost_s,
            sensitivity,
            lambda _: 0.008,
        )

    def cost_s(self, made: Made) -> float:
        precision, float32_nodes = made
        every = len(self.sensitivities[precision])
        return 0.01 * len(float32_nodes) + self.narrow_s[precision] * (every - len(float32_nodes))

    def evaluate(self, made: Made) -> Verdict:
        self.now += 10
        self.evaluated.append(made)
        precision, float32_nodes = made
        drop = sum(
            sensitivity
            for name, sensitivity in self.sensitivities[precision].items()
            if name not in float32_nodes
        )
        return Verdict(drop <= LIMIT, drop, f"drop {drop:.2f}")

    def search(
        self, *, budget_s: float = math.inf, on_step: Callable[[SearchStep], object] | None = None
    ) -> Outcome[Made]:
        levels = [self.level(precision) for precision in self.sensitivities]
        every = len(next(iter(self.sensitivities.values())))
        return search(
            levels,
            self.evaluate,
            float32_cost_s=0.01 * every,
            budget=Budget(0.0, budget_s, lambda: self.now),
            on_step=on_step,
        )


def sensitivities(count: int, bad: Mapping[int, float] | None = None) -> dict[str, float]:
    """Nodes n0, n1, ... that do no sensitivity, but for the `bad` ones."""
    return {f"n{number}": (bad or {}).get(number, 0.0) for number in range(count)}


FAILS = {0: 9.0}
