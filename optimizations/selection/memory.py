"""Memory that calls without a graph took while they were measured, given back when graphs serve again.

A program under stock's graphs has its intermediate results, and the workspaces of its matrix products, in the graphs'
pool only. Measured calls without a graph had them in PyTorch's own memory as well, which the allocator would keep for
ever. Workspaces, 32 MiB on Hopper for each thread and stream, are freed as each recording of stock's frees them; they
stay where a graph that the program captured by hand may write to one.
"""

from __future__ import annotations

import torch

from optimizations.captured.pools import free_workspaces


class Borrowed:
    """What one stretch of measuring took from the device.

    Attributes:
        due: whether `give_back` is to be called, by whoever holds no lock that another thread waits for.
    """

    def __init__(self) -> None:
        self.due = False
        self._device_index = 0
        self._before: int | None = None

    def begin(self, device_index: int) -> None:
        """Calls without a graph follow."""
        if self._before is None:
            self._device_index, self._before = device_index, torch.cuda.memory_reserved(device_index)

    def take_over(self, other: Borrowed) -> None:
        """What calls of another group took, which is one with this now."""
        if self._before is None:
            self._device_index, self._before = other._device_index, other._before
        other._before, other.due = None, False

    def end(self) -> None:
        """No more calls without a graph follow."""
        self.due = self._before is not None

    def give_back(self) -> None:
        """No more calls without a graph follow: the device gets back what was taken meanwhile and is not in use.

        Waits for the device once, as each recording of stock's does. Inside a capture nothing is given back.
        """
        before, self._before = self._before, None
        self.due = False
        if before is None or torch.cuda.is_current_stream_capturing():
            return
        if torch.cuda.memory_reserved(self._device_index) > before:
            free_workspaces()
            torch.cuda.empty_cache()

    def keep(self) -> None:
        """Calls go on without a graph: what they took, they need."""
        self._before = None
