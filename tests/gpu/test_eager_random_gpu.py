"""On a GPU too, compiled programs draw eager's random numbers in eager's order."""

from __future__ import annotations

import pytest
import torch
from test_eager_random import PROGRAMS, both

from optimizations import torch_internals
from suite.measure.eager_random import eager_random_numbers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", PROGRAMS)
def test_draws_are_in_eagers_order(name: str) -> None:
    program, side = PROGRAMS[name]
    w = torch.randn(side, side, generator=torch.Generator().manual_seed(1)).cuda() / side**0.5
    with torch_internals.inductor_config.patch(force_disable_caches=True), eager_random_numbers():
        eager, compiled = both(program, w)
    torch.testing.assert_close(compiled, eager, rtol=1e-2, atol=1e-2)
