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


STRICT = Mode("strict", "must equal graph", baselines=("compile",), bitwise_with=("graph",))
PLACEMENT = MODES["placement"]
SAME, OTHER, ANOTHER = (correctness(digests) for digests in (["a", "b"], ["a", "c"], ["u", "v"]))


@pytest.mark.parametrize(
    ("mode", "known", "expected", "fails"),
    [
        (MODES["graph-unpartitioned"], {"graph": [OTHER]}, ("graph", False), False),  # it promises none
        (MODES["eager"], {"graph": [OTHER]}, (None, None), False),  # it has no graphs
        (STRICT, {"graph": [OTHER]}, ("graph", False), True),
        (STRICT, {}, ("graph", None), False),
        (STRICT, {"graph": [correctness(["a", "c"], deterministic=False)]}, ("graph", None), False),
        (PLACEMENT, {"graph": [SAME], "graph-unpartitioned": [OTHER]}, ("graph", True), False),
        (PLACEMENT, {"graph": [OTHER], "graph-unpartitioned": [SAME]}, ("graph-unpartitioned", True), False),
        (PLACEMENT, {"graph": [OTHER], "graph-unpartitioned": [OTHER]}, ("graph", False), True),
        # If none is equal they must agree among themselves to be a reference at all.
        (PLACEMENT, {"graph": [OTHER], "graph-unpartitioned": [ANOTHER]}, ("graph", None), False),
        # The programs as they are, with the same kernels: they tell nothing about different kernels.
        (PLACEMENT, {"graph-unpartitioned": [OTHER], "compile": [OTHER]}, ("graph-unpartitioned", None), False),
        (PLACEMENT, {"graph-unpartitioned": [SAME], "compile": [SAME]}, ("graph-unpartitioned", True), False),
        (PLACEMENT, {"graph": [SAME, ANOTHER]}, ("graph", True), False),  # of either time that it was prepared
    ],
)
def test_bits_are_compared_with_modes_that_promise_them(
    mode: Mode, known: Mapping[str, Sequence[Correctness]], expected: tuple[str | None, bool | None], fails: bool
) -> None:
    compared = compare_bitwise(mode, SAME, known)
    assert (compared.bitwise_with, compared.bitwise) == expected
    failure = bitwise_failure(mode, compared)
    assert (failure is not None) is fails
    if failure is not None:
        assert f"must equal those of {' or '.join(mode.bitwise_with)} bit for bit" in failure.error
