"""Which inputs the proof lets through, on trials whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimizations.recording.proof import SPREAD_MARGIN, objection, prove
from optimizations.recording.trial import blind_reason, deviation, values_of


@dataclass
class FakeTrial:
    """A graph in which moving one of `wrong`, or all of a set in `wrong_together`, shows in the second tensor.

    `only_on`: the set of data it shows on; None for all. `broken`: wrong even where nothing moved.
    """

    wrong: frozenset[int] = frozenset()
    wrong_together: tuple[frozenset[int], ...] = ()
    only_on: int | None = None
    broken: bool = False
    spread: float = 0.0
    error: float = 10.0
    failing: str | None = None
    data_sets: int = 2
    runs: list[tuple[int, frozenset[int] | None]] = field(default_factory=list)

    def reference(self, data: int) -> None:
        self.runs.append((data, None))

    def repeat(self, data: int) -> Sequence[float]:
        self.runs.append((data, None))
        return [0.0, self.spread]

    def indirect(self, data: int, moved: Collection[int]) -> Sequence[float]:
        self.runs += [(data, None), (data, frozenset(moved))]
        shows = self.only_on in (None, data)
        bad = bool(self.wrong & set(moved)) or any(one <= set(moved) for one in self.wrong_together)
        return [0.0, self.error if self.broken or (bad and shows) else self.spread]

    def failure(self) -> str | None:
        return self.failing


inputs = st.frozensets(st.integers(0, 6), min_size=1)


@given(inputs, inputs, st.sampled_from([None, 0, 1]), st.sampled_from([0.0, 0.5]))
def test_exactly_the_inputs_that_show_are_refused(
    asked: frozenset[int], wrong: frozenset[int], only_on: int | None, spread: float
) -> None:
    trial = FakeTrial(wrong=wrong, only_on=only_on, spread=spread)
    verdict = prove(asked, trial)
    assert set(verdict.proven) == asked - wrong
    assert set(verdict.refused) == asked & wrong
    assert all("tensor 1 of the outcome differs by up to 10" in reason for reason in verdict.refused.values())
    assert verdict.runs == len(trial.runs)


def test_where_nothing_is_wrong_two_sets_of_data_are_enough() -> None:
    trial = FakeTrial()
    assert prove((3, 1), trial).proven == (1, 3)
    assert [run for run in trial.runs if run[1] is not None] == [(0, frozenset({1, 3})), (1, frozenset({1, 3}))]


def test_inputs_that_are_right_alone_but_not_together_are_all_refused() -> None:
    verdict = prove((0, 1, 2), FakeTrial(wrong_together=(frozenset({0, 2}),)))
    assert verdict.proven == ()
    assert set(verdict.refused) == {0, 1, 2}
    assert "alone it passed, but with inputs 0, 1, 2 moved together" in verdict.refused[1]


def test_a_variant_that_is_wrong_with_nothing_moved_is_refused_as_such() -> None:
    trial = FakeTrial(broken=True)
    verdict = prove((0, 1), trial)
    assert verdict.proven == ()
    assert verdict.refused[0].startswith("with all inputs in their placeholders on data set 0")
    assert len(trial.runs) == 8, "nobody tries the inputs one by one"


def test_a_failure_on_the_device_counts_even_if_the_outcome_is_right() -> None:
    verdict = prove((0,), FakeTrial(failing="the prelude could not update a node"))
    assert verdict.proven == ()
    assert "the prelude could not update a node" in verdict.refused[0]


@given(st.floats(1e-6, 1e6), st.floats(0.0, 2.0))
def test_noise_is_allowed_up_to_the_margin(spread: float, factor: float) -> None:
    found = objection([spread], [spread * factor * SPREAD_MARGIN])
    assert (found is None) == (spread * factor * SPREAD_MARGIN <= SPREAD_MARGIN * spread)


@pytest.mark.parametrize(
    ("repeated", "indirect", "said"),
    [
        ([0.0], [math.ulp(0.0)], "two copying runs by nothing"),
        ([1.0], [math.inf], "differs by up to inf"),
        ([1.0], [math.nan], "differs by up to nan"),
        ([math.inf], [math.inf], "none in another"),
        ([0.0, 1.0], [0.0, 4.5], "tensor 1 of the outcome differs by up to 4.5, two copying runs by 1"),
    ],
)
def test_objections(repeated: list[float], indirect: list[float], said: str) -> None:
    assert said in str(objection(repeated, indirect))


def test_outcomes_of_different_length_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="1 deviations of the indirected run for 2"):
        objection([0.0, 0.0], [0.0])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), 0.0),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]), 0.5),
        (torch.tensor([0.0]), torch.tensor([-0.0]), math.ulp(0.0)),
        (torch.tensor([1.0]), torch.tensor([math.nan]), math.inf),
        (torch.tensor([math.inf]), torch.tensor([math.inf]), 0.0),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 3.0]), 2.0),
        (torch.tensor([math.inf]), torch.tensor([1.0]), math.inf),
        (torch.tensor([3, 9]), torch.tensor([3, 4]), 5.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 4j]), 2.0),
        (torch.tensor([]), torch.tensor([]), 0.0),
        (torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([1.0, 4.0]).bfloat16(), 2.0),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([2.0]).to(torch.float8_e4m3fn), 1.0),
    ],
)
def test_deviation_is_zero_only_bit_for_bit(first: torch.Tensor, second: torch.Tensor, expected: float) -> None:
    assert deviation(first, second) == expected
    assert deviation(first.expand(3, *first.shape).transpose(0, 1), second.expand(3, *second.shape).mT) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_second_set_of_data_differs_where_values_may(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0, 7.0, -3.0, math.inf, math.nan], dtype=dtype)
    first, second = values_of(tensor, 0), values_of(tensor, 1)
    assert torch.equal(first, tensor.view(torch.uint8))
    assert second.view(dtype).tolist()[:5] == [0.25, 0.75, 3.75, -1.25, math.inf]


@given(st.integers(0, 1 << 20))
def test_indices_that_are_stored_as_floats_stay_in_range(index: int) -> None:
    (varied,) = values_of(torch.tensor([float(index)]), 1).view(torch.float32).tolist()
    assert 0 <= int(varied) <= index


@pytest.mark.parametrize(
    ("tensor", "blind"),
    [
        (torch.zeros(4, dtype=torch.int64), True),
        (torch.tensor([0, 1]), False),
        (torch.zeros(4, dtype=torch.bool), False),
        (torch.ones(4, dtype=torch.bool), False),
        (torch.zeros(4), False),
        (torch.full((4,), math.nan), True),
        (torch.tensor([math.nan, 1.0]), False),
        (torch.full((2,), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn), True),
        (torch.zeros(3, dtype=torch.complex64), False),
    ],
)
def test_values_equal_to_poison_are_known(tensor: torch.Tensor, blind: bool) -> None:
    assert (blind_reason(tensor) is not None) == blind
