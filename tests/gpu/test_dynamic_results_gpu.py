"""Functions of changing sizes, on a GPU: results that AOTAutograd marks are handed out again, not made again."""

from __future__ import annotations

import pytest
import torch

import optimizations
from optimizations.trees.results import Results

pytestmark = pytest.mark.gpu

SIZES = (8, 24, 40)


def _boxes(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * 2 + y).relu(), (x - y).sum(1)


@pytest.mark.parametrize("selection", ["off", "measure"])
def test_results_of_changing_sizes_are_right_and_not_made_again(
    monkeypatch: pytest.MonkeyPatch, selection: str
) -> None:
    made_again: list[int] = []
    make = Results._make_again
    monkeypatch.setattr(Results, "_make_again", lambda self, place: (made_again.append(place), make(self, place))[1])
    call = torch.compile(_boxes, backend="encore", dynamic=True, options={"selection": selection})
    with torch.no_grad():
        for step in range(300):
            x = torch.full((SIZES[step % 3], 16), float(step), device="cuda")
            y = torch.full_like(x, 1.0 - step)
            results = call(x, y)
            for found, expected in zip(results, _boxes(x, y), strict=True):
                assert torch.equal(found, expected), step
            assert all(vars(result) for result in results), "the mark that this is about"
            del results, found
            if step == 100:
                made_again.clear()
    assert sum(one.steady_replays for one in optimizations.recordings()) > 100
    assert not made_again
