"""Verdicts on disk: found again, ignored with a reason, whole under crashes and many processes."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import math
import os
import runpy
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stored_verdicts import GRAPH, OTHER, verdict, where

from optimizations.selection import identity, store
from optimizations.selection.store import SUFFIX, VerdictStore, key_of
from optimizations.selection.verdict import CHECKSUM, UnreadableVerdict, checksum, parse_verdict


@pytest.fixture
def verdicts(tmp_path: Path) -> VerdictStore:
    return VerdictStore(tmp_path / "verdicts")


def test_what_is_put_is_found_by_another_store_of_the_folder(verdicts: VerdictStore) -> None:
    assert verdicts.get(where()) is None
    assert verdicts.put([verdict()]) is None
    assert VerdictStore(verdicts.directory).get(where()) == verdict()


@pytest.mark.parametrize("field", ["options", "gpu", "driver", "host", "torch", "encore"])
def test_a_verdict_holds_for_its_circumstances_only(verdicts: VerdictStore, field: str) -> None:
    verdicts.put([verdict()])
    assert verdicts.get(where(**{field: "another"})) is None


def test_latency_says_nothing_of_throughput(verdicts: VerdictStore) -> None:
    verdicts.put([verdict()])
    assert verdicts.get(where(objective="throughput")) is None


def sealed(fields: dict[str, Any]) -> bytes:
    """A file of these fields whose checksum is right."""
    rest = {key: one for key, one in fields.items() if key != CHECKSUM}
    return json.dumps({**rest, CHECKSUM: checksum(rest)}).encode()


def spoilt(content: bytes) -> list[tuple[str, bytes, str]]:
    whole = json.loads(content)
    return [
        ("empty", b"", "not JSON"),
        ("cut off", content[: len(content) // 2], "not JSON"),
        ("binary", b"\x80\x04\x95", "not JSON"),
        ("of another program", b'{"name": "x"}', "not a verdict of Encore's"),
        ("a list", b"[1, 2]", "not a verdict of Encore's"),
        ("deep", b"[" * 100_000, "not JSON"),
        ("of a later version", sealed({**whole, "version": 5}), "version 5"),
        ("of the version before", sealed({**whole, "version": 3, "moving": True}), "version 3"),
        ("with a time below zero", sealed({**whole, "median_s": {"copy": -1.0}}), "median_s"),
        ("with a time that is none", sealed({**whole, "median_s": {"copy": math.nan}}), "median_s"),
        ("with times of a stranger", sealed({**whole, "median_s": {"fast": 1.0}}), "times are of"),
        ("with a field more", sealed({**whole, "extra": 1}), "extra"),
        ("without a field", sealed({key: one for key, one in whole.items() if key != "kept"}), "kept"),
        ("with a wrong type", sealed({**whole, "calls": "many"}), "calls"),
        ("with a negative number", sealed({**whole, "calls": -1}), "calls"),
        ("that keeps what it has not", sealed({**whole, "kept": "magic"}), "magic"),
        (
            "of other circumstances",
            sealed({**whole, "circumstances": {**whole["circumstances"], "driver": "580.160"}}),
            "other circumstances",
        ),
        ("of no group", sealed({**whole, "group": [OTHER]}), "its own graph"),
        ("without a checksum", json.dumps({**whole, CHECKSUM: None}).encode(), "checksum"),
        ("with another's checksum", json.dumps({**whole, CHECKSUM: "0" * 64}).encode(), "checksum"),
        ("with a flipped digit", content.replace(b"0.00015", b"0.00095"), "checksum"),
        ("with a bound moved", content.replace(b"1.4", b"1.1"), "checksum"),
        ("huge", b" " * (store.MOST_BYTES + 1), "larger than"),
    ]


@pytest.mark.parametrize("index", range(23))
def test_damaged_and_foreign_files_are_ignored_with_a_reason(
    verdicts: VerdictStore, caplog: pytest.LogCaptureFixture, index: int
) -> None:
    verdicts.put([verdict()])
    (path,) = verdicts.directory.iterdir()
    name, content, reason = spoilt(path.read_bytes())[index]
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert verdicts.get(where()) is None, name
    assert reason in caplog.text
    (found,) = verdicts.list()
    assert found.verdict is None
    assert found.ignored is not None
    assert reason in found.ignored
    assert path.read_bytes() == content, "somebody else's file is left alone"
    verdicts.put([verdict()])
    assert verdicts.get(where()) == verdict(), "and a new verdict takes its place"


def test_of_a_large_file_no_more_is_read_than_shows_that_it_is_none(
    verdicts: VerdictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be larger than memory."""
    verdicts.put([verdict()])
    (path,) = verdicts.directory.iterdir()
    content, read = path.read_bytes(), []

    class Noted(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            read.append(len(found := super().read(size)))
            return found

    monkeypatch.setattr(store.os, "fdopen", lambda descriptor, mode: Noted(io.FileIO(descriptor, mode)))
    path.write_bytes(content.ljust(store.MOST_BYTES))
    assert verdicts.get(where()) == verdict()
    os.truncate(path, 4 * store.MOST_BYTES)
    read.clear()
    (found,) = verdicts.list()
    assert found.ignored == f"it is larger than {store.MOST_BYTES} bytes"
    assert read == [store.MOST_BYTES + 1]


@pytest.mark.parametrize("field", ["version", "kept"])
def test_a_long_text_in_a_foreign_file_is_not_told_whole(verdicts: VerdictStore, field: str) -> None:
    verdicts.put([verdict()])
    (path,) = verdicts.directory.iterdir()
    path.write_bytes(sealed({**json.loads(path.read_bytes()), field: "x" * (store.MOST_BYTES // 2)}))
    (found,) = verdicts.list()
    assert found.ignored is not None
    assert "xxx" in found.ignored
    assert len(found.ignored) <= store.LONGEST_REASON


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("place", ["measuring_s", "excess_s", "median_s.none", "ratio", "low", "high"])
def test_numbers_that_are_none_are_refused_wherever_they_stand(place: str, wrong: float) -> None:
    fields = json.loads(verdict().to_json())
    outer, _, inner = place.partition(".")
    holder = fields["compared"][0] if outer in fields["compared"][0] else fields[outer] if inner else fields
    holder[inner or outer] = wrong
    with pytest.raises(UnreadableVerdict, match=inner or outer):
        parse_verdict(sealed(fields))


def test_a_verdict_cannot_be_made_of_nonsense() -> None:
    fields = json.loads(verdict().to_json())
    fields["compared"][0]["ratio"] = -1.5
    with pytest.raises(UnreadableVerdict, match="compared"):
        parse_verdict(sealed(fields))


def test_whatever_bit_of_a_file_flips_the_verdict_is_ignored_or_the_same(verdicts: VerdictStore) -> None:
    whole = verdict()
    content = whole.to_json()
    accepted = 0
    for place in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        try:
            found = parse_verdict(bytes(damaged))
        except UnreadableVerdict:
            continue
        assert found == whole
        accepted += 1
    assert accepted < len(content) / 2, "blanks that are another blank now"
    assert parse_verdict(json.dumps(dict(reversed(json.loads(content).items()))).encode()) == whole


def test_a_folder_in_the_place_of_a_verdict_is_ignored(verdicts: VerdictStore) -> None:
    (verdicts.directory / f"{key_of(where())}{SUFFIX}").mkdir(parents=True)
    assert verdicts.get(where()) is None
    reason = verdicts.put([verdict()])
    assert reason is not None
    assert "Error" in reason


def test_graphs_judged_together_count_only_together(verdicts: VerdictStore, caplog: pytest.LogCaptureFixture) -> None:
    both = (GRAPH, OTHER)
    one, other = verdict(group=both), verdict(where(OTHER), group=both)
    verdicts.put([one])  # as a process leaves it that ends between the two
    with caplog.at_level(logging.WARNING):
        assert verdicts.get(where()) is None
    assert "judged together" in caplog.text
    verdicts.put([one, other])
    assert verdicts.get(where()) == one
    assert verdicts.get(where(OTHER)) == other
    VerdictStore(verdicts.directory).put([verdict(where(OTHER), group=both, kept="none")])
    assert VerdictStore(verdicts.directory).get(where()) is None, "another process found something else"


def test_each_graph_of_a_large_group_does_not_read_the_files_of_all(
    verdicts: VerdictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hundred partitions of one program: 90,000 files took 16 seconds."""
    graphs = tuple(sorted(hashlib.sha256(str(number).encode()).hexdigest() for number in range(40)))
    verdicts.put([verdict(where(graph), group=graphs) for graph in graphs])
    later = VerdictStore(verdicts.directory)
    reads = []
    read = VerdictStore._read

    def counted(self: VerdictStore, path: Path) -> Any:
        reads.append(path)
        return read(self, path)

    monkeypatch.setattr(VerdictStore, "_read", counted)
    assert [later.get(where(graph)) for graph in graphs] == [verdict(where(graph), group=graphs) for graph in graphs]
    assert len(reads) == 2 * len(graphs) - 1
    asked: list[Any] = []

    class Asked(set[Any]):
        def __contains__(self, one: object) -> bool:
            asked.append(one)  # it is hashed, with the names of all graphs
            return super().__contains__(one)

    later._whole = Asked(later._whole)
    assert [later.get(where(graph)) for graph in graphs] == [verdict(where(graph), group=graphs) for graph in graphs]
    assert len(asked) == len(graphs)
    verdicts.clear([key_of(where(graphs[3]))])
    assert VerdictStore(verdicts.directory).get(where(graphs[0])) is None, "another process looks at all"


def test_what_is_wrong_with_a_folder_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for number in range(3):
        broken = VerdictStore(tmp_path / "file" / "verdicts")
        assert broken.put([verdict(where(f"{number}" * 64), group=(f"{number}" * 64,))]) is not None
    assert len(caplog.messages) == 1


def test_a_full_disk_or_a_folder_that_is_not_writable_costs_the_verdict_only(
    verdicts: VerdictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_atomically", full)
    assert verdicts.put([verdict()]) == "OSError: No space left on device"
    assert verdicts.get(where()) is None


def test_where_folders_cannot_be_synced_verdicts_are_stored_all_the_same(
    verdicts: VerdictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems of networks and of user programs refuse that."""
    original = os.fsync

    def of_files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_only)
    assert verdicts.put([verdict()]) is None
    assert verdicts.get(where()) == verdict()


WRITER = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from pathlib import Path
from stored_verdicts import verdict, where
from optimizations.selection.store import VerdictStore

store = VerdictStore(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    assert store.put([verdict(calls=number)]) is None
    found = store.get(where())
    assert found is not None and found == verdict(calls=found.calls), found
    if number == 0:
        print("ready", flush=True)
"""


def writer(folder: Path, count: int) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    script = textwrap.dedent(WRITER).format(tests=str(here), root=str(here.parent))
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder), str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def test_processes_that_write_the_same_verdict_see_whole_ones(verdicts: VerdictStore) -> None:
    processes = [writer(verdicts.directory, 60) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert [one.ignored for one in verdicts.list()] == [None]
    assert len(list(verdicts.directory.iterdir())) == 1, "nothing is left behind"


def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_verdict(verdicts: VerdictStore) -> None:
    process = writer(verdicts.directory, 1_000_000)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    process.communicate()
    found = verdicts.get(where())
    assert found is not None
    assert found == verdict(calls=found.calls)
    (verdicts.directory / f".{key_of(where())}{SUFFIX}.cut0ff").write_bytes(b"half")  # what it may have left
    assert [one.ignored for one in verdicts.list()] == [None]
    assert verdicts.clear() == 1
    assert list(verdicts.directory.iterdir()) == []


# What a verdict is stored under


def generated(tmp_path: Path, code: str, name: str) -> Any:
    path = tmp_path / f"{name}.py"
    path.write_text(code)
    return runpy.run_path(str(path))["call"]


CODE = "# kernel path: {path}\nKERNEL = '''\n#include <{header}>\n'''\ndef call(args):\n    return {value}\n"


def test_a_graph_is_known_by_its_code_and_not_by_where_it_lies(tmp_path: Path) -> None:
    code = {"path": "/x", "header": "a.h", "value": 1}
    first = identity.graph_digest(generated(tmp_path, CODE.format(**code), "first"), (), ("forward",))
    assert first is not None
    assert len(first) == 64
    for change, integers, extra, same in (
        ({"path": "/elsewhere"}, (), ("forward",), True),
        ({"value": 2}, (), ("forward",), False),
        ({"header": "b.h"}, (), ("forward",), False),
        ({}, (8,), ("forward",), False),
        ({}, (), ("backward",), False),
    ):
        other = generated(tmp_path, CODE.format(**{**code, **change}), "other")
        assert (identity.graph_digest(other, integers, extra) == first) is same, change


def test_a_file_of_many_partitions_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "generated.py"
    path.write_text("".join(f"def partition_{number}(args):\n    return {number}\n\n" for number in range(20)))
    made = runpy.run_path(str(path))
    reads = []
    read_text = Path.read_text

    def counted(self: Path, *arguments: Any, **keywords: Any) -> str:
        reads.append(self)
        return read_text(self, *arguments, **keywords)

    monkeypatch.setattr(Path, "read_text", counted)
    functions = [made[f"partition_{number}"] for number in range(20)]
    digests = {identity.graph_digest(one, sizes) for one in functions for sizes in ([], [3], [4])}
    assert len(digests) == 60
    assert reads == [path]
    path.write_text(path.read_text() + "later = 1\n")
    assert identity.graph_digest(functions[0], []) not in digests


def test_a_function_without_source_has_no_digest() -> None:
    assert identity.graph_digest(len, ()) is None
    assert identity.graph_digest(object(), ()) is None  # type: ignore[arg-type]


def test_the_lock_of_an_editor_in_the_package_is_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "selection" / "identity.py"
    module.parent.mkdir()
    module.write_text("code = 1\n")
    monkeypatch.setattr(identity, "__file__", str(module))
    encore = identity._encore.__wrapped__
    known = encore()
    (module.parent / ".#identity.py").symlink_to("somebody@somewhere.1234")
    assert encore() == known


class Machine:
    """What a verdict is found to hold for, on a machine that a test makes up."""

    def __init__(self, folder: Path) -> None:
        self.properties: dict[str, Any] = {
            "name": "NVIDIA H100", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 80 << 30,
        }  # fmt: skip
        self.files = {
            "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159  Tue\n",
            "/proc/cpuinfo": "processor\t: 0\nmodel name\t: a processor\n",
        }
        self.torch = "2.11.0"
        self.release = "0.1.0"
        self.code = folder / "optimizations" / "selection" / "identity.py"
        self.code.parent.mkdir(parents=True)
        self.code.write_text("code = 1\n")

    def key(self, device_index: int = 0) -> str:
        for one in (identity._gpu, identity.driver_version, identity._processor, identity._encore):
            one.cache_clear()
        read_text = Path.read_text

        def read(path: Path, *arguments: Any, **keywords: Any) -> str:
            return self.files[str(path)] if path.is_relative_to("/proc") else read_text(path, *arguments, **keywords)

        def properties_of(index: int) -> Any:
            return SimpleNamespace(**{**self.properties, "name": f"{self.properties['name']} {index or ''}"})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(identity.torch.cuda, "get_device_properties", properties_of)
            patch.setattr(Path, "read_text", read)
            patch.setattr(identity.torch, "__version__", self.torch)
            patch.setattr(identity, "version", lambda name: f"{self.release} of {name}")
            patch.setattr(identity, "__file__", str(self.code))
            return key_of(identity.circumstances(GRAPH, "indirection=auto", "latency", device_index))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield Machine(tmp_path)
    for one in (identity._gpu, identity.driver_version, identity._processor, identity._encore):
        one.cache_clear()


def test_on_the_same_machine_a_verdict_has_the_same_name(machine: Machine, tmp_path: Path) -> None:
    assert machine.key() == machine.key()
    machine.files["/proc/cpuinfo"] += "cpu MHz\t: 2000\n\nprocessor\t: 1\nmodel name\t: a processor\n"
    assert machine.key() == Machine(tmp_path / "another").key() != machine.key(1)


@pytest.mark.parametrize(
    ("change", "to"),
    [
        ("name", "NVIDIA H200"),
        ("major", 10),
        ("minor", 1),
        ("multi_processor_count", 114),
        ("total_memory", 40 << 30),
        ("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.1  Tue\n"),
        ("/proc/cpuinfo", "model name\t: another processor\n"),
        ("torch", "2.12.0"),
        ("release", "0.2.0"),
        ("code", "code = 2\n"),
        ("a file more", "code = 1\n"),
        ("a file's name", "renamed.py"),
    ],
)
def test_each_of_what_decides_how_fast_a_graph_is_is_in_the_name(machine: Machine, change: str, to: Any) -> None:
    """A verdict of another machine, or of the code before, must not be found."""
    before = machine.key()
    if change in machine.properties:
        machine.properties[change] = to
    elif change in machine.files:
        machine.files[change] = to
    elif change == "code":
        machine.code.write_text(to)
    elif change == "a file more":
        (machine.code.parents[1] / "more.py").write_text(to)
    elif change == "a file's name":
        machine.code.rename(machine.code.with_name(to))
    else:
        setattr(machine, change, to)
    assert machine.key() != before


def test_the_driver_is_read_from_its_kernel_module(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC version: 12\n"
    )
    assert identity.driver_version(file) == "580.159.03"
    file_of_old = tmp_path / "old"
    file_of_old.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    assert identity.driver_version(file_of_old) == "535.104.05"


def test_without_a_file_of_the_kernel_module_nvml_is_asked_for_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def refuse() -> None:
        raise RuntimeError("there is no driver")

    nvml = SimpleNamespace(
        init_v2=lambda: begun.append(1), shutdown=begun.pop, system_get_driver_version=lambda: "591.44"
    )
    for index, (bindings, version) in enumerate([
        (SimpleNamespace(nvml=nvml), "591.44"),
        (SimpleNamespace(nvml=SimpleNamespace(init_v2=refuse)), "unknown"),
        (SimpleNamespace(), "unknown"),
        (None, "unknown"),
    ]):  # fmt: skip
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        assert identity.driver_version(tmp_path / f"none {index}") == version
        unclear = tmp_path / f"unclear {index}"
        unclear.write_text("NVRM version: none\n")
        assert identity.driver_version(unclear) == version
    assert begun == [], "it was shut down"


def test_a_program_that_changes_its_folder_finds_its_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENCORE_CACHE_DIR", "cache")
    found = VerdictStore(store.default_directory())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found.put([verdict()])
    assert (tmp_path / "cache" / "verdicts").is_dir()
    assert found.get(where()) == verdict()


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path))
    assert store.default_directory() == tmp_path / "verdicts"
