"""Forward and backward graphs of one micro-batch of a callable, and the autograd node that launches them.

Note [Gradients of parameters]. A backward graph writes the gradients of parameters to fixed memory, the same for all
micro-batches of a callable. Autograd would make that memory the parameter's `.grad` where there is none, and the next
launch would overwrite it. So a gradient that would become a `.grad` is copied out; one that is added to a `.grad` is
read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations.capture.callables.results import HandedOut
from optimizations.capture.inputs import CopiedInputs, copy_all
from optimizations.capture.step.host_state import Rebound


@dataclass(slots=True)
class Slot:
    """The graphs of one micro-batch. `inputs` are the tensors among its arguments, `nest` what the callable returned.

    `needed`: which inputs get a gradient. `gradients`: fixed memory of the gradients of inputs and parameters, None
    where there is none; `differentiable`: which results take part in differentiation. `begins` is told of a backward
    before its launch, `ended` behind it. `bound` are attributes and variables that the forward binds to tensors it
    makes: each call binds them to copies.
    """

    number: int
    micro_batch: int
    pool: int
    forward: Any
    inputs: CopiedInputs
    parameters: list[torch.Tensor]
    nest: Any
    results: HandedOut
    differentiable: list[bool]
    backward: Any = None
    tangents: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    begins: Callable[[int, int], None] = lambda number, micro_batch: None
    ended: Callable[[], None] = lambda: None
    copied: bool = False
    bound: list[tuple[Rebound, torch.Tensor]] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0

    def run_forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Launch the forward for these inputs."""
        if not self.copied:
            self.results.rescue()
        self.inputs.bind(inputs)
        self.forward.replay()
        self.forwards += 1
        for entry, made in self.bound:
            entry.bind(made.clone())
        handed = self.results.hand_out()
        return tuple(tensor.clone() for tensor in handed) if self.copied else handed

    def run_backward(self, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Launch the backward; gradients of inputs, then of parameters. Note [Gradients of parameters]."""
        self.begins(self.number, self.micro_batch)
        given = [tangent for tangent, takes in zip(tangents, self.differentiable, strict=True) if takes]
        moved = [(to, of) for to, of in zip(self.tangents, given, strict=True) if of is not None]
        copy_all([to for to, _ in moved], [of for _, of in moved])
        self.backward.replay()
        self.backwards += 1
        self.ended()
        count = len(self.gradients) - len(self.parameters)
        held = [None] * count + [parameter.grad for parameter in self.parameters]
        found = [
            gradient if gradient is None or there is None else gradient.detach()
            for gradient, there in zip(self.gradients, held, strict=True)
        ]
        copied = [
            index
            for index, (gradient, there) in enumerate(zip(found, held, strict=True))
            if gradient is not None and there is None
        ]
        of = [gradient for index in copied if (gradient := self.gradients[index]) is not None]
        fresh = [torch.empty_like(gradient) for gradient in of]
        copy_all(fresh, of)
        for index, gradient in zip(copied, fresh, strict=True):
            found[index] = gradient
        return found


class Graphed(torch.autograd.Function):
    """One forward of a slot. Arguments behind the slot and the number of inputs: inputs, then parameters."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.slot = slot
        found = slot.run_forward(list(tensors[:count]))
        ctx.mark_non_differentiable(
            *[tensor for tensor, takes in zip(found, slot.differentiable, strict=True) if not takes]
        )
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.slot.run_backward(tangents)
