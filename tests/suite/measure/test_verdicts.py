"""Verdicts on given errors: what the tolerance and what a reference allow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from suite.measure.correctness import REFERENCE_FACTOR, Agreement, Reference, combine, has_few, judge


def refuse() -> None:
    raise AssertionError("the reference must not be asked")


def test_within_the_tolerance_the_reference_is_not_run():
    verdict = judge({"output": 0.01, "loss": 0.002}, 0.02, 1e-3, refuse)
    assert verdict == Agreement(True, 2, 0.01, "output", None)


A, B = "gradient a", "gradient b"
PRECISE: dict[str, Any] = {"factor": REFERENCE_FACTOR}
"""A reference in higher precision."""
EAGER: dict[str, Any] = {"factor": 1 + REFERENCE_FACTOR, "is_eager": True}
"""Eager without dropout as the reference."""
YES, NO, OPEN = (True, False), (False, False), (True, True)
"""(passed, undecided)."""

VERDICTS: dict[str, list[tuple[float, dict[str, float], dict[str, Any], tuple[bool, bool]]]] = {
    "twice eager's error and one rounding": [
        (0.20, {A: 0.10}, PRECISE, YES),
        (0.202, {A: 0.10}, PRECISE, NO),
        (0.0009, {A: 0.0}, PRECISE, YES),
        (math.inf, {A: math.inf}, PRECISE, NO),
        (0.5, {A: math.inf}, PRECISE, YES),
    ],
    "three times eager's error without dropout": [
        (0.30, {A: 0.10}, {"factor": 1 + REFERENCE_FACTOR}, YES),
        (0.302, {A: 0.10}, {"factor": 1 + REFERENCE_FACTOR}, NO),
        (0.03, {A: 0.0}, {"factor": 1 + REFERENCE_FACTOR}, NO),
        (0.03, {A: math.nan}, {"factor": 1 + REFERENCE_FACTOR}, NO),
        (math.inf, {A: 1.0}, {"factor": 1 + REFERENCE_FACTOR}, NO),
    ],
    # Eager is off by 0.0088, the compiled function the other way: they are farther apart than the tolerance.
    "within the tolerance of the reference": [
        (0.0183, {A: 0.0088}, PRECISE, YES),
        (0.02, {A: 0.0088}, PRECISE, YES),
        (0.0201, {A: 0.0088}, PRECISE, NO),
    ],
    "small gradients once more": [
        (0.6, {A: 0.1}, {**PRECISE, "small": {A}}, NO),
        (0.3, {A: 0.1}, {**PRECISE, "small": {A}}, YES),
        (0.3, {A: 0.1}, PRECISE, NO),
        (0.6, {A: 0.075}, {**EAGER, "small": {A}}, NO),
        (0.3, {A: 0.075}, {**EAGER, "small": {A}}, YES),
        (0.3, {A: 0.075}, EAGER, NO),
    ],
    # DistilGPT2's worst gradient may differ by three times what eager rounds, which is 0.26; zeros differ by 1.
    "at most one half": [
        (0.45, {A: 0.26}, EAGER, YES),
        (0.51, {A: 0.26}, EAGER, NO),
        (0.52, {A: 0.17}, EAGER, NO),
    ],
    "useless eager decides nothing but far errors": [(0.3, {A: 0.7}, EAGER, OPEN), (2.5, {A: 0.7}, EAGER, NO)],
    "a useless gradient disqualifies nearly useless ones": [
        (1.3, {A: 0.41, B: 1.1}, PRECISE, OPEN),
        (2.3, {A: 0.41, B: 1.1}, PRECISE, NO),  # farther off than even the useless one explains
        (0.45, {A: 0.20, B: 1.1}, PRECISE, NO),  # eager is a reference for this one
        (0.39, {A: 0.20, B: 1.1}, PRECISE, YES),
    ],
    "a useless gradient disqualifies those of few elements": [
        (1.37, {A: 0.095, B: 1.5}, {**EAGER, "few": [A]}, OPEN),  # as in EfficientDet: float32 or float64 decides
        (1.37, {A: 0.095, B: 1.5}, EAGER, NO),  # of more elements eager's error says enough
        (1.37, {A: 0.095, B: 1.5}, {**EAGER, "few": [B]}, NO),
        (1.37, {A: 0.095, B: 0.4}, {**EAGER, "few": [A]}, NO),  # eager is useless for no gradient
        (math.inf, {A: 0.095, B: 1.5}, {**EAGER, "few": [A]}, NO),
        (0.28, {A: 0.095, B: 1.5}, {**EAGER, "few": [A]}, YES),
    ],
    "a useless output excuses no gradient": [(0.6, {A: 0.4, "output": 1.1}, PRECISE, NO)],
}


@pytest.mark.parametrize("rule", VERDICTS)
def test_reference_allows(rule):
    for error, eager, how, expected in VERDICTS[rule]:
        verdict = judge({A: 0.3}, 0.02, 1e-3, lambda e=error, own=eager, how=how: Reference({A: e}, own, **how))
        assert (verdict.passed, verdict.undecided) == expected, (error, eager, how)
        assert verdict.reference_error == pytest.approx(eager[A], nan_ok=True)


def test_failed_tensor_is_named_before_a_farther_one():
    reference = Reference({"a": 0.1, "b": 0.3}, {"a": 0.8, "b": 0.01}, 2.0)
    verdict = judge({"a": 0.9, "b": 0.3}, 0.02, 1e-3, lambda: reference)
    assert (verdict.passed, verdict.worst, verdict.reference_error) == (False, "b", 0.01)
    useless = Reference({"output": 0.6}, {"output": 0.4, B: 1.1}, REFERENCE_FACTOR)
    assert not judge({"output": 0.6}, 0.08, 1e-3, lambda: useless).passed, "a useless gradient excuses no output"
    missing = Reference({}, {}, REFERENCE_FACTOR)
    assert judge({"buffer n": 0.3}, 0.02, 1e-3, lambda: missing).passed, "a tensor that is missing has no error there"
    assert not judge({}, 0.02, 1e-3, refuse).passed, "there is nothing to compare"


def test_one_failed_or_open_input_decides_for_all():
    good, bad = Agreement(True, 3, 0.5, "output", 0.4), Agreement(False, 3, 0.2, "loss", None)
    assert combine([good, bad]) == bad
    assert combine([good, Agreement(True, 3, 0.1, "loss", None)]) == good
    assert combine([good, Agreement(True, 1, 0.05, "b", 0.7, undecided=True)]).undecided


@pytest.mark.parametrize(
    ("shape", "few"), [((), True), ((2,), True), ((8, 32, 1, 1), True), ((11,), False), ((88, 1, 3, 3), False)]
)
def test_few_elements_are_counted_by_elements_or_rows(shape, few):
    assert has_few(torch.zeros(shape)) is few
