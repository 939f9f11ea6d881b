"""`encore decisions`: what it lists, explains and clears, with whatever else lies in the folder; wrong use."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored_verdicts import GRAPH, OTHER, verdict, where
from typer.testing import CliRunner

from optimizations.selection import identity, store
from optimizations.selection.identity import Here
from optimizations.selection.store import SUFFIX, VerdictStore, key_of
from suite import cli_decisions
from suite.cli import app
from suite.errors import WrongUse


def decisions(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["decisions", *arguments], catch_exceptions=True)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The backend's folder, with two verdicts and a damaged one."""
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    verdicts = VerdictStore(tmp_path / "verdicts")
    verdicts.put([verdict(), verdict(where(torch="2.12.0"), kept="none", outcome="same", direction="backward")])
    (verdicts.directory / f"{'c' * 64}{SUFFIX}").write_text("{}")
    return verdicts.directory


@pytest.mark.parametrize("arguments", [(), ("list",)])
def test_decisions_are_listed(folder: Path, arguments: tuple[str, ...]) -> None:
    result = decisions(*arguments)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "verdict kept outcome others take direction calls objective GPU holds here"
    assert sum("copy faster none 1.500x, indirection 1.000x inference 156" in line for line in lines) == 1
    assert f"{'c' * 64}{SUFFIX} is ignored: it is not a verdict of Encore's" in lines


def test_a_machine_without_decisions_says_how_to_make_some(tmp_path: Path) -> None:
    result = decisions("list", "--folder", str(tmp_path))
    assert result.exit_code == 0
    assert "no verdicts" in result.stdout
    assert "backend='encore' make some" in result.stdout


def test_decisions_are_json_for_programs(folder: Path) -> None:
    listed = json.loads(decisions("list", "--json").stdout)
    assert json.loads(decisions("--json").stdout) == listed
    misplaced = decisions("--json", "list").exception
    assert isinstance(misplaced, WrongUse)
    assert "encore decisions list --json" in str(misplaced)
    assert [one["verdict"] and one["verdict"]["kept"] for one in listed].count("copy") == 1
    assert [one["ignored"] for one in listed].count("it is not a verdict of Encore's") == 1
    key = key_of(where())
    assert json.loads(decisions("explain", key[:10], "--json").stdout)["key"] == key


def test_the_folder_can_be_named_without_a_command(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no verdicts in" in decisions("--folder", str(tmp_path / "empty")).stdout
    assert decisions("--folder", str(folder)).stdout == decisions("list", "--folder", str(folder)).stdout
    assert decisions("--folder", str(folder), "--json").stdout == decisions("list", "--json").stdout
    misplaced = decisions("--folder", str(folder), "clear", "--all").exception
    assert isinstance(misplaced, WrongUse)
    assert f"encore decisions clear --folder {folder}" in str(misplaced)
    assert len(list(folder.iterdir())) == 3, "nothing was removed"


def test_a_decision_is_explained(folder: Path) -> None:
    result = decisions("explain", key_of(where())[:10])
    assert result.exit_code == 0
    text = result.stdout
    assert "kept: copy (a CUDA graph is replayed, its inputs copied)" in text
    assert "none         150.0 us, 1.500 times the kept one's time (1.400 to 1.600, 12 rounds)" in text
    assert "indirection  100.5 us, 1.000 times the kept one's time (? to 1.010, 12 rounds)" in text
    assert "measured on 156 calls in 0.02 s" in text
    assert "decided on 12 rounds; measuring ended because it was sure" in text
    assert "inputs moved from call to call" in text
    assert "driver 580.159" in text
    assert "is ignored: it is not a verdict" in decisions("explain", "cccc").stdout


HERE = Here(("NVIDIA A100, 40 GB", where().gpu), where().driver, where().host, where().torch, where().encore)


@pytest.mark.parametrize(
    ("here", "holds", "known", "differ"),
    [
        (HERE, "yes", True, []),
        (replace(HERE, gpus=HERE.gpus[:1]), "no: GPU", False, ["GPU"]),
        (replace(HERE, driver="590.1", encore="0.2.0+1"), "no: driver, Encore", False, ["driver", "Encore"]),
        (replace(HERE, host="another", torch="2.10.0"), "no: processor, torch", False, ["processor", "torch"]),
        (replace(HERE, gpus=(), driver="unknown"), "not known without a GPU", None, []),
        (replace(HERE, gpus=(), driver="unknown", torch="2.10.0"), "no: torch", False, ["torch"]),
    ],
)
def test_it_is_told_whether_a_verdict_holds_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, here: Here, holds: str, known: bool | None, differ: list[str]
) -> None:
    monkeypatch.setattr(identity, "here", lambda: here)
    key = key_of(where())
    (line,) = (line.strip() for line in decisions("list").stdout.splitlines() if key[:12] in line)
    assert line.endswith(f" {holds}")
    assert f"  holds here: {holds}\n" in decisions("explain", key).stdout
    found = json.loads(decisions("explain", key, "--json").stdout)
    assert (found["holds_here"], found["differs_here"]) == (known, differ)
    assert found in json.loads(decisions("list", "--json").stdout)


def test_what_a_verdict_is_compared_with_is_what_it_is_stored_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus in (2, 0):
        monkeypatch.setattr(identity.torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(identity.torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(identity, "_gpu", lambda index: f"GPU {index}")
        assert identity.here().gpus == ("GPU 0", "GPU 1")[:gpus]
        assert identity.here().differences(identity.circumstances(GRAPH, "", "latency", 1)) == ()


@pytest.mark.parametrize(
    ("here", "left"),
    [
        (HERE, {"2.11.0", "another GPU"}),
        (replace(HERE, torch="2.12.0"), {"2.12.0"}),
        (replace(HERE, encore="0.2.0+1"), set()),
        (replace(HERE, driver="590.1"), {"another GPU"}),
        (replace(HERE, gpus=(), driver="unknown"), {"2.11.0", "another GPU"}),
        (replace(HERE, host="another", driver="590.1"), {"2.11.0", "another GPU"}),
    ],
)
def test_what_no_program_of_these_versions_reads_is_cleared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, here: Here, left: set[str]
) -> None:
    """A verdict of another machine stays: folders are shared."""
    monkeypatch.setattr(identity, "here", lambda: here)
    VerdictStore(folder).put([verdict(where(gpu="another GPU"))])
    result = decisions("clear", "--stale")
    found = [one.verdict for one in VerdictStore(folder).list()]
    names = {one.circumstances.gpu if "another" in one.circumstances.gpu else one.circumstances.torch for one in found}
    assert (names, result.stdout) == (left, f"{4 - len(left)} removed\n")
    assert decisions("clear", "--stale").stdout == "0 removed\n"


def test_what_else_lies_in_the_folder_is_listed_and_left_alone(folder: Path, tmp_path: Path) -> None:
    cut_off = f".{'d' * 64}{SUFFIX}.x1y2"
    for name in ("notes.txt", f".hidden{SUFFIX}", cut_off):
        (folder / name).write_text("mine")
    (folder / "older").mkdir()
    listed = decisions("list").stdout
    for name in ("notes.txt", f".hidden{SUFFIX}", "older"):
        assert f"{name} is ignored: it is not named as verdicts are" in listed
    assert f"{cut_off} is ignored: it is being written" in listed
    ignored = {one["key"] for one in json.loads(decisions("list", "--json").stdout) if one["ignored"]}
    assert {"notes.txt", "older"} < ignored
    assert decisions("clear", "--all").stdout == "3 removed\n"
    assert {one.name for one in folder.iterdir()} == {"notes.txt", f".hidden{SUFFIX}", "older"}
    alone = decisions("list").stdout
    assert "notes.txt is ignored" in alone and "no verdicts in" in alone


@pytest.mark.parametrize("name", ["n" * 300, "/".join(["n" * 200] * 30)])
def test_a_folder_with_too_long_a_name_is_wrong_use(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for arguments in (("list",), ("explain", "aa"), ("clear", "--all")):
        with pytest.raises(WrongUse, match=r"--folder n.*File name too long; name another"):
            raise decisions(*arguments, "--folder", name).exception
        monkeypatch.setenv("ENCORE_CACHE_DIR", f"/tmp/{name}")
        with pytest.raises(WrongUse, match=r"^/tmp/n.*File name too long"):
            raise decisions(*arguments).exception


def test_a_folder_that_may_not_be_read_is_wrong_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_decisions.os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(WrongUse, match=f"^{folder}: Permission denied; name another"):
        raise decisions("list").exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "zz"), "no verdict begins with 'zz'"),
        (("explain", ""), "no verdict begins with ''"),
        (("clear",), "or give --all"),
        (("clear", "aa", "--all"), "give one of --all and names (aa), not both; nothing was removed"),
        (("clear", "aa", "--all", "--stale"), "give one of --all and --stale and names (aa), not all"),
        (("clear", "aa", "--stale"), "give one of --stale and names (aa), not both"),
        (("clear", "--all", "--stale"), "give one of --all and --stale, not both"),
        (("clear", "zz"), "no verdict begins with 'zz'"),
        (("list", "--folder", "/nowhere"), "is not a folder"),
    ],
)
def test_wrong_use_says_what_to_do(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    result = decisions(*arguments)
    assert isinstance(result.exception, WrongUse)
    assert message in str(result.exception)
    assert len(list(folder.iterdir())) == 3, "nothing was removed"


@pytest.mark.parametrize("path", ["verdicts", ""])
def test_a_file_in_the_place_of_the_backends_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """No program can store a verdict there, so to say that programs make some would be wrong."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(cache))
    assert decisions("list").exit_code == 0, "a folder that is not there yet"
    if path:
        cache.mkdir()
    (cache / path).write_text("")
    for arguments in ("list",), ("explain", "aa"), ("clear", "--all"):
        with pytest.raises(WrongUse, match=f"{cache / 'verdicts'} is not a folder"):
            raise decisions(*arguments).exception


def test_an_ambiguous_beginning_is_not_guessed(folder: Path) -> None:
    twin = key_of(where())[:1]
    for name in ("0", "1"):
        (folder / f"{twin}{name * 63}{SUFFIX}").write_text("{}")
    with pytest.raises(WrongUse, match="verdicts begin with"):
        raise decisions("explain", twin).exception


def test_a_whole_name_is_not_ambiguous_beside_a_copy_of_its_file(folder: Path) -> None:
    key = key_of(where())
    (folder / f"{key}-copy{SUFFIX}").write_bytes((folder / f"{key}{SUFFIX}").read_bytes())
    assert "kept: copy" in decisions("explain", key).stdout
    assert decisions("clear", key).stdout == "1 removed\n"
    assert "other circumstances" in decisions("explain", key).stdout, "the copy is what is left"


def test_what_is_left_of_verdicts_on_several_graphs_is_listed_as_ignored(folder: Path) -> None:
    """Programs take no notice of it, so a list that shows it among the others would be wrong."""
    both = (GRAPH, OTHER)
    pair = [verdict(where(graph, gpu="another"), group=both) for graph in both]
    other_times = verdict(where(OTHER, gpu="another"), group=both, kept="none")
    keys = {key_of(one.circumstances) for one in pair}
    for stored, count in (pair, 2), ([other_times], 0), ([pair[1]], 2), (None, 0):
        if stored is None:
            VerdictStore(folder).clear([key_of(pair[1].circumstances)])
        else:
            VerdictStore(folder).put(stored)
        listed = [one for one in VerdictStore(folder).list() if one.key in keys]
        assert sum(one.verdict is not None for one in listed) == count
        assert sum(VerdictStore(folder).get(one.circumstances) is not None for one in pair) == count
        assert {one.ignored for one in listed} == ({None} if count else {store.ALONE})


def test_decisions_are_cleared_one_or_all(folder: Path) -> None:
    result = decisions("clear", key_of(where())[:16])
    assert (result.exit_code, result.stdout) == (0, "1 removed\n")
    assert VerdictStore(folder).get(where()) is None
    assert VerdictStore(folder).get(where(torch="2.12.0")) is not None
    assert decisions("clear", "--all").stdout == "2 removed\n"
    assert list(folder.iterdir()) == []


@pytest.fixture
def strange(folder: Path) -> Path:
    """What others may leave in the folder: a pipe, a folder, a link to nothing, a name that a terminal obeys."""
    os.mkfifo(folder / f"{key_of(where(gpu='another'))}{SUFFIX}")
    (folder / f"{'4' * 64}{SUFFIX}").mkdir()
    (folder / f"{'5' * 64}{SUFFIX}").symlink_to("/nonexistent")
    (folder / f"\x1b[31m[red]{SUFFIX}").write_text("{}")
    return folder


def test_nobody_waits_for_what_is_not_a_file(strange: Path) -> None:
    assert VerdictStore(strange).get(where(gpu="another")) is None
    found = {one.path.name[:1]: one.ignored for one in VerdictStore(strange).list() if one.verdict is None}
    assert found["4"] is not None
    assert found["5"] == "it is a link to nothing"
    assert "it is not a regular file" in found.values()


def test_a_file_of_the_kernels_that_has_nothing_to_say_yet_is_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to its log: a regular file whose `read` gives None rather than to wait."""

    class NothingYet(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> Any:
            return None

    monkeypatch.setattr(store.os, "fdopen", lambda descriptor, mode: NothingYet(io.FileIO(descriptor, mode)))
    found = VerdictStore(folder).list()
    assert found
    assert {one.ignored for one in found} == {"it has nothing to read now"}


def test_names_of_files_tell_a_terminal_nothing(strange: Path) -> None:
    for arguments in (("list",), ("explain", "\x1b")):
        result = decisions(*arguments)
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout
        assert "\\x1b[31m[red]" in result.stdout
    (strange / f"\x1b[32m{SUFFIX}").write_text("{}")
    ambiguous = str(decisions("explain", "\x1b").exception)
    assert "\x1b" not in ambiguous
    assert "\\x1b[32m" in ambiguous


def test_a_name_that_is_no_text_is_json_all_the_same(folder: Path) -> None:
    """Linux takes any bytes for a name, and such a name cannot be printed."""
    (folder / os.fsdecode(b"\xff\xfe" + SUFFIX.encode())).write_text("{}")
    for arguments in ("list", "--json"), ("explain", "\udcff", "--json"):
        result = decisions(*arguments)
        assert result.exit_code == 0, result.exception
        found = json.loads(result.stdout)
        keys = [one["key"] for one in found] if isinstance(found, list) else [found["key"]]
        assert "\udcff\udcfe" in keys


def test_texts_of_a_verdict_tell_a_terminal_nothing(folder: Path) -> None:
    VerdictStore(folder).put([verdict(where(gpu="[red]an H100\x1b[2J, 80 GB", host="a\nb"))])
    listed, key = decisions("list").stdout, key_of(where(gpu="[red]an H100\x1b[2J, 80 GB", host="a\nb"))
    assert "[red]an H100\\x1b[2J" in listed
    explained = decisions("explain", key[:12]).stdout
    assert "\x1b" not in explained
    assert "a\\nb" in explained


def test_clearing_goes_on_past_what_cannot_be_removed(strange: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("c"):
            raise PermissionError(13, "Permission denied", str(path))
        original(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(PermissionError):
        VerdictStore(strange).clear()
    monkeypatch.setattr(Path, "unlink", original)
    assert sorted(one.name[:1] for one in strange.iterdir()) == ["4", "c"]
    assert decisions("clear", "--all").stdout == "1 removed\n"
    assert [one.name[:1] for one in strange.iterdir()] == ["4"], "a folder is none of ours"
