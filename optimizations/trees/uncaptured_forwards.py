"""Mark the results of forwards that ran without a graph, so that their backwards are recognized.

Note [Uncaptured forwards]. A forward that ran without a graph has its saved tensors in ordinary memory, at new
addresses in each call. A backward assumes fixed addresses for saved tensors, so its recording would fit no later call.
Such a backward runs without a graph too. It is recognized by the storages of its inputs: each result of the forward is
marked, except parameters and results of graphs, which outlive the forward and are inputs of other calls as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from optimizations import torch_internals


class UncapturedForwards:
    """Hold the storages that forwards without a graph returned and that are still alive."""

    def __init__(self) -> None:
        self._marks: dict[int, Any] = {}

    def mark(self, results: Iterable[Any], fixed: Iterable[Any], graph_memory: Collection[int]) -> None:
        """Mark the results of a forward.

        Args:
            results: the forward's results.
            fixed: its inputs at fixed addresses.
            graph_memory: addresses of live results of graphs.
        """
        for key, mark in self._marks.copy().items():  # another thread may mark what a function called inside returned
            if mark.expired() and self._marks.get(key) is mark:
                self._marks.pop(key, None)
        lasting = {value.untyped_storage()._cdata for value in fixed if isinstance(value, torch.Tensor)}
        for value in results:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in lasting and storage.data_ptr() not in graph_memory:
                    # A weak reference keeps the key from being used for another storage.
                    self._marks[storage._cdata] = torch_internals.cudagraph_trees.StorageWeakRef(storage)

    def unmark(self, values: Iterable[Any]) -> None:
        """Remove the marks of what a forward with a graph returned: some are the caller's inputs."""
        for value in values if self._marks else ():
            if isinstance(value, torch.Tensor):
                self._marks.pop(value.untyped_storage()._cdata, None)

    def returned_any_of(self, inputs: Iterable[Any]) -> bool:
        """Return whether one of a backward's inputs was returned by a forward without a graph."""
        marks = self._marks
        return bool(marks) and any(
            isinstance(value, torch.Tensor)
            and (mark := marks.get(value.untyped_storage()._cdata)) is not None
            and not mark.expired()
            for value in inputs
        )
