"""Fill tables of PyTorch's that know functions by their identity and are otherwise filled on first use.

One that is filled while other functions stand in for PyTorch's own would know those, for as long as the process runs:
the compiler would no more know `torch.tensor`, and a default device would not reach it.
"""

from __future__ import annotations

import torch

from optimizations import torch_internals


def fill() -> None:
    """Fill those that are empty. The compiler, which this imports, is also imported by the first mode that sees
    operators, and empties its tables when it is reset."""
    torch_internals.torch_obj_rule_map()
    torch_internals.tensor_method()
    torch_internals.device_constructors()
    torch.overrides.get_overridable_functions()
    torch.overrides.is_tensor_method_or_property(torch.Tensor.add)
