"""Call functions that Inductor compiled for aligned inputs with inputs that may not be aligned.

Note [Misaligned inputs that are returned]. A partition of a program returns an input that a later partition reads or
writes. Run on an aligned copy, it would return the copy: the later partition would write that, and the caller's tensor
would stay as it was. So the input itself is returned, as it is where a graph is replayed. Not where the function took
the memory of the input for a result: then what it returns is that result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from optimizations import torch_internals

ALIGNMENT_BYTES = 16
"""The alignment that Inductor's kernels rely on, in bytes."""


def on_aligned_inputs(
    model: Callable[[list[Any]], Any],
    checked: Sequence[int],
    written: Sequence[int],
    returns: Callable[[int], bool],
) -> Callable[[list[Any]], Any]:
    """Return a function that calls `model` with copies in place of misaligned inputs.

    Args:
        model: takes the list of its inputs, which it empties.
        checked: indices of tensors that `model` takes for aligned.
        written: indices of inputs that it writes; what it wrote to a copy is copied back.
        returns: whether an input that `model` returns is that input, and not a result in its memory.
    """
    if not checked:
        return model

    def run(inputs: list[Any]) -> Any:
        given = {index: inputs[index] for index in checked if inputs[index].data_ptr() % ALIGNMENT_BYTES}
        if not given:
            return model(inputs)
        copies = {index: torch_internals.clone_preserve_strides(value) for index, value in given.items()}
        for index, value in copies.items():
            inputs[index] = value
        outputs = model(inputs)
        changed = [index for index in copies if index in written]
        if changed:
            torch_internals.foreach_copy_([given[index] for index in changed], [copies[index] for index in changed])
        originals = {id(copies[index]): value for index, value in given.items() if returns(index)}
        return [originals.get(id(output), output) for output in outputs] if originals else outputs

    return run
