"""Results of a mode are compared bit for bit with another's, and differences may be failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from fixtures import fake_worker

from suite.measure.modes import MODES, Mode
from suite.results.schema import Correctness
from suite.run.group import bitwise_failure, compare_bitwise


def correctness(digests: Sequence[str], deterministic: bool = True) -> Correctness:
    fields = fake_worker.correctness(len(digests), "same")
    return Correctness.model_validate({**fields, "digests": list(digests), "deterministic": deterministic})


def test_bits_are_reported_where_the_mode_promises_none() -> None:
    mode = MODES["graph-unpartitioned"]
    compared = compare_bitwise(mode, correctness(["a", "b"]), {"graph": [correctness(["a", "c"])]})
    assert (compared.bitwise_with, compared.bitwise) == ("graph", False)
    assert bitwise_failure(mode, compared) is None


def test_changed_bits_fail_where_the_mode_promises_them() -> None:
    strict = Mode("strict", "must equal graph", baselines=("compile",), bitwise_with=("graph",))
    compared = compare_bitwise(strict, correctness(["a", "b"]), {"graph": [correctness(["a", "c"])]})
    assert bitwise_failure(strict, compared) is not None


@pytest.mark.parametrize("known", [{}, {"graph": [correctness(["a", "c"], deterministic=False)]}])
def test_no_verdict_on_bits_without_a_deterministic_reference(known: Mapping[str, Sequence[Correctness]]) -> None:
    strict = Mode("strict", "must equal graph", baselines=("compile",), bitwise_with=("graph",))
    compared = compare_bitwise(strict, correctness(["a", "b"]), known)
    assert (compared.bitwise_with, compared.bitwise) == ("graph", None)
    assert bitwise_failure(strict, compared) is None


@pytest.mark.parametrize(
    ("graph", "other", "expected"),
    [
        (["a", "b"], ["x", "y"], ("graph", True)),
        (["x", "y"], ["a", "b"], ("graph-unpartitioned", True)),
        (["x", "y"], ["x", "y"], ("graph", False)),
        (["x", "y"], ["u", "v"], ("graph", None)),
    ],
)
def test_bits_of_one_of_several_modes_are_enough(
    graph: list[str], other: list[str], expected: tuple[str, bool | None]
) -> None:
    """And if none is equal they must agree among themselves to be a reference at all."""
    strict = MODES["placement"]
    known = {"graph": [correctness(graph)], "graph-unpartitioned": [correctness(other)]}
    compared = compare_bitwise(strict, correctness(["a", "b"]), known)
    assert (compared.bitwise_with, compared.bitwise) == expected
    failure = bitwise_failure(strict, compared)
    assert (failure is None) == (expected[1] is not False)
    if failure is not None:
        assert "graph or graph-unpartitioned or compile" in failure.error


def test_bits_of_either_time_a_mode_was_prepared_are_enough() -> None:
    known = {"graph": [correctness(["a", "b"]), correctness(["x", "y"])]}
    compared = compare_bitwise(MODES["placement"], correctness(["a", "b"]), known)
    assert (compared.bitwise_with, compared.bitwise) == ("graph", True)


def test_modes_without_graphs_are_not_compared_bit_for_bit() -> None:
    compared = compare_bitwise(MODES["eager"], correctness(["a", "b"]), {"graph": [correctness(["a", "c"])]})
    assert (compared.bitwise_with, compared.bitwise) == (None, None)
