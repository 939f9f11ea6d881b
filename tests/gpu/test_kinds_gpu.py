"""Programs of many kinds on a GPU: Encore computes what eager does, and fails only where stock does, in the same way.

Where stock, Encore and `torch.compile` without graphs agree on something else than eager, the program says so
(`unlike_eager`). Where it does not, the test ends as an expected failure that tells how stock differs.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from gpu_harness import forget
from kinds import KINDS
from kinds.world import Outcome, differences, eager, outcome

from optimizations import torch_internals

pytestmark = pytest.mark.gpu


def compiled(name: str, **how: Any) -> Outcome:
    """The outcome of a program whose graphs and compiled functions are gone afterwards."""
    forget()
    try:
        return outcome(name, "cuda", lambda target, **keywords: torch.compile(target, **how, **keywords))
    finally:
        forget()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.on_gpu])
def test_program_equals_eager_or_fails_as_stock_does(name: str) -> None:
    # Programs with random numbers draw eager's.
    with torch_internals.inductor_config.patch(fallback_random=True):
        expected = outcome(name, "cuda", eager)
        stock = expected if KINDS[name].ends_stock else compiled(name, mode="reduce-overhead")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = compiled(name, backend="encore")
    defects = [str(one.message) for one in warned if "defect of Encore" in str(one.message)]
    unlike_eager = differences(found, expected, rtol=1e-3, atol=1e-4)
    unlike_stock = differences(found, stock)
    assert not defects
    if not unlike_eager or (KINDS[name].unlike_eager and not differences(found, compiled(name))):
        return
    assert not unlike_stock, f"unlike eager: {unlike_eager[:3]}; unlike stock: {unlike_stock[:3]}"
    if not KINDS[name].unlike_eager:
        pytest.xfail(f"stock is not like eager either: {unlike_eager[:3]}")
