"""Between a group of functions and the store: which stored verdict holds for a function, and storing a group's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from optimizations.selection.selector import Selector
from optimizations.selection.verdict import StoredVerdict, compared

if TYPE_CHECKING:
    from optimizations.selection.member import Member

NO_SOURCE = "the source of a function cannot be read"
"""Why a verdict is not stored: it would have no name."""


def stored_for(member: Member, candidates: Sequence[str]) -> StoredVerdict | None:
    """The verdict that holds for a function here and now, if it keeps one of these candidates."""
    if member.circumstances is None:
        return None
    found = member.settings.store.get(member.circumstances)
    return found if found is not None and found.kept in candidates else None


def stored_together(members: Sequence[Member], candidates: Sequence[str]) -> tuple[Member, StoredVerdict] | None:
    """The verdict on exactly these functions together, as it is stored for the one that an iteration begins with; for
    the first where that is not known."""
    graphs = sorted({one.circumstances.graph for one in members if one.circumstances is not None})
    known = []
    for member in members:
        found = stored_for(member, candidates)
        if found is None or list(found.group) != graphs or found.kept not in found.median_s:
            return None
        known.append((member, found))
    return next((one for one in known if one[1].leads), known[0]) if known else None


def store(members: Sequence[Member], selector: Selector, *, leader: int | None, moving: bool) -> str | None:
    """Store the verdict that `selector` reached on functions together. Why it is not stored; None where it is.

    `leader` is the serial of the one that an iteration begins with, `moving` whether its inputs move. Functions that
    are alike have one verdict, which cannot say it of one of them.
    """
    assert selector.decision is not None and selector.ended_by is not None
    decision, spent = selector.decision, selector.spent
    known = [one.circumstances for one in members if one.circumstances is not None]
    if len(known) < len(members):
        return NO_SOURCE
    graphs = tuple(sorted({one.graph for one in known}))
    verdicts = [
        StoredVerdict(
            circumstances=one,
            group=graphs,
            candidates=selector.candidates,
            kept=decision.kept,
            outcome=decision.outcome,
            compared=compared(decision),
            median_s=selector.medians,
            moving=moving,
            leads=member.serial == leader and known.count(one) == 1,
            calls=spent.calls,
            measuring_s=spent.seconds,
            excess_s=spent.excess_s,
            rounds=selector.rounds,
            ended_by=selector.ended_by,
            measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            direction=member.direction,
        )
        for one, member in zip(known, members, strict=True)
    ]
    return members[0].settings.store.put(verdicts)
