"""Read what Inductor's generated code does around the one partition that is a whole graph: it orders values.

The code takes each argument out of a list, puts them into another one, and calls the partition; for a thousand
parameters that takes as long as a launch. Where its source does nothing else, the order it passes things on in is all
there is to know. Any other statement means that the code does more.
"""

from __future__ import annotations

import ast
import inspect
import re
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
    statements = (ast.unparse(one) for one in tree.body[0].body if not isinstance(one, ast.Delete))
    found = _PASSES_ON.fullmatch("\n".join(statements))
    if found is None:
        return None
    arguments, passed, given, returned = (found[name].replace(",", " ").split() for name in _GROUPS)
    if not set(passed) <= set(arguments) or not set(returned) <= set(given):
        return None
    taken = [*arguments, *given, found["held"], "args"]
    if len(set(taken)) != len(taken):
        return None
    places = {name: place for place, name in enumerate(arguments)}
    return Order(tuple(places[name] for name in passed), tuple(given.index(name) for name in returned), len(given))


_TUPLE = r"\w+,(?: \w+(?:, \w+)*)?"
_GROUPS = ("arguments", "passed", "given", "returned")
_PASSES_ON = re.compile(
    rf"\(?(?P<arguments>{_TUPLE})\)? = args\n"
    r"args\.clear\(\)\n"
    r"(?P<held>\w+) = \[(?P<passed>(?:\w+(?:, \w+)*)?)\]\n"
    rf"\(?(?P<given>{_TUPLE})\)? = self\.partitions\[0\]\((?P=held)\)\n"
    rf"return \((?P<returned>{_TUPLE})\)"
)
"""The statements of such a function, without `del`, as `ast.unparse` writes them."""
