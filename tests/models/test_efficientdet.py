"""EfficientDet's shapes and losses."""

from __future__ import annotations

import torch
from torch.nn import functional

from models.networks.efficientdet import ANCHORS, IGNORED, detection_loss, focal_loss


def test_focal_loss_without_focus_is_half_of_cross_entropy() -> None:
    logits, wanted = torch.randn(50), torch.randint(2, (50,)).float()
    entropy = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    torch.testing.assert_close(focal_loss(logits, wanted, alpha=0.5, gamma=0.0), 0.5 * entropy)
    sure = torch.tensor([8.0])
    assert focal_loss(sure, torch.ones(1)) < 1e-3 * focal_loss(sure, torch.zeros(1))


def one_anchor(label: float, *, confident: int | None = None, box: float = 0.0) -> dict[str, torch.Tensor]:
    """Losses of a single place whose first anchor has this label; the others are ignored."""
    logits = torch.full((1, ANCHORS * 3, 1, 1), -4.0)
    if confident is not None:
        logits[0, confident] = 4.0
    labels = torch.full((1, 1, 1, ANCHORS), float(IGNORED))
    labels[..., 0] = label
    boxes = torch.zeros(1, 1, 1, 4 * ANCHORS)
    boxes[..., 0] = box
    return detection_loss([logits], [torch.zeros(1, 4 * ANCHORS, 1, 1)], [labels], [boxes], torch.ones(1, 1), 3)


def test_class_loss_is_least_for_the_right_class() -> None:
    right, wrong, background = (one_anchor(2.0, confident=index)["class_loss"] for index in (2, 1, None))
    assert right < background < wrong
    assert one_anchor(IGNORED, confident=1)["class_loss"] == 0
    assert one_anchor(-1.0)["class_loss"] < one_anchor(-1.0, confident=0)["class_loss"]


def test_box_loss_is_hubers_over_anchors_with_an_object() -> None:
    loss = one_anchor(1.0, box=0.5)["box_loss"]
    # delta (|0.5| - delta / 2), over two positives (one is added) and four coordinates
    torch.testing.assert_close(loss, torch.tensor(0.1 * (0.5 - 0.05) / 8))
    found = one_anchor(1.0, box=0.5)
    torch.testing.assert_close(found["loss"], found["class_loss"] + 50 * found["box_loss"])


def test_losses_can_be_computed_in_float64() -> None:
    """A reference of the suite's is: gradients of the whole program in a precision higher than its own."""
    logits, deltas = torch.randn(1, ANCHORS * 3, 2, 2), torch.randn(1, 4 * ANCHORS, 2, 2)
    labels, boxes = torch.randint(-1, 3, (1, 2, 2, ANCHORS)).float(), torch.randn(1, 2, 2, 4 * ANCHORS)

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        first, second = (each.to(dtype).requires_grad_() for each in (logits, deltas))
        losses = detection_loss(
            [first], [second], [labels.to(dtype)], [boxes.to(dtype)], torch.ones(1, 1, dtype=dtype), 3
        )
        assert losses["loss"].dtype == dtype
        return torch.autograd.grad(losses["loss"], (first, second))

    for short, long in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        assert long.dtype == torch.float64
        torch.testing.assert_close(short, long.float())
