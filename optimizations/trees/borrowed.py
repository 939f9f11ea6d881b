"""Keep inputs as they were when something was recorded, over memory that they do not own.

Each takes some microseconds to make, and a recording may have a thousand that nothing ever asks for. So only what a
tensor looked like is noted while recording, and it is made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch


class Borrowed(Sequence[Any]):
    """Hold the inputs by index. Values that are no tensors are kept themselves.

    Args:
        inputs: as the recording has them; none is held that is a tensor.
        look: what `make` needs to know of a tensor.
        make: such a tensor.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        look: Callable[[torch.Tensor], Mapping[str, Any]],
        make: Callable[[Mapping[str, Any]], torch.Tensor],
    ) -> None:
        self._looks = {index: look(value) for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        self._values = [None if index in self._looks else value for index, value in enumerate(inputs)]
        self._make = make

    def is_tensor(self, index: int) -> bool:
        """Return whether the input is a tensor; no tensor is made."""
        return index in self._looks

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        value = self._values[index]
        if value is None and (look := self._looks.get(index % len(self._values))) is not None:
            value = self._values[index] = self._make(look)
        return value

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))
