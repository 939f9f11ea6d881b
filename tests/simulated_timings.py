"""Times of candidates whose truth is known, with what real ones have: noise, drift, outliers, warm-up, regimes."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from optimizations.selection.decide import Rules
from optimizations.selection.selector import Selector


@dataclass(frozen=True)
class Weather:
    """What happens to times that has nothing to do with the candidates.

    Attributes:
        noise: standard deviation of the logarithm of each time.
        drift: growth of all times over a thousand calls.
        outliers: share of calls that take 2 to 20 times as long.
        warm_up: first calls of each candidate, which take three times as long.
        regimes: how probable a change between two speeds, 30 % apart, is at each call.
        period: of every so many calls one is of another size, and takes 1.5 times as long; 0 for none.
        echo: how much of a call's noise is left in the next one.
    """

    noise: float
    drift: float = 0.0
    outliers: float = 0.0
    warm_up: int = 0
    regimes: float = 0.0
    period: int = 0
    echo: float = 0.0


FAIR = Weather(noise=0.01)
FOUL = Weather(noise=0.02, drift=0.3, outliers=0.03, warm_up=3, regimes=0.02, period=2, echo=0.3)


def decided(
    truth: Mapping[str, float],
    weather: Weather,
    seed: int,
    rules: Rules | None = None,
    budget_s: float | None = None,
) -> Selector:
    """A selector that has measured candidates (simplest first) of these true times until it decided."""
    chance = random.Random(seed)
    selector = Selector(list(truth), rules, seed=seed, budget_s=budget_s)
    served = dict.fromkeys(truth, 0)
    calls, slow, last = 0, False, 0.0
    while (turn := selector.next_turn()) is not None:
        last = weather.echo * last + math.sqrt(1 - weather.echo**2) * chance.gauss(0, weather.noise)
        seconds = truth[turn.candidate] * math.exp(last) * (1 + weather.drift) ** (calls / 1000)
        slow ^= chance.random() < weather.regimes
        seconds *= 1.3 if slow else 1.0
        if chance.random() < weather.outliers:
            seconds *= chance.uniform(2, 20)
        if served[turn.candidate] < weather.warm_up:
            seconds *= 3
        if weather.period and calls % weather.period == 0:
            seconds *= 1.5
        served[turn.candidate] += 1
        calls += 1
        selector.record(turn, seconds * 1e-3)
    return selector
