"""Read what Inductor's generated code does around the one partition that is a whole graph: it orders values.

The code takes each argument out of a list, puts them into another one, and calls the partition; for a thousand
parameters that takes as long as a launch. Where its source does nothing else, the order it passes things on in is all
there is to know. Any other statement means that the code does more.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Order:
    """Hold the order in which a graph's arguments go to its partition, and the partition's results to the caller.

    Attributes:
        arguments: by place among the partition's arguments: the place among the graph's.
        results: by place among the graph's results: the place among the partition's, of which there are `given`.
    """

    arguments: tuple[int, ...]
    results: tuple[int, ...]
    given: int

    @property
    def results_as_given(self) -> bool:
        """Return whether the graph's results are the partition's, in their order."""
        return self.results == tuple(range(self.given))


def only_partition(graph: Any) -> tuple[Any, Order] | None:
    """Return what holds the partition of a `CompiledFxGraph` (in `partitions`), and its order; None for more.

    The graph's function (`current_callable`) must be the generated one, with nothing around it.
    """
    runner = getattr(graph, "compiled_fn_runner", None)
    if runner is None or len(getattr(runner, "partitions", ())) != 1:
        return None
    function = graph.current_callable
    if getattr(function, "__self__", None) is not runner:
        return None
    found = order_of(function)
    return None if found is None else (runner, found)


def order_of(function: Callable[..., Any]) -> Order | None:
    """Return the order in which a generated function passes on; None where it does anything else, or has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(function, "__func__", function))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return None
    statements = [one for one in tree.body[0].body if not isinstance(one, ast.Delete)]
    if len(statements) != 5:
        return None
    taken, cleared, listed, called, returned = statements
    arguments = _assigned_names(taken)
    if arguments is None or not _is_args(taken) or ast.unparse(cleared) != "args.clear()":
        return None
    if not (isinstance(listed, ast.Assign) and isinstance(listed.value, ast.List) and len(listed.targets) == 1):
        return None
    held, passed = listed.targets[0], _names(listed.value.elts)
    results = _assigned_names(called)
    if passed is None or results is None or not isinstance(held, ast.Name) or not isinstance(called, ast.Assign):
        return None
    if ast.unparse(called.value) != f"self.partitions[0]({held.id})":
        return None
    if not (isinstance(returned, ast.Return) and isinstance(returned.value, ast.Tuple)):
        return None
    handed = _names(returned.value.elts)
    if handed is None or not set(passed) <= set(arguments) or not set(handed) <= set(results):
        return None
    if {held.id, "args"} & {*arguments, *results} or set(arguments) & set(results):
        return None
    if len(set(arguments)) != len(arguments) or len(set(results)) != len(results):
        return None
    places = {name: place for place, name in enumerate(arguments)}
    return Order(tuple(places[name] for name in passed), tuple(results.index(name) for name in handed), len(results))


def _is_args(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name) and statement.value.id == "args"


def _assigned_names(statement: ast.stmt) -> list[str] | None:
    """Return the names that one tuple is unpacked to."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    return _names(target.elts) if isinstance(target, ast.Tuple) else None


def _names(elements: list[ast.expr]) -> list[str] | None:
    names = [one.id for one in elements if isinstance(one, ast.Name)]
    return names if len(names) == len(elements) else None
