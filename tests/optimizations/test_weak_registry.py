"""Threads and finalizers may add to weak registries and list them at the same time."""

from __future__ import annotations

import ast
import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from simulated_gpu.trees import own_container
from threads import in_threads

from optimizations import torch_internals
from optimizations.calls.bound import BoundRoots
from optimizations.capture.callables.graph_callables import GraphedCallables
from optimizations.capture.step import graphed_step
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.placement.feeds import Feeds
from optimizations.trees import containers
from optimizations.trees.graphed_function import GraphedFunction
from optimizations.weak_registry import WeakRegistry
from tests.test_layers import SOURCES

MEMBERS = [Feeds, BoundRoots, GraphedFunction, GraphedStep, GraphedCallables]
"""The classes of all members of registries."""


class StandIn:
    """Stand for a member of a registry."""


@contextmanager
def collected_everywhere(finalizer: Callable[[], object]) -> Iterator[list[int]]:
    """Collect garbage wherever Python may, which runs the finalizer. Yield the number of its runs."""
    ran, left, thresholds = [0], [True], gc.get_threshold()

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if left[0]:
                ran[0] += 1
                finalizer()
                Garbage()

    Garbage()
    # More objects than -1 are new after each allocation. Only the youngest are collected, which is quick.
    gc.set_threshold(-1, 1_000_000, 1_000_000)
    try:
        yield ran
    finally:
        left[0] = False
        gc.set_threshold(*thresholds)
        gc.collect()


def in_the_middle_of(run: Callable[[], object], finalizer: Callable[[], object], times: int = 50) -> None:
    """Runs this so often, and the finalizer wherever Python allocates meanwhile: more often."""

    def often() -> None:
        with collected_everywhere(finalizer) as ran:
            for _ in range(times):
                run()
            assert ran[0] > times

    in_threads(often)


def test_live_members_are_listed_once() -> None:
    registry: WeakRegistry[StandIn] = WeakRegistry()
    kept = [StandIn() for _ in range(3)]
    for member in (*kept, kept[0]):
        registry.add(member)
    assert sorted(map(id, registry.alive())) == sorted(map(id, kept))
    last = kept.pop()
    assert last in registry.alive()
    del last, member
    assert sorted(map(id, registry.alive())) == sorted(map(id, kept))
    kept.clear()
    assert registry.alive() == []
    assert not registry._references, "references to what is gone would pile up"


def test_finalizers_may_change_a_registry_in_use() -> None:
    registry: WeakRegistry[StandIn] = WeakRegistry()
    by_finalizers: deque[StandIn] = deque(maxlen=40)
    missed: list[int] = []

    def finalizer() -> None:
        by_finalizers.append(StandIn())
        registry.add(by_finalizers[-1])
        if by_finalizers[-1] not in registry.alive():
            missed.append(len(missed))

    def add_and_list() -> None:
        kept: deque[StandIn] = deque(maxlen=10)
        with collected_everywhere(finalizer) as ran:
            for number in range(500):
                kept.append(StandIn())
                registry.add(kept[-1])
                if not set(map(id, kept)) <= set(map(id, registry.alive())):
                    missed.append(number)
            assert ran[0] > 500

    in_threads(add_and_list)
    assert missed == []


@pytest.mark.parametrize("member", MEMBERS)
def test_members_are_compared_by_identity(member: Any) -> None:
    assert member.__eq__ is object.__eq__
    assert member.__hash__ is object.__hash__


def test_finalizer_may_create_containers_during_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "BY_DEVICE", {})

    def finalized() -> None:
        own_container(1)
        containers.managers()
        containers.free_all()

    def make() -> None:
        made = own_container(0)
        assert made.device_index == 0 and own_container(1).device_index == 1

    in_the_middle_of(make, finalized, times=200)


def test_closing_manager_may_create_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "BY_DEVICE", {})
    ended: list[int] = []

    class Manager:
        def __init__(self, device: int) -> None:
            self.device = device

        def shutdown(self) -> None:
            if self.device == 0:
                own_container(1).tree_manager = cast(Any, Manager(1))
            assert containers.manager_of(0) is None, "one that ends is asked for nothing any more"
            ended.append(self.device)

    def end() -> None:
        own_container(0).tree_manager = cast(Any, Manager(0))
        containers.free_all()

    in_threads(end)
    assert ended == [0, 1]
    assert containers.managers() == []


def test_finalizer_may_replace_names_during_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = [object(), object()]
    holder = SimpleNamespace(first=stock[0], second=stock[1])
    monkeypatch.setattr(torch_internals, "holder_of", lambda name: (holder, name))
    blocks = torch_internals.Replacing({name: lambda value: [value] for name in ("first", "second")})

    def enter() -> None:
        with blocks:
            assert holder.first is not stock[0] and holder.second is not stock[1]

    in_the_middle_of(enter, enter)
    assert [holder.first, holder.second] == stock


@pytest.mark.parametrize("name", ["close", "reset"])
def test_finalizer_inside_a_step_cannot_close_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = graphed_step.GraphedStep(lambda: None)
    refused: list[str] = []

    def drop(recordings: Any) -> None:
        try:
            step.reset()
        except RuntimeError as error:
            refused.append(str(error))

    monkeypatch.setattr(step._recorder.recordings, "drop", drop)
    in_threads(getattr(step, name))
    assert len(refused) == 1 and "call it after the step" in refused[0]
    in_threads(step.reset)


def test_no_other_weak_collections_are_listed() -> None:
    """The gradients of steps are looked up by their ids, one by one, and never listed."""
    made = [
        f"{path}:{node.lineno}"
        for path in SOURCES
        if path.parts[-2:] != ("step", "gradients.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute | ast.Name)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id)
        in ("WeakSet", "WeakValueDictionary")
    ]
    assert made == [], "use optimizations.weak_registry"
