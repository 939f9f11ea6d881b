"""FP8 training with delayed scaling, as docs/fp8.md has it, on a GPU: as a step and as callables, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_page import STEPS, program, trained

import encore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no FP8 on this GPU"
    ),
]


def test_step_in_fp8_has_eagers_losses() -> None:
    page, steps = program(), list[Any]()

    def graphed(model: Any, optimizer: Any) -> Any:
        steps.append(encore.graph_step(page.training_step(model, optimizer)))
        return steps[0]

    check(trained(page, "cuda", page.training_step), trained(page, "cuda", graphed))
    assert steps[0].report().replays >= STEPS - 4, steps[0].report()


def test_callables_in_fp8_have_eagers_losses() -> None:
    page, layers = program(), list[Any]()

    def graphed(model: Any, optimizer: Any) -> Any:
        layers.append(encore.graph_callables(list(model)))
        return page.training_step(model, optimizer, encore.graph_step(page.update_scales))

    check(trained(page, "cuda", page.training_step), trained(page, "cuda", graphed))
    report = layers[0].report()
    assert report and not any(one.without_graph for one in report), report


def check(expected: Any, found: Any) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]))
    torch.testing.assert_close(found[1], expected[1])
