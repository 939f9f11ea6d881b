"""Launch one pair of graphs of a callable, forward and backward, by a node of autograd.

Note [Gradients]. A backward graph writes gradients to fixed memory. Autograd makes what it is given the parameter's
`.grad` where there is none, and a hook or the caller of `torch.autograd.grad` may keep it. So all are copied out.

Note [Between forward and backward]. A backward reads what its forward left in the graphs' memory, and parameters and
buffers where they lie. In eager, autograd notices if these are written meanwhile, and raises. So versions of those that
the backward reads are compared here, results of the forward among them, and addresses, because a graph would read
memory that was given back. No forward is launched in a pool where a backward may still come: `Pool.is_awaited`.

Note [Unused results]. A backward graph computes with a gradient for each result that takes part in differentiation,
zeros for one that the loss does not lead to. What depends on such results only gets no gradient in eager, which is
another thing than zeros to an optimizer, so it gets none here. Autograd calls a leaf's hooks all the same, which may
not take None: such a leaf gets the zeros, and so does an argument that was computed from one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.callables.order import Place
from optimizations.capture.callables.results import StaticResults, version_of
from optimizations.capture.inputs import CopiedInputs, copy_all
from optimizations.capture.signature import replaced
from optimizations.capture.step.written_memory import WrittenMemory
from optimizations.torch_internals.autograd_graph import leads_to_hooks


class BackwardRefused(RuntimeError):
    """Report that a backward graph cannot compute what it is asked for, or that what it reads is not there any more."""


class Pool:
    """Hold a memory pool's handle, and the forwards whose backwards read memory of it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._left: list[weakref.ref[Left]] = []

    @property
    def is_awaited(self) -> bool:
        """Return whether a backward that reads this memory may still come."""
        self._left = [one for one in self._left if (left := one()) is not None and not left.is_over]
        return bool(self._left)

    def await_backward(self, left: Left) -> None:
        """Keep the pool's memory until the backward of this forward has run, or cannot come any more."""
        self._left.append(weakref.ref(left))

    def give_up(self) -> None:
        """Let the memory be overwritten. A backward that comes all the same raises `BackwardRefused`."""
        for one in self._left:
            if (left := one()) is not None:
                left.given_up = True


@dataclass(slots=True)
class Slot:
    """Hold the graphs of one `place` of the plan, and what they read and write.

    Attributes:
        inputs: tensors among the arguments. Results of another slot that are `shared` with them are read where they
            lie, and that slot's memory is in `pools`, after this one's own.
        parameters: leaves that get gradients of the backward, after the inputs.
        nest: what the callable returned; `results` are the tensors in it.
        differentiable: which results take part in differentiation.
        copied: the program gets copies of results, which it asked for, or it held a view of one.
        wait_for_others: is called before each launch, for the program may have gone to another stream.
        in_place: whether what the graphs read lies where it lay.
        mutated: tensors whose versions a forward counts up, `mutated_back` those of the backward.
        written_memory: what the forward writes.
        read_back: parameters and buffers whose values the backward reads.
        passed: results that are inputs, by index.
        repeated: results that are the same as an earlier one.
        mates: slots of the same pool that were captured later.
        tangents: where the backward reads the gradients of results; `gradients` what it computes of inputs and
            parameters, None where there is nothing, and `depends` on which of the differentiable results each depends.
        without_gradient: inputs that get none.
    """

    place: Place
    pools: Sequence[Pool]
    forward: Any
    inputs: CopiedInputs
    shared: Sequence[int]
    parameters: list[torch.Tensor]
    nest: Any
    results: StaticResults
    differentiable: list[bool]
    copied: bool = False
    mutated: Sequence[torch.Tensor] = ()
    read_back: Sequence[torch.Tensor] = ()
    written_memory: WrittenMemory = field(default_factory=lambda: WrittenMemory(()))
    passed: Mapping[int, int] = field(default_factory=dict)
    repeated: Mapping[int, int] = field(default_factory=dict)
    backward: Any = None
    tangents: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    depends: list[frozenset[int]] = field(default_factory=list)
    without_gradient: Sequence[int] = ()
    mutated_back: Sequence[torch.Tensor] = ()
    mates: Sequence[Slot] = ()
    wait_for_others: Callable[[], None] = lambda: None
    in_place: Callable[[], bool] = lambda: True
    freed: bool = False
    forwards: int = 0
    backwards: int = 0

    @property
    def name(self) -> str:
        return f"callable {self.place.callable}"

    # Before a forward.

    def refused(self, inputs: Sequence[torch.Tensor]) -> str | None:
        """Return why the forward cannot be launched for these inputs; None if it can. Held results move out then."""
        if self.written_memory.holds_one_of(inputs):
            return ARGUMENT_WRITTEN
        if not self._makes_room():
            return RESULT_HELD
        return None

    def _makes_room(self) -> bool:
        """Let results of the forward before move out, and those of `mates`, which lie where this graph may write on its
        way: that memory was free when they were captured. Return False where one would be overwritten, or was resized.
        """
        own = not self.results.resized and self._move_out()
        return own and all(mate._move_out() for mate in self.mates if mate.results.out)

    def _move_out(self) -> bool:
        """Let its results move out. Where one cannot, results are copies from then on: a program that held a view of
        one until the next call, as the variables of a loop do, would hold one in each."""
        moved = self.results.move_out()
        self.copied = self.copied or not moved
        return moved

    # A forward.

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return what the callable returns for these inputs, as autograd takes part in it."""
        given = [one.detach() if index in self.without_gradient else one for index, one in enumerate(inputs)]
        # As `Graphed.apply`, which looks through parameters too for what functorch left behind. No transform is active.
        unwrapped = torch_internals.unwrap_dead_wrappers(tuple(given))
        found = list(_apply(self, len(given), *unwrapped, *self.parameters))
        self.results.remember(found)
        for index, of in self.passed.items():
            found[index] = inputs[of]
        for index, first in self.repeated.items():
            found[index] = found[first]
        return replaced(self.nest, iter(found))

    def launch_forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Launch the forward for these inputs; return the graph's results."""
        self.inputs.bind(inputs)
        self.forward.replay()
        self.forwards += 1
        if self.mutated:
            torch.autograd.graph.increment_version(self.mutated)
        return self.results.over(copied=self.copied)

    # A backward.

    def launch_backward(
        self, tangents: Sequence[torch.Tensor | None], nodes: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Launch the backward; return gradients of inputs, then of parameters. `nodes`: those that these go to."""
        self.wait_for_others()
        given = [_dense(tangent) for tangent, takes in zip(tangents, self.differentiable, strict=True) if takes]
        moved = [(to, of) for to, of in zip(self.tangents, given, strict=True) if of is not None]
        copy_all([to for to, _ in moved], [of for _, of in moved])
        gradients = self.gradients if len(moved) == len(given) else self._of_used(given, nodes)
        self.backward.replay()
        self.backwards += 1
        if self.mutated_back:
            torch.autograd.graph.increment_version(self.mutated_back)
        found = [(gradient, torch.empty_like(gradient)) for gradient in gradients if gradient is not None]
        copy_all([copy for _, copy in found], [gradient for gradient, _ in found])  # Note [Gradients]
        fresh = iter([copy for _, copy in found])
        return [None if gradient is None else next(fresh) for gradient in gradients]

    def _of_used(self, given: Sequence[torch.Tensor | None], nodes: Sequence[Any]) -> list[torch.Tensor | None]:
        """Return the gradients where some of the results got none. Note [Unused results]."""
        for tangent, of in zip(self.tangents, given, strict=True):
            if of is None:
                tangent.zero_()
        used = {index for index, of in enumerate(given) if of is not None}
        return [
            None if used.isdisjoint(depends) and not leads_to_hooks(node) else gradient
            for gradient, depends, node in zip(self.gradients, self.depends, nodes, strict=True)
        ]

    def free(self) -> None:
        """Free the graphs."""
        self.freed = True
        self.forward.reset()
        if self.backward is not None:
            self.backward.reset()


ARGUMENT_WRITTEN = "an argument lies in memory that it writes"
RESULT_HELD = (
    "a result of an earlier call is held through a view, or was resized; drop it before, clone what you keep or "
    "resize, or pass outputs='copied'; results are copied from now on"
)


def _dense(tangent: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient of a result as the graph reads it. That of rows looked up in the result may be sparse."""
    return tangent if tangent is None or tangent.layout is torch.strided else tangent.to_dense()


class Left:
    """Keep what a forward left for its backward. Note [Between forward and backward]."""

    def __init__(self, slot: Slot, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        self.ran_backward = self.given_up = False
        self._slot = slot
        probes = [version_of(results[index]) for index in slot.results.read_back]
        probes += [version_of(inputs[index]) for index in slot.shared]
        self._versions = [(one, one._version) for one in [*slot.read_back, *probes]]
        for pool in slot.pools:
            pool.await_backward(self)

    @property
    def is_over(self) -> bool:
        """Return whether no backward may come that reads this."""
        return self.ran_backward or self.given_up

    def check(self) -> None:
        """Check, before the backward, that all it needs is there.

        Raises:
            BackwardRefused: something that it needs is another now.
        """
        name = self._slot.name
        if self.ran_backward:
            raise BackwardRefused(
                f"Trying to backward through the graph a second time: the backward of {name} is a graph that computes "
                "all gradients and gives back what it read, whatever retain_graph says; compute them in one backward, "
                "as torch.autograd.backward([a, b]) does, or leave the callable out of graph_callables"
            )
        if self._slot.freed:
            raise BackwardRefused(f"the backward of {name} comes after its graphs were freed; call close() after it")
        if self.given_up:
            raise BackwardRefused(f"the backward of {name} comes after restart(), and what it reads may be overwritten")
        if not self._slot.in_place():
            raise BackwardRefused(
                f"a parameter or buffer of {name} was moved between its forward and its backward, and the graph would "
                "read where it lay; move it after the backward"
            )
        if any(tensor._version != version for tensor, version in self._versions):
            raise BackwardRefused(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter, buffer, argument or result of {name}, between its forward and its backward; clone it "
                "before"
            )


class Graphed(torch.autograd.Function):
    """Run one forward of a slot. Arguments after the slot and the number of inputs: inputs, then parameters."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        found = slot.launch_forward(list(tensors[:count]))
        if any(slot.differentiable):
            ctx.left = Left(slot, tensors, found)
        ctx.mark_non_differentiable(
            *[tensor for tensor, takes in zip(found, slot.differentiable, strict=True) if not takes]
        )
        return found

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        if torch_internals.functorch_level() is not None or any(
            of is not None and torch_internals.is_batched(of) for of in tangents
        ):
            raise BackwardRefused(
                "a backward of a graphed callable is transformed (is_grads_batched=True, or vmap around a backward), "
                "and a graph computes the gradients of one; leave the callable out of graph_callables"
            )
        ctx.left.check()
        nodes = [node for node, _ in ctx.next_functions]
        with torch.no_grad():
            found = ctx.slot.launch_backward(tangents, nodes)
        ctx.left.ran_backward = True
        if torch.is_grad_enabled():  # create_graph=True
            found = [None if one is None else Once.apply(one.requires_grad_()) for one in found]
        return None, None, *found


class Once(torch.autograd.Function):
    """Refuse to differentiate a gradient that a graph computed: nothing is known of how it depends on anything.

    PyTorch's `once_differentiable` leaves such terms out where the gradients of results require none.
    """

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        raise BackwardRefused(
            "a gradient that passed through a graphed callable is differentiated, and its backward is a graph, which "
            "cannot be; compute the gradient inside of the callable, or leave the module out of graph_callables"
        )


_apply: Any = super(torch.autograd.Function, Graphed).apply
