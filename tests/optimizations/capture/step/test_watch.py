"""What Python may change between launches is noticed, by one comparison in C++ where it stands in dicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from graphs_on_cpu import CpuDevice
from step_parts import batches, loss_of, network
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from optimizations.capture.step import host_tensors, unread_tensors
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.guard import Guard
from optimizations.capture.step.watch import Watch
from optimizations.capture.step.watched_entries import LONG
from optimizations.torch_internals.dict_guard import HeldEntries, same_entries

pytestmark = pytest.mark.usefixtures("looked_at")


@pytest.fixture(scope="module", autouse=True)
def not_the_first_step() -> None:
    """The first one of a process takes a call more until it is recorded, and calls are counted here."""
    model = network("cpu")
    step = GraphedStep(lambda batch: loss_of(model, batch).backward(), device=CpuDevice())
    for batch in batches("cpu", 6):
        step(*batch)


class Loop:
    """A loop whose step is recorded; `settings` and `rates` are Python's."""

    def __init__(self) -> None:
        self.model = network("cpu", norm=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.settings = {"scale": 1.5}
        self.graphed = GraphedStep(self.step, device=CpuDevice())
        for batch in batches("cpu", 5):
            self.graphed(*batch)
        assert self.graphed.report().replays == 2

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batch) * self.settings["scale"]
        loss.backward()
        self.optimizer.step()
        return loss

    @property
    def watch(self) -> Watch:
        (recording,) = self.graphed._recordings
        return recording.watch


def moved(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def states_moved(loop: Loop) -> None:
    for kept in loop.optimizer.state.values():
        for tensor in kept.values():
            moved(tensor)


def state_exchanged(loop: Loop) -> None:
    kept = loop.optimizer.state[loop.model[0].weight]
    kept["exp_avg"] = kept["exp_avg"].clone()


CHANGES: dict[str, Callable[[Loop], Any]] = {
    "a parameter is exchanged": lambda loop: setattr(loop.model[0], "weight", nn.Parameter(torch.ones(16, 8))),
    "a parameter's data is exchanged": lambda loop: moved(loop.model[0].weight),
    "a buffer is exchanged": lambda loop: setattr(loop.model[1], "running_mean", torch.zeros(16)),
    "a buffer is added": lambda loop: loop.model[0].register_buffer("other", torch.zeros(1)),
    "a module is added": lambda loop: loop.model.append(nn.Linear(4, 4)),
    "a module is exchanged": lambda loop: loop.model.__setitem__(2, nn.ReLU()),
    "a number of a module": lambda loop: setattr(loop.model[1], "momentum", 0.2),
    "the mode of one module": lambda loop: loop.model[1].eval(),
    "a state of the optimizer": state_exchanged,
    "the memory of the optimizer's states": states_moved,
    "another parameter group": lambda loop: loop.optimizer.add_param_group({"params": [torch.ones(1)]}),
    "a hyperparameter": lambda loop: loop.optimizer.param_groups[0].update(weight_decay=0.5),
    "a hook of a module": lambda loop: loop.model[0].register_forward_hook(lambda *given: None),
    "a hook of the optimizer": lambda loop: loop.optimizer.register_step_post_hook(lambda *given: None),
    "a setting of the loop": lambda loop: loop.settings.update(scale=2.0),
    "a parameter is frozen": lambda loop: loop.model[0].weight.requires_grad_(False),
    "the shape of a buffer": lambda loop: loop.model[1].running_mean.unsqueeze_(0),
    "a hook of a parameter": lambda loop: loop.model[0].weight.register_hook(lambda gradient: None),
    "a hook behind a parameter's gradient": lambda loop: loop.model[0].weight.register_post_accumulate_grad_hook(
        lambda parameter: None
    ),
    "the forward of one module": lambda loop: setattr(loop.model[0], "forward", lambda x: x),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_every_change_is_noticed(name: str) -> None:
    loop = Loop()
    assert loop.watch.unchanged()
    CHANGES[name](loop)
    assert not loop.watch.unchanged()


GLOBAL_HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": nn.modules.module.register_module_forward_hook,
    "forward_pre": nn.modules.module.register_module_forward_pre_hook,
    "backward": nn.modules.module.register_module_full_backward_hook,
    "backward_pre": nn.modules.module.register_module_full_backward_pre_hook,
    "optimizer": register_optimizer_step_post_hook,
    "optimizer_pre": register_optimizer_step_pre_hook,
}


@pytest.mark.parametrize("name", sorted(GLOBAL_HOOKS))
def test_a_global_hook_is_noticed_when_it_comes_and_when_it_goes(name: str) -> None:
    loop = Loop()
    handle = GLOBAL_HOOKS[name](lambda *given: None)
    try:
        assert not loop.watch.unchanged() and loop.watch.host_key()
        with_it = Loop()
        assert with_it.watch.unchanged()
    finally:
        handle.remove()
    assert loop.watch.unchanged() and loop.watch.host_key() == ()
    assert not with_it.watch.unchanged()


def test_hooks_of_others_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    nn.Linear(2, 2).register_forward_hook(lambda *given: None)
    assert loop.watch.unchanged()
    monkeypatch.setattr(loop.watch._hooks, "_now", lambda: pytest.fail("nothing was registered since"))
    assert loop.watch.unchanged()


def test_what_stands_in_dicts_of_modules_and_optimizers_is_not_looked_at_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop()
    in_python = loop.watch._others
    assert len(loop.watch._in_dicts._single) + len(loop.watch._in_dicts._members) > 20
    assert len(in_python._members) + len(in_python._single) < 20
    monkeypatch.setattr(loop.watch._in_dicts, "unchanged", lambda: pytest.fail("C++ was asked before"))
    for batch in batches("cpu", 3):
        loop.graphed(*batch)
    assert loop.graphed.report().replays == 5


def test_a_set_that_is_empty_costs_nothing_in_python_and_an_entry_of_it_is_noticed() -> None:
    model, names = network("cpu"), set[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch) * (2.0 if "twice" in names else 1.0)
        loss.backward()
        optimizer.step()
        return loss

    graphed = GraphedStep(step, device=CpuDevice())
    for batch in batches("cpu", 5):
        graphed(*batch)
    (recording,) = graphed._recordings
    watch = recording.watch
    assert watch.unchanged() and watch.rest().in_python == ()
    assert any(one.holder is names for one in watch.held())
    keys = []
    for name in ("one", "other"):
        names.add(name)
        assert not watch.unchanged()
        keys.append(watch.host_key())
        names.clear()
        assert watch.unchanged() and watch.host_key() == ()
    assert keys[0] != keys[1], "calls with other names are others"
    names.add("one")
    for batch in batches("cpu", 5):
        graphed(*batch)
    filled = [one.watch for one in graphed._recordings if one.watch.unchanged()]
    assert len(filled) == 1 and filled[0].rest().in_python, "what it holds is compared in Python"
    names.clear()
    names.add("other")
    assert not filled[0].unchanged(), "as many, and others"


def test_what_was_written_anew_with_the_same_value_is_no_change() -> None:
    loop = Loop()
    loop.model[1].momentum = float("0.1")  # another object
    loop.model.train()
    for batch in batches("cpu", 3):
        loop.graphed(*batch)
    assert loop.graphed.report().replays == 5


@pytest.mark.parametrize("value", [torch.tensor([2.0, 3.0]), numpy.array([2.0, 3.0]), torch.tensor(2.0), 2])
def test_a_number_that_something_else_takes_the_place_of_is_noticed(value: Any) -> None:
    """Also what has no answer to the question whether it is equal to the number."""
    held = SimpleNamespace(scale=2.0, shift=1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (held.scale if type(held.scale) is float else 5.0) + held.shift

    graphed, x = GraphedStep(step, device=CpuDevice()), torch.ones(2)
    for _ in range(6):
        assert torch.equal(graphed(x), step(x))
    replays = graphed.report().replays
    assert replays
    held.scale = value
    assert torch.equal(graphed(x), step(x))
    assert graphed.report().replays == replays


def exchanged(chosen: set[str]) -> None:
    chosen.remove("twice")
    chosen.add("more")


@pytest.mark.parametrize("change", [exchanged, set.clear])
def test_other_members_of_a_set_are_noticed(change: Callable[[set[str]], None]) -> None:
    chosen = {"twice", "once"}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if "twice" in chosen else 1) * len(chosen)

    graphed = GraphedStep(step, device=CpuDevice())
    x = torch.ones(2)
    for _ in range(7):
        assert torch.equal(graphed(x), step(x))
    replays = graphed.report().replays
    assert replays
    change(chosen)
    assert torch.equal(graphed(x), step(x))
    assert graphed.report().replays == replays


def test_a_hook_that_is_registered_after_the_recording_runs() -> None:
    loop = Loop()
    seen: list[torch.Size] = []
    handle = loop.model[0].register_forward_hook(lambda module, given, result: seen.append(result.shape))
    before = loop.graphed.report().replays
    with pytest.warns(
        UserWarning, match="runs some of its calls without a CUDA graph"
    ):  # it changes a list in each call
        for batch in batches("cpu", 3):
            loop.graphed(*batch)
    assert len(seen) == 3 and loop.graphed.report().replays == before
    handle.remove()
    loop.graphed(*batches("cpu", 1)[0])
    assert loop.graphed.report().replays == before + 1  # the recording serves again


def test_a_comparison_that_fails_without_a_change_is_made_new_ever_more_rarely() -> None:
    made: list[float] = []
    held = {"number": 1.0}

    def make() -> Callable[[], bool]:
        made.append(held["number"])
        return same_entries([HeldEntries(held, tuple(held.items()), 1)])

    guard = Guard(make)
    for call in range(1000):
        held["number"] = float(f"1.{0 * call}")  # another object, with the same value
        if not guard.holds():
            guard.was_wrong()
    assert 3 <= len(made) <= 6


def test_entries_are_the_same_until_one_is_exchanged_added_or_deleted() -> None:
    def made() -> tuple[dict[str, Any], Callable[[], bool]]:
        held = {"a": torch.ones(1), "b": None}
        return held, same_entries([HeldEntries(held, tuple(held.items()), len(held)), HeldEntries({}, (), 0)])

    held, same = made()
    assert same() and same()
    held["a"] = torch.ones(1)
    assert not same()
    held, same = made()
    assert same()
    held["c"] = 1
    assert not same()
    held, same = made()
    del held["b"]
    assert not same()
    assert same_entries([])()


READS: dict[str, Callable[[torch.Tensor], float]] = {
    "tolist": lambda held: held.tolist()[0],
    "numpy": lambda held: float(held.numpy()[0]),
    "an array of it": lambda held: float(numpy.asarray(held)[0]),
}


def host_tensor(device: CpuDevice, count: int = 3) -> torch.Tensor:
    held = torch.ones(count)
    device.host.add(held.untyped_storage().data_ptr())
    return held


@pytest.mark.parametrize("name", sorted(READS))
@pytest.mark.parametrize("large", [False, True])
def test_tensors_in_cpu_memory_are_read_without_an_operator_and_compared(name: str, large: bool) -> None:
    device = CpuDevice()
    held = host_tensor(device, host_tensors.MOST_BYTES if large else 3)
    step = GraphedStep(lambda x: x * READS[name](held), device=device)
    for index in range(14):
        if index == 7:
            held.fill_(9.0)
        x = torch.randn(3)
        assert torch.equal(step(x), x * (9.0 if index >= 7 else 1.0))
    assert 4 + 4 <= step.report().replays <= 4 + 6


def test_a_tensor_in_cpu_memory_that_changes_in_each_call_and_plays_no_part_is_left_out() -> None:
    device = CpuDevice()
    held = host_tensor(device)
    step = GraphedStep(lambda x: (x * 2, held)[0], device=device)
    for _ in range(10):
        held.add_(1.0)
        step(torch.randn(3))
    assert step.report().replays == 7


@pytest.mark.parametrize("value", [torch.ones(3), 3.0, "many"])
def test_a_look_at_a_defaultdict_adds_nothing_to_it(value: Any) -> None:
    """As the program's own look at a key that is gone would. Other keys may be there instead, and tensors unread."""
    kept: defaultdict[str, Any] = defaultdict(list, first=value, other=7.0)
    graphed = GraphedStep(lambda x: x * 2 if kept else x, device=CpuDevice())
    for _ in range(5):
        graphed(torch.ones(3))
    assert graphed.report().replays == 2
    del kept["first"]
    kept["second"] = value
    for _ in range(5):
        graphed(torch.ones(3))
    assert list(kept) == ["other", "second"]


def test_a_dict_of_data_is_not_looked_through_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    data = {index: torch.ones(1) for index in range(LONG + 1)}
    graphed = GraphedStep(lambda x: x * 2 if data else x, device=CpuDevice())
    for _ in range(5):
        graphed(torch.ones(3))
    look = unread_tensors.look
    monkeypatch.setattr(unread_tensors, "look", lambda tensor: looked.append(tensor) or look(tensor))
    graphed(torch.ones(3))
    assert (graphed.report().replays, looked) == (3, [])
