"""Launch the forward and backward graphs of one micro-batch of a callable, by a node of autograd.

Note [Gradients of parameters]. A backward graph writes the gradients of parameters to fixed memory, the same for all
micro-batches of a callable. Autograd makes that memory the parameter's `.grad` where there is none, and the next launch
would overwrite it. So a gradient that would become a `.grad` is copied out, until it is known that the program lets go
of it in time (`gradient_memory`). One that another reader gets is always copied: a hook of the parameter, or of its
node in the graph of autograd, or the caller of `torch.autograd.grad`. One that is only added to a `.grad` is read at
once, and is not.

Note [Between forward and backward]. A backward reads what its forward left in the graphs' memory, and parameters and
buffers where they lie. In eager, autograd notices if these are written meanwhile, and raises. So versions of those that
the backward reads are compared here, results of the forward among them; addresses, because a graph would read memory
that was given back; and that the forward did not run again since.

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
from optimizations.capture.callables.binding import Binding
from optimizations.capture.callables.gradient_memory import GradientMemory, LeftAside, before_launch, put_back
from optimizations.capture.callables.results import HandedOut, version_of
from optimizations.capture.inputs import CopiedInputs, copy_all
from optimizations.capture.signature import replaced
from optimizations.capture.step.host_state import Rebound
from optimizations.capture.step.outputs import view_like
from optimizations.capture.step.written_memory import WrittenMemory, shared_with_written
from optimizations.graph.memory import MemoryRanges
from optimizations.torch_internals.autograd_graph import adds_to_gradient, held_by_others, leads_to_hooks

PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Slot:
    """Hold the graphs of one micro-batch. `inputs`: tensors among its arguments, `nest`: what the callable returned.

    `gradients`: fixed memory of the gradients of inputs and parameters, None where there is none, and `depends` on
    which of the differentiable results each depends; `differentiable`: which results take part in differentiation.
    `begins` is called before the launch of a backward, `ended` after it. `wait`: makes the host wait for the device.
    `bound` are attributes and variables that the forward binds to tensors it makes, in the order in which dicts have
    them: each call binds them to copies, `made`. Those that take part in differentiation are among the results, after
    what is returned, and have an index. `written` are inputs that the forward writes, `mutated` other tensors, in
    `written_memory`, and `mutated_back` those that the backward writes; `read_memory` is what it reads, where it writes
    inputs too; `read_back` are parameters and buffers whose values the backward reads. `in_place`: whether what the
    graphs read lies where it lay. `passed`: which results are inputs, or views of them, that no graph has to make.
    `repeated`: which are the same as an earlier one. `without_gradient`: inputs that get none. `mates`: those of the
    same pool that were captured later. `left`: what the last forward left for its backward, as long as that may come.
    `hands_out_copies`: of its results, as one was held through a view when the next call came. `binding`: what the
    attributes and variables held that it binds.
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
    depends: list[frozenset[int]] = field(default_factory=list)
    begins: Callable[[int, int], None] = lambda number, micro_batch: None
    ended: Callable[[], None] = lambda: None
    wait: Callable[[], None] = lambda: None
    copied: bool = False
    hands_out_copies: bool = False
    bound: list[tuple[Rebound, torch.Tensor | int]] = field(default_factory=list)
    made: list[torch.Tensor] = field(default_factory=list)
    written: Sequence[int] = ()
    mutated: Sequence[torch.Tensor] = ()
    mutated_back: Sequence[torch.Tensor] = ()
    read_back: Sequence[torch.Tensor] = ()
    written_memory: WrittenMemory = field(default_factory=lambda: WrittenMemory(()))
    read_memory: WrittenMemory = field(default_factory=lambda: WrittenMemory(()))
    in_place: Callable[[], bool] = lambda: True
    mates: Sequence[Slot] = ()
    repeated: Mapping[int, int] = field(default_factory=dict)
    without_gradient: Sequence[int] = ()
    passed: Mapping[int, tuple[int, Any]] = field(default_factory=dict)
    freed: bool = False
    left: Callable[[], AsLeft | None] = lambda: None
    binding: Binding = field(default_factory=Binding)
    gradient_memory: GradientMemory | None = None
    left_memory: MemoryRanges = field(default_factory=lambda: MemoryRanges(()))
    forward_overwrites: list[GradientMemory] = field(default_factory=list)
    backward_overwrites: list[GradientMemory] = field(default_factory=list)
    in_left_memory: list[tuple[GradientMemory, frozenset[int]]] = field(default_factory=list)
    left_aside: LeftAside = field(default_factory=LeftAside)
    copied_out: Sequence[torch.Tensor] = ()
    forwards: int = 0
    backwards: int = 0

    @property
    def copied_gradient_bytes(self) -> int:
        """Return the bytes of gradients that the last backward returned as copies."""
        return sum(gradient.nbytes for gradient in self.copied_out)

    @property
    def gradients_are_lost(self) -> bool:
        """Return whether launches would overwrite what they must not, or write unread memory. See `gradient_memory`."""
        if any(memory.lost for memory in self.forward_overwrites):
            return True
        return any(memory.lost for memory in self.backward_overwrites)

    @property
    def awaits_backward(self) -> bool:
        """Return whether the backward of the last forward may still come: autograd holds it, and it did not run."""
        left = self.left()
        return left is not None and not left.used

    def run_forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Launch the forward for these inputs, for which there is room."""
        self.inputs.bind(inputs)
        kept = before_launch(self.forward_overwrites, self.wait)
        self.left_aside = LeftAside(self.in_left_memory)
        try:
            self.forward.replay()
            self.left_aside.take()
        finally:
            put_back(kept, self.wait)
        self.forwards += 1
        if self.written:
            self.inputs.give_back(inputs, self.written)
        if self.mutated:
            torch.autograd.graph.increment_version(self.mutated)
        self.made = [made.clone() for _, made in self.bound if not isinstance(made, int)]
        return self.results.hand_out_copies() if self.copied or self.hands_out_copies else self.results.hand_out()

    def makes_room(self) -> bool:
        """Let the results of the forward before leave, and those of `mates`; return whether a forward may be launched.
        These may lie where this graph writes on its way, for that memory was free when they were captured. The order
        says that they are over, but not that their results are let go of. False where one cannot leave, and would be
        overwritten, or has left for good, so that the launch would not write it; and so for gradients that were
        donated."""
        if self.gradients_are_lost:
            return False
        own = self.copied or (not self.results.resized and self._leaves())
        return own and all(mate._leaves() for mate in self.mates if mate.results.are_out)

    def _leaves(self) -> bool:
        """Let its results leave. Where one cannot, results are copies from then on: a program that held a view of one
        until the next call, as the variables of a loop do, would hold one in each."""
        left = self.results.leave()
        self.hands_out_copies = self.hands_out_copies or not left
        return left

    def run(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the results of a forward of these inputs, as autograd takes part in it."""
        given = list(inputs)
        for index in self.without_gradient:
            given[index] = given[index].detach()
        # As `Graphed.apply`, which looks through parameters too for what functorch left behind. No transform is active.
        unwrapped = torch_internals.unwrap_dead_wrappers(tuple(given))
        results: tuple[torch.Tensor, ...] = _apply(self, len(given), *unwrapped, *self.parameters)
        return results

    def returned(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Any:
        """Return what the callable returns for these inputs and `results` of the graph; bind the rest to attributes."""
        found = list(results)
        for index, (given, view) in self.passed.items():
            found[index] = inputs[given] if view is None else view_like(inputs[given], *view)
        for index, first in self.repeated.items():
            found[index] = found[first]
        made, self.made = iter(self.made), []
        for entry, of in self.bound:
            entry.bind(found[of] if isinstance(of, int) else next(made))
        return replaced(self.nest, iter(found))

    def free(self) -> None:
        """Free the graphs."""
        self.freed = True
        self.left_aside = LeftAside()
        self.forward.reset()
        if self.backward is not None:
            self.backward.reset()

    def shares(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether one of these inputs lies in memory that the forward writes, other than that input itself.

        And whether one that it writes lies in memory that it reads otherwise.
        """
        if self.written and (
            shared_with_written(inputs, self.written) is not None
            or self.read_memory.holds_one_of([inputs[index] for index in self.written])
        ):
            return True
        return self.written_memory.holds_one_of(inputs)

    def run_backward(
        self, tangents: Sequence[torch.Tensor | None], nodes: Sequence[Any], *, creates_graph: bool = False
    ) -> list[torch.Tensor | None]:
        """Launch the backward; return gradients of inputs, then of parameters. Note [Gradients of parameters].

        `nodes`: those of autograd that these go to. `creates_graph`: whether that is under `create_graph=True`.
        """
        self.begins(self.number, self.micro_batch)
        given = [_dense(tangent) for tangent, takes in zip(tangents, self.differentiable, strict=True) if takes]
        moved = [(to, of) for to, of in zip(self.tangents, given, strict=True) if of is not None]
        copy_all([to for to, _ in moved], [of for _, of in moved])
        gradients = self.gradients
        if len(moved) < len(given):
            gradients = self._of_used(given, nodes)
        for mate in self.mates:  # none since the forward, if calls come in the order
            if mate.results.are_out:
                mate.results.rescue()
        kept = before_launch(self.backward_overwrites, self.wait)
        if self.gradient_memory is not None:
            self.gradient_memory.begin_round()
        try:
            self.left_aside.give_back()
            self.backward.replay()
            self.backwards += 1
            if self.mutated_back:
                torch.autograd.graph.increment_version(self.mutated_back)
            self.ended()
            return self._handed_out(gradients, nodes, creates_graph)
        finally:
            put_back(kept, self.wait)

    def _handed_out(
        self, gradients: Sequence[torch.Tensor | None], nodes: Sequence[Any], creates_graph: bool
    ) -> list[torch.Tensor | None]:
        """Return what autograd gets for gradients that lie in the graph's memory."""
        memory = self.gradient_memory
        count = len(gradients) - len(self.parameters)
        found = list(gradients)
        copied = [index for index, gradient in enumerate(gradients[:count]) if gradient is not None]
        held = held_by_others(nodes)
        become: set[int] = set()
        for index, parameter in enumerate(self.parameters, start=count):
            gradient = found[index]
            if gradient is None:
                continue
            goes_on = not (parameter._backward_hooks or held[index]) and adds_to_gradient(nodes[index])
            to_add = parameter.grad is not None
            goes_on = goes_on and (to_add or not (creates_graph or memory is None or type(parameter) not in PLAIN))
            if goes_on and (to_add if memory is None else memory.hands_out(gradient, to_add=to_add)):
                found[index] = gradient.detach()
                continue
            copied.append(index)
            if goes_on and not to_add:
                become.add(index)
        of = [gradient for index in copied if (gradient := gradients[index]) is not None]
        fresh = [torch.empty_like(gradient) for gradient in of]
        copy_all(fresh, of)
        self.copied_out = of
        for index, gradient in zip(copied, fresh, strict=True):
            found[index] = gradient
        if become and memory is not None:
            memory.became([gradient for index in become if (gradient := found[index]) is not None])
        return found

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


def _dense(tangent: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient of a result as the graph reads it. That of rows looked up in the result may be sparse."""
    return tangent if tangent is None or tangent.layout is torch.strided else tangent.to_dense()


@dataclass(slots=True, weakref_slot=True)
class AsLeft:
    """Keep what a forward left for its backward. Note [Between forward and backward].

    `used`: whether that ran, and gave back what it read.
    """

    forwards: int
    versions: list[int]
    results: list[tuple[torch.Tensor, int]]
    used: bool = False

    @staticmethod
    def by(slot: Slot, results: Sequence[torch.Tensor]) -> AsLeft:
        """Return what a forward with these results left."""
        probes = [version_of(results[index]) for index in slot.results.read_back]
        return AsLeft(
            slot.forwards, [tensor._version for tensor in slot.read_back], [(one, one._version) for one in probes]
        )

    def check(self, slot: Slot) -> None:
        """Check, before the backward, that all it needs is there.

        Raises:
            Overwritten: something that it needs is another now.
        """
        name = f"callable {slot.number}, micro-batch {slot.micro_batch}"
        if self.used:
            raise Overwritten(
                f"Trying to backward through the graph a second time: the backward of {name} is a graph that computes "
                "all gradients and gives back what it read, whatever retain_graph says; compute them in one backward, "
                "as torch.autograd.backward([a, b]) does, or leave the callable out of graph_callables"
            )
        if slot.freed:
            raise Overwritten(f"the backward of {name} comes after its graphs were freed; call close() behind it")
        if slot.gradients_are_lost:
            raise Overwritten(
                f"a gradient that lies where graphs write was resized between the forward and the backward of {name}; "
                "do that with a clone of it"
            )
        if self.forwards != slot.forwards:
            raise Overwritten(
                f"the forward of {name} ran again since the one that this backward belongs to, and what that left is "
                "overwritten; run each backward before the next forward of its micro-batch"
            )
        if not slot.in_place():
            raise Overwritten(
                f"a parameter or buffer of {name} was moved between its forward and its backward, and the graph would "
                "read where it lay; move it behind the backward"
            )
        written = [tensor._version for tensor in slot.read_back] != self.versions
        if written or any(probe._version != version for probe, version in self.results):
            raise Overwritten(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter, buffer or result of {name}, between its forward and its backward; clone it before"
            )


class Overwritten(RuntimeError):
    """Report that what a backward needs is not there any more."""


class Graphed(torch.autograd.Function):
    """Run one forward of a slot. Arguments after the slot and the number of inputs: inputs, then parameters."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        found = slot.run_forward(list(tensors[:count]))
        ctx.left = AsLeft.by(slot, found)
        slot.left = weakref.ref(ctx.left)
        ctx.mark_non_differentiable(
            *[tensor for tensor, takes in zip(found, slot.differentiable, strict=True) if not takes]
        )
        return found

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        if torch_internals.functorch_level() is not None or any(
            of is not None and torch_internals.is_batched(of) for of in tangents
        ):
            raise NotTransformed(
                "a backward of a graphed callable is transformed (is_grads_batched=True, or vmap around a backward), "
                "and a graph computes the gradients of one; leave the callable out of graph_callables"
            )
        ctx.left.check(ctx.slot)
        nodes = [node for node, _ in ctx.next_functions]
        creates_graph = torch.is_grad_enabled()
        with torch.no_grad():
            found = ctx.slot.run_backward(tangents, nodes, creates_graph=creates_graph)
        ctx.left.used = True
        if creates_graph:
            found = [None if one is None else Once.apply(one.detach().requires_grad_()) for one in found]
        return None, None, *found


class Once(torch.autograd.Function):
    """Refuse to differentiate a gradient that a graph computed: nothing is known of how it depends on anything."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        raise NotTwice(
            "a gradient that passed through a graphed callable is differentiated, and its backward is a graph, which "
            "cannot be; compute the gradient inside of the callable, or leave the module out of graph_callables"
        )


class NotTwice(RuntimeError):
    """Report that a gradient of a gradient was asked for."""


class NotTransformed(RuntimeError):
    """Report that a graph was asked for several backwards at once."""


_apply: Any = super(torch.autograd.Function, Graphed).apply
