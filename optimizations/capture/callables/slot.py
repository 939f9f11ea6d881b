"""Launch one pair of graphs of a callable, forward and backward, by a node of autograd.

Note [Gradients]. A backward graph writes gradients to fixed memory. If `.grad` is None, autograd assigns the gradient
tensor itself to it. A hook or the caller of `torch.autograd.grad` may keep it, too. So all gradients are copied out.

Note [Between forward and backward]. A backward reads tensors that its forward saved in the graphs' memory, and
parameters and buffers in place. In eager, autograd raises if these were written between the two. So all tensors that
the backward reads are saved for it, including results of the forward. Their addresses are compared as well, because a
graph would read freed memory. No forward is launched while a backward may still run: `Slot.is_awaited`. Results that a
later callable reads in place (`share_io=True`) are referenced by what is saved for its backward.

Note [Unused results]. A backward graph takes a gradient for each differentiable result: zeros if the loss does not
depend on it. In eager a tensor on which only such results depend gets no gradient. For an optimizer this differs from
zeros, so it gets none here. Autograd calls a leaf's hooks in any case, and these may not accept None. So a leaf with
hooks gets the zeros, and so does an argument that was computed from one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.callables.results import StaticResults
from optimizations.capture.inputs import CopiedInputs, copy_all
from optimizations.capture.side_by_side import RacedGraph
from optimizations.capture.signature import replaced
from optimizations.capture.step.observer import storage
from optimizations.torch_internals.autograd_graph import leads_to_hooks


class BackwardRefused(RuntimeError):
    """Report that a backward graph cannot compute the requested gradients, or that a tensor it reads was moved."""


@dataclass(slots=True)
class Slot:
    """Hold one pair of graphs of a callable, and what they read and write.

    Attributes:
        place: the numbers of the callable and of its sample, and the index of the micro-batch among those in flight.
        inputs: tensors among the arguments.
        forwards: those whose backward may read this memory.
        parameters: leaves that get gradients from the backward, after the inputs.
        nest: the structure that the callable returned; its tensors are those of the inputs and results at `order`.
        differentiable: which results are differentiable.
        in_place: whether the tensors that the graphs read have their recorded addresses.
        written: storages that the forward writes.
        read_back: parameters and buffers whose values the backward reads.
        tangents: tensors from which the backward reads the gradients of results.
        gradients: the gradients that it computes of inputs and parameters; None for those without one.
        depends: for each gradient, the differentiable results on which it depends.
    """

    place: tuple[int, int, int]
    forward: RacedGraph
    inputs: CopiedInputs
    parameters: list[torch.Tensor]
    nest: Any
    order: Sequence[int]
    results: StaticResults
    differentiable: list[bool]
    read_back: Sequence[torch.Tensor]
    written: set[int]
    backward: RacedGraph | None = None
    tangents: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    depends: list[frozenset[int]] = field(default_factory=list)
    in_place: Callable[[], bool] = lambda: True
    forwards: list[weakref.ref[Forward]] = field(default_factory=list)

    @property
    def is_awaited(self) -> bool:
        """Return whether a backward that reads this memory may still run."""
        self.forwards = awaited(self.forwards)
        return bool(self.forwards)

    def refused(self, inputs: Sequence[torch.Tensor]) -> str | None:
        """Return why the forward cannot be launched; None if it can. Move results that are still referenced."""
        if self.written and not self.written.isdisjoint(map(storage, inputs)):
            return ARGUMENT_WRITTEN
        if not self.results.move_out():
            self.results.copied = True
            return RESULT_HELD
        return None

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the results of the callable for these inputs, connected to autograd."""
        has_none = [one is None for one in self.gradients] or [False for _ in inputs]
        given = [one.detach() if detached else one for one, detached in zip(inputs, has_none, strict=False)]
        # Like `Graphed.apply`, which unwraps dead functorch wrappers also of parameters. No transform is active.
        unwrapped = torch_internals.unwrap_dead_wrappers(tuple(given))
        found = _apply(self, len(given), *unwrapped, *self.parameters)
        self.results.out = [weakref.ref(one) for one in found]
        known = [*inputs, *found]
        return replaced(self.nest, iter([known[index] for index in self.order]))

    def launch_backward(
        self, tangents: Sequence[torch.Tensor | None], nodes: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Launch the backward; return gradients of inputs, then of parameters. `nodes`: their autograd nodes."""
        assert self.backward is not None
        self.backward.device.follow()
        given = [tangent for tangent, takes in zip(tangents, self.differentiable, strict=True) if takes]
        moved = [(to, of) for to, of in zip(self.tangents, given, strict=True) if of is not None]
        copy_all([to for to, _ in moved], [of for _, of in moved])
        gradients = self.gradients if len(moved) == len(given) else self._of_used(given, nodes)
        self.backward.replay()
        found = [(gradient, torch.empty_like(gradient)) for gradient in gradients if gradient is not None]
        copy_all([copy for _, copy in found], [gradient for gradient, _ in found])  # Note [Gradients]
        fresh = iter([copy for _, copy in found])
        return [None if gradient is None else next(fresh) for gradient in gradients]

    def _of_used(self, given: Sequence[torch.Tensor | None], nodes: Sequence[Any]) -> list[torch.Tensor | None]:
        """Return the gradients if some of the results have none. Note [Unused results]."""
        for tangent, of in zip(self.tangents, given, strict=True):
            if of is None:
                tangent.zero_()
        used = {index for index, of in enumerate(given) if of is not None}
        return [
            None if used.isdisjoint(depends) and not leads_to_hooks(node) else gradient
            for gradient, depends, node in zip(self.gradients, self.depends, nodes, strict=True)
        ]

    def free(self) -> None:
        """Free the graphs. A later backward raises `BackwardRefused`."""
        for one in awaited(self.forwards):
            if (forward := one()) is not None:
                forward.over = FREED
        for graph in filter(None, (self.forward, self.backward)):
            graph.captured.reset()


ARGUMENT_WRITTEN = "an argument overlaps memory that the graph writes"
RESULT_HELD = (
    "a result of an earlier call is held through a view, or was resized; drop it before, clone what you keep or "
    "resize, or pass outputs='copied'; results are copied from now on"
)
FREED = "comes after its graphs were freed; call close() after it"
RAN_BACKWARD = (
    "is called a second time, but its graph frees what it read, also with retain_graph=True; compute all "
    "gradients in one backward, as torch.autograd.backward([a, b]) does, or leave the callable out of graph_callables"
)


MOVED = (
    "would read the old address of a parameter or buffer, which was moved between its forward and its backward; move "
    "it after the backward"
)


class Forward:
    """Note whether the backward of a forward may still run. Autograd's record of the forward references it.

    Attributes:
        over: why the backward cannot run; None while it may.
    """

    over: str | None = None

    def __call__(self, gradient: torch.Tensor) -> None:
        """Note that the backward runs, as a hook of a result."""
        self.over = RAN_BACKWARD


def awaited(forwards: Sequence[weakref.ref[Forward]]) -> list[weakref.ref[Forward]]:
    """Return those of these forwards whose backward may still run."""
    return [one for one in forwards if (forward := one()) is not None and forward.over is None]


class Graphed(torch.autograd.Function):
    """Run one forward of a slot. The arguments are the slot, the number of inputs, the inputs, and parameters."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        slot.inputs.bind(tensors[:count])
        slot.forward.replay()
        found = slot.results.over()
        if any(slot.differentiable):
            ctx.noted = Forward()
            slot.forwards.append(weakref.ref(ctx.noted))
            results = [found[index] for index in slot.results.read_back]
            ctx.save_for_backward(*slot.read_back, *results, *[tensors[index] for index in slot.inputs.in_place])
        ctx.mark_non_differentiable(
            *[tensor for tensor, takes in zip(found, slot.differentiable, strict=True) if not takes]
        )
        return found

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise BackwardRefused(
                f"the backward of callable {ctx.slot.place[0]} is a graph, whose gradients cannot be "
                "differentiated (create_graph=True); compute such gradients inside of the callable, or leave it out of "
                "graph_callables"
            )
        why = ctx.noted.over or (None if ctx.slot.in_place() else MOVED)
        if why is not None:
            raise BackwardRefused(f"the backward of callable {ctx.slot.place[0]} {why}")
        _ = ctx.saved_tensors  # raises if one was written: Note [Between forward and backward]
        found = ctx.slot.launch_backward(tangents, [node for node, _ in ctx.next_functions])
        ctx.noted.over = RAN_BACKWARD
        return None, None, *found


_apply: Any = super(torch.autograd.Function, Graphed).apply
