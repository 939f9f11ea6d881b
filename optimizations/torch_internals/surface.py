"""List the members of PyTorch classes that Encore subclasses, uses or overrides: what a new PyTorch may change.

`tests/optimizations/torch_internals/test_surface.py` compares this list with the installed PyTorch, and with what
`trees` really uses. It is written for 2.11, and `later` says what newer versions changed; `stock_trees` lets Encore's
code ignore that.
docs/supporting_torch.md describes how to check another version.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Later:
    """Hold what a version changed.

    Attributes:
        since: the minor version.
        methods: the parameters of methods that have others now.
        attributes: attributes that Encore uses, and that are new.
        gone: attributes that no longer exist.
    """

    since: tuple[int, int]
    methods: dict[str, tuple[str, ...] | None] = dataclasses.field(default_factory=dict)
    attributes: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Surface:
    """Describe a class of PyTorch.

    Attributes:
        name: its entry among the attributes of `torch._inductor.cudagraph_trees`.
        methods: by name, the parameters of methods, properties as `None`.
        attributes: what its instances hold.
        overridden: which of these Encore replaces, around PyTorch's own.
        later: what versions after 2.11 changed, oldest first.
    """

    name: str
    methods: dict[str, tuple[str, ...] | None]
    attributes: frozenset[str]
    overridden: frozenset[str]
    later: tuple[Later, ...] = ()

    def at(self, version: tuple[int, int]) -> Surface:
        """Return the class as a minor version of PyTorch has it."""
        found = self
        for change in self.later:
            if change.since <= version:
                found = dataclasses.replace(
                    found,
                    methods=found.methods | change.methods,
                    attributes=(found.attributes | change.attributes) - change.gone,
                )
        return found


_ADD_FUNCTION = (
    "self",
    "model",
    "inputs",
    "static_input_idxs",
    "stack_traces",
    "mode",
    "constants",
    "placeholders",
    "mutated_input_idxs",
)


SUBCLASSED = (
    Surface(
        "CUDAGraphNode",
        methods={
            "_allocate_and_copy_recording_inputs": ("self", "inputs"),
            "_check_liveness": ("indices", "output_refs"),
            "_copy_inputs_and_remove_from_src": ("self", "dsts", "srcs"),
            "_initialize_cached_tensors": ("self",),
            "_is_cuda_graph_recorded_tensor": ("self", "t"),
            "_mark_prior_graph_output_as_aliased": ("self", "index"),
            "_path_from_root": None,
            "_reconstruct_from_tensor_metadata": ("self", "metadata", "storage"),
            "_record": ("self", "model", "inputs"),
            "_tensor_metadata": ("x", "ignore_storage_offset"),
            "all_outputs_are_dead": ("self",),
            "check_invariants": ("self", "inputs"),
            "create_storage": ("self", "metadata"),
            "parent": None,
            "path_live_weakrefs": ("self",),
            "prepare_alias_info_for_tensor_construction": ("self", "out_alias_info", "metadata"),
            "reconstruct_outputs": ("self",),
            "remove_node_cached_tensors": ("self",),
            "run": ("self", "new_inputs"),
            "run_graph": ("self",),
        },
        attributes=frozenset(
            (
                "cached_tensor_outputs",
                "children",
                "cuda_graphs_pool",
                "cudagraph_managed_idxs",
                "device",
                "expected_dead_indices_after_graph",
                "expected_dead_indices_before_graph",
                "graph",
                "live_indices_after_graph",
                "non_managed_static_input_idxs",
                "non_static_input_idx",
                "output_storage_alias",
                "outputs_metadata",
                "outputs_weakrefs",
                "path_weakrefs",
                "preserved_aliased_inputs",
                "reconstructed_inputs",
                "static_input_data_ptrs",
                "static_input_idxs",
                "static_output_tensors",
                "stream",
                "unaliased_in_all_paths",
                "wrapped_function",
            )
        ),
        overridden=frozenset(
            (
                "_allocate_and_copy_recording_inputs",
                "_check_liveness",
                "_copy_inputs_and_remove_from_src",
                "_initialize_cached_tensors",
                "_mark_prior_graph_output_as_aliased",
                "_record",
                "all_outputs_are_dead",
                "check_invariants",
                "reconstruct_outputs",
                "remove_node_cached_tensors",
                "run",
                "run_graph",
            )
        ),
        later=(
            Later((2, 12), attributes=frozenset(("tensor_static_input_idxs",))),
            Later((2, 15), attributes=frozenset(("input_copy_idxs",))),
        ),
    ),
    Surface(
        "CUDAGraphTreeManager",
        methods={
            "add_function": (*_ADD_FUNCTION, "compile_id"),
            "apply_checkpoint_execution_state_in_allocator": ("self",),
            "can_start_new_generation": ("self",),
            "_get_node_id": ("self",),
            "current_node": None,
            "exceed_rerecord_limit": ("self", "node_id", "function_id"),
            "execute_node": ("self", "node", "new_inputs"),
            "get_curr_generation": (),
            "get_roots": ("self",),
            "record_function": ("self", "new_inputs", "function_id"),
            "run": ("self", "new_inputs", "function_id"),
            "run_eager": ("self", "new_inputs", "function_id"),
            "shutdown": ("self",),
            "update_generation": ("self",),
            "user_invoked_mark_step": (),
        },
        attributes=frozenset(
            (
                "compile_id",
                "cuda_graphs_thread_pool",
                "current_gen",
                "device_index",
                "graph",
                "id_to_compile_id",
                "id_to_mode",
                "ids_to_funcs",
                "mode",
                "non_cudagraph_managed_mutation_hint",
                "num_rerecord",
                "path_state",
                "roots",
                "running_forwards_with_pending_backwards",
                "stream",
                "warmed_up_functions",
            )
        ),
        overridden=frozenset(
            (
                "add_function",
                "apply_checkpoint_execution_state_in_allocator",
                "can_start_new_generation",
                "execute_node",
                "record_function",
                "run",
                "run_eager",
                "shutdown",
            )
        ),
        later=(
            Later(
                (2, 14),
                methods={
                    "add_function": (
                        *_ADD_FUNCTION,
                        "kernel_free_cudagraph",
                        "user_visible_output_idxs",
                        "compile_id",
                    ),
                    "can_start_new_generation": ("self", "curr_generation"),
                },
            ),
            Later(
                (2, 15),
                methods={
                    "add_function": (
                        *_ADD_FUNCTION,
                        "kernel_free_cudagraph",
                        "user_visible_output_idxs",
                        "compile_id",
                        "cudagraph_managed_input_rerecord_limit",
                        "cudagraph_managed_input_rerecord_action",
                    )
                },
                attributes=frozenset(
                    ("skip_cudagraph", "cudagraph_managed_input_rerecord", "demoted_cudagraph_managed_idxs")
                ),
                gone=frozenset(("non_cudagraph_managed_mutation_hint",)),
            ),
        ),
    ),
    Surface(
        "TreeManagerContainer",
        methods={"_finalize_tree_manager": ("self",), "get_tree_manager": ("self",)},
        attributes=frozenset(("device_index", "lock", "tree_manager")),
        overridden=frozenset(("_finalize_tree_manager", "get_tree_manager")),
        later=(Later((2, 15), methods={"get_tree_manager": ("self", "initial_mempool_allocation_gb")}),),
    ),
)
