"""Which source each generated kernel has. Kernels of other sources may have one name: `triton_poi_fused__to_copy_3`."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from pathlib import Path

from optimizations import torch_internals
from optimizations.torch_internals.tuning import without_number

_KERNEL = re.compile(r"async_compile\.triton\(\s*'(\w+)',\s*'''(.*?)'''", re.DOTALL)
_DIGITS = 6


class KernelSources:
    """Those of the modules that Inductor loads from the making of this on."""

    def __init__(self) -> None:
        self._before = len(torch_internals.PyCodeCache.modules)

    def digests(self) -> dict[str, str]:
        """By a kernel's name, number included. A name that stands for several sources is left out."""
        sources: dict[str, set[str]] = defaultdict(set)
        for module in torch_internals.PyCodeCache.modules[self._before :]:
            for name, source in _kernels_of(module.__file__):
                sources[name].add(source)
        return {
            name: hashlib.sha256(found.pop().encode()).hexdigest()[:_DIGITS]
            for name, found in sources.items()
            if len(found) == 1
        }


def _kernels_of(file: str | None) -> list[tuple[str, str]]:
    """Names and sources in a generated module, the latter without the number; none where it cannot be read."""
    try:
        text = Path(file or "").read_text(encoding="utf-8")
    except OSError:
        return []
    return [(name, without_number(source, name)) for name, source in _KERNEL.findall(text)]
