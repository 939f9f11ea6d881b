"""Compiled kernels are found by content, never handed out damaged, and do not fill the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizations.compiled_cache import Compiled, CompiledCache, default_directory


class Builder:
    """Counts how often it had to build."""

    def __init__(self, image: bytes = b"cubin") -> None:
        self.image = image
        self.builds = 0

    def __call__(self) -> Compiled:
        self.builds += 1
        return Compiled(self.image, "Used 4 registers")


def only_file(cache: CompiledCache) -> Path:
    (path,) = cache.directory.iterdir()
    return path


@given(image=st.binary(max_size=200), said=st.text(max_size=50))
def test_what_was_stored_comes_back(tmp_path_factory: pytest.TempPathFactory, image: bytes, said: str) -> None:
    cache = CompiledCache(tmp_path_factory.mktemp("cache"))
    stored = Compiled(image, said)
    cache.get_or_build(("key",), lambda: stored)

    def fail() -> Compiled:
        raise AssertionError("built although it was stored")

    assert cache.get_or_build(("key",), fail) == stored


def test_any_part_of_the_key_makes_another_entry(tmp_path: Path) -> None:
    cache, builder = CompiledCache(tmp_path), Builder()
    keys = [("ab", "c"), ("a", "bc"), ("ab",), ("ab", "c", ""), ("ab", "d")]
    for key in keys + keys:
        cache.get_or_build(key, builder)
    assert builder.builds == len(keys)


def spoil_image(content: bytes) -> bytes:
    return content[:-1] + b"?"


def spoil_log(content: bytes) -> bytes:
    return content.replace(b"Used 4", b"Used 9")


def truncate(content: bytes) -> bytes:
    return content[:40]


def empty(content: bytes) -> bytes:
    return b""


def other_json(content: bytes) -> bytes:
    return b"[1]\ncubin"


def other_format(content: bytes) -> bytes:
    return content.replace(b'"format": 1', b'"format": 2')


@pytest.mark.parametrize("spoil", [spoil_image, spoil_log, truncate, empty, other_json, other_format])
def test_a_damaged_entry_is_built_again(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    cache, builder = CompiledCache(tmp_path), Builder()
    cache.get_or_build(("key",), builder)
    path = only_file(cache)
    spoiled = spoil(path.read_bytes())
    assert spoiled != path.read_bytes()
    path.write_bytes(spoiled)
    assert cache.get_or_build(("key",), builder) == Compiled(b"cubin", "Used 4 registers")
    assert builder.builds == 2
    cache.get_or_build(("key",), builder)
    assert builder.builds == 2, "the entry was mended"


def test_a_failed_build_stores_nothing(tmp_path: Path) -> None:
    cache = CompiledCache(tmp_path)

    def fail() -> Compiled:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.get_or_build(("key",), fail)
    assert list(tmp_path.iterdir()) == []


def test_entries_unused_for_longest_go_when_the_folder_is_full(tmp_path: Path) -> None:
    cache, builder = CompiledCache(tmp_path, limit_bytes=3500), Builder(bytes(1000))
    for age, key in enumerate(("a", "b", "c")):
        cache.get_or_build((key,), builder)
        newest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (1000 + age, 1000 + age))
    cache.get_or_build(("a",), builder)
    cache.get_or_build(("d",), builder)
    assert builder.builds == 4
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3500
    for key in ("a", "c", "d"):
        cache.get_or_build((key,), builder)
    assert builder.builds == 4, "b was unused for longest, so only b went"


def test_an_entry_larger_than_the_limit_is_kept_until_the_next(tmp_path: Path) -> None:
    cache, builder = CompiledCache(tmp_path, limit_bytes=10), Builder(bytes(100))
    cache.get_or_build(("a",), builder)
    cache.get_or_build(("a",), builder)
    assert builder.builds == 1
    cache.get_or_build(("b",), builder)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_made_costs_only_the_next_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache, builder = CompiledCache(tmp_path / "file" / "cache"), Builder()
    assert cache.get_or_build(("key",), builder).image == b"cubin"
    assert "cannot store compiled code" in caplog.text


def test_a_full_disk_leaves_no_part_of_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert CompiledCache(tmp_path).get_or_build(("key",), Builder()).image == b"cubin"
    assert list(tmp_path.iterdir()) == []


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ENCORE_CACHE_DIR", raising=False)
    assert default_directory() == tmp_path / "encore" / "cubins"
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path / "own"))
    assert default_directory() == tmp_path / "own" / "cubins"


def test_user_without_home_gets_a_folder_of_the_process() -> None:
    """As in a container that runs under a user id nobody registered."""
    code = """
import os, pwd
os.environ.pop("HOME", None), os.environ.pop("XDG_CACHE_HOME", None), os.environ.pop("ENCORE_CACHE_DIR", None)
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
from optimizations.compiled_cache import default_directory
assert default_directory() == default_directory()
default_directory().mkdir()
print(default_directory())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip())
    assert folder.name == "cubins"
    assert not folder.parent.exists()
