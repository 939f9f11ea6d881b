"""Guards check that attributes have their earlier values if tensors are at new addresses."""

from __future__ import annotations

import pytest
import torch

from optimizations.placement import guards
from optimizations.placement.guards import checks_for


def test_pinned_scalar_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy into it may be in flight, so equal bytes are no evidence."""
    pinned: set[int] = set()
    asked: list[int] = []

    def is_pinned(tensor: torch.Tensor) -> bool:
        asked.append(tensor.data_ptr())
        return tensor.data_ptr() in pinned

    monkeypatch.setattr(guards, "is_pinned", is_pinned)
    first, second, third = (torch.tensor(2.5) for _ in range(3))
    checks = checks_for([(0, first)])

    for _ in range(3):
        assert not checks.fail([first])
        assert not checks.fail([second])
    assert asked == [first.data_ptr(), second.data_ptr()], "each address is asked about once"

    pinned.add(third.data_ptr())
    for _ in range(2):
        assert checks.fail([third])
    assert not checks.fail([first])
