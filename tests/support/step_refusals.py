"""Steps that no graph can repeat, each with words of the reason that has to be given, and whether a line is named."""

from __future__ import annotations

import array
import functools
import itertools
import random
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from step_parts import batches, loss_of, made_of, network, training_step
from torch import nn

Batch = dict[str, torch.Tensor]


Step = Callable[..., Any]


@dataclass
class Refused:
    """`step(batch)` changes the parameters of `model`; the reason holds `words`, what to do instead `advice`, and it
    names a line if `line`."""

    step: Step
    model: nn.Module
    words: str
    line: bool = True
    batches: list[tuple[Any, ...]] | None = None
    between: Callable[[int], None] = lambda index: None
    advice: str = ""


REFUSED: dict[str, Callable[[str], Refused]] = {}


def refused(
    words: str, *, line: bool = True, dropout: float = 0.0, advice: str = "", name: str | None = None
) -> Callable[[Step], Step]:
    """Register a function that makes a step of the parts that its parameters name.

    These are the `device`, a `model`, and a step to `train` it. It returns the step, and what else `Refused`
    takes in a dict.
    """

    def register(make: Step) -> Step:
        def made(device: str) -> Refused:
            model = network(device, dropout=dropout)
            given = {"device": device, "model": model, "train": trained(model)}
            step, more = made_of(make, given)
            return Refused(**{"step": step, "model": model, "words": words, "line": line, "advice": advice, **more})

        REFUSED[name or make.__name__] = made
        return make

    return register


def trained(call: Any, model: nn.Module | None = None) -> Callable[[Batch], torch.Tensor]:
    """Return a training step. It calls `call`, which may wrap the model."""
    train = training_step(call, torch.optim.SGD((model or call).parameters(), lr=0.1))
    return lambda batch: train(batch).detach()


@refused("writes into argument 0['x'], of which a graph has a copy", line=False)
def writes_into_its_batch(train: Step) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        batch["x"].mul_(2)
        return train(batch)

    return step


@refused("writes into a tensor, which shares memory with argument 1", line=False)
def writes_where_an_argument_lies(device: str, train: Step) -> Any:
    total = torch.zeros(4, device=device)

    def step(batch: Batch, first: torch.Tensor) -> torch.Tensor:
        total.add_(train(batch))
        return first.sum()

    return step, {"batches": [(batch, total[:2]) for (batch,) in batches(device)]}


@refused("changes argument 0['x'] itself", line=False)
def gradient_of_the_batch(train: Step) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        batch["x"].requires_grad_()
        return train(batch)

    return step


@refused("is given index, which changes on every call", line=False)
def number_that_changes(device: str, train: Step) -> Any:
    calls = [(*batch, index) for index, batch in enumerate(batches(device, 70))]
    return lambda batch, index: train(batch) * index, {"batches": calls}


@refused("returns something else than a tensor that differs from call to call", line=False)
def returns_a_new_object(train: Step) -> Step:
    return lambda batch: SimpleNamespace(loss=train(batch))


@refused("changes a container that it is given as an argument", line=False)
def entry_of_the_batch_replaced(train: Step) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        batch["x"] = batch["x"] * 2
        return train(batch)

    return step


@refused("more than 64 different calls were seen", line=False)
def batches_of_a_class_that_is_unknown(device: str, train: Step) -> Any:
    class Given:
        def __init__(self, content: Batch) -> None:
            self.content = content

    return lambda batch: train(batch.content), {"batches": [(Given(batch),) for (batch,) in batches(device, 70)]}


class Store(MutableMapping):  # type: ignore[type-arg]
    """Its copies hold what it holds."""

    def __init__(self, content: Batch) -> None:
        self.content = content

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.content[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.content[key] = value

    def __delitem__(self, key: str) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


@refused("TypeError: a copy of a Store holds its values in the same memory", line=False)
def batches_whose_copies_share_what_they_hold(device: str, train: Step) -> Any:
    return train, {"batches": [(Store(batch),) for (batch,) in batches(device)]}


@refused("TypeError: a copy of a Store holds its values in the same memory", line=False)
def results_whose_copies_share_what_they_hold(train: Step) -> Step:
    return lambda batch: Store({"loss": train(batch)})


@refused("backward has not run", line=False)
def backward_outside(model: nn.Module) -> Step:
    return lambda batch: loss_of(model, batch)


ON_THE_HOST = "reads a value of the GPU on the host"


@refused(ON_THE_HOST)
def item(train: Step) -> Step:
    return lambda batch: train(batch).item()


@refused("size depends on values")
def boolean_mask(train: Step) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        train(batch)
        return batch["x"][batch["x"] > 0].sum()

    return step


@refused("trainer.steps changes from ")
def counter_in_a_slot(train: Step) -> Step:
    @dataclass(slots=True)
    class Trainer:
        steps: int = 0

    trainer = Trainer()

    def step(batch: Batch) -> torch.Tensor:
        trainer.steps += 1
        return train(batch)

    return step


@refused("seen has ")
def activations_collected_by_a_hook(model: Any, train: Step) -> Step:
    seen: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, given, result: seen.append(result.detach()))
    return train


@refused("changes Python's state", advice="do it outside of the step, as `train()`, `eval()` and `scheduler.step()`")
def scheduler_inside(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train = training_step(model, optimizer)

    def step(batch: Batch) -> torch.Tensor:
        loss = train(batch)
        scheduler.step()
        return loss

    return step


@refused("['lr'], which changes on every call")
def rate_of_an_optimizer_for_numbers(model: nn.Module) -> Any:
    """Plain SGD takes its learning rate as a number only, and it differs in each call."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return training_step(model, optimizer), {"between": lambda index: scheduler.step()}


def scheduled(model: nn.Module, step_of: Step) -> Any:
    """Return a step whose rate is another in each call, and exact in float32; it calls `step_of(optimizer, loss)`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train = training_step(model, optimizer)
    return lambda batch: step_of(optimizer, train(batch).detach()), {"between": lambda index: scheduler.step()}


@refused("optimizer.param_groups[0]['lr'], which changes on every call")
def rate_that_decides(model: nn.Module) -> Any:
    return scheduled(model, lambda optimizer, loss: loss * 2 if optimizer.param_groups[0]["lr"] > 0.01 else loss)


@refused("optimizer.param_groups[0]['lr'] changes from")
def rate_changed_in_the_step(model: nn.Module) -> Any:
    def change(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] *= 0.5
        return loss

    return scheduled(model, change)


@refused("reads from an iterator or a random generator, source")
def iterator(train: Step) -> Step:
    source: Iterator[int] = itertools.cycle([1, 2])
    return lambda batch: train(batch) * next(source)


@refused("trainer.average is bound to another tensor")
def average_bound_to_another_tensor(device: str, train: Step) -> Any:
    average = torch.zeros((), device=device)
    trainer = SimpleNamespace(average=average, first=average)

    def step(batch: Batch) -> torch.Tensor:
        trainer.average = 0.9 * trainer.average + train(batch)
        return trainer.average + trainer.first

    return step, {"between": lambda index: setattr(trainer, "first", trainer.average)}


@refused("trainer.total is bound to another tensor")
def total_that_takes_part_in_differentiation(device: str, model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SimpleNamespace(total=torch.zeros((), device=device))

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        trainer.total = trainer.total + loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@refused("state.hidden is bound to another tuple of tensors")
def states_in_a_tuple(device: str, train: Step) -> Step:
    state = SimpleNamespace(hidden=(torch.zeros((), device=device), torch.ones((), device=device)))

    def step(batch: Batch) -> torch.Tensor:
        one, other = state.hidden
        state.hidden = one + train(batch), other * 2
        return one + other

    return step


@refused("metric.computed is set to None")
def an_attribute_set_to_none(device: str, train: Step) -> Any:
    metric = SimpleNamespace(computed=None)

    def step(batch: Batch) -> torch.Tensor:
        metric.computed = None
        return train(batch)

    return step, {"between": lambda index: setattr(metric, "computed", torch.ones((), device=device))}


@refused("from Python values")
def tensor_from_python_values(device: str, train: Step) -> Step:
    return lambda batch: train(batch) * torch.tensor([3.0] * 40, device=device)


@refused("copies a CPU tensor to the GPU")
def number_assigned_at_places(device: str, train: Step) -> Step:
    places = torch.tensor([0, 2], device=device)

    def step(batch: Batch) -> torch.Tensor:
        x = batch["x"].clone()
        x[places] = 0.5
        return train({**batch, "x": x})

    return step


@refused("computes with a nested tensor")
def nested_tensors(train: Step) -> Step:
    """Only PyTorch knows the sizes of those that have no class of their own."""

    def step(batch: Batch) -> torch.Tensor:
        rows = torch.nested.nested_tensor([batch["x"][0], batch["x"][1, :3]])
        return train(batch) * rows.to_padded_tensor(0.0).sum()

    return step


@refused("reaches a sparse tensor, neighbours", line=False)
def a_sparse_tensor_from_before(device: str, train: Step) -> Step:
    neighbours = torch.eye(6, device=device).to_sparse()
    return lambda batch: train({"x": torch.sparse.mm(neighbours, batch["x"]), "y": batch["y"]})


@refused("calls torch.manual_seed", dropout=0.1)
def seeds_itself(train: Step) -> Step:
    def step(batch: Batch) -> torch.Tensor:
        torch.manual_seed(0)
        return train(batch)

    return step


SETS_A_STATE = "seeds a generator of random numbers, or sets its state"


@refused("draws random numbers from a generator of its own")
def generator_of_its_own(device: str, train: Step) -> Step:
    noise = torch.Generator(device=device).manual_seed(3)

    def step(batch: Batch) -> torch.Tensor:
        return train({"x": batch["x"] + torch.randn(8, device=device, generator=noise), "y": batch["y"]})

    return step


@refused(SETS_A_STATE, dropout=0.1, line=False)
def seeds_the_default_generator_by_itself(device: str, train: Step) -> Step:
    default = torch.default_generator if device == "cpu" else torch.cuda.default_generators[0]

    def step(batch: Batch) -> torch.Tensor:
        default.manual_seed(7)
        return train(batch)

    return step


@refused("differs in two calls with equal shapes: one ran")
def alternates(train: Step) -> Step:
    """Python decides by what no watch sees: the reason is the first operator that differs."""
    hidden = array.array("i", [0])  # a container of C

    def step(batch: Batch) -> torch.Tensor:
        hidden[0] += 1
        loss = train(batch)
        return loss.sin() if hidden[0] % 2 else loss.cos()

    return step


@refused(" heads[1]) where the call before has")
def weights_in_turn(device: str, train: Step) -> Step:
    """The operators are the same, and so are all shapes."""
    heads = [torch.ones(3, device=device), torch.zeros(3, device=device)]
    hidden = array.array("i", [0])

    def step(batch: Batch) -> torch.Tensor:
        hidden[0] += 1
        train(batch)
        return heads[hidden[0] % 2] * 2

    return step


@refused("ctc_loss has a result whose size depends on values", advice="make graphs of the model alone")
def loss_of_ctc(device: str, train: Step) -> Step:
    labels = torch.ones(2, 3, dtype=torch.long, device=device)

    def step(batch: Batch) -> torch.Tensor:
        scores = batch["x"].new_ones(8, 2, 5).log_softmax(-1)
        return train(batch) + nn.functional.ctc_loss(scores, labels, (8, 8), (3, 2))

    return step


class CountsInPython(torch.optim.SGD):
    """Counts steps in Python as optimizers of libraries do."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


@refused("['step'] changes from ", line=False, advice="as PyTorch's optimizers do with capturable=True")
def optimizer_that_counts_in_python(model: nn.Module) -> Step:
    return training_step(model, CountsInPython(model.parameters(), lr=0.1))


@refused("weight itself (its requires_grad", line=False)
def leaves_a_layer_frozen(model: Any, train: Step) -> Any:
    def step(batch: Batch) -> torch.Tensor:
        loss = train(batch)
        model[0].weight.requires_grad_(False)
        return loss

    return step, {"between": lambda index: model.requires_grad_() and None}


@refused("reads from an iterator or a random generator, draws")
def generator_of_its_own_on_the_host(train: Step) -> Step:
    """It decides a branch that is rarely taken."""
    draws = random.Random(5)
    return lambda batch: train(batch) * 2 if draws.random() < 1e-9 else train(batch)


@refused("uses a module of TorchScript", line=False)
def a_module_of_torchscript(device: str, train: Step) -> Step:
    scripted = torch.jit.script(torch.nn.Linear(1, 1).to(device))  # type: ignore[no-untyped-call]
    return lambda batch: train(batch) * scripted.weight


@refused("the gradient of another parameter", line=False)
def gradients_exchanged(device: str, train: Step) -> Step:
    one, other = (nn.Parameter(torch.ones(8, device=device)) for _ in range(2))

    def step(batch: Batch) -> torch.Tensor:
        ((one * 2 + other) * batch["x"]).sum().backward()  # type: ignore[no-untyped-call]
        one.grad, other.grad = other.grad, one.grad
        return train(batch)

    return step


class OfAKind(torch.Tensor):
    """A class of the program's own for gradients."""


@refused("no plain tensor", line=False)
def gradients_of_a_class_of_its_own(device: str, model: nn.Module) -> Any:
    """The program puts others there before each call, and the step adds to them."""
    generator = torch.Generator().manual_seed(3)

    def put(index: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device).as_subclass(OfAKind)

    put(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train = training_step(model, optimizer, zero=lambda: None)
    return lambda batch: train(batch).detach(), {"between": put}


@refused("the gradient of ", line=False, advice="return a copy of it")
def gradient_that_is_returned(model: Any, train: Step) -> Step:
    return lambda batch: (train(batch), model[0].weight.grad)


# Parts of PyTorch that read on the host: each has its own advice.

OPTIONS = "make the optimizer with capturable=True or fused=True"
OPTIMIZERS: list[type[torch.optim.Optimizer]] = [torch.optim.Adam, torch.optim.Adagrad, torch.optim.Adafactor]


def training_with(make: Callable[[Any], torch.optim.Optimizer]) -> Step:
    return lambda model: training_step(model, make(model.parameters()))


for kind in OPTIMIZERS:
    refused(ON_THE_HOST, advice=OPTIONS, name=f"counts of {kind.__name__}")(training_with(kind))


@refused("", advice=OPTIONS)
def optimizer_with_a_closure(model: nn.Module) -> Step:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def step(batch: Batch) -> torch.Tensor:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            found = loss_of(model, batch)
            found.backward()
            return found

        return optimizer.step(loss).detach()

    return step


def scaled(model: nn.Module, *, fused: bool) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler(next(model.parameters()).device.type, init_scale=8.0)

    def step(batch: Batch) -> Any:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale() if fused else None

    return step


@refused(ON_THE_HOST, advice="with fused=True")
def a_scaler_that_decides_on_the_host(model: nn.Module) -> Step:
    return scaled(model, fused=False)


@refused(ON_THE_HOST, advice="read the scale after the step")
def a_scaler_whose_scale_is_read(model: nn.Module) -> Step:
    return scaled(model, fused=True)


@refused(ON_THE_HOST, advice="leave error_if_nonfinite off")
def clipping_that_raises(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        return norm

    return step


@refused(ON_THE_HOST, advice="a number as momentum")
def statistics_over_all_batches(device: str) -> Any:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None)).to(device)
    return trained(model), {"model": model}


@refused(ON_THE_HOST, advice="the scheduler after the step")
def a_scheduler_that_looks_at_the_loss(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    train = training_step(model, optimizer)

    def step(batch: Batch) -> torch.Tensor:
        loss = train(batch).detach()
        scheduler.step(loss)
        return loss

    return step


@refused(ON_THE_HOST, advice="src_is_causal=")
def a_transformer_that_looks_whether_a_mask_is_causal(device: str) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).to(device)
    mask = nn.Transformer.generate_square_subsequent_mask(6, device=device)
    return trained(functools.partial(model, mask=mask), model), {"model": model}
