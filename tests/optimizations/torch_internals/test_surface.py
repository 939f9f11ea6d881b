"""What Encore uses of the classes it subclasses is listed, and is what the installed PyTorch has."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from optimizations import torch_internals
from optimizations.torch_internals.surface import SUBCLASSED, Surface
from optimizations.trees import cudagraphify, manager, node, results

INSTALLED = tuple(surface.at(torch_internals.version()) for surface in SUBCLASSED)

OURS: dict[str, tuple[type, ...]] = {
    "CUDAGraphNode": (node.EncoreNode,),
    "CUDAGraphTreeManager": (manager.EncoreManager,),
    "TreeManagerContainer": (cudagraphify.EncoreContainer,),
}


def stock(surface: Surface) -> Any:
    return getattr(torch_internals.cudagraph_trees, surface.name)


def members(stock_class: Any) -> set[str]:
    """Everything that the class, or its methods on `self`, define."""
    tree = ast.parse(inspect.getsource(stock_class))
    stored = {
        found.attr
        for found in ast.walk(tree)
        if isinstance(found, ast.Attribute)
        and isinstance(found.value, ast.Name)
        and found.value.id == "self"
        and isinstance(found.ctx, ast.Store)
    }
    return stored | {name for name in vars(stock_class) if not name.startswith("__")}


@pytest.mark.parametrize("surface", INSTALLED, ids=lambda one: one.name)
def test_methods_have_the_listed_parameters(surface: Surface) -> None:
    for name, parameters in surface.methods.items():
        member = inspect.getattr_static(stock(surface), name)
        if parameters is None:
            assert isinstance(member, property), name
            continue
        function = member.__func__ if isinstance(member, staticmethod) else member
        assert tuple(inspect.signature(function).parameters) == parameters, name
    assert surface.attributes <= members(stock(surface))


@pytest.mark.parametrize("surface", INSTALLED, ids=lambda one: one.name)
def test_overridden_members_are_listed(surface: Surface) -> None:
    ours = {name for one in OURS[surface.name] for name in vars(one) if not name.startswith("__")}
    assert ours & members(stock(surface)) - {"current_node", "roots"} - surface.attributes == surface.overridden


@pytest.mark.parametrize("surface", INSTALLED, ids=lambda one: one.name)
def test_used_members_are_listed(surface: Surface) -> None:
    """By names: an attribute that the class has, and that stands in the sources behind `self`, is a use of it."""
    definitions = [
        found
        for one in OURS[surface.name]
        for found in ast.parse(Path(inspect.getsourcefile(one) or "").read_text()).body
        if isinstance(found, ast.ClassDef) and found.name == one.__name__
    ]
    assert len(definitions) == len(OURS[surface.name])
    used = {
        found.attr
        for definition in definitions
        for found in ast.walk(definition)
        if isinstance(found, ast.Attribute) and isinstance(found.value, ast.Name) and found.value.id == "self"
    }
    if surface.name == "CUDAGraphNode":  # what the results of a node use of it
        used |= {
            found.attr
            for found in ast.walk(ast.parse(inspect.getsource(results)))
            if isinstance(found, ast.Attribute) and isinstance(found.value, ast.Name) and found.value.id == "node"
        }
    listed = surface.attributes | surface.methods.keys()
    assert used & members(stock(surface)) <= listed
