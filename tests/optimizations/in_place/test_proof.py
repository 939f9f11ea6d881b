"""What has to be seen before a graph that reads inputs in place stands in for the copying one."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimizations.in_place.proof import (
    EQUAL_CALLS,
    MOST_CALLS,
    OBJECTIONS,
    PATIENT_CALLS,
    SPREAD_MARGIN,
    Observed,
    Proof,
    Standing,
    deviation,
    objection,
)

EQUAL = (0.0, 0.0)


def test_equal_outcomes_on_calls_that_differ_prove() -> None:
    proof = Proof(frozenset({0, 2}))
    assert proof.add(Observed(frozenset({0}), EQUAL)) is Standing.UNDECIDED
    assert proof.add(Observed(frozenset({0}), EQUAL)) is Standing.UNDECIDED, "input 2 was always the same"
    assert proof.add(Observed(frozenset({2}), EQUAL)) is Standing.PROVEN


def test_calls_on_the_same_data_prove_nothing() -> None:
    proof = Proof(frozenset({0}))
    verdicts = [proof.add(Observed(frozenset(), EQUAL)) for _ in range(MOST_CALLS)]
    assert verdicts == [Standing.UNDECIDED] * (MOST_CALLS - 1) + [Standing.GIVEN_UP]
    assert "held the same data" in str(proof.objection)


def test_two_runs_that_are_close_by_chance_refuse_nothing() -> None:
    """The same function, drawn from: three outcomes of a tensor, as atomic additions give."""
    for seed in range(50):
        draw = random.Random(seed)
        proof = Proof(frozenset({0}))
        verdict = Standing.UNDECIDED
        while verdict is Standing.UNDECIDED:
            first, second, third = (draw.choice((0.0, 1.0, 3.0)) for _ in range(3))
            spread = (abs(second - first),) if proof.needs_spread else None
            verdict = proof.add(Observed(frozenset({0}), (abs(third - first),), spread))
        assert verdict is Standing.PROVEN, seed


def test_constant_inputs_do_not_delay_the_others() -> None:
    proof = Proof(frozenset({0, 1}))
    verdicts = [proof.add(Observed(frozenset({0}), EQUAL)) for _ in range(PATIENT_CALLS)]
    assert verdicts[-1] is Standing.PARTLY
    assert proof.always_the_same == {1}


def test_without_unproven_inputs_equal_outcomes_are_enough() -> None:
    proof = Proof(frozenset())
    verdicts = [proof.add(Observed(frozenset(), EQUAL)) for _ in range(EQUAL_CALLS)]
    assert verdicts[-1] is Standing.PROVEN


def test_a_difference_asks_for_the_spread_and_is_judged_by_it() -> None:
    proof = Proof(frozenset({0}))
    assert proof.add(Observed(frozenset({0}), (0.0, 3.0))) is Standing.UNDECIDED
    assert proof.needs_spread
    assert proof.add(Observed(frozenset({0}), (0.0, 3.0), (0.0, 1.0))) is Standing.UNDECIDED
    assert proof.add(Observed(frozenset({0}), (0.0, 3.9), (0.0, 1.0))) is Standing.PROVEN


def test_a_difference_that_the_spread_never_explains_refuses() -> None:
    proof = Proof(frozenset({0}))
    proof.add(Observed(frozenset({0}), (0.5, 0.0)))
    verdicts = [proof.add(Observed(frozenset({0}), (0.5, 0.0), (0.0, 0.0))) for _ in range(OBJECTIONS)]
    assert verdicts == [Standing.UNDECIDED] * (OBJECTIONS - 1) + [Standing.REFUSED]
    assert "differs by up to 0.5, two copying runs by nothing" in str(proof.objection)


@given(st.floats(1e-30, 1e30), st.floats(0.0, 100.0))
def test_within_four_times_the_spread_nothing_speaks_against_it(spread: float, share: float) -> None:
    found = objection([spread], [spread * share])
    assert (found is None) == (spread * share <= SPREAD_MARGIN * spread)


def test_numbers_that_become_none_are_no_spread() -> None:
    assert "is a number in one run" in str(objection([math.inf], [math.inf]))
    with pytest.raises(ValueError, match="2 deviations"):
        objection([0.0], [0.0, 0.0])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.5),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), 0.0),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), math.inf),
        (torch.tensor([math.inf]), torch.tensor([1.0]), math.inf),
        (torch.tensor([0.0]), torch.tensor([-0.0]), math.ulp(0.0)),
        (torch.tensor([3, 4]), torch.tensor([3, 9]), 5.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 4j]), 2.0),
        (torch.empty(0), torch.empty(0), 0.0),
    ],
)
def test_deviations(first: torch.Tensor, second: torch.Tensor, expected: float) -> None:
    if not first.dtype.is_floating_point or not torch.isnan(first).any() or expected:
        assert float(deviation(first, second)) == expected
    else:
        assert float(deviation(first, first.clone())) == 0.0


def test_whole_storages_are_compared_as_the_numbers_they_hold() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    assert float(deviation(one.view(torch.uint8), other.view(torch.uint8), one)) == 2.0
