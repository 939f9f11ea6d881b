"""Compiled code that leads kernels and copies of an executable graph to where inputs lie, without a driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as bindings
from simulated_gpu.driver import SimulatedDriver

from optimizations import host_code
from optimizations.graph import host
from optimizations.graph.driver import CudaCallFailed, function_address
from optimizations.graph.host import HostUpdates
from optimizations.graph.memory import MemoryRanges
from optimizations.graph.protocol import AddressPlace
from optimizations.graph.records import MemoryRange
from optimizations.in_place.addresses import AddressTracker, TrackedInput

EXECUTABLE = 4096
OWNED = MemoryRange(address=0x10000, size_bytes=0x1000)
SIZE = 256

pytestmark = pytest.mark.usefixtures("compiled_looks")


class Driver:
    """Notes what its functions are called with. `code` is what they return."""

    def __init__(self) -> None:
        self.code = 0
        self.calls: list[tuple[int, ...]] = []
        self._functions = [ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * count)(self._set) for count in (3,)]
        self.kernels = ctypes.cast(self._functions[0], ctypes.c_void_p).value

    def _set(self, *given: int) -> int:
        self.calls.append(given)
        return self.code


class Update(host._KernelUpdate):
    """That of a kernel, of which nothing is read. Each use of an input is a word, and what is added to its address."""

    def __init__(self, node: int, uses: Sequence[tuple[int, int]], function: int | None) -> None:
        self.words = [ctypes.c_uint64(0) for _ in uses]
        self.places = [
            AddressPlace(index, delta, 8, word) for (index, delta), word in zip(uses, self.words, strict=True)
        ]
        self._handle = node
        self._launch = SimpleNamespace(getPtr=lambda: node + 1)
        self.function = function
        self.set_in: list[Any] = []

    def set(self, executable: Any) -> None:
        self.set_in.append(executable)


class Copy(host._MemcpyUpdate):
    """The update of a copy from an input."""

    def __init__(self, index: int) -> None:
        self.word = ctypes.c_uint64(0)
        self.places = [AddressPlace(index, 0, 8, self.word)]
        self.set_in: list[Any] = []

    def set(self, executable: Any) -> None:
        self.set_in.append(executable)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def tracker_of(updates: Sequence[Any], inputs: Sequence[int] = (0, 2), *, compiled: bool = True) -> AddressTracker:
    pointers = HostUpdates(updates, EXECUTABLE)
    tracked = [TrackedInput(index, 16, 0x100 * (1 + index), size_bytes=SIZE) for index in inputs]
    recorded = [0x100 * (1 + index) if index in inputs else None for index in range(3)]
    return AddressTracker(
        tracked,
        recorded,
        pointers,
        MemoryRanges([OWNED]),
        lambda tensors: None,
        compile=pointers.compiled if compiled else None,
    )


def test_kernels_that_read_a_moved_input_are_set_once(driver: Driver) -> None:
    both, one = Update(7, [(0, 0), (2, 32), (0, -8)], driver.kernels), Update(9, [(2, 0)], driver.kernels)
    tracker = tracker_of([both, one])
    assert tracker.follow_at([0x100, 5, 0x300]) and driver.calls == [], "where it was recorded"
    assert tracker.follow_at([0x20000, 5, 0x300])
    assert driver.calls == [(EXECUTABLE, 7, 8)] and [word.value for word in both.words] == [0x20000, 0, 0x1FFF8]
    assert (tracker.moves, tracker.pointer_bytes, tracker.pending) == (1, 16, True)
    assert tracker.addresses == [0x20000, None, 0x300]
    assert tracker.follow_at([0x20000, 6, 0x300]) and len(driver.calls) == 1
    assert tracker.follow_at([0x30000, 5, 0x40000])
    assert sorted(driver.calls[1:]) == [(EXECUTABLE, 7, 8), (EXECUTABLE, 9, 10)]
    assert [word.value for word in both.words] == [0x30000, 0x40020, 0x2FFF8] and one.words[0].value == 0x40000
    assert (tracker.moves, tracker.pointer_bytes) == (2, 48) and not both.set_in, "the driver itself was called"


def test_graph_with_copies_is_followed_in_python(driver: Driver) -> None:
    """Where the bindings keep the parameters of a copy is not known."""
    kernel, copy = Update(7, [(0, 0)], driver.kernels), Copy(2)
    tracker = tracker_of([kernel, copy])
    assert tracker.follow_at([0x20000, 5, 0x40000])
    assert (copy.word.value, kernel.words[0].value) == (0x40000, 0x20000)
    assert driver.calls == [] and kernel.set_in == copy.set_in == [EXECUTABLE]


def test_functions_of_the_library_are_of_the_bindings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for the driver in a test has handles that the library would follow into nowhere."""
    monkeypatch.setattr("optimizations.graph.driver._address", lambda name: 1)
    assert function_address(bindings, "cuGraphLaunch") == 1
    assert function_address(SimulatedDriver(), "cuGraphLaunch") is None


EDGES = (0x20000, 0x20008, 0x10000 - SIZE, 0x10000 - SIZE + 16, 0x10000, 0x10FF0, 0x11000, 0x11010, 0x10000 - 16)


@pytest.mark.parametrize("address", EDGES)
def test_it_refuses_what_python_refuses(driver: Driver, address: int) -> None:
    """Not aligned, or in memory that the graph writes: then nothing was done for the others either."""
    updates = [Update(7, [(0, 0)], driver.kernels), Update(9, [(2, 0)], driver.kernels)]
    compiled, plain = tracker_of(updates), tracker_of(updates, compiled=False)
    for given in ([address, 0, 0x50000], [0x50000, 0, address]):
        driver.calls.clear()
        before = list(compiled.addresses)
        taken = compiled.follow_at(given)
        assert taken == plain.follow_at(given) and compiled.addresses == plain.addresses
        assert taken or (driver.calls == [] and compiled.addresses == before)


def test_what_the_driver_refuses_is_unknown_until_it_is_set(driver: Driver) -> None:
    update = Update(7, [(0, 0)], driver.kernels)
    tracker = tracker_of([update], (0,))
    driver.code = 719
    with pytest.raises(CudaCallFailed, match="cuGraphExecKernelNodeSetParams") as failed:
        tracker.follow_at([0x20000, 0, 0])
    assert failed.value.code == 719 and tracker.addresses[0] == 0
    driver.code = 0
    assert tracker.follow_at([0x100, 0, 0]) and len(driver.calls) == 2 and update.words[0].value == 0x100


class OfMemory:
    """A node that is no kernel's."""

    def __init__(self) -> None:
        self.places = [AddressPlace(0, 0, 8, ctypes.c_uint64(0))]

    def set(self, executable: Any) -> None:
        """Nothing: the cell says where it reads."""


@pytest.mark.parametrize("change", ["another kind of node", "no compiled code", "no driver", "another cell"])
def test_python_does_what_cannot_be_compiled(change: str, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    update: Any = Update(7, [(0, 0)], driver.kernels)
    if change == "another kind of node":
        update = OfMemory()
    elif change == "no compiled code":
        monkeypatch.setattr(host_code, "looks", lambda: None)
    elif change == "no driver":
        update.function = None
    else:
        update.places = [AddressPlace(0, 0, 8, SimpleNamespace(value=0))]
    tracker = tracker_of([update], (0,))
    assert tracker.follow_at([0x20000, 0, 0]) and update.places[0].cell.value == 0x20000
    assert driver.calls == [] and tracker.pointer_bytes == 8


def test_while_inputs_rest_python_follows(driver: Driver) -> None:
    tracker = tracker_of([Update(7, [(0, 0)], driver.kernels)], (0,))
    tracker.rest(True)
    assert tracker.follow_at([0x20000, 0, 0]) and driver.calls == []


def test_an_executable_that_is_read_is_held(driver: Driver) -> None:
    update = Update(7, [(0, 0)], driver.kernels)
    follow = HostUpdates([update], EXECUTABLE).compiled([(0, 15, 0x100, SIZE)], [])
    where = ctypes.addressof(update.words[0])
    del update
    torch.empty(64)
    now: list[int | None] = [0x100]
    assert follow is not None and follow([0x20000], now) == 8 and now == [0x20000]
    assert ctypes.c_uint64.from_address(where).value == 0x20000


WRONG: dict[str, Callable[[Any], object]] = {
    "no lists": lambda follow: follow((1,), [1]),
    "one list": lambda follow: follow([1]),
    "too few": lambda follow: follow([], []),
    "no numbers": lambda follow: follow(["a"], [1]),
    "negative": lambda follow: follow([-1], [1]),
    "named": lambda follow: follow([1], now=[1]),
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_is_an_error(call: str, driver: Driver) -> None:
    follow = HostUpdates([Update(7, [(0, 0)], driver.kernels)], EXECUTABLE).compiled([(0, 15, 0x100, SIZE)], [])
    with pytest.raises((TypeError, IndexError, OverflowError)):
        WRONG[call](follow)
    assert driver.calls == []


@pytest.mark.parametrize("raw", [(0, 0, 2, 15, 8), (0, 1, 0, 15, 8), (-1, 0, 1, 15, 8)])
def test_a_plan_that_leads_elsewhere_is_an_error(raw: tuple[int, ...], driver: Driver) -> None:
    compiled = host_code.looks()
    assert compiled is not None
    with pytest.raises(ValueError, match="cells"):
        compiled.Follower(
            None, 1, host.INPUT.pack(*raw), host.CELL.pack(8, 0, 0), host.UPDATE.pack(driver.kernels, 7, 8, 0), b""
        )


@pytest.mark.parametrize("broken", range(4))
def test_a_part_of_a_record_is_an_error(broken: int, driver: Driver, compiled_looks: Any) -> None:
    records = [
        host.INPUT.pack(0, 0, 1, 15, 8),
        host.CELL.pack(8, 0, 0),
        host.UPDATE.pack(driver.kernels, 7, 8, 0),
        bytes(16),
    ]
    compiled_looks.Follower(None, 1, *records)
    records[broken] = records[broken][:-1]
    with pytest.raises(ValueError, match="64 bits"):
        compiled_looks.Follower(None, 1, *records)
