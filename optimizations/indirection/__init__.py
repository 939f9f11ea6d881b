"""Copy-free replay: where a captured graph holds its inputs' addresses, and how they are replaced.

What others build on; nothing here touches a GPU. `find_pointer_uses` reads two captures, `make_plan` decides who
replaces what, `dereference` and `assemble` make the variants of Triton kernels, `build_prelude` the kernel that updates
nodes on the device.
"""

from optimizations.indirection.cubin_cache import CubinCache
from optimizations.indirection.plan import Applier, Available, Choice, Plan, make_plan
from optimizations.indirection.pointers import Analysis, PointerUse, Reason, ReasonCode, find_pointer_uses
from optimizations.indirection.prelude import build_prelude
from optimizations.indirection.ptx import PtxError, dereference, read_kernel
from optimizations.indirection.ptxas import assemble

__all__ = [
    "Analysis",
    "Applier",
    "Available",
    "Choice",
    "CubinCache",
    "Plan",
    "PointerUse",
    "PtxError",
    "Reason",
    "ReasonCode",
    "assemble",
    "build_prelude",
    "dereference",
    "find_pointer_uses",
    "make_plan",
    "read_kernel",
]
