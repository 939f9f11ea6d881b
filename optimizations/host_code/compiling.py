"""Compiles `module.c`, which includes the other files, for the Python that runs, and loads it."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from optimizations.compiled_cache import Compiled, CompiledCache, default_directory

log = logging.getLogger(__name__)

NAME = "encore_looks"
"""The module's, as it stands in `module.c`."""
SOURCES = Path(__file__).parent
SWITCH = "ENCORE_HOST_CODE"
TIMEOUT_S = 60
_FLAGS = ("-O2", "-fPIC", "-shared", "-Wno-deprecated-declarations")


class NotCompiled(RuntimeError):
    """There is no compiled code; the message says why."""


@functools.cache
def looks() -> ModuleType | None:
    """The compiled module; None where there is none, and the log says why. It is compiled at the first call."""
    if (chosen := os.environ.get(SWITCH, "on")) not in ("on", "off"):
        log.warning("%s is %r; it may be on or off, and is taken for off", SWITCH, chosen)
    try:
        if chosen != "on":
            raise NotCompiled(f"{SWITCH} is {chosen}")
        return _module()
    except Exception as error:  # another machine may have anything
        log.info("Calls are looked at in Python, which takes longer: %s.", error)
        return None


def _module() -> ModuleType:
    """The compiled module, from the cache or by the compiler. One that cannot be loaded is not kept.

    Raises:
        NotCompiled: there is none to be had.
        ImportError: what there is cannot be loaded.
    """
    if sys.implementation.name != "cpython":
        raise NotCompiled(f"it is written for CPython, and this is {sys.implementation.name}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):  # and loading it would give that Python its lock back
        raise NotCompiled("it relies on Python's lock, and this Python is built to run without")
    compiler, headers = _compiler(), sysconfig.get_paths()["include"]
    sources = [part for path in sorted(SOURCES.glob("*.[ch]")) for part in (path.name, path.read_text())]
    key = (NAME, *sources, sys.version, str(sysconfig.get_config_var("SOABI")), compiler, headers, *_FLAGS)
    cache = CompiledCache(default_directory("host"), suffix=".so")
    loaded: list[ModuleType] = []

    def build() -> Compiled:
        compiled = _compile(compiler, headers)
        loaded.append(_load(compiled.image))
        return compiled

    image = cache.get_or_build(key, build).image
    return loaded[0] if loaded else _load(image)


def _compiler() -> str:
    """The one that Triton takes.

    Raises:
        NotCompiled: there is none.
    """
    chosen = os.environ.get("CC")
    found = shutil.which(chosen) if chosen else shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if found is None:
        raise NotCompiled(f"there is no compiler {chosen}, as CC says" if chosen else "there is no C compiler")
    return found


def _compile(compiler: str, headers: str) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="encore-looks-") as folder:
        made = Path(folder) / f"{NAME}.so"
        command = [compiler, *_FLAGS, f"-I{headers}", str(SOURCES / "module.c"), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotCompiled(f"{compiler} did not compile it ({error})") from error
        if done.returncode != 0:
            raise NotCompiled(f"{compiler} ended with {done.returncode}: {done.stderr.strip()[:500]}")
        return Compiled(made.read_bytes(), done.stderr)


def _load(image: bytes) -> ModuleType:
    """The module of this content. It is loaded from a file that nobody else can write, and which is gone then."""
    with tempfile.TemporaryDirectory(prefix="encore-looks-") as folder:
        path = Path(folder) / f"{NAME}.so"
        path.write_bytes(image)
        loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
        spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
