"""The tensors that optimizers keep for each parameter, and whether they lie where a recording knows them to lie.

Note [States behind the launch]. There may be three for each parameter, and to compare the memory of all before a launch
would take most of the time that is before it. So a steady replay compares the first two and the last two of each
optimizer before the launch: who moves states elsewhere moves all of them, as a rule, and then the call is recorded
again. All others it compares behind the launch, while the GPU works. Where one has moved, or looks otherwise, the call
is an error: the launch has used and written the memory from before. That memory is kept, so that the launch writes
nothing else. Calls that are looked at in the full way compare all before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from optimizations import torch_internals
from optimizations.capture.step.guard import Guard
from optimizations.capture.step.set_aside import is_plain
from optimizations.capture.step.tensor_marks import look, looks
from optimizations.torch_internals.argument_guard import same_looks

MOST_NAMED = 3
"""States that an error names."""


class StatesMoved(RuntimeError):
    """Behind a launch: states of optimizers were not as the graph knows them. `names` are theirs."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names

    def words(self, step: str) -> str:
        """What the program is told."""
        more = len(self.names) - MOST_NAMED
        named = ", ".join(self.names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        one = len(self.names) == 1
        return (
            f"{step} found behind its launch that the program has moved or changed what an optimizer keeps: {named} "
            f"{'lies' if one else 'lie'} elsewhere than in the calls before, or {'looks' if one else 'look'} "
            "otherwise. This call has used and written the memory from before, so weights and states may not be those "
            "of eager. Move states by load_state_dict, or put new tensors into `optimizer.state`; where `.data =` "
            "or `set_` or `t_()` has to do it, call reset() of the step before its next call. The next call looks at "
            "everything anew."
        )


class OptimizerStates:
    """These tensors, by path, as they are when this is made. What has no memory of its own is left out."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        found = {path: tensor for path, tensor in tensors.items() if is_plain(tensor)}
        self._names, self._tensors = list(found), list(found.values())
        self._memory = [tensor.untyped_storage() for tensor in self._tensors]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._indices = list(range(len(self._tensors)))
        self._then = looks(self._tensors)
        self._looks = Guard(self._compare_looks)

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def _compare_looks(self) -> Callable[[], bool]:
        together = tuple(self._tensors)
        return functools.partial(same_looks(together), together)

    def compared_now(self) -> tuple[Callable[[], bool], Callable[[], bool]]:
        """Functions that tell whether all lie where they lay, and whether all look as they did, in a call of C++ each.

        They are for calls under the settings that are there now: autocast and inference mode are part of looks.
        """
        lie = functools.partial(torch_internals.data_ptrs_equal, self._tensors, self._addresses, self._indices)
        return lie, self._compare_looks()

    def stand(self) -> bool:
        """Whether all lie where they lay and look as they did."""
        if not torch_internals.data_ptrs_equal(self._tensors, self._addresses, self._indices):
            return False
        if not self._looks.holds():
            if looks(self._tensors) != self._then:
                return False
            self._looks.was_wrong()
        return True

    def differing(self) -> list[str]:
        """The names of those that do not."""
        return [
            name
            for name, tensor, address, then in zip(self._names, self._tensors, self._addresses, self._then, strict=True)
            if tensor.data_ptr() != address or look(tensor) != then
        ]
