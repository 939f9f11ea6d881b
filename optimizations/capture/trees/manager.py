"""Managers of Encore's recordings: CUDAGraph Trees whose nodes read their inputs in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.trees.containers import thread_containers
from optimizations.capture.trees.function import Capturable
from optimizations.capture.trees.node import EncoreNode
from optimizations.captured.recapture import pool_memory
from optimizations.recording.attempt import ineligible_reason
from optimizations.replay.addresses import OwnedMemory
from optimizations.torch_internals.rebind import with_globals

trees = torch_internals.cudagraph_trees
CUDAGraphTreeManager: Any = trees.CUDAGraphTreeManager
TreeManagerContainer: Any = trees.TreeManagerContainer


def container(device_index: int) -> EncoreContainer:
    """The container of this thread (of the thread whose backward this one runs) for a CUDA device."""
    containers = thread_containers()
    with containers.lock:
        if device_index not in containers.by_device:
            containers.by_device[device_index] = EncoreContainer(device_index)
        found: EncoreContainer = containers.by_device[device_index]
        return found


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
        """As stock's; frees what the nodes hold beside their graphs as well. Nothing can be run any more.

        Waits for the device: a replay under way on another stream reads what is freed here.
        """
        nodes = list(self.nodes())
        torch.cuda.synchronize(self.device_index)
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
