"""Replays: which calls have a recording, what is compared before one, and what it leaves."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interrupts import interrupted_at
from simulated_gpu.operators import CpuDevice, CpuGraph
from step_parts import Graph, assert_as_eager, batches, loss_of, network, training_step
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import BatchEncoding

from optimizations.capture.signature import signature
from optimizations.capture.step import call_recorder
from optimizations.capture.step.call import Arguments
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.host_state import LONG, Hooks
from optimizations.torch_internals import dictionary_writes, held_values
from optimizations.torch_internals.held_values import Held, HeldValues


def deep_network(layers: int) -> nn.Module:
    torch.manual_seed(5)
    inner = [module for _ in range(layers) for module in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(nn.Linear(8, 16), *inner, nn.Linear(16, 4))


def recorded(step: Callable[..., Any], given: list[tuple[Any, ...]]) -> tuple[GraphedStep, Any]:
    """Return a step that replays these calls, and its recording."""
    graphed = GraphedStep(step, device=CpuDevice())
    for one in given:
        graphed(*one)
    (recording,) = graphed._recorder.recordings.tried
    return graphed, recording


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Collect the names of the functions that are called in the block, in Python and in C."""
    names: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(argument.__name__)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.001, fused=True),
}


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_replay_compares_many_modules_in_as_few_calls(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are compared and put one by one; all else in bulk."""
    monkeypatch.setattr(CpuGraph, "replay", lambda graph: None)
    given, found = batches("cpu", 9), []
    for layers in (1, 30):
        model = deep_network(layers)
        graphed, recording = recorded(training_step(model, OPTIMIZERS[optimizer](model.parameters())), given)
        tensors = list(given[0][0].values())
        with counted() as names:
            assert recording.arguments.tensors_of(given[0], {}) is not None and recording.watch.unchanged()
        assert len(tensors) == 2 and graphed.report().replays > 0
        found.append(names)
    assert len(found[1]) <= len(found[0]) + 1, "states of many parameters are compared in turn, which is one call more"


def test_replay_calls_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are its time on the host, but for what they compare. A test on a GPU limits the time itself."""
    monkeypatch.setattr(CpuGraph, "replay", lambda graph: None)
    given, model = batches("cpu", 9), deep_network(0)
    step = GraphedStep(
        training_step(model, OPTIMIZERS["adamw"](model.parameters())), device=CpuDevice(), check_every=None
    )
    for one in given:
        step(*one)
    replays = step.report().replays
    with counted() as names:
        step(*given[0])
    assert step.report().replays == replays + 1
    assert len(names) <= 185


def test_keyword_arguments_may_have_any_name() -> None:
    def step(batch: dict[str, torch.Tensor], **named: Any) -> torch.Tensor:
        total: torch.Tensor = named["function"](batch["x"]) * named["self"] + named["number"]
        return total

    graphed = GraphedStep(step, device=CpuDevice())
    for (batch,) in batches("cpu", 9):
        given = {"function": torch.sin, "self": 2.0, "number": 3.0}
        torch.testing.assert_close(graphed(batch, **given), step(batch, **given), rtol=0, atol=0)
    assert graphed.report().replays > 0, graphed.report()


def test_interrupted_call_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, interrupts = CpuGraph.replay, [False]

    def replay(graph: CpuGraph) -> None:
        if interrupts[0]:
            raise KeyboardInterrupt
        stock(graph)

    monkeypatch.setattr(CpuGraph, "replay", replay)
    given = [(torch.ones(3) * index,) for index in range(6)]
    graphed, _ = recorded(lambda x: x.sum(), given)
    for index in (5, 2, 5):
        interrupts[0] = True
        with pytest.raises(KeyboardInterrupt):
            graphed(*given[index])
        interrupts[0] = False
        for other in (3, 5, index, index):
            assert graphed(*given[other]).item() == 3 * other


def test_interrupted_comparison_of_hooks_is_repeated() -> None:
    for line in range(40):
        weight = nn.Parameter(torch.ones(3))
        hooks = Hooks([weight])
        weight.register_hook(torch.neg)
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(line, "step/host_state.py") as where:
            assert not hooks.unchanged()
        assert not hooks.unchanged(), where
    assert not where, "all places were interrupted"


def test_step_without_references_is_freed_at_once() -> None:
    graphed, recording = recorded(lambda x: x.sum(), [(torch.ones(3) * index,) for index in range(6)])
    graph = weakref.ref(recording.graph)
    gc.collect()
    gc.disable()
    try:
        del graphed, recording
        assert graph() is None
    finally:
        gc.enable()


# A recording's comparison before replays is cheap and changes nothing.


class Loop:
    """A loop whose step is recorded; `settings` and `rates` are Python's."""

    def __init__(self) -> None:
        self.model = network("cpu", norm=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.settings = {"scale": 1.5}
        self.graphed = GraphedStep(self.step, device=CpuDevice())
        for batch in batches("cpu", 6):
            self.graphed(*batch)
        assert self.graphed.report().replays >= 2

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batch) * self.settings["scale"]
        loss.backward()
        self.optimizer.step()
        return loss

    @property
    def watch(self) -> Any:
        (recording,) = self.graphed._recorder.recordings.tried
        return recording.watch


def another_weight(loop: Loop) -> None:
    loop.model[0].weight = nn.Parameter(torch.zeros_like(loop.model[0].weight))


def moved_state(loop: Loop) -> None:
    moved = loop.optimizer.state[loop.model[0].weight]["exp_avg"]
    moved.data = moved.data * 0.5


def decay(optimizer: torch.optim.Optimizer, *given: Any) -> None:
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.mul_(0.5)


CHANGES: dict[str, Callable[[Loop], Any]] = {
    "a number in a dict": lambda loop: loop.settings.update(scale=2.5),
    "the mode of a module": lambda loop: loop.model[1].eval(),
    "a setting of a module": lambda loop: setattr(loop.model[1], "eps", 0.1),
    "another parameter": another_weight,
    "the data of a parameter": lambda loop: setattr(loop.model[0].weight, "data", loop.model[0].weight.data.clone()),
    "a frozen parameter": lambda loop: loop.model[0].weight.requires_grad_(False),
    "another buffer": lambda loop: setattr(loop.model[1], "running_mean", torch.ones(16)),
    "a module more": lambda loop: loop.model.append(nn.ReLU()),
    "a first module of a module": lambda loop: loop.model[1].add_module("inner", nn.ReLU()),
    "another forward": lambda loop: setattr(loop.model[0], "forward", loop.model[0].forward),
    "a hook": lambda loop: loop.model[0].register_forward_hook(lambda *given: None),
    "a hook of a parameter": lambda loop: loop.model[0].weight.register_hook(lambda gradient: gradient),
    "a number of an optimizer": lambda loop: loop.optimizer.param_groups[0].update(weight_decay=0.5),
    "a group more": lambda loop: loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "the data of a state": moved_state,
    "another state": lambda loop: loop.optimizer.state[loop.model[0].weight].update(exp_avg=torch.zeros(16, 8)),
    "no state of a parameter": lambda loop: loop.optimizer.state.pop(loop.model[0].weight),
    "no states": lambda loop: loop.optimizer.state.clear(),
    "states of a new run": lambda loop: setattr(loop.optimizer, "state", collections.defaultdict(dict)),
    "a hook of an optimizer": lambda loop: loop.optimizer.register_step_post_hook(decay),
    "a loaded state": lambda loop: loop.optimizer.load_state_dict(loop.optimizer.state_dict()),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_change_is_noticed(name: str) -> None:
    loop = Loop()
    assert loop.watch.unchanged()
    CHANGES[name](loop)
    assert not loop.watch.unchanged()
    theirs, mine = Loop(), Loop()
    for one in (theirs, mine):
        CHANGES[name](one)
    for batch in batches("cpu", 6):
        assert torch.equal(mine.graphed(*batch), theirs.step(*batch))


@functools.lru_cache
def positions(count: int) -> torch.Tensor:
    return torch.arange(float(count))


class Shifted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + positions(x.shape[-1])


def test_new_module_caches_a_tensor_that_is_computed() -> None:
    """A capture computes nothing, so one that fails must not be the first run of code."""
    theirs, mine = Loop(), Loop()
    found = []
    for loop, step in ((theirs, theirs.step), (mine, mine.graphed)):
        positions.cache_clear()
        loop.model[-2] = Shifted()
        found.append([step(batch).detach() for (batch,) in batches("cpu", 6)])
    assert all(map(torch.equal, *found))
    assert mine.graphed.report().replays > 4


GLOBAL_HOOKS = [register_optimizer_step_pre_hook, register_optimizer_step_post_hook, register_module_forward_hook]


@pytest.mark.parametrize("register", GLOBAL_HOOKS)
def test_added_or_removed_global_hook_is_noticed(register: Callable[..., Any]) -> None:
    loop = Loop()
    handle = register(lambda *given: None)
    try:
        assert not loop.watch.unchanged()
    finally:
        handle.remove()
    assert loop.watch.unchanged()


@pytest.mark.parametrize("value", [1.5, float("1.5")])
def test_equal_value_written_again_is_no_change(value: float) -> None:
    loop = Loop()
    loop.settings["scale"] = value
    assert loop.watch.unchanged() and loop.watch.unchanged()
    loop.settings["scale"] = 1.75
    assert not loop.watch.unchanged()


def test_comparison_adds_nothing_to_a_defaultdict() -> None:
    held = collections.defaultdict(lambda: 2.0, {"scale": 1.0})
    graphed = GraphedStep(lambda batch: batch["x"].sum() * held["scale"], device=CpuDevice())
    for batch in batches("cpu", 6):
        graphed(*batch)
    del held["scale"]
    assert graphed(*batches("cpu", 1)[0]).item() == batches("cpu", 1)[0][0]["x"].sum().item() * 2


def test_long_container_is_compared_by_its_length() -> None:
    data = {index: float(index) for index in range(LONG + 1)}
    graphed = GraphedStep(lambda batch: batch["x"].sum() * len(data), device=CpuDevice())
    for batch in batches("cpu", 6):
        graphed(*batch)
    (recording,) = graphed._recorder.recordings.tried
    assert len(recording.watch) < LONG
    data[-1] = 0.0
    (batch,) = batches("cpu", 1)[0]
    assert torch.equal(graphed(batch), batch["x"].sum() * (LONG + 2))


@pytest.mark.parametrize("key", ["a", 1, torch.ones(2)])
def test_any_write_to_a_dict_is_noticed_by_its_version(key: Any) -> None:
    written, other = {key: 1.5}, {"a": 1.5}
    held = HeldValues([Held(written, ((key, 1.5),), 1), Held(other, (("a", 1.5),), 1)])
    assert held.same() and not held.written()
    written[key] = 2.5
    assert not held.same() and [one is written for one in held.written()] == [True]
    written[key] = 1.5
    assert not held.same()


def test_nothing_is_compared_while_no_watched_dict_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 and later count the writes."""
    left = [100]
    monkeypatch.setattr(dictionary_writes, "can_be_watched", lambda: True)
    monkeypatch.setattr(dictionary_writes, "Watched", list)
    for module in (dictionary_writes, held_values):
        monkeypatch.setattr(module, "writes_left", lambda: left[0])
    settings, members = {"a": 1.5}, [1.5]
    held = HeldValues([Held(settings, (("a", 1.5),), 1), Held(members, ((0, members[0]),), 1)])
    assert held.same()
    settings["a"] = 2.5  # this stand-in does not count it
    assert held.same()
    left[0] -= 1
    assert not held.same() and not held.same()
    held = HeldValues([Held(settings, (("a", 2.5),), 1), Held(members, ((0, members[0]),), 1)])
    assert held.same()
    members[0] = 2.5
    assert not held.same()


@pytest.mark.parametrize("is_written", [True, False])
def test_entries_are_compared_where_versions_miss_writes(is_written: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_values, "have_versions", lambda: False)
    value, other = object(), object()
    settings = {"a": value, "b": other}
    held = HeldValues([Held(settings, (("a", value),), 2, is_written=is_written)])
    settings["b"] = value
    assert held.same() and not held.written()
    settings["a"] = other
    assert not held.same()


def test_dict_written_in_each_call_is_compared_by_entries() -> None:
    loop = Loop()
    for count in range(4):
        loop.settings["unrelated"] = loop.settings["scale"] = 1.5
        del loop.settings["unrelated"]
        assert loop.watch.unchanged(), count
    made = loop.watch._held
    loop.settings["scale"] = 1.5
    assert loop.watch.unchanged() and loop.watch._held is made, "it was made again"
    loop.settings["scale"] = 1.75
    assert not loop.watch.unchanged()


def test_tensors_as_keys_are_compared_in_python() -> None:
    assert not Held({}, ((torch.ones(2), 1),), is_written=True).is_comparable
    assert Held({}, (("a", 1),), is_written=True).is_comparable and Held([1], ((0, 1),)).is_comparable


# Calls that match a recording are recognized without a signature, and no other calls are.


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: Any


@dataclasses.dataclass
class Alone:
    image: torch.Tensor


Pair = collections.namedtuple("Pair", "first second")
x, y = torch.ones(2, 3), torch.ones(4, dtype=torch.int64)


def known(arguments: tuple[Any, ...], keywords: dict[str, Any] | None = None) -> Arguments:
    return Arguments(arguments, keywords or {})


class Mine(torch.Tensor):
    pass


OTHERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "shape": ((x,), (torch.ones(3, 2),)),
    "strides": ((x,), (torch.ones(3, 2).T,)),
    "dtype": ((x,), (x.double(),)),
    "gradient": ((x,), (x.clone().requires_grad_(),)),
    "class": ((x,), (x.as_subclass(Mine),)),
    "parameter": ((x,), (torch.nn.Parameter(x, requires_grad=False),)),
    "no tensor": ((x,), (3,)),
    "something with a shape": ((x,), (x.numpy(),)),
    "more": ((x,), (x, y)),
    "fewer": ((x, y), (x,)),
    "none": ((x,), ()),
    "exchanged": ((x, y), (y, x)),
    "one tensor twice": (([x, x.clone()],), ([x, x],)),
    "no longer the same": (([x, x],), ([x, x.clone()],)),
    "key": (({"x": x},), ({"z": x},)),
    "another dataclass": ((Sample(x, y),), (Alone(x),)),
    "a field": ((Sample(x, 1),), (Sample(x, 2),)),
    "key of a mapping": ((BatchEncoding({"x": x}),), (BatchEncoding({"y": x}),)),
    "order of keys": (({"x": x, "z": x.clone()},), ({"z": x, "x": x.clone()},)),
    "one key more": (({"x": x},), ({"x": x, "z": 1},)),
    "no dict": (({"x": x},), (collections.OrderedDict(x=x),)),
    "list for tuple": (([x],), ((x,),)),
    "named": (([x, y],), (Pair(x, y),)),
    "a longer list": (([x],), ([x, y],)),
    "a longer list with a number": (([x, 1],), ([x, 1, y],)),
    "a shorter list with a number": (([x, 1],), ([x],)),
    "tuple for list with a number": (([x, 1],), ((x, 1),)),
    "number": ((x, 1), (x, 2)),
    "kind of number": ((x, 1), (x, True)),
    "text": ((x, "a"), (x, "b")),
}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_call_with_another_signature_is_not_known(name: str) -> None:
    ours, theirs = OTHERS[name]
    assert signature((ours, {}), []) != signature((theirs, {}), [])
    arguments = known(ours)
    assert arguments.tensors_of(ours, {}) is not None
    assert arguments.tensors_of(theirs, {}) is None
    assert arguments.tensors_of(ours, {"more": 1}) is None


def test_objects_are_known_by_their_identity() -> None:
    for value, other in (({3: x}, {4: x}), ({1, 2}, {1, 2}), (object(), object())):
        arguments = known((value, x))
        assert arguments.tensors_of((value, x), {}) is not None
        assert arguments.tensors_of((other, x), {}) is None


def counted_signatures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []

    def counting(*arguments: Any) -> Any:
        made.append(1)
        return signature(*arguments)

    monkeypatch.setattr(call_recorder, "signature", counting)
    return made


def test_alternating_recordings_need_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, a number, and gradients that are there or not."""
    made = counted_signatures(monkeypatch)

    def program(graph: Graph) -> Iterator[torch.Tensor]:
        model = network("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
            loss = loss_of(model, batch) * scale
            loss.backward()
            return loss.detach()

        call = graph(step)
        for index in range(40):
            if index == 32:
                made.clear()
            (batch,) = batches("cpu", 1, 6 + index // 2 % 2)[0]
            yield call(batch, 0.5 if index % 4 else 0.25)
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    report = assert_as_eager(program)
    assert made == [] and len(report.recordings) == 4 and report.refusals == ()


def test_freed_recording_is_not_replayed() -> None:
    model = network("cpu")
    step = GraphedStep(lambda batch: loss_of(model, batch).detach(), device=CpuDevice())
    calls = batches("cpu")
    for batch in calls[:5]:
        step(*batch)
    assert step.report().replays == 2
    step.close()
    step(*calls[5])
    assert step.report().replays == 2
