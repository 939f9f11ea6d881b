"""Results of a graph as the caller gets them: its own tensors where the function returns an input, and copies of what
it keeps. Note [Kept results] in `pool_manager`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from optimizations.trees.node import EncoreNode
from optimizations.trees.returned import over

if TYPE_CHECKING:
    from optimizations.trees.function import RecordableFunction


def kept_copied(node: Any, function: RecordableFunction, outputs: Any) -> Any:
    """The outputs of `node`, those that the program keeps copied out of the pool.

    Outputs that share memory share a copy, and those that are one tensor stay one. If memory is too short
    for copies, none is made: the graph has run, and results that are held keep the next one from writing over them.
    """
    if node is None:
        return outputs
    handed = list(outputs)
    del outputs
    try:
        return _copied(node, function, handed)
    except torch.OutOfMemoryError:
        return handed


def _copied(node: Any, function: RecordableFunction, handed: list[Any]) -> list[Any]:
    """The same list, changed when all copies are made."""
    if isinstance(node, EncoreNode) and node.function is function and node.copy_out(handed):
        return handed
    pool = {
        reference.data_ptr()
        for one in node._path_from_root
        for reference in one.outputs_weakrefs
        if reference is not None
    }
    copies: dict[int, torch.UntypedStorage] = {}
    for place in function.kept_outputs:
        value = handed[place] if place < len(handed) else None
        if not isinstance(value, torch.Tensor):
            continue
        address = value.untyped_storage().data_ptr()
        if address in pool and address not in copies:
            copies[address] = value.untyped_storage().clone()
    function.kept_copies += len(copies)
    function.kept_bytes += sum(one.nbytes() for one in copies.values())
    last = {id(value): place for place, value in enumerate(handed)}
    same = [last[id(value)] for value in handed]
    for place, value in enumerate(handed):
        if isinstance(value, torch.Tensor) and (address := value.untyped_storage().data_ptr()) in copies:
            handed[place] = over(copies[address], value, int(value.storage_offset()))
    return [handed[place] for place in same]


def with_inputs(outputs: Any, returned: Mapping[int, torch.Tensor]) -> list[Any]:
    """The outputs, with the caller's own tensors where the function returns an input (by place)."""
    handed = list(outputs)
    for place, caller in returned.items():
        output = handed[place]
        # The placeholder begins where its storage does.
        geometry = (output.dtype, output.shape, output.stride(), output.storage_offset())
        if geometry == (caller.dtype, caller.shape, caller.stride(), 0):
            handed[place] = caller
        else:
            start = caller.storage_offset() * caller.element_size() // output.element_size()
            handed[place] = over(caller.untyped_storage(), output, start + output.storage_offset())
    return handed
