"""pytest's own bytecode of test files, written before its processes start.

pytest compiles each test file with its assertions rewritten. Where none of that is there yet, each process of a run
does it for all files, for ten seconds and more. Here it is done once, on all cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def write_ahead(files: Sequence[Path], config: pytest.Config) -> None:
    """In forks, one for each core that this process may use. A file that is no Python is left to who imports it."""
    count = min(len(files), len(os.sched_getaffinity(0)))
    forks = []
    for first in range(count):
        fork = os.fork()
        if fork == 0:
            for file in files[first::count]:
                with suppress(Exception):
                    _write(file, config)
            os._exit(0)
        forks.append(fork)
    for fork in forks:
        os.waitpid(fork, 0)


def files_with_tests(arguments: Sequence[str]) -> list[Path]:
    """Those of pytest's arguments, and those in folders among them."""
    paths = [Path(argument.partition("::")[0]) for argument in arguments]
    return [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]


def compiled(file: Path) -> Path:
    """Where pytest looks for it."""
    return rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)


def _write(file: Path, config: pytest.Config) -> None:
    path = compiled(file)
    if rewrite._read_pyc(file, path) is None:
        source, code = rewrite._rewrite_test(file, config)
        if rewrite.try_makedirs(path.parent):
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, path)
