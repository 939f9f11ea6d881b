"""Record functions with Encore's managers, as stock's `cudagraphify` does with its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.rebind import with_globals
from optimizations.torch_internals.stock_trees import named_arguments, without_duplicates
from optimizations.trees.containers import TreeManagerContainer, thread_containers
from optimizations.trees.fast_path import on_fast_path
from optimizations.trees.function import RecordableFunction
from optimizations.trees.inner_graphs import resting
from optimizations.trees.manager import EncoreManager
from optimizations.trees.reasons import INSIDE_CAPTURE


class EncoreContainer(TreeManagerContainer):
    """Hold a manager of Encore's. It is stock's container, which ends its manager once no function needs it."""

    tree_manager: EncoreManager | None

    def _finalize_tree_manager(self) -> None:
        if self.tree_manager is not None:
            self.tree_manager.outlived()
        super()._finalize_tree_manager()

    def get_tree_manager(self, *arguments: Any, **keywords: Any) -> EncoreManager:
        with self.lock:
            if self.tree_manager is None:
                settings = named_arguments(super().get_tree_manager, arguments, keywords)
                self.tree_manager = EncoreManager(self.device_index, **settings)
            return self.tree_manager


def container(device_index: int) -> EncoreContainer:
    """Return the container of this thread (of the thread whose backward this one runs) for a CUDA device."""
    by_device = thread_containers().by_device
    found: EncoreContainer | None = by_device.get(device_index)
    return by_device.setdefault(device_index, EncoreContainer(device_index)) if found is None else found


_record = without_duplicates(with_globals(torch_internals.cudagraph_trees.cudagraphify, get_container=container))


def record(
    function: RecordableFunction, inputs: list[Any], *arguments: Any, **keywords: Any
) -> tuple[Callable[[list[Any]], Any] | None, Any]:
    """Record a function as `torch._inductor.cudagraph_trees.cudagraphify` does. See `graphed_function.Record`.

    Not inside of a capture of the program's own: a manager captures when it is made.
    """
    if not resting() and torch.cuda.is_current_stream_capturing():
        function.ran_without_graph(INSIDE_CAPTURE)
        return None, function(inputs)
    full, outputs = _record(function, inputs, *arguments, **keywords)
    return on_fast_path(full.func.__self__, full), outputs
