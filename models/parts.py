"""Define programs that are not compiled as a whole: their users compile a part, which the program then calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from models.registry import Inputs


@runtime_checkable
class CompiledInParts(Protocol):
    """Define a module that is compiled in parts, which it defines itself."""

    def compiled_with(self, **keywords: Any) -> Callable[..., Any]:
        """Return the program as its users call it, its part compiled with these keywords of `torch.compile`."""
        ...

    def compiled_part(self, inputs: Inputs) -> tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]]:
        """Return the program's call of that part with these inputs: module, arguments, keyword arguments."""
        ...


@runtime_checkable
class CapturedByHand(Protocol):
    """Define a module of which users capture a part into a CUDA graph by hand."""

    def captured_by_hand(self) -> Callable[..., Any]:
        """Return the program with that part captured in its first call, and replayed from then on."""
        ...
