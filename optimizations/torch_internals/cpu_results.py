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
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals

SETTING = "aot_inductor.metadata"
"""A setting of Inductor's that is part of the key of its cache and changes nothing but what AOTInductor packages."""

_MARK = {"encore": "CPU results stay, 1"}
"""Marks Encore's graphs, which are compiled with the corrected pass. Inductor's cache separates them from stock's."""


def marked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's settings for a graph, with the mark."""
    theirs = settings.get(SETTING, torch_internals.inductor_config.aot_inductor.metadata)
    return {**settings, SETTING: {**theirs, **_MARK}}


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
        if _MARK.items() <= config.aot_inductor.metadata.items():
            corrected_mover()("cuda", allow_inputs=bool(config.triton.cudagraphs and config.graph_partition))(graph)
        else:
            stock(graph)

    return move
