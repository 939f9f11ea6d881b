"""A kernel is tuned once for all programs that have it.

Inductor keeps what it found for a kernel under a digest of the kernel's source. The source has the kernel's name, and
the name a number: its place among the kernels of the program. So a program with one kernel more at its beginning tunes
all others again. If that gives other results, two programs with the same kernels differ in speed by chance. Here a
kernel is known by its source without that number.

`CachingAutotuner.autotune_to_one_config(self, *args, **kwargs)` times `self.launchers` and keeps one of them. Checked
on PyTorch 2.11.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from optimizations import torch_internals
from optimizations.atomic_file import write_atomically

_FOLDER = "tuned"
_NUMBER = re.compile(r"_\d+$")
_METHOD = "autotune_to_one_config"


def tune_once() -> None:
    """From now on, in this process, a kernel that was tuned before is launched as it was then.

    What is found is kept in Inductor's cache folder, whichever that is when a kernel is tuned. Processes may share it:
    where two tune a kernel at the same time, each keeps its own result.
    """
    tuner = torch_internals.CachingAutotuner
    original = getattr(tuner, _METHOD)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        file = _file_of(self)
        known = _read(file)
        again = [one for one in self.launchers if _described(one.config) == known]
        if again:
            self.launchers = again[:1]  # it is timed once more, and kept where PyTorch looks for it
        result = original(self, *args, **kwargs)
        if file is not None and not again:
            _write(file, self.launchers[0].config)
        return result

    setattr(tuner, _METHOD, tuned)


def _file_of(tuner: Any) -> Path | None:
    """Where the result for this kernel is kept; None where its source cannot be read."""
    name, folder = tuner.inductor_meta.get("kernel_name"), os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not name or not folder or not tuner.filename:
        return None
    try:
        source = Path(tuner.filename).read_text()
    except OSError:
        return None
    digest = hashlib.sha256(source.replace(name, _NUMBER.sub("", name)).encode()).hexdigest()
    return Path(folder) / _FOLDER / f"{digest}.json"


def _read(file: Path | None) -> Any:
    try:
        return json.loads(file.read_bytes()) if file is not None else None
    except (OSError, ValueError):
        return None


def _write(file: Path, config: Any) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(_described(config)).encode())
    except OSError as error:  # the next program tunes it again
        print(f"what a kernel was tuned to is not kept: {error}")


def _described(config: Any) -> dict[str, Any]:
    """What a configuration launches: tiles, warps, stages and registers."""
    known = {name: getattr(config, name, None) for name in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
    return {"kwargs": dict(sorted(config.kwargs.items())), **known}
