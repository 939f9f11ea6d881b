"""What is read of tensors all at once shows what changes of tensors in a GPU's memory, too, and steps rest on it."""

from __future__ import annotations

import pytest
import torch
from step_parts import batches, network, training_step
from torch import nn

import optimizations
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.torch_internals.tensor_words import TensorWords
from tests.optimizations.torch_internals.test_tensor_words import CHANGES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", [nn.Parameter, lambda one: one], ids=["parameter", "tensor"])
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_of_a_tensor_on_the_gpu_is_seen(change: str, kind: type[nn.Parameter]) -> None:
    found = [kind(torch.randn(3, 3, device="cuda")) for _ in range(3)]
    words = TensorWords(found)
    assert all(map(words.tells_of, found)) and words.unchanged()
    with torch.no_grad():
        found[0].add_(1)
        assert words.unchanged()
        held = CHANGES[change](found[1])
    assert not words.unchanged()
    del held


def test_another_device_is_seen() -> None:
    found = nn.Parameter(torch.zeros(2, 2, device="cuda"))
    words = TensorWords([found])
    found.data = torch.zeros(2, 2)
    assert not words.unchanged()


@pytest.mark.parametrize("held", [0, 1, 4])
def test_step_with_held_gradients_equals_eager(held: int) -> None:
    """And takes no full way for that."""
    sides = []
    for graphed in (True, False):
        model = network("cuda")
        step = training_step(model, torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True))
        sides.append((model, optimizations.graph_step(step) if graphed else step))
    (mine, step), (theirs, eager) = sides
    assert isinstance(step, GraphedStep)
    kept: list[list[torch.Tensor]] = [[], []]
    full, call = [0], step._call

    def counted(args: object, kwargs: object) -> object:
        full[0] += 1
        return call(args, kwargs)

    step._call = counted  # type: ignore[method-assign]
    given = batches("cuda", 40)
    for index, batch in enumerate(given):
        for some, model in zip(kept, (mine, theirs), strict=True):
            some += [one.grad for one in list(model.parameters())[:held] if one.grad is not None]
        assert torch.equal(step(*batch), eager(*batch)), index
        assert all(map(torch.equal, *kept)), index
        if index == 20:
            settled = full[0]
    assert full[0] == settled
    assert all(map(torch.equal, mine.parameters(), theirs.parameters()))
