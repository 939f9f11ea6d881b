"""CUDAGraph Trees have all that Encore uses, and newer PyTorch's handling of results and inputs is disabled."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, check, nodes, values

from optimizations import torch_internals
from optimizations.torch_internals import stock_trees
from optimizations.trees import graphed_function, manager, node, reasons, results
from optimizations.trees.containers import managers

OWN_SETTINGS = {
    "kernel_free_cudagraph": True,
    "user_visible_output_idxs": (0,),
    "cudagraph_managed_input_rerecord_limit": 1,
}
"""What Inductor passes where a program sets it."""


@contextmanager
def settings(**options: Any) -> Iterator[None]:
    """Set those of Inductor's options that this version has."""
    triton = torch_internals.inductor_config.triton
    known = {f"triton.{name}": value for name, value in options.items() if hasattr(triton, name)}
    with torch_internals.inductor_config.patch(known):
        yield


def test_duplicates_are_always_disabled() -> None:
    def stock(model: Any, user_visible_output_idxs: Any = (7,), other: int = 0) -> Any:
        return model, user_visible_output_idxs, other

    assert stock_trees.without_duplicates(stock)("model", **OWN_SETTINGS, other=3) == ("model", (), 3)


def test_function_without_kernels_is_captured(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu), **OWN_SETTINGS)
    check(compiled, values(7), calls=4)
    assert [node.graph is not None for node in nodes()] == [True]
    assert len(compiled.functions[0].recordings()) == 1


def test_kept_results_are_copied_by_encore(cuda_on_cpu: CudaOnCpu) -> None:
    w = values(7)
    with settings(cudagraph_trees_generation_cloning="user_visible"):
        compiled = Compiled(Model(cuda_on_cpu), **OWN_SETTINGS)
        kept = []
        for step in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            (out,) = compiled.function([values(step), values(1), w])
            kept.append((out, 2 * values(step) + values(1) * w))
    assert all(torch.equal(out, expected) for out, expected in kept)
    (function,) = compiled.functions
    assert function.kept_outputs == {0}
    assert {one.reason for one in function.uncaptured()} == {reasons.KEPT}
    assert not any(getattr(one, "has_live_user_visible_output_cloning", False) for one in managers())


def test_every_size_is_recorded(cuda_on_cpu: CudaOnCpu) -> None:
    def scaled(inputs: list[Any]) -> list[Any]:
        model, (_, x) = Model(cuda_on_cpu), inputs
        inputs.clear()
        return model([x, x, x])

    with settings(cudagraph_dynamic_shape_rerecord_limit=1):
        compiled = Compiled(scaled, static_inputs=())
        for step in range(9):
            torch.compiler.cudagraph_mark_step_begin()
            compiled.function([step % 3, values(step)])
    assert len(compiled.functions) == 3
    assert [len(function.recordings()) for function in compiled.functions] == [1, 1, 1]


def test_moved_results_are_never_demoted_to_copies(cuda_on_cpu: CudaOnCpu) -> None:
    """Encore records such a function again, or patches it; since 2.15 stock copies the input from then on."""
    first, second = Compiled(Model(cuda_on_cpu), **OWN_SETTINGS), Compiled(Model(cuda_on_cpu), **OWN_SETTINGS)
    w = values(7)
    for step in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        x, y = values(step), values(1)
        results = [first.function([x, y, w])[0] for _ in range(1 + step % 3)]
        (out,) = second.function([results[-1], y, w])
        assert torch.equal(out, 2 * (2 * x + y * w) + y * w), step
        del results, out
    for one in managers():
        assert not any(getattr(one, "demoted_cudagraph_managed_idxs", {}).values())
        assert not any(any(places.values()) for places in getattr(one, "skip_cudagraph", {}).values())


def test_copied_inputs_have_one_list(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, values(7), calls=3)
    (node,) = nodes()
    node.input_copy_idxs = [1]
    assert node.non_static_input_idx == node.input_copy_idxs == [1]


def test_recordings_leave_no_compilation_metrics(cuda_on_cpu: CudaOnCpu) -> None:
    """PyTorch takes as long for one as for a recording. Its timers count recordings."""
    utils = torch_internals.dynamo_utils
    utils.get_runtime_metrics_context().finish()
    utils.compilation_time_metrics.clear()
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, values(7), calls=3)
    assert utils.get_runtime_metrics_context()._metrics == {}
    assert len(utils.compilation_time_metrics["CUDAGraphNode.record"]) == len(nodes()) == 1


def test_released_pool_clears_its_decisions(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, values(7), calls=3)
    (one,) = managers()
    one.leave_pool()
    hint = "skip_cudagraph" if hasattr(one, "skip_cudagraph") else "non_cudagraph_managed_mutation_hint"
    assert not getattr(one, hint) and not one.num_rerecord


factor = 2


def scaled(value: int, *, offset: int = 1) -> int:
    """Reads a global."""
    return factor * value + offset


def test_rebound_function_reads_the_new_global() -> None:
    bound = stock_trees.with_globals(scaled, factor=10)
    assert (bound(3), scaled(3)) == (31, 7)
    assert bound(3, offset=0) == 30
    assert (bound.__name__, bound.__doc__) == (scaled.__name__, scaled.__doc__)


def test_global_that_is_not_read_is_refused() -> None:
    with pytest.raises(torch_internals.UnsupportedTorch, match=r"scaled does not read quotient"):
        stock_trees.with_globals(scaled, quotient=3)


def test_non_python_function_is_refused() -> None:
    with pytest.raises(torch_internals.UnsupportedTorch, match="not a plain Python function"):
        stock_trees.with_globals(len, factor=1)


def test_input_indices_are_found_as_in_a_list() -> None:
    indices = stock_trees.InputIndices([3, 0, 3, 7])
    assert [index in indices for index in range(9)] == [index in [3, 0, 7] for index in range(9)]
    indices = stock_trees.InputIndices([3, 0, 7])
    assert [index in indices for index in range(9)] == [index in [3, 0, 7] for index in range(9)]
    indices.append(5)
    indices.remove(0)
    indices += [8, 9]
    assert [index in indices for index in range(10)] == [index in [3, 7, 5, 8, 9] for index in range(10)]


# The classes of CUDAGraph Trees that Encore subclasses have, in the installed PyTorch, what Encore uses of them.


OURS = [node.EncoreNode, manager.EncoreManager, graphed_function.EncoreContainer]

OVERRIDDEN = {
    "EncoreNode": {
        *("_allocate_and_copy_recording_inputs", "_check_liveness", "_copy_inputs_and_remove_from_src", "_record"),
        *("_initialize_cached_tensors", "_mark_prior_graph_output_as_aliased"),
        *("_is_alias_of_live_recorded_tensor", "_is_cuda_graph_recorded_tensor"),
        *("_tensor_metadata", "check_invariants", "reconstruct_outputs", "remove_node_cached_tensors"),
        *("run", "run_first_inputs", "run_graph"),
    },
    "EncoreManager": {
        *("add_function", "apply_checkpoint_execution_state_in_allocator", "can_start_new_generation", "execute_node"),
        *("record_function", "run", "run_eager", "shutdown"),
    },
    "EncoreContainer": {"_finalize_tree_manager", "get_tree_manager"},
}
"""Methods that Encore replaces, around PyTorch's own. One that is not here has a name that PyTorch uses too."""


def definition(one: type) -> ast.ClassDef:
    tree = ast.parse(Path(inspect.getsourcefile(one) or "").read_text())
    return next(found for found in tree.body if isinstance(found, ast.ClassDef) and found.name == one.__name__)


def attributes(tree: ast.AST, owner: str, kinds: tuple[type, ...] = (ast.Load, ast.Store)) -> set[str]:
    """Names of the attributes of a local variable."""
    return {
        found.attr
        for found in ast.walk(tree)
        if isinstance(found, ast.Attribute) and isinstance(found.value, ast.Name) and found.value.id == owner
        if isinstance(found.ctx, kinds)
    }


def members(one: Any) -> set[str]:
    """Everything that a class, or its methods on `self`, define."""
    return attributes(definition(one), "self", (ast.Store,)) | {name for name in vars(one) if not name.startswith("__")}


@pytest.mark.parametrize("ours", OURS)
def test_used_members_exist(ours: type) -> None:
    used = attributes(definition(ours), "self")
    if ours is node.EncoreNode:
        used |= attributes(ast.parse(inspect.getsource(results)), "node")
    assert used - members(ours) <= members(ours.__base__)


@pytest.mark.parametrize("ours", OURS)
def test_only_known_members_are_overridden(ours: type) -> None:
    both = members(ours) & members(ours.__base__)
    assert {name for name in both if callable(getattr(ours, name, None))} == OVERRIDDEN[ours.__name__]
    stored = attributes(definition(ours), "self", (ast.Store,)) & members(ours.__base__)
    assert {name for name in stored if name.startswith("_")} == set()


@pytest.mark.parametrize("ours", OURS)
def test_overriding_methods_take_stocks_arguments(ours: type) -> None:
    for name in OVERRIDDEN[ours.__name__]:
        mine, stock = (inspect.signature(getattr(one, name)).parameters for one in (ours, ours.__base__))
        passes_on = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in mine.values())
        assert passes_on or [*mine] == [*stock] or name == "_check_liveness", name
