"""Each exchanged, inserted or deleted tensor of a module is seen, by counted writes to dictionaries or a comparison."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from optimizations.torch_internals import dictionary_writes, held_values
from optimizations.torch_internals.dictionary_writes import (
    NEVER,
    ComparedAfterWrites,
    Watched,
    can_be_watched,
    writes_left,
)
from optimizations.torch_internals.identity_guard import Exchanged, HeldTensors, same_tensors


@pytest.fixture(autouse=True, params=[0, held_values.FEW_COMPARISONS], ids=["nodes", "in Python"])
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where writes are reported, the first comparisons are made by guard nodes, or in Python."""
    monkeypatch.setattr(held_values, "FEW_COMPARISONS", request.param)


def model() -> Any:
    made = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    made.register_buffer("scale", torch.ones(1))
    return made


def held_by(module: nn.Module, tensors: list[Any]) -> HeldTensors:
    def numbered(found: Any) -> dict[str, int]:
        first = len(tensors)
        tensors.extend(found.values())
        return {name: first + place for place, name in enumerate(found)}

    parameters, buffers = numbered(module._parameters), numbered(module._buffers)
    return HeldTensors(parameters, buffers, {name: held_by(one, tensors) for name, one in module._modules.items()})


def comparison(*modules: nn.Module) -> Callable[[], bool]:
    tensors: list[Any] = []
    made = same_tensors([(module, held_by(module, tensors)) for module in modules], tensors)
    return lambda: bool(tensors) and (made.seen == writes_left() or made.holds())


def exchanged(dictionary: dict[str, Any], name: str) -> None:
    dictionary[name] = nn.Parameter(dictionary[name].detach().clone())


CHANGES: dict[str, Callable[[Any], object]] = {
    "parameter": lambda one: exchanged(one[0]._parameters, "weight"),
    "parameter by attribute": lambda one: setattr(one[1][1], "bias", nn.Parameter(torch.zeros(2))),
    "parameter inserted": lambda one: one[0].register_parameter("other", nn.Parameter(torch.zeros(1))),
    "parameter deleted": lambda one: delattr(one[0], "bias"),
    "parameter deleted and put back": lambda one: one[0]._parameters.update(bias=one[0]._parameters.pop("bias").data),
    "two parameters swapped": lambda one: one[0]._parameters.update(weight=one[0].bias, bias=one[0].weight),
    "parameters cleared": lambda one: one[0]._parameters.clear(),
    "dictionary of parameters": lambda one: one[0].__dict__.update(_parameters=dict(one[0]._parameters)),
    "dictionary of parameters by attribute": lambda one: setattr(one[0], "_parameters", dict(one[0]._parameters)),
    "dictionary of modules by attribute": lambda one: setattr(one, "_modules", dict(one._modules)),
    "begun anew": lambda one: one[0].__init__(2, 2),
    "buffer": lambda one: setattr(one, "scale", torch.ones(1)),
    "buffer of a submodule": lambda one: one[1][0]._buffers.update(running_mean=torch.zeros(2)),
    "buffer deleted": lambda one: delattr(one, "scale"),
    "dictionary of buffers": lambda one: one[1][0].__dict__.update(_buffers=dict(one[1][0]._buffers)),
    "module": lambda one: one[1].__setitem__(1, nn.Linear(2, 2)),
    "module inserted": lambda one: one.append(nn.Linear(2, 2)),
    "module deleted": lambda one: delattr(one[1], "1"),
    "modules swapped": lambda one: one._modules.update({"0": one[1], "1": one[0]}),
    "dictionary of modules": lambda one: one[1].__dict__.update(_modules=dict(one[1]._modules)),
}

KEPT: dict[str, Callable[[Any], object]] = {
    "values": lambda one: one[0].weight.data.add_(1),
    "data": lambda one: setattr(one[0].weight, "data", torch.zeros(2, 2)),
    "attribute": lambda one: setattr(one[1], "number", 3),
    "attribute deleted": lambda one: delattr(one[0], "in_features"),
    "buffer set to itself": lambda one: one._buffers.update(scale=one.scale),
    "buffer that is not read": lambda one: one.register_buffer("other", torch.zeros(1)),
    "dictionary set to itself": lambda one: one[0].__dict__.update(_parameters=one[0]._parameters),
    "mode": lambda one: one.eval(),
    "gradient": lambda one: setattr(one[0].weight, "grad", torch.zeros(2, 2)),
    "contents": lambda one: torch.utils.swap_tensors(one[0].weight, nn.Parameter(torch.zeros(2, 2))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_exchanged_parameter_is_found(change: str) -> None:
    one, other = model(), model()
    same = comparison(one, other)
    assert all(same() for _ in range(4))
    CHANGES[change](other)
    assert not any(same() for _ in range(4)), "and stays seen"


@pytest.mark.parametrize("change", KEPT)
def test_other_change_is_no_exchange(change: str) -> None:
    one = model()
    same = comparison(one)
    for _ in range(3):
        KEPT[change](one) if change != "attribute deleted" or hasattr(one[0], "in_features") else None
        assert all(same() for _ in range(4))
    exchanged(one[1][1]._parameters, "weight")
    assert not same()


@pytest.mark.parametrize("change", ["parameter", "buffer"])
def test_tensor_exchanged_during_creation_is_found(change: str) -> None:
    one = model()
    tensors: list[Any] = []
    held = held_by(one, tensors)
    CHANGES[change](one)
    with pytest.raises(Exchanged):
        same_tensors([(one, held)], tensors)


def test_many_modules_are_compared() -> None:
    one = nn.Sequential(*(nn.Linear(1, 1) for _ in range(70)))
    same = comparison(one)
    assert same() and same()
    one[69].bias = nn.Parameter(torch.zeros(1))
    assert not same()


# Writes to watched dictionaries are counted, and dictionaries are watched only while they are compared.


watching = pytest.mark.skipif(not can_be_watched(), reason="this Python does not tell of writes to dictionaries")

WRITES: dict[str, Callable[[dict[str, Any]], object]] = {
    "set": lambda one: one.update(a=2),
    "insert": lambda one: one.setdefault("new", 1),
    "delete": lambda one: one.pop("a"),
    "clear": lambda one: one.clear(),
    "set to the same": lambda one: one.update(a=one["a"]),
}


def of_linear(made: nn.Linear) -> ComparedAfterWrites:
    return same_tensors([(made, HeldTensors({"weight": 0}))], [made.weight])


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="3.13.0 leaves out some writes, so each process tries it out")
def test_python_3_12_reports_writes() -> None:
    assert can_be_watched() == (sys.version_info >= (3, 12))


@watching
@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("write", WRITES)
def test_dictionary_write_is_counted(write: str, kind: type[dict[str, Any]]) -> None:
    dictionary = kind(a=1)
    watched = Watched([dictionary])
    before = writes_left()
    assert dictionary["a"] == 1 and writes_left() == before, "reading is no write"
    WRITES[write](dictionary)
    # Python itself does not tell of an object that is set where it is already.
    assert (writes_left() != before) or write == "set to the same"
    del watched


@watching
def test_unwatched_dictionary_is_not_counted() -> None:
    dictionary = {"a": 1}
    first, second = Watched([dictionary]), Watched([dictionary])
    del first
    before = writes_left()
    dictionary["a"] = 2
    assert writes_left() != before, "the other one still watches"
    del second
    before = writes_left()
    dictionary["a"] = 3
    assert writes_left() == before
    assert id(dictionary) not in dictionary_writes._watched_for


@watching
def test_garbage_collection_during_registration_is_safe() -> None:
    """Dictionaries released by a collection under the lock are unwatched once the lock is free."""
    dictionary = {"a": 1}
    watched: Any = Watched([dictionary])
    with dictionary_writes._changing:
        watched = None
        gc.collect()
        assert dictionary_writes._to_be_left
    kept = Watched([{}])
    assert not dictionary_writes._to_be_left and kept is not None
    before = writes_left()
    dictionary["a"] = 2
    assert watched is None and writes_left() == before


@watching
def test_unwritten_dictionary_is_not_compared() -> None:
    compared: list[int] = []
    dictionary: dict[str, Any] = {"a": 1}
    same = ComparedAfterWrites(lambda dictionaries: compared.append(1) is None, (dictionary,))
    assert same.seen == NEVER and same.holds()
    assert same.seen == writes_left() and compared == [1]
    dictionary["a"] = 2
    assert same.seen != writes_left() and same.holds() and compared == [1, 1]


def test_other_pythons_compare_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizations.torch_internals.dictionary_writes.can_be_watched", lambda: False)
    made = nn.Linear(2, 2)
    same = of_linear(made)
    assert same.holds() and same.seen == NEVER
    made.weight = nn.Parameter(torch.zeros(2, 2))
    assert not same.holds() and same.seen == NEVER


@watching
def test_threads_may_write_and_compare() -> None:
    """After each exchange that a thread has made, the next look in any thread sees it."""
    made = nn.Linear(2, 2)
    state = [(of_linear(made), made.weight)]
    missed: list[int] = []
    done = threading.Event()

    def exchange() -> None:
        for _ in range(2000):
            made.weight = nn.Parameter(torch.zeros(2, 2))
        done.set()

    def look() -> None:
        while not done.is_set():
            same, weight = state[0]
            held = same.seen == writes_left() or same.holds()
            now = made.weight
            if not held:
                try:
                    state[0] = (same_tensors([(made, HeldTensors({"weight": 0}))], [now]), now)
                except Exception:  # exchanged since
                    continue
            elif now is not weight and (same.seen == writes_left() or same.holds()):
                missed.append(1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=one) for one in (exchange, look, look)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not missed


@watching
def test_modules_are_freed_while_an_exception_is_raised() -> None:
    for _ in range(20):
        made: Any = nn.Linear(2, 2)
        same: Any = of_linear(made)
        assert same.holds()
        with pytest.raises(ValueError, match="invalid literal"):
            (made, same, int(f"no number {made is same}"))
        made = same = None
    gc.collect()
    assert not dictionary_writes._to_be_left


AFTER_THE_END = """
import atexit
from optimizations.torch_internals.dictionary_writes import ComparedAfterWrites, writes_left

class Object: pass

def look():
    dictionary["a"] = 2
    owners[7].late = 1
    for _ in range(2):
        held = same.seen == writes_left() or same.holds()
        print("held" if held else "written")

atexit.register(look)  # it runs after what was registered later
dictionary, owners = {"a": 1}, [Object() for _ in range(50)]
same = ComparedAfterWrites(lambda found: found[0]["a"] == 1, (dictionary, *map(vars, owners)))
assert same.holds()
"""


def test_writes_at_the_end_of_a_process_are_compared() -> None:
    program = [sys.executable, "-c", AFTER_THE_END]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "written\nwritten\n", "")


def test_nodes_are_made_after_a_few_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock(side_effect=held_values.comparison)
    monkeypatch.setattr(held_values, "comparison", made)
    monkeypatch.setattr(held_values, "FEW_COMPARISONS", 3)
    dictionary = {"weight": object(), "other": 1}
    held = [held_values.Held(dictionary, (("weight", dictionary["weight"]),))]
    holders, same = held_values.comparison_when_written(held)
    for number in range(6):
        assert same(holders)
        assert made.call_count == (number >= 3)
    dictionary["weight"] = object()
    assert not same(holders)
    _, same = held_values.comparison_when_written(held)
    assert not any(same(holders) for _ in range(6)), "nodes made then would know the wrong value"
