"""Correct a pass of Inductor's so that results on the CPU stay on the CPU.

With CUDA graphs enabled, `ConstructorMoverPass` moves CPU scalar inputs, and tensors that a graph makes on the CPU, to
the GPU if everything computed from them can be there too. PyTorch 2.11 moves too much: results of the graph, and all
values computed from scalars alone. So `x * 2, torch.zeros(3)` returns zeros on the GPU, `scalar.sin()` is computed
there, and `on_cpu + scalar.sin()` cannot be compiled. Without CUDA graphs these programs work.

The corrected pass stops at results: results on the CPU are computed there. A CPU scalar input that the graph writes (an
optimizer's step count) follows stock's rules: if it is computed from scalars and needed on the GPU, it is computed
there and copied back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals

SETTING = "post_grad_custom_post_pass"
"""Inductor's setting for a pass of the user's, which is part of the key of its cache."""

GraphPass = Callable[[torch.fx.Graph], None]

_MARK = "encore: CPU results stay, 1"
"""The name of a pass that does nothing and identifies marked graphs."""


def settings_for(graph_module: torch.fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return Inductor's settings for a graph of Dynamo. One with values on the CPU and elsewhere gets a mark.

    Marked graphs are compiled with the corrected pass. Inductor's cache separates them from stock's graphs.
    """
    values = [node.meta.get("example_value") for node in graph_module.graph.nodes if node.op != "output"]
    tensors = [one for one in torch_internals.pytree.tree_leaves([*inputs, *values]) if isinstance(one, torch.Tensor)]
    if len({one.device.type == "cpu" for one in tensors}) < 2:
        return settings
    theirs = settings.get(SETTING, getattr(torch_internals.inductor_config, SETTING))
    return {**settings, SETTING: pass_after(theirs, _MARK)}


@functools.cache
def corrected_mover() -> Any:
    """Return the class of the corrected pass."""

    class Mover(torch_internals.ConstructorMoverPass):
        """Move nothing that a result on the CPU is computed from."""

        def cannot_be_moved(self, node: torch.fx.Node) -> bool:
            if node.op == "output" or not isinstance(node.meta.get("val"), torch.Tensor):
                return True
            return bool(super().cannot_be_moved(node))

        def all_inputs_are_cpu_scalar_or_on_target_device(self, node: torch.fx.Node) -> bool:
            """Return what stock does for a node whose own value is on the target device, else False."""
            return self.is_on_target_device(node) and super().all_inputs_are_cpu_scalar_or_on_target_device(node)

    return Mover


def corrected(stock: Callable[[torch.fx.Graph], None]) -> Callable[[torch.fx.Graph], None]:
    """Return `move_constructors_to_gpu`, which uses the corrected pass for marked graphs."""

    @functools.wraps(stock)
    def move(graph: torch.fx.Graph) -> None:
        config = torch_internals.inductor_config
        if getattr(getattr(config, SETTING), "name", None) == _MARK:
            corrected_mover()("cuda", allow_inputs=bool(config.triton.cudagraphs and config.graph_partition))(graph)
        else:
            stock(graph)

    return move


def pass_after(theirs: Any, name: str, own: GraphPass | None = None) -> Any:
    """Return a pass for `SETTING` that does what `theirs` does, if there is one, and then `own`.

    Args:
        theirs: the pass that is set already.
        name: name and version of this pass, for the key of Inductor's cache; an attribute of the returned pass.
        own: a module-level function, so that Inductor's compile processes find it; None for a pass that is a mark.

    """
    return _kind()(theirs, name, own)


@functools.cache
def _kind() -> Any:
    """Return a subclass of Inductor's pass class, which is imported when something is compiled."""

    class PassAfter(torch_internals.CustomGraphPass):
        def __init__(self, theirs: Any, name: str, own: GraphPass | None) -> None:
            self.name = name
            self._theirs = theirs
            self._own = own

        def __call__(self, graph: torch.fx.Graph) -> None:
            for each in (self._theirs, self._own):
                if each is not None:
                    each(graph)

        def __reduce__(self) -> Any:
            # For Inductor's compile processes: a class defined in a function cannot be imported there.
            return pass_after, (self._theirs, self.name, self._own)

        def uuid(self) -> Any:
            """Return the key of both passes, or None if the pass before has none: then nothing is cached."""
            if self._theirs is None:
                return self.name
            before = self._theirs.uuid() if isinstance(self._theirs, torch_internals.CustomGraphPass) else None
            return before and (self.name, before)

    return PassAfter
