"""Reduce a model's output to the scalar that is differentiated, as the published runners do.

TorchBench and timm rows are trained on the mean of whatever the model returns, never on the model's real training
loss; Hugging Face rows on the loss the model computes from the labels it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def mean_loss(output: Any) -> torch.Tensor:
    """Return the mean reduction of a nested output to a scalar.

    The result is the mean of a tensor, the mean of the reductions of a list's members, or of a mapping's values.

    Raises:
        TypeError: the output holds something else, which is named.
    """
    import torch

    if isinstance(output, torch.Tensor):
        return output.sum() / output.numel()
    members = list(output.values()) if isinstance(output, Mapping) else output
    if isinstance(members, (list, tuple)) and members:
        total = mean_loss(members[0])
        for member in members[1:]:
            total = total + mean_loss(member)
        return total / len(members)
    raise TypeError(
        f"no mean of {type(output).__name__}: an output must be a tensor or a non-empty list, tuple or mapping of "
        "outputs; give the workload its own loss"
    )


def scaled(loss: Callable[[Any], torch.Tensor], scale: float, output: Any) -> torch.Tensor:
    """Return an output's loss, in float32 at least, times `scale`: see `models.instance.Instance.loss_scale`."""
    found = loss(output)
    return (found.float() if found.element_size() < 4 else found) * scale  # in float16 it may be too large


def own_loss(output: Any) -> torch.Tensor:
    """Return the loss a Hugging Face model returns first when labels are passed: a scalar tensor.

    Raises:
        TypeError: the first element is not a scalar tensor, so no labels were passed.
    """
    import torch

    first = output[0]
    if not isinstance(first, torch.Tensor) or first.dim() != 0:
        raise TypeError("the model returned no loss as its first element; pass labels with the inputs")
    return first
