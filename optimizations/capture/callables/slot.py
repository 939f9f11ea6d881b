"""Launch one pair of graphs of a callable, forward and backward, by a node of autograd.

Note [Results]. Results are returned without a copy. The next launch of the graph writes its results to the same memory.
A result that the caller still references is first moved to its own memory. Views of a result (also through DLPack),
results that share memory, and results with an autograd graph whose backward did not run cannot be moved. A call that
would overwrite them runs without its graph. So does a call after a result was resized: the result has different memory
then, and nothing would read what the graph writes.

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

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.inputs import CopiedInputs, copy_all
from optimizations.capture.side_by_side import RacedGraph
from optimizations.capture.signature import replaced
from optimizations.capture.step.observer import storage
from optimizations.torch_internals.autograd_graph import leads_to_hooks
from optimizations.torch_internals.geometry import is_lazy_view


class StaticResults:
    """Track the results of one graph, `static`, and the tensors over them that the caller got. Note [Results].

    Args:
        static: the results, in the memory that the graph writes.
        read_back: indices of results that the backward reads. Each returned tensor has a separate version counter.
        reached: storages of the program. Results in these, such as a weight, are not moved.

    Attributes:
        out: returned tensors that may still be in the graph's memory.
        copied: the program gets copies. It requested this, or it referenced a view of a result during a call, which
            the variables of a loop would do on every call.
    """

    def __init__(
        self, static: Sequence[torch.Tensor], read_back: Sequence[int], reached: Collection[int], *, copied: bool
    ) -> None:
        self.static, self.copied = list(static), copied
        self.read_back = () if copied else tuple(read_back)
        self._own = [tensor for tensor in static if storage(tensor) not in reached]
        self._written_at = list(map(storage, self._own))
        self.out: list[weakref.ref[torch.Tensor]] = []
        self._idle: list[int] = []

    def over(self) -> tuple[torch.Tensor, ...]:
        """Return aliases or copies of the graph's results. Results in the program's memory are always aliases."""
        return tuple(
            tensor.detach().clone()
            if self.copied and storage(tensor) in self._written_at
            else _over(tensor)
            if index in self.read_back
            else tensor.detach()
            for index, tensor in enumerate(self.static)
        )

    def move_out(self) -> bool:
        """Move results that are still referenced to new memory. Return False if impossible."""
        if list(map(storage, self._own)) != self._written_at:
            return False
        if not self._idle:  # before the first launch only Encore references them
            self._idle = list(map(_uses, self._own))
        alive = [tensor for reference in self.out if (tensor := reference()) is not None]
        held = [tensor for tensor in alive if storage(tensor) in self._written_at]
        places = Counter(map(storage, held))
        uses = zip(map(_uses, self._own), self._idle, self._written_at, strict=True)
        if any(count > idle + places[place] for count, idle, place in uses) or any(one > 1 for one in places.values()):
            return False
        # DLPack references the tensor, and its consumer the address: after a move the two would differ.
        if any(torch_internals.tensor_use_count(one) > 1 for one in held):
            return False
        for tensor in held:
            tensor.data = tensor.detach().clone()
        self.out = []
        return True


def _over(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of another one and a separate version counter."""
    if is_lazy_view(tensor):
        return tensor.detach()
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _uses(tensor: torch.Tensor) -> int:
    """Return the references to the storage in C++ plus those to its Python object, which C++ does not count."""
    memory = tensor.untyped_storage()
    count: int = torch_internals.storage_use_count(memory._cdata)
    return count + sys.getrefcount(memory)


class BackwardRefused(RuntimeError):
    """Report that a backward graph cannot compute the requested gradients, or that a tensor it reads was moved."""


@dataclass(slots=True)
class Slot:
    """Hold one pair of graphs of a callable, and what they read and write.

    Attributes:
        place: the numbers of the callable and of its sample, and the index of the micro-batch among those in flight.
        inputs: tensors among the arguments.
        last: refers weakly to the last forward, whose backward may read this memory.
        parameters: leaves that get gradients from the backward, after the inputs.
        nest: the structure that the callable returned; its tensors are those of the inputs and results at `order`.
        differentiable: which results are differentiable.
        in_place: whether the tensors that the graphs read have their recorded addresses.
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
    backward: RacedGraph
    tangents: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    depends: list[frozenset[int]]
    in_place: Callable[[], bool] = lambda: True
    last: Callable[[], Forward | None] = lambda: None

    @property
    def is_awaited(self) -> bool:
        """Return whether a backward that reads this memory may still run."""
        return (forward := self.last()) is not None and forward.over is None

    def shareable(self) -> list[torch.Tensor | None]:
        """Return the results that a later callable can read in place; None for others."""
        pairs = zip(self.results.static, self.differentiable, strict=True)
        found = [*(None for _ in self.inputs.recording_inputs), *(one if takes else None for one, takes in pairs)]
        return [found[place] for place in self.order]

    def refused(self, inputs: Sequence[torch.Tensor]) -> str | None:
        """Return why the forward cannot be launched; None if it can. Move results that are still referenced."""
        if self.forward.written and not self.forward.written.isdisjoint(map(storage, inputs)):
            return ARGUMENT_WRITTEN
        if not self.results.move_out():
            self.results.copied = True
            return RESULT_HELD
        return None

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the results of the callable for these inputs, connected to autograd."""
        pairs = zip(inputs, self.gradients, strict=False)
        given = [one.detach() if gradient is None else one for one, gradient in pairs]
        # Like `Graphed.apply`, which unwraps dead functorch wrappers also of parameters. No transform is active.
        unwrapped = torch_internals.unwrap_dead_wrappers(tuple(given))
        found = _apply(self, *unwrapped, *self.parameters)
        self.results.out = [weakref.ref(one) for one in found]
        known = [*inputs, *found]
        return replaced(self.nest, iter([known[index] for index in self.order]))

    def free(self) -> None:
        """Free the graphs. A later backward raises `BackwardRefused`."""
        if (forward := self.last()) is not None:
            forward.over = forward.over or FREED
        for graph in (self.forward, self.backward):
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
CREATES_GRAPH = (
    "is a graph, whose gradients cannot be differentiated (create_graph=True); compute such gradients inside of the "
    "callable, or leave it out of graph_callables"
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


class Graphed(torch.autograd.Function):
    """Run one forward of a slot. The arguments are the slot, its inputs, and parameters."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        slot.inputs.bind(tensors)
        slot.forward.replay()
        found = slot.results.over()
        if any(slot.differentiable):
            ctx.noted = Forward()
            slot.last = weakref.ref(ctx.noted)
            results = [found[index] for index in slot.results.read_back]
            ctx.save_for_backward(*slot.read_back, *results, *[tensors[index] for index in slot.inputs.in_place])
        ctx.mark_non_differentiable(
            *[tensor for tensor, takes in zip(found, slot.differentiable, strict=True) if not takes]
        )
        return found

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        slot: Slot = ctx.slot
        why = CREATES_GRAPH if torch.is_grad_enabled() else ctx.noted.over or (None if slot.in_place() else MOVED)
        if why is not None:
            raise BackwardRefused(f"the backward of callable {slot.place[0]} {why}")
        _ = ctx.saved_tensors  # raises if one was written: Note [Between forward and backward]
        slot.backward.device.follow()
        taken = [tangent for tangent, takes in zip(tangents, slot.differentiable, strict=True) if takes]
        given = {index: tangent for index, tangent in enumerate(taken) if tangent is not None}
        copy_all([slot.tangents[index] for index in given], list(given.values()))
        gradients = slot.gradients
        if len(given) < len(taken):  # Note [Unused results]
            for index in set(range(len(taken))) - given.keys():
                slot.tangents[index].zero_()
            gradients = [
                None if given.keys().isdisjoint(depends) and not leads_to_hooks(node) else gradient
                for gradient, depends, (node, _) in zip(gradients, slot.depends, ctx.next_functions, strict=True)
            ]
        slot.backward.replay()
        found = [(gradient, torch.empty_like(gradient)) for gradient in gradients if gradient is not None]
        copy_all([copy for _, copy in found], [gradient for gradient, _ in found])  # Note [Gradients]
        ctx.noted.over = RAN_BACKWARD
        fresh = iter([copy for _, copy in found])
        return None, *[None if gradient is None else next(fresh) for gradient in gradients]


_apply: Any = super(torch.autograd.Function, Graphed).apply
