"""Order a manager's calls over threads and streams.

Note [Threads]. A function may be called from any thread, and a device has one manager for all threads. So calls hold a
lock. A thread that never used CUDA has no current context, which driver calls need. Work on a new stream waits for the
work enqueued on the last call's stream, because both use the same memory.

Note [Captures of the program's own]. On a stream that is being captured, a graph can be neither launched nor recorded.
`torch.cuda.graph` changes the current stream, so the change of streams reveals a capture. Functions run without graphs
inside it.

Note [Results on other streams]. A call on a new stream waits for the stream of the previous call. But the program may
enqueue more work on the previous stream that reads live results, and release them before the device has run it. So
while results are alive that existed when a stream was left, each call waits for that stream, and once more after they
are released.

Note [Calls past the manager]. A function without a graph may read results of graphs on another stream, and the next
replay overwrites them. So its calls are ordered by streams as all others are (`follow_streams`): they wait for earlier
graphs, and later graphs wait for them.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.calls.turns import inside_a_function, make_context_current, stream_of, wait_for_stream
from optimizations.trees.containers import manager_of


class CallStreams:
    """Hold the streams on which the functions of one manager are called.

    Attributes:
        entered: thread-local attributes, one for each direction in which the thread has called a function.
        callers: the threads that call functions other than backwards.
        left: results of graphs that work on earlier streams may read, by stream.
        last: the stream of the last call; None if the next call must check for a capture on any stream.
        inside_capture: whether the last call came on a stream that was being captured.
    """

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self.entered = threading.local()
        self.callers: set[int] = set()
        self.last: int | None = None
        self.inside_capture = False
        self._last_outside: int | None = None  # last stream outside of a capture; it has waited for all others
        self.left: dict[int, list[Any]] = {}

    def enter(self, is_backward: bool, node: Any) -> None:
        """Prepare the current thread and stream for a call that follows the recording `node`."""
        if not is_backward:  # a backward has a thread of its own
            self.callers.add(threading.get_ident())
        entered_as = "backward" if is_backward else "forward"
        if not hasattr(self.entered, entered_as):
            make_context_current(self._device_index)
            setattr(self.entered, entered_as, True)
        self.follow(node)

    def follow(self, node: Any) -> None:
        """Let the current stream wait for those of earlier calls. Notes [Threads], [Results on other streams]."""
        stream = torch_internals.current_raw_stream(self._device_index)
        self.inside_capture = torch.cuda.is_current_stream_capturing()
        if self.inside_capture:  # Note [Captures of the program's own]
            self.last = None  # each call checks again until one is outside
            return
        if stream == self.last:
            return
        before = self._last_outside
        if before is not None and before != stream:
            self.left[before] = list(node.path_live_weakrefs()) if node is not None else []
        self.left.pop(stream, None)
        for other in self.left:
            wait_for_stream(other, self._device_index)
        live = {other: [one for one in results if one() is not None] for other, results in self.left.items()}
        self.left = {other: results for other, results in live.items() if results}
        self._last_outside = stream  # after the waits: an interrupted call leaves them to the next one
        self.last = None if self.left else stream

    def before(self) -> torch.cuda.Stream | None:
        """Return the stream on which launches may still be running; None if nothing was called."""
        before = self._last_outside
        return None if before is None else stream_of(before, self._device_index)


def follow_streams(device_index: int) -> None:
    """Order this thread's next work on a device after the graphs that it called. Note [Calls past the manager].

    Inside of another function this does nothing: that function's call is already ordered.
    """
    manager = manager_of(device_index)
    if manager is None or manager.streams.last == torch_internals.current_raw_stream(device_index):
        return
    if threading.get_ident() in manager.streams.callers and not inside_a_function():
        with manager.turn:
            manager.streams.follow(manager.current_node)
