"""The error between two results, and incomparable results."""

from __future__ import annotations

import math

import pytest
import torch

from models.registry import Inputs
from suite.measure import compare
from suite.measure.compare import Size, errors, misshapen, relative_error
from suite.measure.results import State

CPU = torch.device("cpu")


def distance(value, reference, **options) -> float:
    return relative_error(torch.as_tensor(value), torch.as_tensor(reference), device=CPU, **options)


@pytest.mark.parametrize(
    ("value", "reference", "least", "error"),
    [
        ([3.3, 4.4], [3.0, 4.0], None, 0.1),
        ([[1.0, 2.0]], [[1.0, 2.0]], None, 0.0),
        ([3.0, 4.5], [3.0, 4.0], None, 0.5 / 4.0),  # the maximum norm; L2: 0.5 / 5
        ([1.0, 0.5, 0.5, 0.5], [1.0, 0.0, 0.0, 0.0], None, math.sqrt(0.75)),  # L2; maximum: 0.5
        # Only finite elements are measured.
        ([3.3, 4.4, math.nan, math.inf], [3.0, 4.0, math.nan, math.inf], None, 0.1),
        ([math.nan], [math.nan], None, 0.0),
        # A small value is measured against a floor.
        ([0.3, 0.0, 0.0, 0.0], [0.0] * 4, None, math.inf),
        ([0.3, 0.0, 0.0, 0.0], [0.0] * 4, Size(rms=1.0, largest=3.0), 0.3 / 2),
        ([0.3, 0.0, 0.0, 0.0], [0.0] * 4, Size(rms=9.0, largest=3.0), 0.3 / 3),
    ],
)
def test_error_is_the_larger_norm_over_that_of_the_reference(value, reference, least, error):
    assert distance(value, reference, **{"least": least} if least else {}) == pytest.approx(error)


def test_long_tensors_are_compared_in_chunks_as_if_at_once(monkeypatch):
    reference = torch.arange(1.0, 101.0)
    one, all_of_them = reference.clone(), reference + 5.0
    one[3] += 3.0
    whole = distance(one, reference), distance(all_of_them, reference)
    monkeypatch.setattr(compare, "CHUNK_ELEMENTS", 7)
    assert (distance(one, reference), distance(all_of_them, reference)) == pytest.approx(whole)
    assert whole == pytest.approx((3.0 / 100.0, 50.0 / float(reference.norm())))


@pytest.mark.parametrize(
    ("value", "reference"),
    [
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([1.0, math.inf], [1.0, 2.0]),
        ([1.0, math.inf], [1.0, -math.inf]),
        ([math.nan, 1.0], [math.inf, 1.0]),
        ([1.0, 2.0, 3.0], [1.0, 2.0]),
        ([1, 2], [1, 3]),
        ([True, False], [True, True]),
        ([1.0, 2.0], [1, 2]),
        ([1e-30, 0.0], [0.0, 0.0]),
    ],
)
def test_incomparable_results_have_infinite_error(value, reference):
    assert distance(value, reference) == math.inf


def state_of(**buffers: torch.Tensor) -> State:
    module = torch.nn.Module()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return State(module, Inputs())


def found(results, reference, state=None, tolerance=0.01) -> dict[str, float]:
    return errors(results, reference, state or state_of(), device=CPU, tolerance=tolerance)


def test_float_dtypes_may_differ_in_value_but_not_in_form():
    results, reference = {"output": torch.ones(4, dtype=torch.bfloat16)}, {"output": torch.ones(4)}
    assert found(results, reference) == {"output": 0.0}
    assert misshapen(results, reference, state_of()) == ["output"]
    assert misshapen(reference, reference, state_of()) == []


def test_missing_tensor_has_infinite_error():
    fewer, more = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    for results, reference in ((fewer, more), (more, fewer)):
        assert found(results, reference) == {"a": 0.0, "b": math.inf}
        assert misshapen(results, reference, state_of()) == ["b"]


def test_unchanged_buffer_is_compared_with_its_earlier_value():
    state = state_of(count=torch.tensor([2.0]))
    changed = {"buffer count": torch.tensor([3.0])}
    assert found(changed, {}, state) == {"buffer count": pytest.approx(0.5)}
    assert found({}, changed, state) == {"buffer count": pytest.approx(1 / 3)}
    assert misshapen(changed, {}, state) == []


@pytest.mark.parametrize(
    ("name", "value", "tolerance", "least", "most"),
    [
        ("gradient bias", -1e-9, 0.01, 0.0, 1e-6),
        ("gradient bias", 0.5, 0.01, 10.0, math.inf),  # no noise: as large as the real gradients
        ("gradient bias", 50 * 2.0**-24, 1e-4, 0.0, 1e-4),  # some roundings
        ("gradient bias", 1e-3, 1e-4, 1e-2, math.inf),
        ("output", -1e-9, 0.01, 1.99, 2.01),  # outputs get no allowance
    ],
)
def test_vanishing_gradient_noise_is_measured_against_the_others(name, value, tolerance, least, most):
    weight = torch.full((100,), 1.0)
    weight[0] = math.inf  # an overflow says nothing of the size
    reference = {"gradient weight": weight, name: torch.full((4,), 1e-9)}
    results = {"gradient weight": weight.clone(), name: torch.full((4,), value)}
    assert least <= found(results, reference, tolerance=tolerance)[name] <= most


def test_vanishing_statistic_noise_is_measured_against_others():
    state = state_of(mean=torch.ones(4), var=torch.zeros(4), count=torch.tensor(10**6))
    reference = {
        "buffer mean": torch.full((4,), 1e-9),
        "buffer var": torch.ones(4),
        "buffer count": torch.tensor(10**6),
    }
    results = {**reference, "buffer mean": torch.full((4,), -1e-9)}
    assert found(results, reference, state)["buffer mean"] < 1e-6
    results["buffer mean"] = torch.full((4,), 0.5)
    assert found(results, reference, state)["buffer mean"] > 10
    assert found({**reference, "buffer count": torch.tensor(10**6 + 1)}, reference, state)["buffer count"] == math.inf
    unchanged = {name: tensor for name, tensor in reference.items() if name != "buffer mean"}
    assert found(unchanged, reference, state)["buffer mean"] > 10
