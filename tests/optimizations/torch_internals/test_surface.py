"""The classes of CUDAGraph Trees that Encore subclasses have, in the installed PyTorch, what Encore uses of them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from optimizations.trees import graphed_function, manager, node, results

OURS = [node.EncoreNode, manager.EncoreManager, graphed_function.EncoreContainer]

OVERRIDDEN = {
    "EncoreNode": {
        *("_allocate_and_copy_recording_inputs", "_check_liveness", "_copy_inputs_and_remove_from_src", "_record"),
        *("_initialize_cached_tensors", "_mark_prior_graph_output_as_aliased"),
        *("check_invariants", "reconstruct_outputs", "remove_node_cached_tensors", "run", "run_graph"),
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
