"""A recording's comparison before replays is cheap and changes nothing."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.reach import LONG
from optimizations.torch_internals import dictionary_writes, held_values
from optimizations.torch_internals.held_values import Held, HeldValues


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
    "another state": lambda loop: loop.optimizer.state[loop.model[0].weight].update(exp_avg=torch.zeros(16, 8)),
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


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
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


def test_values_are_equal_until_one_is_replaced() -> None:
    a, b, c = object(), object(), object()
    attributes, members = {"a": a, "b": b}, [a, b]
    cell = types.CellType(c)
    held = HeldValues(
        [
            Held(attributes, (("a", a),), 2, is_written=True),
            Held(members, ((1, b),), 2),
            Held(cell, (("cell_contents", c),), attributes=True),
        ]
    )
    assert held.same()
    attributes["b"] = c
    assert held.same()
    attributes["a"] = c
    assert not held.same()
    attributes["a"] = a
    members.append(a)
    assert not held.same()
    members.pop()
    cell.cell_contents = a
    assert not held.same()
    cell.cell_contents = c
    assert held.same()


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
    assert loop.watch.unchanged() and loop.watch._held is made, "nothing is made anew"
    loop.settings["scale"] = 1.75
    assert not loop.watch.unchanged()


def test_size_of_a_dict_with_tensors_as_keys_is_compared() -> None:
    weights = {torch.ones(1): 1.5, 2: 2.5}
    graphed = GraphedStep(lambda batch: batch["x"].sum() * sum(weights.values()), device=CpuDevice())
    for batch in batches("cpu", 6):
        graphed(*batch)
    (recording,) = graphed._recorder.recordings.tried
    weights[2] = 2.5
    assert recording.watch.unchanged() and recording.watch.unchanged()
    weights[3] = 1.0
    assert not recording.watch.unchanged()


def test_tensors_as_keys_are_compared_in_python() -> None:
    assert not Held({}, ((torch.ones(2), 1),), is_written=True).is_comparable
    assert Held({}, (("a", 1),), is_written=True).is_comparable and Held([1], ((0, 1),)).is_comparable
