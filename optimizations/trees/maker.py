"""Make CUDA graphs with Encore's managers when `hook` calls it in stock's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations.graph.prelude_check import unload_kernels
from optimizations.options import Options
from optimizations.report import ReportedFunction
from optimizations.torch_internals.only_partition import only_partition
from optimizations.trees import containers
from optimizations.trees.graphed_function import GraphedFunction, container
from optimizations.trees.readable_seeds import give_readable_seeds


class EncoreMaker:
    """Make CUDA graphs of compiled functions in stock's place, for one compilation. See `hook`.

    Args:
        options: the user's; `indirection` is anything but "off".
        report: called with every function that is made into CUDA graphs, and reads its report from it later.
    """

    def __init__(self, options: Options, report: Callable[[ReportedFunction], None]) -> None:
        self._options = options
        self._report = report
        self._forward: Any = None  # the `CompiledFxGraph` of a forward, until its autograd function is made

    def cudagraphify(
        self,
        model: Callable[[list[Any]], Any],
        static_input_idxs: Sequence[int] = (),
        *,
        is_backward: bool,
        is_inference: bool,
        **keywords: Any,
    ) -> GraphedFunction:
        """See `torch._inductor.compile_fx.cudagraphify`."""
        return GraphedFunction(
            model,
            self._options,
            self._report,
            "backward" if is_backward else "inference" if is_inference else "forward",
            static_input_idxs=static_input_idxs,
            **keywords,
        )

    def get_manager(self, device_index: int | None = None, create_if_none_exists: bool = True) -> Any:
        """See `torch._inductor.cudagraph_trees.get_manager`.

        It is created if missing: a backward from a cache is compiled before its forward was ever called, and stock
        asserts that the manager exists.
        """
        index = torch.cuda.current_device() if device_index is None else device_index
        return container(index).get_tree_manager()

    def compiled(self, compiled_graph: Any, *, graphed: bool) -> None:
        """Callback: Inductor compiled or loaded `compiled_graph`; `graphed`: CUDA graphs run its functions."""
        give_readable_seeds(compiled_graph, graphed=graphed)
        settings = compiled_graph.fx_kwargs
        if graphed and not settings.get("is_backward") and not settings.get("is_inference"):
            self._forward = compiled_graph

    def forward_returns(self, count: int) -> None:
        """Callback: callers get the first `count` results of the last compiled forward. The others are saved."""
        forward, self._forward = self._forward, None
        if forward is not None:
            tell_what_callers_get(forward, count)


def tell_what_callers_get(forward: Any, count: int) -> None:
    """Record in the function of a `CompiledFxGraph` that callers get its first `count` results."""
    function, places = forward.current_callable, list(range(count))
    found = only_partition(forward)
    if found is not None:
        runner, order = found
        function, places = runner.partitions[0], [order.results[place] for place in places]
    if isinstance(function, GraphedFunction):
        function.callers_get = frozenset(places)


def release_recordings() -> None:
    """Free every graph, memory pool, placeholder and kernel of Encore's own. Functions record again when called."""
    containers.free_all()
    unload_kernels()
