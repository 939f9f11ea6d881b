"""Add a pass to Inductor's setting for a user's, after the one that is there already."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.fx

from optimizations import torch_internals

SETTING = "post_grad_custom_post_pass"
"""Inductor's setting for a pass of the user's, which is part of the key of its cache."""

GraphPass = Callable[[torch.fx.Graph], None]


def behind(theirs: Any, name: str, own: GraphPass | None = None) -> Any:
    """Return a pass that does what `theirs` does, if there is one, and then `own`.

    Args:
        theirs: what is set already.
        name: of this pass and its version, for the key of Inductor's cache; an attribute of what is returned.
        own: a function of a module, so that Inductor's compile processes find it; None for a pass that is a mark.

    Raises:
        UnsupportedTorch: Inductor has no such passes.
    """
    return _kind()(theirs, name, own)


@functools.cache
def _kind() -> Any:
    """Return a subclass of Inductor's pass class, which is imported when something is compiled."""

    class Behind(torch_internals.CustomGraphPass):
        def __init__(self, theirs: Any, name: str, own: GraphPass | None) -> None:
            self.name = name
            self._theirs = theirs
            self._own = own

        def __call__(self, graph: torch.fx.Graph) -> None:
            for each in (self._theirs, self._own):
                if each is not None:
                    each(graph)

        def __reduce__(self) -> Any:
            # For Inductor's compile processes: a class made here has no name there.
            return behind, (self._theirs, self.name, self._own)

        def uuid(self) -> Any:
            """Return the key of both passes, or None if the pass before has none: then nothing is cached."""
            if self._theirs is None:
                return self.name
            before = self._theirs.uuid() if isinstance(self._theirs, torch_internals.CustomGraphPass) else None
            return before and (self.name, before)

    return Behind
