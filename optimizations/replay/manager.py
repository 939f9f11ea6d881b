"""The managers of Encore's recordings, one per thread and device, apart from stock's.

Stock keeps its managers in a dictionary that only the importing thread and its autograd threads can reach. Encore's is
made in each thread that needs it, and put into PyTorch's thread-local state, which the autograd engine hands on to the
threads that run this thread's backward.

Note [A reference for the thread-local state]. `torch._C._stash_obj_in_tls` takes an object over without counting a
reference, and drops one when the thread ends. So one is counted here, or the object would die under those who use it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from optimizations import torch_internals
from optimizations.indirection.following import OwnedMemory
from optimizations.replay.attempt import ineligible_reason
from optimizations.replay.function import Capturable
from optimizations.replay.node import EncoreNode
from optimizations.replay.rebind import with_globals
from optimizations.replay.recapture import pool_memory

trees = torch_internals.cudagraph_trees
CUDAGraphTreeManager: Any = trees.CUDAGraphTreeManager
TreeManagerContainer: Any = trees.TreeManagerContainer

_TLS_KEY = "encore_containers"


class _Containers:
    """The containers of one thread, by device."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_device: dict[int, EncoreContainer] = {}


_ALL: weakref.WeakSet[_Containers] = weakref.WeakSet()


def container(device_index: int) -> EncoreContainer:
    """The container of this thread (of the thread whose backward this one runs) for a CUDA device."""
    if not torch_internals.is_key_in_tls(_TLS_KEY):
        made = _Containers()
        _ALL.add(made)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # Note [A reference for the thread-local state]
        torch_internals.stash_obj_in_tls(_TLS_KEY, made)
    containers: _Containers = torch_internals.get_obj_in_tls(_TLS_KEY)
    with containers.lock:
        if device_index not in containers.by_device:
            containers.by_device[device_index] = EncoreContainer(device_index)
        return containers.by_device[device_index]


class EncoreManager(CUDAGraphTreeManager):
    """CUDAGraph Trees whose functions are `Capturable`s and whose nodes are `EncoreNode`s."""

    add_function = with_globals(CUDAGraphTreeManager.add_function, get_container=container)
    _record_function = with_globals(CUDAGraphTreeManager.record_function, CUDAGraphNode=EncoreNode)

    def record_function(self, new_inputs: list[Any], function_id: Any) -> Any:
        outputs = self._record_function(new_inputs, function_id)
        if self._capturable(function_id).mutation_refused is not None:
            for hints in self.non_cudagraph_managed_mutation_hint.values():
                hints.pop(function_id, None)
        return outputs

    def _capturable(self, function_id: Any) -> Capturable:
        return self.ids_to_funcs[function_id].model

    def _update_non_cudagraph_managed_mutation(self, function_id: Any, inputs: list[Any]) -> None:
        """As stock's, but a mutated input that may be read in place does not forbid a graph.

        Inputs in memory of the pool are left to stock: the graph would overwrite what it writes for the caller.
        """
        function = self.ids_to_funcs[function_id]
        if self._capturable(function_id).mutation_refused is None and function.mutated_input_idxs:
            managed = self._get_cuda_graph_recorded_tensor_checker()
            owned = OwnedMemory(pool_memory(self.cuda_graphs_thread_pool))
            if all(
                index in function.static_input_idxs
                or managed(inputs[index])
                or (_is_candidate(inputs[index], self.device_index) and inputs[index].data_ptr() not in owned)
                for index in function.mutated_input_idxs
            ):
                self.non_cudagraph_managed_mutation_hint[self._get_node_id()][function_id] = False
                return
        super()._update_non_cudagraph_managed_mutation(function_id, inputs)

    def nodes(self) -> Iterator[EncoreNode]:
        """All recordings."""
        nodes = list(self.get_roots()) if self.roots is not None else []
        while nodes:
            node = nodes.pop()
            yield node
            for children in node.children.values():
                nodes.extend(children)

    def shutdown(self) -> None:
        """As stock's; frees what the nodes hold beside their graphs as well. Nothing can be run any more."""
        nodes = list(self.nodes())
        super().shutdown()
        for node in nodes:
            node.release()


class EncoreContainer(TreeManagerContainer):
    """Stock's container, which ends its manager when no function needs it any more, with a manager of Encore's."""

    tree_manager: EncoreManager | None

    def get_tree_manager(self) -> EncoreManager:
        with self.lock:
            if self.tree_manager is None:
                self.tree_manager = EncoreManager(self.device_index)
            return self.tree_manager


def _is_candidate(value: Any, device_index: int) -> bool:
    return ineligible_reason(value, device_index) is None


record = with_globals(trees.cudagraphify, get_container=container)
"""`torch._inductor.cudagraph_trees.cudagraphify` with the managers of this module. See `function.Record`."""


def managers(device_index: int | None = None) -> list[EncoreManager]:
    """The managers there are, of all threads, on one device or on all."""
    return [
        found.tree_manager
        for containers in list(_ALL)
        for index, found in list(containers.by_device.items())
        if found.tree_manager is not None and device_index in (None, index)
    ]


def shut_down() -> None:
    """Shut every manager down and forget it: graphs, memory pools and placeholders are freed."""
    for containers in list(_ALL):
        with containers.lock:
            for found in containers.by_device.values():
                if found.tree_manager is not None:
                    found.tree_manager.shutdown()
            containers.by_device.clear()
