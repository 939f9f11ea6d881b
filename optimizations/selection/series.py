"""The selectors of one group, one after another: what they cost adds up, and so do the verdicts that were given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optimizations.selection.budget import Budget
from optimizations.selection.selector import MOST_VOIDS, Selector, Spent
from optimizations.selection.settings import Settings

MOST_RESTARTS = 8
"""Times that measuring begins again because graphs changed; then the group is left as it is."""

RECORDING_SHARE = 0.5
"""Of what a group may cost, for recording others' graphs again. The rest is needed to tell candidates apart."""

NO_SHARE_LEFT = "measuring has taken the share of compile time that it may"


class Series:
    """Attributes:
    selector: the current one, decided or not; None where nothing was measured that counts.
    restarts: how often measuring began again.
    """

    def __init__(self) -> None:
        self.selector: Selector | None = None
        self.restarts = 0
        self._budget = Budget()
        self._earlier = Spent()
        self._recording_s = 0.0
        self._voided: tuple[str, ...] = ()
        self._calls_without_verdict = 0

    def begin(
        self,
        candidates: Sequence[str],
        settings: Sequence[Settings],
        groups: int,
        *,
        seed: int,
        behind_s: float = 0.0,
    ) -> Selector | str:
        """A selector for these candidates that is not decided; or why there is none.

        `settings` are of all compilations that the group is from, and `groups` have still to be measured for them.
        `behind_s` is what recording the graphs of others took that are recorded again where calls are served without
        one (`Members.recorded_behind`). It counts as cost once.
        """
        current = self.selector
        if current is not None and current.candidates == tuple(candidates) and current.decision is None:
            return current
        self.forget_times()
        allowed_s = self._budget.begin(settings, groups)
        if allowed_s is not None and allowed_s <= 0:
            return NO_SHARE_LEFT
        recording_s = max(0.0, behind_s - self._recording_s)
        if allowed_s is not None and recording_s > RECORDING_SHARE * allowed_s:
            return (
                f"behind a call without a graph, graphs of other functions would be recorded again, for about "
                f"{recording_s:.2g} s; measuring may cost {allowed_s:.2g} s, and half of it that way"
            )
        self._recording_s += recording_s
        self.selector = Selector(
            candidates,
            settings[0].rules,
            budget_s=None if allowed_s is None else self._earlier.excess_s + allowed_s,
            seed=seed,
            earlier=replace(self._earlier, excess_s=self._earlier.excess_s + recording_s),
            voided=self._voided,
            calls_before=self._calls_without_verdict,
        )
        return self.selector

    @property
    def spent(self) -> Spent:
        """By all of them."""
        return self._earlier if self.selector is None else self.selector.spent

    @property
    def voided(self) -> tuple[str, ...]:
        """Why verdicts were given up, measured or stored."""
        return self._voided if self.selector is None else tuple(self.selector.voided)

    def void(self, reason: str) -> bool:
        """A verdict is given up, measured or stored, and with it all times; False where that is not done any more."""
        if self.selector is not None:
            return self.selector.void(reason)
        if len(self._voided) >= MOST_VOIDS:
            return False
        self._voided += (reason,)
        return True

    def forget_times(self) -> None:
        """What was measured does not count any more; what it cost does."""
        if self.selector is not None:
            self.charge()
            self._earlier, self._voided = self.selector.spent, tuple(self.selector.voided)
            undecided = self.selector.decision is None
            self._calls_without_verdict = self.selector.calls_so_far if undecided else 0
            self.selector = None

    def take_over(self, other: Series) -> None:
        """What was measured of another group, which is one with this now, does not count any more either. What it cost
        does: or a program whose functions join one group, one late after the other, would be measured for ever."""
        self.forget_times()
        other.forget_times()
        self._earlier = self._earlier.plus(other._earlier)
        self._budget.take_over(other._budget)
        self._recording_s += other._recording_s
        # A verdict that was stored for both was given up by both.
        self._voided += tuple(reason for reason in other._voided if reason not in self._voided)
        self._calls_without_verdict += other._calls_without_verdict
        self.restarts = max(self.restarts, other.restarts)

    def charge(self) -> None:
        """Put what measuring has cost so far on the account of the compilation."""
        if self.selector is not None:
            self._budget.charge(self.selector.spent.excess_s)

    def restart(self) -> bool:
        """Forget all times because graphs changed; False where that has happened too often."""
        self.forget_times()
        self.restarts += 1
        return self.restarts <= MOST_RESTARTS
