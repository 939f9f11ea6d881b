"""The tensors that optimizers keep for each parameter, and whether they lie where a recording knows them to lie.

Note [States behind the launch]. There may be three for each parameter, and to compare the memory of all before a launch
would take most of the time that is before it. So a steady replay compares the first two and the last two of each
optimizer before the launch: who moves states elsewhere moves all of them, as a rule, and then the call is recorded
again. All others it compares behind the launch, while the GPU works. Where one has moved, or looks otherwise, the call
is an error: the launch has used and written the memory from before. That memory is kept, so that the launch writes
nothing else. It is gone where the program gave it back itself (`resize_(0)` of the storage): then the error says that
something else may have been written. Calls that are looked at in the full way compare all before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from optimizations.capture.held_alone import is_plain
from optimizations.capture.step.known_tensors import KnownTensors
from optimizations.capture.step.tensor_marks import look
from optimizations.torch_internals.tensor_words import TensorWords

MOST_NAMED = 3
"""States that an error names."""


class StatesMoved(RuntimeError):
    """Behind a launch: states of optimizers were not as the graph knows them. `names` are theirs.

    `given_back`: of those whose memory is not even kept.
    """

    def __init__(self, names: Sequence[str], given_back: Sequence[str] = ()) -> None:
        super().__init__(", ".join(names))
        self.names, self.given_back = names, given_back

    def words(self, step: str) -> str:
        """What the program is told."""
        more = len(self.names) - MOST_NAMED
        named = ", ".join(self.names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        one = len(self.names) == 1
        return (
            f"{step} found behind its launch that the program has moved or changed what an optimizer keeps: {named} "
            f"{'lies' if one else 'lie'} elsewhere than in the calls before, or {'looks' if one else 'look'} "
            "otherwise. This call has used and written the memory from before, so weights and states may not be those "
            f"of eager. {self._lost()}"
            "Move states by load_state_dict, or put new tensors into `optimizer.state`; where `.data =` "
            "or `set_` or `t_()` has to do it, call reset() of the step before its next call. The next call looks at "
            "everything again."
        )

    def _lost(self) -> str:
        if not self.given_back:
            return ""
        return (
            f"The memory of {', '.join(self.given_back[:MOST_NAMED])} was given back (`resize_`): this call has "
            "written there, so whatever lies there now may be wrong. "
        )


class OptimizerStates:
    """The tensors of this mapping, by path, as they are now. Those without memory of their own are left out."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        found = {path: tensor for path, tensor in tensors.items() if is_plain(tensor)}
        self._names, self._known = list(found), KnownTensors(found.values())
        self._memory = [tensor.untyped_storage() for tensor in found.values()]
        self._starts = [storage.data_ptr() for storage in self._memory]

    def __bool__(self) -> bool:
        return bool(self._names)

    def compared_now(self) -> Callable[[], bool]:
        """A function that tells whether all lie where they lie now, and look as they do now.

        They have to `stand`. What cannot be read at once is compared for calls under the settings that are there now:
        autocast and inference mode are part of looks.
        """
        words = TensorWords(self._known.tensors)
        others = KnownTensors(one for one in self._known.tensors if not words.tells_of(one))
        if not others.tensors:
            return words.unchanged
        look = others.compared_looks()
        return lambda: words.unchanged() and others.lie() and look()

    def stand(self) -> bool:
        """Whether all lie where they lay and look as they did."""
        return self._known.lie() and self._known.look()

    def given_back(self) -> list[str]:
        """The names of those whose memory from then is not kept any more."""
        there = zip(self._names, self._memory, self._starts, strict=True)
        return [name for name, storage, start in there if storage.data_ptr() != start]

    def differing(self) -> list[str]:
        """The names of those that do not."""
        known = self._known
        return [
            name
            for name, tensor, address, then in zip(self._names, known.tensors, known.addresses, known.then, strict=True)
            if tensor.data_ptr() != address or look(tensor) != then
        ]
