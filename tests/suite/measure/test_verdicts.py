"""Verdicts on given errors: what the tolerance and what a reference allow."""

from __future__ import annotations

import math

import pytest
import torch

from suite.measure.correctness import (
    REFERENCE_FACTOR,
    Agreement,
    Reference,
    combine,
    has_few,
    judge,
)


def refuse() -> None:
    raise AssertionError("the reference must not be asked")


def test_within_the_tolerance_the_reference_is_not_run():
    verdict = judge({"output": 0.01, "loss": 0.002}, 0.02, 1e-3, refuse)
    assert verdict == Agreement(True, 2, 0.01, "output", None)


@pytest.mark.parametrize(
    ("compiled", "eager", "passed"),
    [(0.20, 0.10, True), (0.202, 0.10, False), (0.0009, 0.0, True), (math.inf, math.inf, False), (0.5, math.inf, True)],
)
def test_reference_allows_twice_eagers_error_and_one_rounding(compiled, eager, passed):
    reference = Reference({"output": compiled}, {"output": eager}, REFERENCE_FACTOR)
    verdict = judge({"output": 0.3}, 0.02, 1e-3, lambda: reference)
    assert verdict.passed is passed
    assert verdict.reference_error == eager


@pytest.mark.parametrize(
    ("error", "eager", "passed"),
    [(0.30, 0.10, True), (0.302, 0.10, False), (0.03, 0.0, False), (0.03, math.nan, False), (math.inf, 1.0, False)],
)
def test_eager_reference_allows_three_times_its_error(error, eager, passed):
    found = {"output": error}
    verdict = judge(found, 0.02, 1e-3, lambda: Reference(found, {"output": eager}, 1 + REFERENCE_FACTOR))
    assert verdict.passed is passed


@pytest.mark.parametrize(("compiled", "passed"), [(0.0183, True), (0.02, True), (0.0201, False)])
def test_result_within_tolerance_of_the_reference_passes(compiled, passed):
    """Eager is off by 0.0088, the compiled function the other way: they are farther apart than the tolerance."""
    reference = Reference({"gradient": compiled}, {"gradient": 0.0088}, REFERENCE_FACTOR)
    assert judge({"gradient": 0.0203}, 0.02, 1e-3, lambda: reference).passed is passed


@pytest.mark.parametrize(("small", "compiled", "passed"), [(True, 0.6, False), (True, 0.3, True), (False, 0.3, False)])
@pytest.mark.parametrize(("factor", "is_eager"), [(REFERENCE_FACTOR, False), (1 + REFERENCE_FACTOR, True)])
def test_small_gradients_may_be_off_once_more(small, compiled, passed, factor, is_eager):
    eager = 0.3 / (factor + 1)
    names = {"gradient"} if small else set()
    reference = Reference({"gradient": compiled}, {"gradient": eager}, factor, is_eager=is_eager, small=names)
    assert judge({"gradient": compiled}, 0.02, 1e-3, lambda: reference).passed is passed


def test_tensor_missing_in_a_reference_has_no_error_there():
    assert judge({"buffer n": 0.3}, 0.02, 1e-3, lambda: Reference({}, {}, REFERENCE_FACTOR)).passed


def test_failed_tensor_is_named_before_a_farther_one():
    verdict = judge(
        {"a": 0.9, "b": 0.3}, 0.02, 1e-3, lambda: Reference({"a": 0.1, "b": 0.3}, {"a": 0.8, "b": 0.01}, 2.0)
    )
    assert (verdict.passed, verdict.worst, verdict.reference_error) == (False, "b", 0.01)


def test_incomparable_results_do_not_pass():
    assert not judge({}, 0.02, 1e-3, refuse).passed


def test_one_failed_input_fails_the_mode():
    good, bad = Agreement(True, 3, 0.5, "output", 0.4), Agreement(False, 3, 0.2, "loss", None)
    assert combine([good, bad]) == bad
    assert combine([good, Agreement(True, 3, 0.1, "loss", None)]) == good


@pytest.mark.parametrize(("eager", "error", "passed"), [(0.26, 0.45, True), (0.26, 0.51, False), (0.17, 0.52, False)])
def test_allowed_error_is_at_most_one_half(eager, error, passed):
    """DistilGPT2's worst gradient may differ by three times what eager rounds, which is 0.26; zeros differ by 1."""
    found = {"gradient": error}
    reference = Reference(found, {"gradient": eager}, 1 + REFERENCE_FACTOR, is_eager=True)
    assert judge(found, 0.02, 1e-3, lambda: reference).passed is passed


def test_stochastic_eager_that_is_useless_decides_nothing():
    reference = Reference({"gradient": 0.3}, {"gradient": 0.7}, 1 + REFERENCE_FACTOR, is_eager=True)
    verdict = judge({"gradient": 0.3}, 0.02, 1e-3, lambda: reference)
    assert (verdict.passed, verdict.undecided) == (True, True)
    far = Reference({"gradient": 2.5}, {"gradient": 0.7}, 1 + REFERENCE_FACTOR, is_eager=True)
    assert not judge({"gradient": 2.5}, 0.02, 1e-3, lambda: far).passed


@pytest.mark.parametrize(
    ("own", "error", "passed", "undecided"),
    [
        (0.41, 1.3, True, True),  # another gradient of eager's is useless, and this one nearly
        (0.41, 2.3, False, False),  # farther off than even the useless one explains
        (0.20, 0.45, False, False),  # eager is a reference for this one
        (0.20, 0.39, True, False),
    ],
)
def test_useless_gradient_disqualifies_nearly_useless_ones(own, error, passed, undecided):
    compiled = {"gradient a": error, "gradient b": 0.9, "output": 0.01}
    reference = Reference(compiled, {"gradient a": own, "gradient b": 1.1, "output": 0.01}, REFERENCE_FACTOR)
    verdict = judge({"gradient a": error}, 0.08, 1e-3, lambda: reference)
    assert (verdict.passed, verdict.undecided) == (passed, undecided)


@pytest.mark.parametrize(
    ("few", "worst", "error", "passed", "undecided"),
    [
        (["gradient a"], 1.5, 1.37, True, True),  # as in EfficientDet: float32 or float64 decides
        ([], 1.5, 1.37, False, False),  # of more elements eager's error says enough
        (["gradient b"], 1.5, 1.37, False, False),
        (["gradient a"], 0.4, 1.37, False, False),  # eager is useless for no gradient
        (["gradient a"], 1.5, math.inf, False, False),
        (["gradient a"], 1.5, 0.28, True, False),
    ],
)
def test_useless_gradient_disqualifies_those_of_few_elements(few, worst, error, passed, undecided):
    own = {"gradient a": 0.095, "gradient b": worst}
    reference = Reference({"gradient a": error}, own, 1 + REFERENCE_FACTOR, is_eager=True, few=few)
    verdict = judge({"gradient a": error}, 0.02, 1e-3, lambda: reference)
    assert (verdict.passed, verdict.undecided) == (passed, undecided)


@pytest.mark.parametrize(
    ("shape", "few"), [((), True), ((2,), True), ((8, 32, 1, 1), True), ((11,), False), ((88, 1, 3, 3), False)]
)
def test_few_elements_are_counted_by_elements_or_rows(shape, few):
    assert has_few(torch.zeros(shape)) is few


def test_useless_gradient_and_output_do_not_excuse_each_other():
    found = {"output": 0.6}
    reference = Reference(found, {"output": 0.4, "gradient b": 1.1}, REFERENCE_FACTOR)
    assert not judge(found, 0.08, 1e-3, lambda: reference).passed
    found = {"gradient a": 0.6}
    reference = Reference(found, {"output": 1.1, "gradient a": 0.4}, REFERENCE_FACTOR)
    assert not judge(found, 0.08, 1e-3, lambda: reference).passed


def test_one_input_without_a_verdict_leaves_all_without_one():
    decided, open_one = Agreement(True, 1, 0.1, "a", None), Agreement(True, 1, 0.05, "b", 0.7, undecided=True)
    assert combine([decided, open_one]).undecided
