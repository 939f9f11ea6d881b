"""Compute how much memory new gradients of a step take, to have it in one piece before anything else is captured.

Note [Room for gradients]. In eager the gradients of the iteration before are free memory when the next one begins:
what the forward computes lies there, and after it the new gradients do. The pool of a graph begins with nothing. What
the forward computes gets many small pieces, into which no gradient fits later, so gradients get pieces of their own
(DeepRecommender: 1.7 GB, where eager takes 1.3). So a new pool gets one piece of the size of all gradients first, which
is free again at once.

That is of use only if gradients are made there. So those count that the step lets go of. Where no parameter has one
before a call, those count that an observed call left, and if it left none, as with a `zero_grad` at its end, those that
parameters of the step's optimizers will have. Of parameters that stand for others, such as parts on several GPUs, the
size says nothing. And options of PyTorch's allocator may keep it from carving small pieces out of a large free one:
then a piece of this size would be of no use to what the forward computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import torch

from optimizations.graph.memory import size_bytes

_ALIGNMENT = 512
"""Bytes. As PyTorch's allocator aligns what it gives."""
SMALL = 1 << 20
"""Bytes. PyTorch's allocator has pieces of their own for what is not larger."""

_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with options of PyTorch's allocator."""
_KEEP_WHOLE = ("max_split_size_mb", "roundup_power2_divisions", "cudaMallocAsync")


def carves(environment: Mapping[str, str]) -> bool:
    """Return whether PyTorch's allocator, by its options there, carves requests out of free pieces of any size."""
    return not any(option in environment.get(name, "") for name in _OPTIONS for option in _KEEP_WHOLE)


def room_for_gradients(
    parameters: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor | None],
    optimizers: Iterable[torch.optim.Optimizer],
    made: Set[int],
) -> int:
    """Return the bytes of the gradients that a call makes. Note [Room for gradients].

    `before`: the gradient of each parameter before the call. `made`: identities of parameters whose gradients an
    observed call replaced, where it let go of all from before.
    """
    counted = set(made)
    if not counted and all(gradient is None for gradient in before):
        groups = [group.get("params", ()) for optimizer in optimizers for group in optimizer.param_groups]
        counted = {id(parameter) for group in groups for parameter in group if parameter.requires_grad}
    found = [parameter for parameter in parameters if id(parameter) in counted]
    plain = [one for one in found if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided]
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in map(size_bytes, plain) if size > SMALL)
