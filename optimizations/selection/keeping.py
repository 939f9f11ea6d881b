"""Between a group of functions and the store: which stored verdict holds for a function, and storing a group's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from optimizations.selection.selector import Selector
from optimizations.selection.verdict import StoredVerdict, compared

if TYPE_CHECKING:
    from optimizations.selection.member import Member

NO_SOURCE = "the source of a function cannot be read"
"""Why a verdict is not stored: it would have no name."""


EITHER = (True, False)
"""Whether inputs move is not known before they were seen. Which verdict is tried first must be the same for all
functions that were judged together."""


def stored_for(member: Member, candidates: Sequence[str], moving: Sequence[bool] = EITHER) -> StoredVerdict | None:
    """The verdict that holds for a function here and now, if it keeps one of these candidates: for the first of these
    values of `Circumstances.moving` that has one."""
    if member.circumstances is None:
        return None
    for value in moving:
        found = member.settings.store.get(member.circumstances.with_inputs(moving=value))
        if found is not None and found.kept in candidates:
            return found
    return None


def stored_together(
    members: Iterable[Member], candidates: Sequence[str], moving: Sequence[bool], *, exactly: bool = False
) -> tuple[Member, StoredVerdict] | None:
    """The one verdict that is stored for each of these functions, as it is for the one that an iteration begins with;
    for the first where that is not known. It may be on more functions than these; not so with `exactly`."""
    members = list(members)
    graphs = sorted({one.circumstances.graph for one in members if one.circumstances is not None})
    for value in moving:
        known: list[tuple[Member, StoredVerdict]] = []
        for member in members:
            found = stored_for(member, candidates, (value,))
            if found is None or (known and not found.is_with(known[0][1])):
                break
            if exactly and (list(found.group) != graphs or found.kept not in found.median_s):
                break
            known.append((member, found))
        if known and len(known) == len(members):
            return next((one for one in known if one[1].leads), known[0])
    return None


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
            circumstances=one.with_inputs(moving=moving),
            group=graphs,
            candidates=selector.candidates,
            kept=decision.kept,
            outcome=decision.outcome,
            compared=compared(decision),
            median_s=selector.medians,
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
