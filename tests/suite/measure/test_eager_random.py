"""Compiled programs draw eager's random numbers in eager's order, even where Inductor would reorder them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from optimizations import torch_internals
from suite.measure.eager_random import eager_random_numbers

Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def moved_to_its_user(w: torch.Tensor, v: torch.Tensor, narrow: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In inference Inductor moves the second draw after the third, because its use is at the end."""
    first = (torch.randn(64, 64, device=w.device) @ w).relu().sum(0)
    second = torch.randn(4, device=w.device)
    third = (torch.randn(64, 64, device=w.device) @ w).relu().sum(0)
    return first + third, second


def moved_for_memory(w: torch.Tensor, v: torch.Tensor, narrow: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The peak of memory is smaller if the large draw is last."""
    large, small = torch.randn(512, 512, device=w.device), torch.randn(16, device=w.device)
    chain = ((w @ w) @ w).sin() @ w
    return large.mul_(2).sum(0), chain.mean(0)[:16] + small


def dropouts(w: torch.Tensor, v: torch.Tensor, narrow: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same for dropouts, each of which has a mask as its second result."""
    large, small = torch.native_dropout(w, 0.5, True)[0], torch.native_dropout(narrow, 0.5, True)[0]
    chain = ((w @ w) @ w) @ w
    return large @ v, chain @ small


PROGRAMS = {
    "moved to its user": (moved_to_its_user, 64),
    "moved for memory": (moved_for_memory, 512),
    "dropouts": (dropouts, 512),
}
SETTINGS = {
    "moved to its user": {},
    "moved for memory": {"reorder_for_locality": False},
    "dropouts": {"reorder_for_locality": False},
}


def both(program: Program, w: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Eager's results, and the compiled program's, from the same seed."""
    torch.compiler.reset()
    found = []
    with torch.no_grad():
        for call in (program, torch.compile(program)):
            torch.manual_seed(3)
            found.append(call(w, w[:, :16].contiguous(), w[:, 16:32].contiguous()))
    return found[0], found[1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_draws_are_in_eagers_order(name: str) -> None:
    program, side = PROGRAMS[name]
    w = torch.randn(side, side, generator=torch.Generator().manual_seed(1)) / side**0.5
    with torch_internals.inductor_config.patch(force_disable_caches=True):
        with eager_random_numbers():
            eager, compiled = both(program, w)
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-3)
        # That Inductor moves these draws by itself is what makes it a test.
        with torch_internals.inductor_config.patch({"fallback_random": True, **SETTINGS[name]}):
            eager, compiled = both(program, w)
        assert not torch.allclose(compiled[1], eager[1], atol=0.01)


def test_pass_reaches_compile_processes() -> None:
    name = "post_grad_custom_post_pass"
    with eager_random_numbers():
        known = getattr(torch_internals.inductor_config, name)
        rebuilt = copy.deepcopy(known)  # as pickle does it
        assert rebuilt is not known and rebuilt.uuid() == known.uuid() == "encore: draws in order, 1"
