"""On a GPU too, compiled programs draw eager's random numbers in eager's order."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from optimizations import torch_internals
from suite.measure.eager_random import eager_random_numbers
from tests.suite.measure.test_eager_random import PROGRAMS, both

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_draws_are_in_eagers_order(name: str) -> None:
    program, side = PROGRAMS[name]
    w = torch.randn(side, side, generator=torch.Generator().manual_seed(1)).cuda() / side**0.5
    with torch_internals.inductor_config.patch(force_disable_caches=True), eager_random_numbers():
        eager, compiled = both(program, w)
    torch.testing.assert_close(compiled, eager, rtol=1e-2, atol=1e-2)


def attended(heads: torch.Tensor) -> torch.Tensor:
    """Transformers 5 passes a mask that hides nothing while traced, and none at other times."""
    traced = torch.compiler.is_compiling()
    mask = heads.new_ones(1, 1, 128, 1, dtype=torch.bool).expand(8, 1, 128, 128) if traced else None
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, dropout_p=0.5)


def gradients(heads: torch.Tensor) -> list[torch.Tensor]:
    """Those of eager and of the compiled program, from the same seed."""
    torch.compiler.reset()
    found = []
    for call in (attended, torch.compile(attended)):
        torch.manual_seed(3)
        leaf = heads.clone().requires_grad_()
        call(leaf).square().sum().backward()
        found.append(leaf.grad)
    return found


def test_attention_dropout_is_equal_with_and_without_a_mask() -> None:
    heads = torch.randn(8, 4, 128, 64, generator=torch.Generator().manual_seed(1)).half().cuda()
    with torch_internals.inductor_config.patch(force_disable_caches=True), eager_random_numbers():
        with sdpa_kernel(SDPBackend.MATH):
            eager, compiled = gradients(heads)
        torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)
        # That they drop others by themselves is what makes it a test.
        eager, compiled = gradients(heads)
    assert (compiled - eager).norm() > 0.1 * eager.norm()
