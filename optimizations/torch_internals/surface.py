"""Members of the classes of PyTorch that Encore subclasses, and uses or overrides: what a new PyTorch may change.

`tests/test_surface.py` compares this list with the installed PyTorch, and with what `capture/trees` really uses.
Checked on 2.11; docs/supporting_torch.md tells how to check another version.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Surface:
    """A class of PyTorch.

    Attributes:
        name: its entry among the attributes of `torch._inductor.cudagraph_trees`.
        methods: by name, the parameters of methods, properties as `None`.
        attributes: what its instances hold.
        overridden: which of these Encore replaces, around PyTorch's own.
    """

    name: str
    methods: dict[str, tuple[str, ...] | None]
    attributes: frozenset[str]
    overridden: frozenset[str]


SUBCLASSED = (
    Surface(
        "CUDAGraphNode",
        methods={
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
    ),
    Surface(
        "CUDAGraphTreeManager",
        methods={
            "add_function": (
                "self",
                "model",
                "inputs",
                "static_input_idxs",
                "stack_traces",
                "mode",
                "constants",
                "placeholders",
                "mutated_input_idxs",
                "compile_id",
            ),
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
    ),
    Surface(
        "TreeManagerContainer",
        methods={"_finalize_tree_manager": ("self",), "get_tree_manager": ("self",)},
        attributes=frozenset(("device_index", "lock", "tree_manager")),
        overridden=frozenset(("_finalize_tree_manager", "get_tree_manager")),
    ),
)
