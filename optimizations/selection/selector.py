"""Selection for one group of graphs as a state machine: asked before each call, told the time after it.

It knows candidates by name and times by seconds, and nothing of graphs, devices or files. Times may come late and in
any order (the device has not reached the end of a call yet), or never (a call that was not what it was to be): a round
that lacks one does not count.

Note [Void]. A verdict holds for the circumstances under which it was reached. `void` forgets it and all times, and
measuring begins again; after `MOST_VOIDS` of them, stored verdicts included, the next one stands whatever happens, or a
program whose circumstances change all the time would be measured for ever.

Note [First calls]. A candidate's first calls load kernels and allocate. So the rounds at the beginning give no
candidate up, even where they use the whole budget up. The last candidate is the exception: it has served the program's
calls so far, and what is faster in its own first calls is faster.

Note [Interrupts]. A KeyboardInterrupt may come between any two lines, and the program may go on. What belongs to a
round is written before the round itself, so no round lacks it, and what is left without a round is replaced by the next
one's. All parts of a verdict are there at the same time, or none.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from optimizations.selection.decide import Decision, EndedBy, Round, Rules, block_median, hopeless, judge
from optimizations.selection.period import NO_PERIOD, Timed, period_of
from optimizations.selection.schedule import Turn, turns
from optimizations.selection.totals import OUTLIER, Means, clipped_mean

MOST_VOIDS = 3
"""Verdicts that are given up because circumstances changed; the next one stays."""


FEWEST_ROUNDS = 3
"""Counted rounds that say something. A budget that ends measuring before leaves calls to the last candidate, as they
were, if that is not hopelessly slow."""

EARLY_SHARE = 0.5
"""Of the budget, after which candidates that are hopelessly slow are not measured any more."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What measuring took: `calls` in `rounds` rounds, `seconds` in all, `excess_s` more than the best candidate's
    calls would have taken. Of the latter `waiting_s` is what the program lost because the device was waited for. It
    holds, too, what recording graphs of others again takes (`Series.begin`)."""

    calls: int = 0
    rounds: int = 0
    seconds: float = 0.0
    excess_s: float = 0.0
    waiting_s: float = 0.0

    def plus(self, other: Spent) -> Spent:
        """By both."""
        return Spent(
            self.calls + other.calls,
            self.rounds + other.rounds,
            self.seconds + other.seconds,
            self.excess_s + other.excess_s,
            self.waiting_s + other.waiting_s,
        )


class Selector:
    """See the module.

    Args:
        candidates: names, simplest first.
        rules: how much is measured.
        budget_s: measuring ends when `Spent.excess_s` exceeds this; None for no such limit.
        seed: of the order in which candidates take turns.
        earlier, voided: what was spent before, and verdicts given up, of a selector that this one follows.
        calls_before: calls of selectors that this one follows which count for `Rules.most_calls` as well.

    Attributes:
        decision: the verdict; None while there is none.
        ended_by: what brought it about.
        voided: why earlier verdicts were given up.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        rules: Rules | None = None,
        *,
        budget_s: float | None = None,
        seed: int = 0,
        earlier: Spent | None = None,
        voided: Sequence[str] = (),
        calls_before: int = 0,
    ) -> None:
        self.candidates = tuple(candidates)
        self.rules = rules or Rules()
        self.decision: Decision | None = None
        self.ended_by: EndedBy | None = None
        self.voided = list(voided)
        self._budget_s = budget_s
        self._seed = seed
        self._earlier = earlier or Spent()
        self._looks = frozenset(self.rules.looks(len(self.candidates)))
        self._lost_s = 0.0
        self._call = 0
        self._begin(calls_before)

    def _begin(self, calls_before: int = 0) -> None:
        self._calls_before = calls_before
        self._left = self.candidates
        self._given_up: frozenset[str] = frozenset()
        self._hasty = False
        self._rounds: list[Round] = []
        self._counted: list[Mapping[str, Sequence[tuple[int, float]]]] = []
        self._looked_at = 0
        self._lead_in: list[Round] = []
        self._round_index = 0
        self._queue: deque[Turn] = deque()
        self._open: dict[int, dict[str, list[tuple[int, float] | None]]] = {}
        self._calls = 0
        self._seconds: dict[str, array[float]] = {name: array("d") for name in self.candidates}
        self.decision = self.ended_by = None
        if len(self.candidates) == 1:
            self._judge()
        self._end_at_cap()

    def next_turn(self) -> Turn | None:
        """Who is to serve the next call; None once it is decided. Each turn is to be answered by `record` or `lost`."""
        if self.decision is not None:
            return None
        if not self._queue:
            self._queue.extend(turns(self._left, self._round_index, self.rules.block_calls, self._seed))
            self._open[self._round_index] = {name: [None] * self.rules.block_calls for name in self._left}
            self._round_index += 1
        self._calls += 1
        turn = replace(self._queue.popleft(), call=self._call)
        self._call += 1
        return turn

    def passed(self) -> None:
        """A call of the program was nobody's turn."""
        self._call += 1

    @property
    def at_block_start(self) -> bool:
        """Whether the next turn begins a block: calls before it by whomever change no time that counts."""
        return not self._queue or self._queue[0].place == 0

    def record(self, turn: Turn, seconds: float) -> None:
        """The time of a call.

        Raises:
            ValueError: it is not a positive number of seconds.
        """
        if not 0 < seconds < float("inf"):
            raise ValueError(f"a call takes a positive number of seconds, not {seconds}")
        blocks = self._open.get(turn.round)
        if self.decision is not None or blocks is None:
            return
        self._seconds[turn.candidate].append(seconds)
        if turn.place >= self.rules.block_calls:
            return
        blocks[turn.candidate][turn.place] = turn.call, seconds
        if all(one is not None for block in blocks.values() for one in block):
            self._round_done(turn.round)
        elif len(self._rounds) < FEWEST_ROUNDS and all(one is not None for one in blocks[turn.candidate]):
            self._end_if_dear(turn.round, blocks)

    def lost(self, turn: Turn) -> None:
        """The call of this turn was not what it was to be: its round does not count."""
        self._open.pop(turn.round, None)
        self._queue = deque(one for one in self._queue if one.round != turn.round)
        self._end_at_cap()

    @property
    def spent(self) -> Spent:
        """What measuring took so far, for verdicts that were given up as well."""
        clipped = self._clipped_s()
        counts = self.measured_calls
        best = min((total / counts[name] for name, total in clipped.items()), default=0.0)
        waiting = self._lost_s * sum(counts.values())
        excess = sum(total - best * counts[name] for name, total in clipped.items()) + waiting
        return Spent(
            self._earlier.calls + self._calls,
            self._earlier.rounds + len(self._rounds),
            self._earlier.seconds + sum(sum(one) for one in self._seconds.values()),
            self._earlier.excess_s + excess,
            self._earlier.waiting_s + waiting,
        )

    def _clipped_s(self) -> dict[str, float]:
        """The time of each candidate's calls, less what stopped the program."""
        return {
            name: float(np.minimum(np.array(self._seconds[name]), OUTLIER * middle).sum())
            for name, middle in self.medians.items()
        }

    def lost_by_waiting(self, seconds: float) -> None:
        """What each measured call took longer because the device was waited for (`overlap`)."""
        self._lost_s = seconds

    @property
    def says_little(self) -> bool:
        """Whether the verdict is that calls are served as they were, for too little was measured to tell."""
        return self._is_guess_of(FEWEST_ROUNDS)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether later processes should begin with the verdict; not with a guess whose intervals have no bounds, nor
        where a candidate was given up after a few rounds, in which it may have been the host that was slow."""
        return self.decision is not None and not self._hasty and not self._is_guess_of(min(self._looks))

    def _is_guess_of(self, fewer_rounds: int) -> bool:
        guessed = self.decision is not None and self.decision.outcome == "unresolved"
        return guessed and len(self._rounds) < fewer_rounds

    @property
    def rounds(self) -> int:
        """That count, of the present verdict."""
        return len(self._rounds)

    @property
    def calls_so_far(self) -> int:
        """That count for `Rules.most_calls`."""
        return self._calls_before + self._calls

    @property
    def medians(self) -> dict[str, float]:
        """The median of all times of each candidate, in seconds, since the last verdict that was given up."""
        return {
            name: float(np.partition(np.array(one), len(one) // 2)[len(one) // 2])
            for name, one in self._seconds.items()
            if one
        }

    @property
    def measured_calls(self) -> dict[str, int]:
        """How many times each candidate has, since the same moment."""
        return {name: len(one) for name, one in self._seconds.items()}

    @property
    def steadfast(self) -> bool:
        """Whether the verdict stands whatever happens. Note [Void]."""
        return len(self.voided) >= MOST_VOIDS

    def void(self, reason: str) -> bool:
        """Circumstances changed: forget the verdict and all times. False where that is not done any more."""
        if self.steadfast:
            return False
        self._earlier = self.spent
        self.voided.append(reason)
        self._begin()
        return True

    def _round_done(self, index: int) -> None:
        blocks = self._open.pop(index)
        found = self._whole_blocks(blocks)
        if index < self.rules.lead_in_rounds:
            self._lead_in.append(found)
        else:
            self._counted[len(self._rounds) :] = [self._counted_calls(blocks)]  # Note [Interrupts]
            self._rounds.append(found)
            if len(self._rounds) in self._looks:
                self._judge()
        self._end_at_cap()

    def _whole_blocks(self, blocks: Mapping[str, Sequence[tuple[int, float] | None]]) -> Round:
        times = {name: [one[1] for one in block if one is not None] for name, block in blocks.items()}
        return {
            name: block_median(block, self.rules)
            for name, block in times.items()
            if len(block) == self.rules.block_calls
        }

    def _counted_calls(
        self, blocks: Mapping[str, Sequence[tuple[int, float] | None]]
    ) -> Mapping[str, Sequence[tuple[int, float]]]:
        first = self.rules.lead_in_calls
        return {name: [one for one in block[first:] if one is not None] for name, block in blocks.items()}

    def _without_period(self) -> tuple[Sequence[Round], Sequence[Means]]:
        """Counted rounds, as medians and as means, as they would be if the program's calls had no period."""
        counted = self._counted[: len(self._rounds)]
        period = period_of(
            [
                Timed(call, name, seconds)
                for blocks in counted
                for name, block in blocks.items()
                for call, seconds in block
            ]
        )
        times = self.medians
        means = [
            {name: clipped_mean(block, times[name], period) for name, block in blocks.items()} for blocks in counted
        ]
        if period is NO_PERIOD:
            return self._rounds, means
        return [
            {name: median(seconds / period.ratio(call) for call, seconds in block) for name, block in blocks.items()}
            for blocks in counted
        ], means

    def _judge(self, *, at_the_end: bool = False) -> None:
        rounds, means = self._without_period()
        judged = judge(
            self.candidates,
            rounds,
            self.rules,
            at_the_end=at_the_end,
            given_up=frozenset(self.candidates) - frozenset(self._left),
            means=means,
            looked_at=self._looked_at,
        )
        self._left, self._looked_at = judged.left, len(rounds)
        if judged.decision is not None:
            self.ended_by = self.ended_by or "certainty"
            self.decision = judged.decision
            # Hundreds of graphs would keep the times of thousands of calls each.
            self._counted.clear()
            self._open.clear()
            self._queue.clear()

    def _end_at_cap(self) -> None:
        if self.decision is not None:
            return
        share = self._share_used()
        if share > EARLY_SHARE:
            self._give_up(self._rounds)
        if len(self._left) == 1:
            self._judge(at_the_end=True)
        elif share > 1:
            self._end("cost")
        elif self.calls_so_far >= self.rules.most_calls:
            self._end("calls")
        elif len(self._rounds) >= FEWEST_ROUNDS and self._seconds_used() > self.rules.most_s:
            self._end("time")

    def _end_if_dear(self, index: int, blocks: Mapping[str, Sequence[tuple[int, float] | None]]) -> None:
        """Not even the rounds that say something may cost more than all of measuring may, or take for ever."""
        if self.decision is not None:
            return
        dear, long = self._share_used() > 1, self._seconds_used() > 2 * self.rules.most_s
        if dear or long:
            unfinished = self._whole_blocks(blocks)
            if index < self.rules.lead_in_rounds:
                self._lead_in.append(unfinished)
                self._end("cost" if dear else "time")
            else:
                self._end("cost" if dear else "time", unfinished)

    def _give_up(self, rounds: Sequence[Round], among: Collection[str] | None = None) -> None:
        found = hopeless(self._left, rounds)
        self._given_up |= found if among is None else found.intersection(among)
        self._hasty = self._hasty or (bool(self._given_up) and len(self._rounds) < FEWEST_ROUNDS)
        self._left = tuple(one for one in self._left if one not in self._given_up)

    def _end(self, by: EndedBy, *unfinished: Round) -> None:
        """With what there is, and a round that was not brought to its end. Note [First calls]."""
        self.ended_by = by
        little = len(self._rounds) < FEWEST_ROUNDS
        if little:
            seen = [*self._rounds, *unfinished]
            self._give_up(seen)
            self._give_up([*self._lead_in, *seen], among=self.candidates[-1:])
        self._judge(at_the_end=True)
        assert self.decision is not None
        if little and len(self._left) > 1:
            kept, times = self._left[-1], self.medians
            if kept != self.candidates[-1]:
                kept = min(self._left, key=lambda one: times.get(one, math.inf))
            self.decision = replace(self.decision, kept=kept, outcome="unresolved", comparisons=())

    def _seconds_used(self) -> float:
        """Since measuring began, or began again."""
        return sum(self._clipped_s().values())

    def _share_used(self) -> float:
        """Of the budget."""
        if self._budget_s is None:
            return 0.0
        return self.spent.excess_s / self._budget_s if self._budget_s > 0 else math.inf
