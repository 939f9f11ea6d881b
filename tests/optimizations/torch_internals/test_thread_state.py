"""Threads that keep something in PyTorch's state and how they end; memory queries drop no references."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from optimizations.torch_internals import thread_state

KEY = "tests_of_thread_state"

ENDS_WITH_ITS_THREADS = """
import threading
import torch
from optimizations.torch_internals import thread_state

class Kept: pass

begin = threading.Event()

def run():
    thread_state.keep("key", Kept())
    begin.wait()

threads = [threading.Thread(target=run) for _ in range(64)]
for thread in threads:
    thread.start()
begin.set()
for thread in threads:
    thread.join()
"""


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    found: set[int] = set()
    monkeypatch.setattr(thread_state, "_keepers", found)
    yield found


def test_process_exits_cleanly_right_after_its_threads() -> None:
    """Without the wait about every fifth one is aborted."""
    for _ in range(6):
        done = subprocess.run(
            [sys.executable, "-c", ENDS_WITH_ITS_THREADS], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr


def test_ended_threads_are_awaited_until_they_are_gone(keepers: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    there = iter([True, True, False])
    asked = []
    monkeypatch.setattr(thread_state, "_is_there", lambda thread: asked.append(thread) or next(there))
    keepers.add(7)
    thread_state.wait_for_ended_threads()
    assert asked == [7, 7, 7]


def test_running_threads_are_not_awaited(keepers: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons may never end."""
    thread_state.keep(KEY, object())
    assert keepers == {threading.get_native_id()}
    monkeypatch.setattr(thread_state, "_is_there", lambda thread: pytest.fail("it runs"))
    thread_state.wait_for_ended_threads()


def test_wait_for_threads_is_bounded(keepers: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_state, "_is_there", lambda thread: True)
    monkeypatch.setattr(thread_state, "LONGEST_WAIT_S", 0.02)
    keepers.update((7, 8))
    thread_state.wait_for_ended_threads()


def test_thread_state_is_separate_and_released() -> None:
    found = []

    def other() -> None:
        found.append(thread_state.find(KEY))
        thread_state.keep(KEY, "the other's")
        found.append(thread_state.find(KEY))

    thread_state.keep(KEY, "this one's")
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert (found, thread_state.find(KEY)) == ([None, "the other's"], "this one's")


# Memory queries do not drop references of the caller.


ASKS = """
import sys
from optimizations.torch_internals.gpu_state import memory_segments
pool = int("1000"), int("70000")
before = [sys.getrefcount(one) for one in (*pool, 0, False)]
for _ in range(100):
    assert memory_segments(pool) == []
    memory_segments()
after = [sys.getrefcount(one) for one in (*pool, 0, False)]
print([had - has for had, has in zip(before, after)])
"""


def test_pool_queries_drop_no_references() -> None:
    """In a process of its own: plain PyTorch 2.11 crashes it at the second question."""
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(lost <= 0 for lost in json.loads(done.stdout)[:2])
