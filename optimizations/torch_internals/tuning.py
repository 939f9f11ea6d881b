"""Tune a kernel once for all programs that have it.

Inductor keeps what it found for a kernel under a digest of the kernel's source. The source has the kernel's name, and
the name a number: its place among the kernels of the program. So a program with one kernel more at its beginning tunes
all others again. If that gives other results, two programs with the same kernels differ in speed by chance. Here a
kernel is known by its source without that number.

`CachingAutotuner.autotune_to_one_config(self, *args, **kwargs)` times `self.launchers`, keeps one of them, and tells
`self.save_cache_hook(config, nanoseconds, triton_cache_hash=launcher.cache_hash)` of it, which may be None. Checked on
PyTorch 2.11.

Note [Keys of tuning]. `torch.compiler.config.cache_key_tag` is made for this and does more: it is in the keys of what
tuning found as well, though only of what the process itself looks up. Compile workers, which are processes of their
own, do not know it. So a kernel is tuned and stored without the tag. When its graph comes from the cache, the kernel is
looked up with the tag. Nothing is found, and each process tunes it again, perhaps to another result. All settings of
Inductor are in the keys of graphs. The one that is used here only adds text to what AOTInductor packages.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from optimizations import torch_internals
from optimizations.atomic_file import write_atomically

_FOLDER = "tuned"
_NUMBER = re.compile(r"_\d+$")
_METHOD = "autotune_to_one_config"


def tune_once(alone: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Launch every kernel that was tuned before as it was then, from now on in this process.

    What is found is kept in Inductor's cache folder, whichever that is when a kernel is tuned. Processes may share it.
    A kernel is tuned inside of `alone()`, of the first call of this function: what lets one process after another in
    there makes sure that none tunes what another has tuned.
    """
    tuner = torch_internals.CachingAutotuner
    original = getattr(tuner, _METHOD)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        file = _file_of(self)
        if _launch_as_known(self, file):
            return None
        with alone():
            if _launch_as_known(self, file):  # while this process waited
                return None
            result = original(self, *args, **kwargs)
            if file is not None:
                _write(file, self.launchers[0].config)
            return result

    setattr(tuner, _METHOD, tuned)


def without_number(source: str, name: str) -> str:
    """Return the source of the kernel `name` as it is at any place in a program: its name has no number."""
    return source.replace(name, _NUMBER.sub("", name))


def _launch_as_known(tuner: Any, file: Path | None) -> bool:
    """Take the launcher that `file` names, if there is one, and keep it where PyTorch looks for it too."""
    known = _read(file)
    again = [one for one in tuner.launchers if _described(one.config) == known]
    if not again:
        return False
    tuner.launchers = again[:1]
    if tuner.save_cache_hook:
        tuner.save_cache_hook(again[0].config, 0, triton_cache_hash=again[0].cache_hash)
    return True


def _file_of(tuner: Any) -> Path | None:
    """Return where the result for this kernel is kept; None where its source cannot be read."""
    name, folder = tuner.inductor_meta.get("kernel_name"), os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not name or not folder or not tuner.filename:
        return None
    try:
        source = Path(tuner.filename).read_text()
    except OSError:
        return None
    digest = hashlib.sha256(without_number(source, name).encode()).hexdigest()
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
    """Return what a configuration launches: tiles, warps, stages and registers."""
    known = {name: getattr(config, name, None) for name in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
    return {"kwargs": dict(sorted(config.kwargs.items())), **known}


def mark_graphs(owner: str) -> None:
    """Find only compiled graphs that were compiled under the same mark from now on. Kernels are found by all."""
    torch_internals.inductor_config.aot_inductor.metadata = {"owner": owner}


def graphs_marked(owner: str) -> AbstractContextManager[None]:
    """Do the same inside the block only: after it the mark is what it was."""
    settings = {"aot_inductor.metadata": {"owner": owner}}
    patch: AbstractContextManager[None] = torch_internals.inductor_config.patch(settings)
    return patch
