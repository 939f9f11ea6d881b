"""Steps that no graph can repeat, each with words of the reason that has to be given, and whether a line is named."""

from __future__ import annotations

import array
import itertools
import random
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from step_parts import batches, loss_of, network, training_step
from torch import nn


@dataclass
class Refused:
    """`step(batch)` changes the parameters of `model`; the reason holds `words`, what to do instead `advice`, and it
    names a line if `line`."""

    step: Callable[..., Any]
    model: nn.Module
    words: str
    line: bool = True
    batches: list[tuple[Any, ...]] | None = None
    between: Callable[[int], None] = lambda index: None
    advice: str = ""


REFUSED: dict[str, Callable[[str], Refused]] = {}


def refused(make: Callable[[str], Refused]) -> Callable[[str], Refused]:
    REFUSED[make.__name__] = make
    return make


def trained(model: nn.Module) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    train = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return lambda batch: train(batch).detach()


@refused
def item(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    return Refused(lambda batch: train(batch).item(), model, "reads a value of the GPU on the host")


@refused
def branch_on_a_tensor(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        if loss > 1.0:
            loss = loss * 2
        return loss

    return Refused(step, model, "reads a value of the GPU on the host")


@refused
def item_caught_by_the_program(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        try:
            loss.item()
        except RuntimeError:
            return loss * 0
        return loss

    return Refused(step, model, "reads a value of the GPU on the host")


@refused
def boolean_mask(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        train(batch)
        return batch["x"][batch["x"] > 0].sum()

    return Refused(step, model, "size depends on values")


@refused
def counter_in_python(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    trainer = SimpleNamespace(steps=0)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        trainer.steps += 1
        return train(batch) * trainer.steps

    return Refused(step, model, "trainer.steps changes from ")


@refused
def counter_in_a_slot(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    @dataclass(slots=True)
    class Trainer:
        steps: int = 0

    trainer = Trainer()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        trainer.steps += 1
        return train(batch)

    return Refused(step, model, "trainer.steps changes from ")


class Counts:
    calls = 0


@refused
def counter_in_a_class(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    Counts.calls = 0

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        Counts.calls += 1
        return train(batch)

    return Refused(step, model, "Counts.calls changes from ")


@refused
def entries_in_turn(device: str) -> Refused:
    model = network(device)
    train, used = trained(model), {"first": 1.0, "second": 2.0}

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        oldest = next(iter(used))
        used[oldest] = used.pop(oldest)
        return train(batch)

    return Refused(step, model, "used has its entries in another order", line=False)


@refused
def entries_in_turn_in_another_dict(device: str) -> Refused:
    model = network(device)
    train, used = trained(model), [{"first": 1.0, "second": 2.0}]

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        oldest, *others = used[0]
        used[0] = {name: used[0][name] for name in (*others, oldest)}
        return train(batch)

    return Refused(step, model, "used[0] changes", line=False)


@refused
def losses_kept_in_turn(device: str) -> Refused:
    model = network(device)
    train, last = trained(model), {"first": torch.zeros((), device=device), "second": torch.zeros((), device=device)}

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        oldest = next(iter(last))
        del last[oldest]
        last[oldest] = train(batch)
        return last[oldest]

    return Refused(step, model, "last has its entries in another order", line=False)


@refused
def losses_kept_in_a_list(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    losses: list[torch.Tensor] = []

    def step(batch: dict[str, torch.Tensor]) -> None:
        losses.append(train(batch))

    return Refused(step, model, "losses has ")


@refused
def activations_collected_by_a_hook(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    seen: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, given, result: seen.append(result.detach()))
    return Refused(train, model, "seen has ")


@refused
def scheduler_inside(device: str) -> Refused:
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train = training_step(model, optimizer)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        scheduler.step()
        return loss

    return Refused(step, model, "changes Python's state")


@refused
def rate_of_an_optimizer_for_numbers(device: str) -> Refused:
    """Plain SGD takes its learning rate as a number only, and it differs in each call."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = training_step(model, optimizer)
    return Refused(step, model, "['lr'], which changes on every call", between=lambda index: scheduler.step())


def scheduled(device: str, step_of: Callable[..., Any], words: str, *, line: bool = True) -> Refused:
    """Its rate is another in each call, and exact in float32; the step calls `step_of(optimizer, loss)`."""
    model = network(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train = training_step(model, optimizer)

    def step(batch: dict[str, torch.Tensor]) -> Any:
        return step_of(optimizer, train(batch).detach())

    return Refused(step, model, words, line=line, between=lambda index: scheduler.step())


@refused
def rate_that_decides(device: str) -> Refused:
    def decide(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
        return loss * 2 if optimizer.param_groups[0]["lr"] > 0.01 else loss

    return scheduled(device, decide, "reads the learning rate of an optimizer in Python")


@refused
def rate_changed_in_the_step(device: str) -> Refused:
    def change(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] *= 0.5
        return loss

    return scheduled(device, change, "optimizer.param_groups[0]['lr'] changes from")


@refused
def rate_returned(device: str) -> Refused:
    def look(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> tuple[torch.Tensor, float]:
        rate = optimizer.param_groups[0]["lr"]
        return loss, rate

    return scheduled(device, look, "returns the learning rate or the betas of an optimizer", line=False)


@refused
def iterator(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    source: Iterator[int] = itertools.cycle([1, 2])

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return train(batch) * next(source)

    return Refused(step, model, "reads from an iterator, source")


@refused
def random_number_of_the_host(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return train(batch) if random.random() < 2 else train(batch) * 2

    return Refused(step, model, "draws random numbers on the host (random)")


@refused
def average_bound_to_another_tensor(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    average = torch.zeros((), device=device)
    trainer = SimpleNamespace(average=average, first=average)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        trainer.average = 0.9 * trainer.average + train(batch)
        return trainer.average + trainer.first

    def between(index: int) -> None:
        trainer.first = trainer.average

    return Refused(step, model, "trainer.average is bound to another tensor", between=between)


@refused
def total_that_takes_part_in_differentiation(device: str) -> Refused:
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SimpleNamespace(total=torch.zeros((), device=device))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        trainer.total = trainer.total + loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Refused(step, model, "trainer.total is bound to another tensor")


def states_in_a_new(kind: type[tuple[Any, ...]] | type[list[Any]], device: str) -> Refused:
    model = network(device)
    train = trained(model)
    state = SimpleNamespace(hidden=kind([torch.zeros((), device=device), torch.ones((), device=device)]))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        one, other = state.hidden
        state.hidden = kind([one + train(batch), other * 2])
        return one + other

    return Refused(step, model, f"state.hidden is bound to another {kind.__name__} of tensors")


@refused
def states_in_a_tuple(device: str) -> Refused:
    return states_in_a_new(tuple, device)


@refused
def states_in_a_new_list(device: str) -> Refused:
    return states_in_a_new(list, device)


@refused
def losses_kept_by_name(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    kept: dict[str, list[torch.Tensor]] = {"loss": []}

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        kept["loss"].append(loss)
        return loss

    return Refused(step, model, "kept['loss'] has ")


@refused
def an_attribute_set_to_none(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    metric = SimpleNamespace(computed=None)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        metric.computed = None
        return train(batch)

    def between(index: int) -> None:
        metric.computed = torch.ones((), device=device)

    return Refused(step, model, "metric.computed is set to None", between=between)


@refused
def backward_outside(device: str) -> Refused:
    model = network(device)
    return Refused(lambda batch: loss_of(model, batch), model, "backward has not run", line=False)


@refused
def result_with_a_gradient(device: str) -> Refused:
    model = network(device)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        model.zero_grad()
        loss_of(model, {**batch, "x": x}).backward()
        with torch.no_grad():
            model[0].weight.sub_(model[0].weight.grad)
        return x

    return Refused(step, model, "has a gradient (`.grad`)", line=False)


@refused
def attributes_of_results(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        loss.rows = len(batch["x"])  # type: ignore[attr-defined]
        return loss

    return Refused(step, model, "sets attributes of what it returns or keeps, a tensor (rows)", line=False)


@refused
def attributes_of_arguments(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["x"].seen = True  # type: ignore[attr-defined]
        return train(batch)

    return Refused(step, model, "sets attributes of an argument, a tensor (seen)", line=False)


class Looked(nn.Module):
    """Its activation, of which the program looks at the gradient after the step."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = network(device)
        self.last = nn.Linear(4, 4).to(device)
        self.hidden: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.hidden = self.inner(x)
        self.hidden.retain_grad()
        return self.last(self.hidden)


@refused
def attribute_with_a_gradient(device: str) -> Refused:
    model = Looked(device)
    return Refused(trained(model), model, "has a gradient (`.grad`)", line=False)


@refused
def tensor_from_python_values(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    return Refused(lambda batch: train(batch) * torch.tensor([3.0] * 40, device=device), model, "from Python values")


@refused
def nested_tensors(device: str) -> Refused:
    """Of those that are no class of their own, nobody but PyTorch knows the sizes."""
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = torch.nested.nested_tensor([batch["x"][0], batch["x"][1, :3]])
        return train(batch) * rows.to_padded_tensor(0.0).sum()

    return Refused(step, model, "computes with a nested tensor")


def with_a_sparse(layout: Callable[[torch.Tensor], torch.Tensor], device: str) -> Refused:
    model = network(device)
    train, neighbours = trained(model), layout(torch.eye(6, device=device))

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return train({"x": torch.sparse.mm(neighbours, batch["x"]), "y": batch["y"]})

    return Refused(step, model, "uses a sparse tensor, neighbours", line=False)


@refused
def a_sparse_tensor_from_before(device: str) -> Refused:
    return with_a_sparse(torch.Tensor.to_sparse, device)


@refused
def a_sparse_tensor_in_rows(device: str) -> Refused:
    return with_a_sparse(torch.Tensor.to_sparse_csr, device)


@refused
def a_sparse_buffer(device: str) -> Refused:
    """What modules hold may be read without a trace."""
    model = network(device)
    model.register_buffer("neighbours", torch.eye(6, device=device).to_sparse())
    return Refused(trained(model), model, "uses a sparse tensor, model.neighbours", line=False)


@refused
def a_nested_tensor_from_before(device: str) -> Refused:
    model = network(device)
    train, rows = trained(model), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=device)
    return Refused(
        lambda batch: train(batch) * rows.to_padded_tensor(0.0).sum(), model, "computes with a nested tensor"
    )


@refused
def seeds_itself(device: str) -> Refused:
    model = network(device, dropout=0.1)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(0)
        return train(batch)

    return Refused(step, model, "calls torch.manual_seed")


def disturbs_its_noise(device: str, disturb: Callable[[torch.Generator], Any]) -> Refused:
    """It draws twice, and something is done to the generator in between."""
    model = network(device)
    train, noise = trained(model), torch.Generator(device=device).manual_seed(3)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        some = torch.randn(8, device=device, generator=noise)
        disturb(noise)
        other = torch.randn(8, device=device, generator=noise)
        return train({"x": batch["x"] + some + other, "y": batch["y"]})

    return Refused(step, model, "seeds a generator of random numbers, or sets its state")


@refused
def seeds_a_generator_of_its_own(device: str) -> Refused:
    return disturbs_its_noise(device, lambda noise: noise.manual_seed(5))


@refused
def draws_the_same_numbers_again(device: str) -> Refused:
    state = torch.Generator(device=device).manual_seed(3).get_state()
    return disturbs_its_noise(device, lambda noise: noise.set_state(state))


@refused
def seeds_the_default_generator_by_itself(device: str) -> Refused:
    model = network(device, dropout=0.1)
    train = trained(model)
    default = torch.default_generator if device == "cpu" else torch.cuda.default_generators[0]

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        default.manual_seed(7)
        return train(batch)

    return Refused(step, model, "seeds a generator of random numbers, or sets its state")


@refused
def alternates(device: str) -> Refused:
    """Python decides by what no watch sees: the reason is the first operator that differs."""
    model = network(device)
    train = trained(model)

    hidden = array.array("i", [0])  # a container of C

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden[0] += 1
        loss = train(batch)
        return loss.sin() if hidden[0] % 2 else loss.cos()

    return Refused(step, model, "differs in two calls with equal shapes: one ran")


@refused
def weights_in_turn(device: str) -> Refused:
    """The operators are the same, and so are all shapes."""
    model = network(device)
    train = trained(model)
    heads = [torch.ones(3, device=device), torch.zeros(3, device=device)]
    hidden = array.array("i", [0])

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden[0] += 1
        train(batch)
        return heads[hidden[0] % 2] * 2

    return Refused(step, model, "'heads[1]') where the call before gave")


@refused
def writes_into_one_of_two_views(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    def step(first: torch.Tensor, second: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        first.mul_(2)
        train(batch)
        return second.sum()

    calls = []
    for (batch,) in batches(device):
        whole = torch.ones(4, 4, device=device)
        calls.append((whole[:3], whole[1:], batch))
    return Refused(step, model, "argument 0, which shares memory with argument 1", line=False, batches=calls)


@refused
def gradient_of_the_batch(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["x"].requires_grad_()
        return train(batch)

    return Refused(step, model, "changes argument 0['x'] itself", line=False)


@refused
def the_shape_of_the_batch(device: str) -> Refused:
    """It is still the memory from before."""
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        batch["x"].t_()
        return loss

    return Refused(step, model, "changes argument 0['x'] itself", line=False)


@refused
def number_that_changes(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    calls = [(*batch, index) for index, batch in enumerate(batches(device, 70))]
    words = "is given index, which changes on every call"
    return Refused(lambda batch, index: train(batch) * index, model, words, line=False, batches=calls)


@refused
def returns_a_new_object(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    words = "call to call: `result`, an object of SimpleNamespace"
    return Refused(lambda batch: SimpleNamespace(loss=train(batch)), model, words, line=False)


@refused
def loss_of_ctc(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    labels = torch.ones(2, 3, dtype=torch.long, device=device)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        scores = batch["x"].new_ones(8, 2, 5).log_softmax(-1)
        return train(batch) + nn.functional.ctc_loss(scores, labels, (8, 8), (3, 2))

    words = "ctc_loss has a result whose size depends on values"
    return Refused(step, model, words, advice="make graphs of the model alone")


class CountsInPython(torch.optim.SGD):
    """As optimizers of libraries: a number for each parameter, or one for the group."""

    def __init__(self, *args: Any, for_group: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.for_group = for_group

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            if self.for_group:
                group["step"] = group.get("step", 0) + 1
            for parameter in () if self.for_group else group["params"]:
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


def counting_step(device: str, *, for_group: bool) -> Refused:
    model = network(device)
    optimizer = CountsInPython(model.parameters(), lr=0.1, for_group=for_group)
    advice = "or use an optimizer that does so"
    return Refused(training_step(model, optimizer), model, "['step'] changes from ", line=False, advice=advice)


@refused
def optimizer_that_counts_for_each_parameter(device: str) -> Refused:
    return counting_step(device, for_group=False)


@refused
def optimizer_that_counts_for_a_group(device: str) -> Refused:
    return counting_step(device, for_group=True)


@refused
def entry_of_the_batch_replaced(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["x"] = batch["x"] * 2
        return train(batch)

    return Refused(step, model, "changes argument 0, a dict that it is given", line=False)


@refused
def list_that_it_is_given_grows(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    calls = [(*batch, []) for batch in batches(device)]

    def step(batch: dict[str, torch.Tensor], losses: list[torch.Tensor]) -> None:
        losses.append(train(batch))

    return Refused(step, model, "changes argument 1, a list that it is given", line=False, batches=calls)


@refused
def leaves_a_layer_frozen(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        model[0].weight.requires_grad_(False)
        return loss

    return Refused(
        step,
        model,
        "weight itself (its requires_grad",
        line=False,
        between=lambda index: model.requires_grad_() and None,
    )


def draws_itself(device: str, draws: random.Random | numpy.random.Generator) -> Refused:
    """It decides a branch that is rarely taken."""
    model = network(device)
    train = trained(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return train(batch) * 2 if draws.random() < 1e-9 else train(batch)

    return Refused(step, model, "draws random numbers on the host (draws)")


@refused
def generator_of_its_own_on_the_host(device: str) -> Refused:
    return draws_itself(device, random.Random(5))


@refused
def generator_of_numpy(device: str) -> Refused:
    return draws_itself(device, numpy.random.default_rng(5))


@refused
def function_of_numpys_own_generator(device: str) -> Refused:
    """Held by itself: a function of a compiled class, which says of its module what no other class does."""
    model = network(device)
    train, rand = trained(model), numpy.random.rand

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return train(batch) * 2 if rand() < 1e-9 else train(batch)

    return Refused(step, model, "draws random numbers on the host (RandomState)", line=False)


@refused
def counter_in_an_array(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    steps = numpy.zeros(1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        steps[0] += 1
        return train(batch)

    return Refused(step, model, "steps changes", line=False)


@refused
def a_large_array(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    table = numpy.ones(2**18)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return train(batch) * float(table[0])

    return Refused(step, model, "reaches 2.0 MB in arrays of NumPy, table among them", line=False)


@refused
def batches_of_a_class_that_is_unknown(device: str) -> Refused:
    model = network(device)
    train = trained(model)

    class Batch:
        def __init__(self, content: dict[str, torch.Tensor]) -> None:
            self.content = content

    calls = [(Batch(batch),) for (batch,) in batches(device, 12)]
    return Refused(
        lambda batch: train(batch.content), model, "is given another batches_of_a_class", line=False, batches=calls
    )


class Store(MutableMapping):  # type: ignore[type-arg]
    """Its copies hold what it holds."""

    def __init__(self, content: dict[str, torch.Tensor]) -> None:
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


@refused
def batches_whose_copies_share_what_they_hold(device: str) -> Refused:
    model = network(device)
    calls = [(Store(batch),) for (batch,) in batches(device)]
    return Refused(trained(model), model, "argument 0 is a Store", line=False, batches=calls)


@refused
def results_whose_copies_share_what_they_hold(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    words = "returns an object of a class of which no copy can be made"
    return Refused(lambda batch: Store({"loss": train(batch)}), model, words, line=False)


@dataclass
class Stage:
    factor: float
    before: Stage | None = None


@refused
def a_dataclass_that_leads_back_to_itself(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    stage = Stage(2.0, Stage(1.0))
    stage.before.before = stage  # type: ignore[union-attr]
    calls = [(*batch, stage) for batch in batches(device)]
    return Refused(
        lambda batch, stage: train(batch) * stage.factor, model, "argument 1 is a Stage", line=False, batches=calls
    )


@refused
def a_deadline(device: str) -> Refused:
    model = network(device)
    train, deadline = trained(model), time.monotonic() + 3600.0

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        return loss * 2 if time.monotonic() > deadline else loss

    return Refused(step, model, "reads the clock, time.monotonic")


@refused
def a_module_of_torchscript(device: str) -> Refused:
    model = network(device)
    train = trained(model)
    scripted = torch.jit.script(torch.nn.Linear(1, 1).to(device))  # type: ignore[no-untyped-call]
    return Refused(lambda batch: train(batch) * scripted.weight, model, "uses a module of TorchScript", line=False)
