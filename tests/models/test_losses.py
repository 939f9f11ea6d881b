from __future__ import annotations

from typing import Any

import pytest
import torch

from models.losses import mean_loss, own_loss, scaled

ONES, FIVES = torch.ones(3), torch.full((2, 2), 5.0)


@pytest.mark.parametrize(
    ("output", "mean"),
    [
        (FIVES, 5.0),
        ((ONES, FIVES), 3.0),
        ([ONES, FIVES, FIVES, FIVES], 4.0),
        ({"a": ONES, "b": FIVES}, 3.0),
        ({"a": ONES, "b": (FIVES, torch.full((7,), 9.0))}, 4.0),
    ],
)
def test_mean_loss_weights_every_tensor_equally(output: Any, mean: float) -> None:
    assert mean_loss(output).item() == pytest.approx(mean)


@pytest.mark.parametrize("output", [None, (), {}, (ONES, "text")])
def test_mean_loss_refuses_what_has_no_mean(output: Any) -> None:
    with pytest.raises(TypeError, match="no mean of"):
        mean_loss(output)


def test_mean_loss_can_be_differentiated() -> None:
    leaf = torch.ones(4, requires_grad=True)
    mean_loss({"a": leaf * 2, "b": ONES}).backward()
    assert torch.equal(leaf.grad, torch.full((4,), 0.25))


def test_own_loss_is_the_first_element() -> None:
    loss = torch.tensor(2.0)
    assert own_loss((loss, FIVES)) is loss


def test_scaled_loss_is_not_rounded_to_float16() -> None:
    leaf = torch.full((4,), 3.0, dtype=torch.float16, requires_grad=True)
    loss = scaled(mean_loss, 2.0**15, leaf)
    assert loss.dtype == torch.float32 and loss.item() == 3 * 2**15
    loss.backward()
    assert torch.equal(leaf.grad, torch.full((4,), 2.0**13, dtype=torch.float16))
    assert scaled(mean_loss, 4.0, torch.ones(3, dtype=torch.float64)).dtype == torch.float64


def test_own_loss_without_a_loss_asks_for_labels() -> None:
    with pytest.raises(TypeError, match="pass labels"):
        own_loss((FIVES,))
