"""Prepare fast calls of recordings: what a call has to compare before it may launch, laid out once.

`fast_path` takes them. A recording gets one when it was recorded, and when it was replayed on the slow path.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from optimizations import torch_internals
from optimizations.torch_internals.stock_trees import compared_inputs
from optimizations.trees.node import EncoreNode

MOST_KEPT = 128
"""Fast calls that are kept for one function after one recording: one for each recording that alternates with others
there. To check one more on the fast path takes a hundredth of what the slow path does.
"""


class FastCall:
    """Call one recording again in the circumstances of the call before, with all checks laid out in advance.

    Attributes:
        node: the recording; `state`: its state when this was made. Another one now: this is not valid any more.
        addresses, compared: where inputs at fixed addresses and results of earlier graphs lie, and their places.
        dead_before, dead_after: references to results that must have died before the graph, and when it runs.
        dying: places of inputs that are results of earlier graphs, and are let go before the launch.
    """

    __slots__ = (
        "addresses",
        "compared",
        "dead_after",
        "dead_before",
        "dying",
        "graph",
        "node",
        "seeds",
        "session",
        "state",
        "tracker",
    )

    def __init__(self, node: EncoreNode) -> None:
        self.node = node
        self.state = node.state
        self.addresses = node.static_input_data_ptrs
        self.compared = sorted(compared_inputs(node))  # results of earlier graphs are among them
        # At an address of the GPU that is compared, no seed can lie on the host.
        self.seeds = [index for index in node.function.code().seeds if index not in self.compared]
        self.dead_before = node.references(node.expected_dead_indices_before_graph)
        self.dead_after = node.references(node.expected_dead_indices_after_graph)
        self.dying = [index for index in node.cudagraph_managed_idxs if not node.preserved_aliased_inputs[index]]
        self.tracker = node.tracker
        self.session = node.session
        self.graph: Any = node.graph

    @property
    def valid(self) -> bool:
        """Return whether the recording is unchanged since this was made."""
        return bool(self.state == self.node.state)


def fast_call(node: EncoreNode) -> FastCall | None:
    """Return the fast call of a recording, or None if it can have none now."""
    options = torch_internals.inductor_config.triton
    debugging = options.fast_path_cudagraph_asserts or options.force_cudagraph_sync or options.force_cudagraphs_warmup
    if debugging or node.function.returned_inputs or node.reads_what_is_gone or node.graph is None:
        return None
    return FastCall(node)


class FastCalls:
    """Hold the fast calls of one manager's functions, by function and by the recording before them (None: none)."""

    def __init__(self) -> None:
        self._calls: defaultdict[Any, dict[EncoreNode | None, list[FastCall]]] = defaultdict(dict)

    def of(self, function_id: Any) -> dict[EncoreNode | None, list[FastCall]]:
        """Return those of one function; always the same dictionary."""
        return self._calls[function_id]

    def clear(self) -> None:
        """Forget all of them."""
        for calls in self._calls.values():
            calls.clear()

    def expect(self, node: EncoreNode) -> None:
        """Let the next call like the one that this recording served take the fast path."""
        if not node.function.lean:
            return
        found = self._calls[node.wrapped_function.id]
        calls = [call for call in found.get(node.parent, ()) if call.valid]
        if not any(call.node is node for call in calls):
            made = fast_call(node)
            calls = [*([] if made is None else [made]), *calls][:MOST_KEPT]
            # What was recorded for a call's addresses comes before what copies it.
            calls.sort(key=lambda one: one.node.copies_parameters)
        if calls:
            found[node.parent] = calls
        else:
            found.pop(node.parent, None)
