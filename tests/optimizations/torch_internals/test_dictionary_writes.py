"""Writes to watched dictionaries are counted, and dictionaries are watched only while they are compared."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optimizations.torch_internals import dictionary_writes
from optimizations.torch_internals.dictionary_writes import (
    NEVER,
    ComparedAfterWrites,
    Watched,
    can_be_watched,
    writes_left,
)
from optimizations.torch_internals.identity_guard import HeldTensors, same_tensors

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


ENDING = """
import torch
from optimizations.torch_internals.dictionary_writes import Watched, can_be_watched
model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(50)])
kept = [Watched([module.__dict__, module._parameters]) for module in model.modules()] if can_be_watched() else []
import atexit
atexit.register(lambda: setattr(model, "late", 1))
print("ended")
"""


def test_process_exits_while_watching() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")


AFTER_THE_END = """
import atexit
from optimizations.torch_internals.dictionary_writes import ComparedAfterWrites, writes_left

def look():
    dictionary["a"] = 2
    for _ in range(2):
        held = same.seen == writes_left() or same.holds()
        print("held" if held else "written")

atexit.register(look)  # it runs after what was registered later
dictionary = {"a": 1}
same = ComparedAfterWrites(lambda found: found[0]["a"] == 1, (dictionary,))
assert same.holds()
"""


def test_writes_at_the_end_of_a_process_are_compared() -> None:
    program = [sys.executable, "-c", AFTER_THE_END]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "written\nwritten\n", "")
