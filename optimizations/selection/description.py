"""The report of one function's selection, from the state of its group."""

from __future__ import annotations

from optimizations.report.recordings import Direction
from optimizations.report.selection import CandidateTime, SelectionReport, State
from optimizations.selection.decide import Decision
from optimizations.selection.selector import Selector, Spent
from optimizations.selection.verdict import Compared, StoredVerdict, compared


def describe(
    direction: Direction,
    state: State,
    reason: str | None,
    group: int,
    functions: int,
    objective: str,
    selector: Selector | None,
    spent: Spent,
    voided: tuple[str, ...],
    decision: Decision | None,
    stored: StoredVerdict | None,
    not_stored: str | None,
    budget_s: float | None,
) -> SelectionReport:
    """See `report.selection.SelectionReport`."""
    if stored is not None:
        names, medians, calls = stored.candidates, stored.median_s, {}
        comparisons: tuple[Compared, ...] = stored.compared
    else:
        names = selector.candidates if selector is not None else ()
        medians = selector.medians if selector is not None else {}
        calls = selector.measured_calls if selector is not None else {}
        comparisons = compared(decision) if decision is not None else ()
    by_name = {one.candidate: one for one in comparisons}
    return SelectionReport(
        direction=direction,
        state=state,
        reason=reason,
        group=group,
        functions=functions,
        objective=objective,
        candidates=tuple(
            CandidateTime(
                candidate=name,
                calls=calls.get(name, 0),
                median_us=medians[name] * 1e6 if name in medians else None,
                ratio=by_name[name].ratio if name in by_name else None,
                low=by_name[name].low if name in by_name else None,
                high=by_name[name].high if name in by_name else None,
            )
            for name in names
        ),
        kept=decision.kept if decision is not None else None,
        outcome=decision.outcome if decision is not None else None,
        source=None if decision is None else "measured" if stored is None else "stored",
        calls=spent.calls,
        measuring_s=spent.seconds,
        excess_s=spent.excess_s,
        waiting_s=spent.waiting_s,
        voided=voided,
        not_stored=not_stored if decision is not None else None,
        budget_s=budget_s,
        rounds=stored.rounds if stored is not None else selector.rounds if selector is not None else 0,
        ended_by=stored.ended_by if stored is not None else selector.ended_by if selector is not None else None,
    )
