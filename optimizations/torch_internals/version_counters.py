"""The counters of versions that tensors have, to be counted up for what a graph wrote. Checked on PyTorch 2.11.

To hand a tensor to C++ costs more where only Python owns it: PyTorch counts references to the Python object whenever a
second owner comes and goes. A program's own tensors must not get one (`torch.utils.swap_tensors` refuses such). But
what `detach()` gives has the same counter for good, whatever `.data =` and `set_` do to either. So tensors without
memory stand for the counters here, and C++ owns each of these as the base of a view.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optimizations import torch_internals


class VersionCounters:
    """Those of the given tensors. `tensors` have them: `torch_internals.increment_version` is to be called with these.

    Neither the given tensors nor their memory are kept alive. One that `swap_tensors` made another since has another
    counter. Who uses this sees that where the tensor's look is compared (`argument_guard`), and makes it again.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        with torch_internals.disable_torch_function(), torch.inference_mode(False), torch.no_grad():
            self.tensors = [_with_counter_of(tensor) for tensor in given]
            self._views = [one.view(0) for one, tensor in zip(self.tensors, given, strict=True) if one is not tensor]


def _with_counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that has the counter of this one; itself where it is of a kind of its own."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_inference() or tensor.is_quantized:
        return tensor
    found = tensor.detach()
    found.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return found
