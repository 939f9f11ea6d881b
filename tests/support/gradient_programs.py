"""Random programs over graphed callables that let go of their gradients at first, and hold them later.

A program is drawn from a seed, and runs with its modules as they are or graphed. Losses, weights, gradients and what it
holds of them are the same in both.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH, STEPS, POLITE = 3, 10, 3
ORDERS = (
    *([1, -1], [1, 1, -1, -1], [1, -1, 1, -1], [1, 2, -2, -1], [1, -1, 2, -2], [2, 1, -2, 1, -1, 2, -1, -2]),
    *([1, 1, 1, -1, -1, -1], [1, 1, -1, 1, -1, 1, -1, -1], [1, 2, 1, 2, -2, -1, -2, -1], [2, -2, 1, -1, 2, 1, -1, -2]),
    *([1, -1, 2, -2, 3, -3], [1, 2, 3, -3, -2, -1], [3, -3, 1, 2, -2, -1, 3, 1, -1, -3]),
)
TRAITS = ("tied", "frozen", "halves", "double")


class Layers(nn.Module):
    """Two layers with some of the `TRAITS`."""

    def __init__(self, traits: list[str]) -> None:
        super().__init__()
        self.traits = traits
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ParameterList([torch.randn(WIDTH) for _ in range(2)] if "halves" in traits else [])
        if "tied" in traits:
            self.second.weight = self.first.weight
        elif "double" in traits:
            self.second.double()
        if "frozen" in traits:
            self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh()
        y = self.second(y.to(self.second.weight.dtype)).to(x.dtype)
        return y * torch.cat([*self.parts]).view(2, WIDTH).sum(0) if len(self.parts) else y


class Program:
    """What was drawn, and its state. `acts` are the names of what it does behind its polite steps."""

    def __init__(self, seed: int, graphed: Callable[..., Any] | None) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.order = self.rng.choice(ORDERS)
        traits = [self.rng.sample(TRAITS, self.rng.randint(0, 2)) for _ in range(max(self.order))]
        self.modules = [Layers(some) for some in traits]
        self.group: Any = None
        given = self.order if self.rng.random() < 0.8 or self.order != [1, 2, -2, -1] else None
        outputs = self.rng.choice(["static"] * 7 + ["copied"])
        samples = [(torch.randn(2, WIDTH),) for _ in traits]
        if graphed is not None:
            self.group = graphed(self.modules, samples, order=given, outputs=outputs)
        self.parameters = list({id(one): one for module in self.modules for one in module.parameters()}.values())
        self.averages: dict[int, torch.Tensor] = {}
        self.saved: list[torch.Tensor | None] = []
        self.found: list[Any] = []
        self.heard: list[Any] = []
        self.taken: list[Any] = []
        self.handles: list[Any] = []
        self.acts: list[str] = []
        self.ends, self.backward = "none", "backward"

    def run(self) -> list[torch.Tensor | None]:
        for step in range(STEPS):
            torch.manual_seed(step)
            within = ""
            if step >= POLITE:
                self.backward = self.rng.choice(["backward"] * 4 + ["retain", "some", "ask"])
                self.ends = self.rng.choice(["none", "none", "none", self.ends, "zero", "stay"])
                within = self.rng.choice(["", "", *WITHIN])
            self._iterate(within)
            self.found += [None if one.grad is None else one.grad.clone() for one in self.parameters]
            if step >= POLITE:
                self.acts.append(act := self.rng.choice(list(ACTS)))
                ACTS[act](self)
            self._end()
        held = [*self.found, *self.heard, *self.taken, *self.saved, *self.averages.values()]
        return [*held, *self.parameters, *map(_grad, self.parameters)]

    def _iterate(self, within: str) -> None:
        waiting: dict[int, list[torch.Tensor]] = {}
        at = self.rng.randrange(len(self.order))
        ends = self.rng.randrange(len(self.order)) if within and self.rng.random() < 0.2 else None
        for place, entry in enumerate(self.order):
            if place == ends:
                self._leave_early(waiting)
                return
            due = place == at or (place > at and self.rng.random() < 0.3)
            if within and due and (entry > 0 or self.order[place - 1] != -entry):
                self.acts.append(f"{within} before {place}")
                WITHIN[within](self)
            if entry > 0:
                x = self._input(place, alone=not waiting.get(entry))
                waiting.setdefault(entry, []).append(self.modules[entry - 1](x).square().sum())
            else:
                self._backward(waiting[-entry].pop(0))

    def _input(self, place: int, *, alone: bool) -> torch.Tensor:
        """A batch, or a part of a gradient that nothing writes until it is read for the last time."""
        x, entry = torch.randn(2, WIDTH), self.order[place]
        module = self.modules[entry - 1]
        gradient = module.first.weight.grad
        at_once = alone and self.order[place + 1 : place + 2] == [-entry] and "tied" not in module.traits
        return gradient[:2] if gradient is not None and at_once and self.rng.random() < 0.2 else x

    def _leave_early(self, waiting: dict[int, list[torch.Tensor]]) -> None:
        """Without the backwards that are to come."""
        self.acts.append("left early")
        waiting.clear()
        if self.group is not None:
            self.group.restart()

    def _backward(self, loss: torch.Tensor) -> None:
        self.found.append(loss.detach())
        wanted = [one for one in self.parameters if one.requires_grad]
        if self.backward == "ask" and not self.handles:
            self.found += [one for one in torch.autograd.grad(loss, wanted, allow_unused=True) if one is not None]
        elif self.backward == "some":
            loss.backward(inputs=wanted[::2])
        else:
            loss.backward(retain_graph=self.backward == "retain")

    def _end(self) -> None:
        with torch.no_grad():
            for one in self.parameters:
                if one.grad is not None:
                    one.sub_(0.01 * one.grad)
        for one in self.parameters:
            if self.ends == "none":
                one.grad = None
            elif self.ends == "zero" and one.grad is not None:
                one.grad.zero_()

    def gradients(self) -> list[torch.Tensor]:
        return [one.grad for one in self.parameters if one.grad is not None]

    # What it does.

    def keep(self) -> None:
        self.found += self.gradients()

    def keep_views(self) -> None:
        self.found += [one.t()[:1] for one in self.gradients() if one.dim() == 2]

    def keep_arrays(self) -> None:
        self.found += [torch.from_numpy(one.numpy()) for one in self.gradients()]

    def keep_dlpack(self) -> None:
        self.found += [torch.from_dlpack(one) for one in self.gradients()]

    def drop(self) -> None:
        self.found = [None if one is None else one.detach().clone() for one in self.found]
        self.averages.clear()

    def move(self) -> None:
        self.saved = [one.grad for one in self.parameters]
        for one in self.parameters:
            one.grad = None

    def move_back(self) -> None:
        for one, gradient in zip(self.parameters, self.saved, strict=False):
            one.grad = gradient

    def exchange(self) -> None:
        for module in self.modules:
            some, other = module.first.bias, module.second.bias
            if some.grad is not None and other.grad is not None and some.dtype == other.dtype:
                some.grad, other.grad = other.grad, some.grad

    def share(self) -> None:
        for module in self.modules:
            if module.first.bias.grad is not None and "double" not in module.traits:
                module.second.bias.grad = module.first.bias.grad

    def clone(self) -> None:
        for one in self.parameters:
            one.grad = None if one.grad is None else one.grad.clone()

    def turn(self) -> None:
        for one in self.parameters:
            one.grad = None if one.grad is None or one.dim() < 2 else one.grad.t()

    def average(self) -> None:
        """As an optimizer does whose buffers are gradients at first."""
        for index, one in enumerate(self.parameters):
            if one.grad is not None and index in self.averages:
                self.averages[index].mul_(0.5).add_(one.grad)
            elif one.grad is not None:
                self.averages[index] = one.grad

    def give_data(self) -> None:
        for one in self.gradients():
            self.found.append(one.data)
            one.data = torch.ones_like(one)

    def swap(self) -> None:
        for one in self.parameters:
            if (gradient := one.grad) is not None:
                one.grad = None
                other = torch.zeros_like(gradient)
                with contextlib.suppress(RuntimeError):  # something else holds it
                    torch.utils.swap_tensors(gradient, other)
                self.found.append(other)
                one.grad = gradient

    def clip(self) -> None:
        if found := self.gradients():
            self.found.append(nn.utils.clip_grad_norm_(self.parameters, 0.1))
            self.found += torch._foreach_norm(found)

    def freeze(self) -> None:
        self.parameters[-1].requires_grad_(not self.parameters[-1].requires_grad)

    def resize(self) -> None:
        """Of memory that nothing else lies in: arrays would dangle in eager, too."""
        self.drop()
        self.heard, self.taken, self.saved = [], [], []
        for one in self.gradients()[::2]:
            if one.untyped_storage().nbytes() == one.nbytes and one.untyped_storage().resizable():
                one.untyped_storage().resize_(0)
        for one in self.parameters:
            one.grad = None

    def copy(self) -> None:
        self.found += [one.grad for module in copy.deepcopy(self.modules) for one in module.parameters()]

    def hook(self) -> None:
        if self.modules[0].second.bias.requires_grad:
            self.handles.append(self.modules[0].second.bias.register_hook(lambda gradient: self.heard.append(gradient)))

    def hook_behind(self) -> None:
        def take(parameter: torch.Tensor) -> None:
            self.taken.append(parameter.grad)
            parameter.grad = None

        if self.modules[0].first.bias.requires_grad and not self.handles:
            self.handles.append(self.modules[0].first.bias.register_post_accumulate_grad_hook(take))

    def unhook(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def validate(self) -> None:
        with torch.no_grad():
            self.found += [module(torch.randn(2, WIDTH)) for module in self.modules]

    def write(self) -> None:
        for one in self.gradients()[::2]:
            one.mul_(0.5)

    def let_go(self) -> None:
        self.drop()
        self.forget()

    def forget(self) -> None:
        for one in self.parameters:
            one.grad = None

    def zero(self) -> None:
        for one in self.gradients():
            one.zero_()


def _grad(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad


ACTS: dict[str, Callable[[Program], None]] = {
    name: getattr(Program, name)
    for name in (
        *(
            "keep",
            "keep_views",
            "keep_arrays",
            "keep_dlpack",
            "drop",
            "move",
            "move_back",
            "exchange",
            "share",
            "clone",
        ),
        *("turn", "average", "give_data", "swap", "clip", "freeze", "resize", "copy", "hook", "hook_behind", "unhook"),
    )
}
WITHIN: dict[str, Callable[[Program], None]] = {
    name: getattr(Program, name) for name in ("validate", "forget", "zero", "keep", "keep_views")
}
