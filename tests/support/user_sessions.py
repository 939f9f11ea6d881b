"""Sessions as users have them: models that are called, trained, changed and copied in drawn orders.

A session draws the same from one seed whatever serves its calls, so what it notes can be compared.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import binding_programs
import torch
import torch._functorch.config as functorch_config
from binding_programs import EXCHANGES, Model
from torch import nn
from torch.utils.checkpoint import checkpoint

import optimizations
from models.nests import tensors_of

Compile = Callable[[Any], Callable[..., Any]]
WIDTH = 4


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("offset", torch.arange(float(WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.norm(self.first(x)))) + self.offset
        return result


class Counting(nn.Module):
    """Writes a buffer in each call, and gives it out with a view of its result and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        self.mean.lerp_(x.detach().float().mean(0), 0.1)
        y = x @ self.weight
        return {"y": y, "turned": y.t()[1:], "x": x, "calls": self.calls * 1, "mean": self.mean * 1}


class Broken(nn.Module):
    """Two graphs and Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.first(x))
        torch._dynamo.graph_break()
        result: torch.Tensor = self.second(y) * y
        return result


class Shared(nn.Module):
    """One layer that is called twice, and blocks whose activations are made again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = checkpoint(lambda t: torch.sin(self.layer(t)), x, use_reentrant=False)
        return self.last(y), y


MODELS: tuple[Callable[[], nn.Module], ...] = (Plain, Model, Counting, Broken, Shared)


def written(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes an input, and returns it with a view of it."""
    x.mul_(0.5).add_(y.mean())
    return x, x[1:] * y[1:]


def _tensors(found: Any) -> list[torch.Tensor]:
    return list(tensors_of(found))


def in_a_thread(target: Callable[[], Any]) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


class Session:
    """`noted` are copies of what was seen; `actions` are named in a failure."""

    def __init__(self, seed: int, compile_: Compile, *, device: str, reset: Callable[[], Any], models: int = 2) -> None:
        self.draw = random.Random(seed)
        self._compile = compile_
        self._reset = reset
        self._device = device
        binding_programs.SEEDS = itertools.count(77)
        torch.manual_seed(seed)
        self.nets = [self.draw.choice(MODELS)().to(device) for _ in range(models)]
        self.runs = [compile_(net) for net in self.nets]
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.5) for net in self.nets]
        self.held: list[torch.Tensor] = []
        self.pending: list[tuple[int, torch.Tensor]] = []
        self.gradients: list[torch.Tensor] = []
        self.chain = compile_(self.one_after_the_other)
        self.borrower = compile_(self.with_parameters)
        self.writer = compile_(written)
        self.lasting = [self.values(5), self.values(5)]
        self.hooks: list[Any] = []
        self.noted: list[torch.Tensor] = []
        self.actions: list[str] = []

    # What the actions draw

    def values(self, rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.draw.randrange(10**6))
        return torch.randn(rows, WIDTH, generator=generator).to(self._device)

    def input(self) -> torch.Tensor:
        kind = self.draw.choice(("new", "new", "new", "lasting", "lasting", "shifted", "turned", "held"))
        rows = self.draw.choice((3, 3, 3, 3, 5))
        if kind == "lasting":
            x = self.draw.choice(self.lasting)
            if self.draw.random() < 0.3 and not self.pending:
                x.copy_(self.values(5))
            return x
        if kind == "shifted":
            return torch.cat([torch.zeros(1, device=self._device), self.values(rows).flatten()])[1:].view(rows, WIDTH)
        if kind == "turned":
            return self.values(rows).t().contiguous().t()
        fitting = [
            one
            for one in self.held
            if (one.shape, one.dtype) == ((3, WIDTH), torch.float32) and not one.is_inference() and not self.pending
        ]
        if kind == "held" and fitting:
            return self.draw.choice(fitting)
        return self.values(rows)

    def note(self, *tensors: torch.Tensor) -> None:
        self.actions[-1] += f" [{len(self.noted)}]"
        self.noted += [one.detach().clone() for one in tensors]

    @contextlib.contextmanager
    def some_mode(self) -> Iterator[None]:
        kind = self.draw.choice(("no_grad", "no_grad", "inference", "grad", "autocast", "disabled"))
        self.actions[-1] += f" {kind}"
        with contextlib.ExitStack() as stack:
            if kind in ("no_grad", "autocast"):
                stack.enter_context(torch.no_grad())
            if kind == "inference":
                stack.enter_context(torch.inference_mode())
            if kind == "autocast":
                stack.enter_context(torch.autocast(self._device, torch.bfloat16))
            if kind == "disabled":
                stack.enter_context(torch.no_grad())
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def note_gradients(self, *indices: int) -> None:
        self.note(*[gradient for index in indices for gradient in self.gradients_of(index)])

    def gradients_of(self, index: int) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.nets[index].parameters() if parameter.grad is not None]

    def which(self) -> int:
        return self.draw.randrange(len(self.nets))

    def keep(self, tensors: list[torch.Tensor]) -> None:
        for one in tensors:
            if self.draw.random() < 0.3:
                self.held.append(one[1:] if one.dim() and self.draw.random() < 0.3 else one)

    def loss(self, index: int, x: torch.Tensor) -> torch.Tensor:
        y = _tensors(self.runs[index](x))
        if self.draw.random() < 0.3:
            self.keep([one.detach() for one in y])
        return sum((one.square().mean() for one in y if one.requires_grad), torch.zeros((), device=self._device))

    def one_after_the_other(self, x: torch.Tensor) -> torch.Tensor:
        for net in self.nets:
            x = _tensors(net(x))[0]
        return x

    def with_parameters(self, index: int, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        return torch.func.functional_call(self.nets[index], parameters, (x,))

    # Actions

    def infer(self) -> None:
        index, x = self.which(), self.input()
        with self.some_mode():
            found = _tensors(self.runs[index](x))
        self.note(*found)
        self.keep([one for one in found if not one.requires_grad])

    def infer_in_a_thread(self) -> None:
        index, x = self.which(), self.input()
        found: list[torch.Tensor] = []

        def run() -> None:
            with torch.no_grad():
                found.extend(_tensors(self.runs[index](x)))

        in_a_thread(run)
        self.note(*found)
        self.keep(found)

    def train(self) -> None:
        index = self.which()
        for _ in range(self.draw.choice((1, 1, 1, 2, 3))):
            self.loss(index, self.input()).backward()
        self.note_gradients(index)
        if self.draw.random() < 0.3:
            self.gradients += self.gradients_of(index)
        if self.draw.random() < 0.5 and not self.pending:
            self.optimizers[index].step()
        if self.draw.random() < 0.7:
            self.nets[index].zero_grad(set_to_none=self.draw.random() < 0.7)

    def train_together(self) -> None:
        """One model after the other."""
        one, other = self.which(), self.which()
        y = _tensors(self.runs[one](self.input()))[0]
        self.loss(other, y).backward()
        self.note_gradients(one, other)

    def forward_for_later(self) -> None:
        index = self.which()
        self.pending.append((index, self.loss(index, self.input())))

    def backward_of_before(self) -> None:
        if not self.pending:
            return
        index, loss = self.pending.pop(self.draw.randrange(len(self.pending)))
        again = self.draw.random() < 0.2
        loss.backward(retain_graph=again)
        if again:
            loss.backward()
        self.note(loss, *self.gradients_of(index))

    def forget_a_forward(self) -> None:
        if self.pending:
            self.pending.pop()

    def gradient_of_an_input(self) -> None:
        x = self.values(3).requires_grad_()
        found = torch.autograd.grad(self.loss(self.which(), x), x)
        self.note(*found)
        self.keep(list(found))

    def look_at_what_is_held(self) -> None:
        self.note(*self.held, *self.gradients)

    def write_what_is_held(self) -> None:
        separate = [one for one in self.held if 0 not in one.stride()]
        if separate and not self.pending:
            one = self.draw.choice(separate)
            with torch.inference_mode() if one.is_inference() else torch.no_grad():
                if self.draw.random() < 0.5:
                    one.add_(1)
                else:
                    one.view(-1)[:1].fill_(2) if one.is_contiguous() else one.mul_(0.5)

    def let_go(self) -> None:
        for _ in range(self.draw.randrange(1, 5)):
            if self.held:
                self.held.pop(self.draw.randrange(len(self.held)))
        if self.draw.random() < 0.5:
            self.gradients.clear()

    def exchange(self) -> None:
        if self.pending:
            return
        index = self.which()
        net = self.nets[index]
        if isinstance(net, Model):
            change = self.draw.choice(EXCHANGES)
            self.actions[-1] += f" {change.__name__}"
            change(net)
        else:
            way = self.draw.choice(("data", "load", "assign", "copy", "new", "double"))
            self.actions[-1] += f" {way}"
            with torch.no_grad():
                for parameter in net.parameters():
                    if way == "data":
                        parameter.data = parameter.data * 1.25
                    elif way == "copy":
                        parameter.mul_(0.75)
            if way == "double":
                net.double().float()
            if way in ("load", "assign"):
                state = {name: one.clone() * 1 + 0.125 for name, one in net.state_dict().items()}
                if "norm.num_batches_tracked" in state:
                    state["norm.num_batches_tracked"] = net.state_dict()["norm.num_batches_tracked"].clone()
                net.load_state_dict(state, assign=way == "assign")
            if way == "new":
                for module in net.modules():
                    for name, one in list(module.named_parameters(recurse=False)):
                        setattr(module, name, nn.Parameter(one.detach() * 0.5 + 0.25))
        self.optimizers[index] = torch.optim.SGD(net.parameters(), lr=1e-3)

    def switch_training(self) -> None:
        net = self.nets[self.which()]
        net.train(not net.training)

    def freeze(self) -> None:
        if self.pending:
            return
        parameters = list(self.nets[self.which()].parameters())
        one = self.draw.choice(parameters)
        one.requires_grad_(not one.requires_grad or sum(p.requires_grad for p in parameters) == 1)

    def hook(self) -> None:
        if self.hooks and self.draw.random() < 0.5:
            self.hooks.pop().remove()
            return
        net = self.nets[self.which()]
        one = self.draw.choice([p for p in net.parameters() if p.requires_grad])
        self.hooks.append(one.register_hook(lambda gradient: gradient * 1.5))

    def copied(self) -> None:
        index = self.which()
        if self.pending:
            return
        self.nets[index].zero_grad()
        self.nets[index] = copy.deepcopy(self.nets[index])
        self.runs[index] = self._compile(self.nets[index])
        self.optimizers[index] = torch.optim.SGD(self.nets[index].parameters(), lr=1e-3)

    def wrong_call(self) -> None:
        index = self.which()
        if isinstance(self.nets[index], Counting):
            return  # what is compiled raises before it counts
        with contextlib.suppress(RuntimeError):
            self.runs[index](torch.ones(3, WIDTH + 3, device=self._device))

    def collect(self) -> None:
        gc.collect()

    def reset(self) -> None:
        if not self.pending:
            self._reset()

    def chained(self) -> None:
        x = self.input()
        with self.some_mode():
            found = self.chain(x)
        self.note(found)
        if found.requires_grad:
            found.sum().backward()
            self.note_gradients(*range(len(self.nets)))
        else:
            self.keep([found])

    def write_an_input(self) -> None:
        """Its own tensors, over and over; results that are the input."""
        if self.pending:
            return
        x = self.draw.choice(self.lasting)
        with torch.no_grad():
            for _ in range(self.draw.choice((1, 2, 6))):
                same, part = self.writer(x, self.values(5))
        self.note(x, same, part)
        self.keep([part, same])

    def through_time(self) -> None:
        """Each step gets the state of the one before, and the gradient goes through all of them."""
        index = self.which()
        with torch.set_grad_enabled(self.draw.random() < 0.5):
            state, states = self.values(3), []
            for _ in range(self.draw.randrange(2, 6)):
                state = _tensors(self.runs[index](state))[0]
                states.append(state)
            if state.requires_grad:
                torch.stack(states).square().mean().backward()
                self.note_gradients(index)
        self.note(*states)
        self.keep([one.detach() for one in states])

    def several_losses_at_once(self) -> None:
        if len(self.pending) > 1:
            total = torch.stack([loss for _, loss in self.pending]).sum()
            self.pending.clear()
            total.backward()
            self.note_gradients(*range(len(self.nets)))

    def backward_in_a_thread(self) -> None:
        if self.pending:
            index, loss = self.pending.pop()
            in_a_thread(loss.backward)
            self.note_gradients(index)

    def packed(self) -> None:
        index = self.which()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = self.loss(index, self.input())
        self.loss(index, self.input()).backward()
        loss.backward()
        self.note_gradients(index)

    def other_parameters(self) -> None:
        index = self.which()
        others = {name: (p * 2).detach().requires_grad_() for name, p in self.nets[index].named_parameters()}
        y = _tensors(self.borrower(index, others, self.input()))
        loss = sum((one.square().mean() for one in y), torch.zeros((), device=self._device))
        found = torch.autograd.grad(loss, list(others.values()), allow_unused=True)
        self.note(*[one for one in found if one is not None])

    def gradients_of_the_users(self) -> None:
        """Gradients that are given, written, and exchanged between calls."""
        for parameter in self.nets[self.which()].parameters():
            if parameter.grad is None:
                parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
            elif self.draw.random() < 0.5:
                parameter.grad.mul_(0.5)
            else:
                parameter.grad = parameter.grad + 1

    def steady(self) -> None:
        """Many equal calls: what is recorded is replayed."""
        index, training = self.which(), self.draw.random() < 0.5 and not self.pending
        for _ in range(8):
            x = self.values(3)
            if training:
                self.optimizers[index].zero_grad()
                loss = self.loss(index, x)
                loss.backward()
                self.optimizers[index].step()
                self.note(loss)
            else:
                with torch.no_grad():
                    self.note(*_tensors(self.runs[index](x)))

    def act(self) -> None:
        weights = {
            self.infer: 6, self.infer_in_a_thread: 1, self.train: 4, self.train_together: 2,
            self.forward_for_later: 2, self.backward_of_before: 3, self.forget_a_forward: 1,
            self.gradient_of_an_input: 1, self.look_at_what_is_held: 3, self.write_what_is_held: 2, self.let_go: 3,
            self.exchange: 2, self.switch_training: 1, self.freeze: 0.5, self.hook: 0.5, self.copied: 0.3,
            self.reset: 0.3, self.chained: 2, self.write_an_input: 2, self.through_time: 2,
            self.several_losses_at_once: 1, self.backward_in_a_thread: 1, self.packed: 1, self.other_parameters: 0.5,
            self.gradients_of_the_users: 1, self.wrong_call: 0.3, self.collect: 0.5, self.steady: 3,
        }  # fmt: skip
        action = self.draw.choices(list(weights), list(weights.values()))[0]
        self.actions.append(action.__name__)
        action()


def run_session(
    seed: int,
    compile_: Compile,
    actions: int,
    *,
    device: str = "cpu",
    reset: Callable[[], Any] = gc.collect,
    mark_steps: bool = False,
) -> Session:
    """A session of so many actions; with `mark_steps` each is an iteration."""
    session = Session(seed, compile_, device=device, reset=reset)
    for _ in range(actions):
        if mark_steps:
            torch.compiler.cudagraph_mark_step_begin()
        session.act()
    session.actions.append("end")
    session.look_at_what_is_held()
    return session


def check_session(seed: int, actions: int, *, device: str = "cpu", lean: bool = True, mark_steps: bool) -> None:
    """A session under Encore notes what it notes in eager mode."""
    expected = run_session(seed, lambda target: target, actions, device=device, mark_steps=mark_steps)
    # Buffers that a backward may write over are PyTorch's reason to refuse retain_graph.
    with functorch_config.patch(donated_buffer=False):
        found = run_session(
            seed,
            lambda target: torch.compile(target, backend="encore", options={"lean": lean}),
            actions,
            device=device,
            reset=optimizations.reset,
            mark_steps=mark_steps,
        )
    assert not differences(found, expected), found.actions
    assert found.actions == expected.actions


def differences(found: Session, expected: Session) -> list[str]:
    """What a session noted otherwise, beyond roundings that steps of training carry on."""
    if len(found.noted) != len(expected.noted):
        return [f"{len(found.noted)} values, not {len(expected.noted)}"]
    lines = []
    for number, (one, other) in enumerate(zip(found.noted, expected.noted, strict=True)):
        allowed = 2e-2 if other.dtype is torch.bfloat16 else 1e-3
        try:
            torch.testing.assert_close(one, other, rtol=allowed, atol=allowed)
        except AssertionError as error:
            lines.append(f"value {number}: {error}")
    return lines
