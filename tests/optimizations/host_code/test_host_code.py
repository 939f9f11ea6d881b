"""Code in C is compiled once for each machine, and where it cannot be compiled Python does without."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from optimizations.host_code import compiling

TYPES = ("Words", "Entries", "Looks", "Settings", "Nest", "Versions", "Bound")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what is compiled."""
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(compiling.SWITCH, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compilers that are called."""
    called: list[str] = []
    compile_with = compiling._compile
    monkeypatch.setattr(compiling, "_compile", lambda *given: (called.append(given[0]), compile_with(*given))[1])
    return called


def looks() -> ModuleType | None:
    """As in another process."""
    found: ModuleType | None = compiling.looks.__wrapped__()
    return found


def works(module: ModuleType | None) -> bool:
    if module is None:
        return False
    held = {"a": TYPES}
    entries = module.Entries(((held, 1, ("a",), (TYPES,), ()),), True, True, (), (), ())
    before = entries()
    held["a"] = ()
    return before and not entries() and all(hasattr(module, name) for name in TYPES)


def why(caplog: pytest.LogCaptureFixture) -> str:
    """What the log says where there is no compiled code."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=compiling.__name__):
        assert looks() is None
    (said,) = [one for one in caplog.records if one.levelno == logging.INFO]
    assert "Python" in said.getMessage()
    return said.getMessage()


def compiler_that(folder: Path, does: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.usefixtures("compiled_looks")
def test_it_is_compiled_once_and_found_again(cache: Path, compilations: list[str]) -> None:
    first, second = looks(), looks()
    assert works(first) and works(second) and first is not second
    assert len(compilations) == 1
    (kept,) = cache.rglob("*.so")
    assert kept.parent == cache / "host"


@pytest.mark.usefixtures("compiled_looks")
def test_a_process_compiles_it_once(cache: Path) -> None:
    code = "from optimizations import host_code; assert host_code.looks() is host_code.looks() is not None"
    subprocess.run(
        [sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=True
    )
    assert len(list(cache.rglob("*.so"))) == 1


@pytest.mark.usefixtures("compiled_looks")
@pytest.mark.parametrize("spoil", [lambda kept: kept[:-100], lambda kept: kept[:-1] + b"?", lambda kept: b""])
def test_what_is_damaged_is_compiled_again(
    spoil: Callable[[bytes], bytes], cache: Path, compilations: list[str]
) -> None:
    assert works(looks())
    (kept,) = cache.rglob("*.so")
    kept.write_bytes(spoil(kept.read_bytes()))
    assert works(looks()) and works(looks())
    assert len(compilations) == 2


@pytest.mark.usefixtures("compiled_looks", "cache")
@pytest.mark.parametrize("part", ["source", "compiler", "Python"])
def test_another_source_or_compiler_or_python_is_another_entry(
    part: str, tmp_path: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works(looks())
    if part == "source":
        changed = Path(shutil.copytree(compiling.SOURCES, tmp_path / "changed"))
        with (changed / "words.c").open("a") as file:
            file.write("/* more */\n")
        monkeypatch.setattr(compiling, "SOURCES", changed)
    elif part == "compiler":
        monkeypatch.setenv("CC", compiler_that(tmp_path, f'exec {compiling._compiler()} "$@"'))
    else:
        monkeypatch.setattr(sys, "version", sys.version + " of another build")
    assert works(looks())
    assert len(compilations) == 2


@pytest.mark.usefixtures("compiled_looks")
def test_a_cache_that_cannot_be_written_costs_the_next_process_a_compilation(
    cache: Path, compilations: list[str]
) -> None:
    cache.write_text("a file, where the folder would be")
    assert works(looks()) and works(looks())
    assert len(compilations) == 2


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "there is no C compiler" in why(caplog)


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    said = why(caplog)
    assert "no-such-compiler" in said and "CC" in said


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo this is wrong >&2; exit 3", "ended with 3: this is wrong"),
        ("exit 0", "encore_looks.so"),
        ('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "encore_looks.so"),
    ],
    ids=["fails", "makes nothing", "makes nonsense"],
)
def test_a_compiler_that_makes_no_module_is_done_without(
    does: str, said: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler_that(tmp_path, does))
    assert said in why(caplog)
    assert not list(cache.rglob("*.so"))


@pytest.mark.usefixtures("cache")
def test_a_compiler_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "TIMEOUT_S", 0.2)
    monkeypatch.setenv("CC", compiler_that(tmp_path, "exec sleep 30"))
    began = time.monotonic()
    assert "timed out" in why(caplog)
    assert time.monotonic() - began < 10


@pytest.mark.usefixtures("cache", "compiled_looks")
def test_without_the_headers_of_python_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h" in why(caplog)


def test_it_can_be_turned_off(
    cache: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(compiling.SWITCH, "off")
    assert "ENCORE_HOST_CODE is off" in why(caplog)
    assert [one.levelname for one in caplog.records] == ["INFO"]
    assert not compilations and not cache.exists()


@pytest.mark.parametrize("value", ["", "1", "ON", "no"])
def test_what_the_switch_does_not_know_is_warned_of_and_counts_as_off(
    value: str,
    cache: Path,
    compilations: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(compiling.SWITCH, value)
    why(caplog)
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert repr(value) in warning and "taken for off" in warning
    assert not compilations and not cache.exists()


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (lambda patched: patched.setattr(sys.implementation, "name", "pypy"), "pypy"),
        (
            lambda patched: patched.setattr(sysconfig, "get_config_var", lambda name: int(name == "Py_GIL_DISABLED")),
            "lock",
        ),
    ],
    ids=["another Python", "a Python without its lock"],
)
def test_it_is_compiled_for_no_python_that_it_is_not_written_for(
    patch: Callable[[pytest.MonkeyPatch], None],
    said: str,
    cache: Path,
    compilations: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patched:
        patch(patched)
        assert said in why(caplog)
    assert not compilations and not cache.exists()


@pytest.mark.usefixtures("cache", "compiled_looks")
def test_no_file_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert works(looks())
    assert list((tmp_path / "temporary").iterdir()) == []
