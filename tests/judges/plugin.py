"""A plugin of pytest that compiles other projects' tests with one compiler, and notes how each test ended.

    ENCORE_JUDGE_COMPILER=encore ENCORE_JUDGE_ROWS=FILE python -m pytest -p judges.plugin TESTS

Calls of `torch.compile` that name Inductor or no backend get the compiler's keywords; those that name another one, such
as "eager", stay as they are. Each call of a compiled function is `CALLS` calls with the same arguments, whose last
result counts: most tests call a function once, and graphs would not be replayed. The first test of each class runs
before any second one.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_pool import GONE

from . import trial
from .worker import prepare

COMPILER = os.environ.get("ENCORE_JUDGE_COMPILER", "compile")
ROWS = os.environ.get("ENCORE_JUDGE_ROWS")
PREFIX = os.environ.get("ENCORE_JUDGE_NAME", "project")
CALLS = 4


def pytest_configure(config: pytest.Config) -> None:
    """Put the compiler into `torch.compile` and count graphs that are launched."""
    prepare()
    torch.compile = given_compiler(torch.compile, dict(trial.COMPILERS[COMPILER]))
    counting = trial.counted_replays()
    config.stash[REPLAYS] = counting.__enter__()
    config.add_cleanup(lambda: counting.__exit__(None, None, None))


REPLAYS: Any = pytest.StashKey()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the first test of each class or file before any second one."""
    seen: Counter[str] = Counter()
    places = {}
    for item in items:
        family = item.nodeid.rpartition("::")[0]
        places[item] = seen[family]
        seen[family] += 1
    items.sort(key=places.__getitem__)


def given_compiler(stock: Any, keywords: dict[str, Any]) -> Any:
    """Return `torch.compile` with other keywords where the program leaves the backend to PyTorch."""

    @functools.wraps(stock)
    def compile_(model: Any = None, **given: Any) -> Any:
        if given.get("backend", "inductor") != "inductor":
            return stock(model, **given)
        kept = {name: value for name, value in given.items() if name not in ("backend", "mode", "options")}
        if model is None:
            return lambda target: compile_(target, **given)
        return _repeated(stock(model, **kept, **keywords))

    return compile_


def _repeated(compiled: Any) -> Any:
    once = compiled.forward if isinstance(compiled, torch.nn.Module) else compiled

    @functools.wraps(once)
    def again(*args: Any, **given: Any) -> Any:
        for _ in range(CALLS - 1):
            once(*args, **given)
        return once(*args, **given)

    if not isinstance(compiled, torch.nn.Module):
        return again
    compiled.forward = again
    return compiled


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the graphs that the test launched."""
    before = item.config.stash[REPLAYS]()
    try:
        yield
    finally:
        item.stash[REPLAYS] = item.config.stash[REPLAYS]() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write a row for each test when it has run, or when it is skipped or fails before."""
    report = yield
    if ROWS and (report.when == "call" or (report.when == "setup" and not report.passed)):
        row: dict[str, Any] = {"task": f"{PREFIX}|{report.nodeid}", "compiler": COMPILER}
        if report.skipped:
            row = {**row, "compiler": "eager", "skipped": f"the project skips it: {_reason(report)}"}
        else:
            row.update(passed=report.passed, replays=item.stash.get(REPLAYS, 0), seconds=round(report.duration, 3))
            if call.excinfo is not None:
                row["wrong"] = trial.described(call.excinfo.value)
        _write(row)
        if call.excinfo is not None and trial.is_lost(call.excinfo.value):
            os._exit(GONE)  # every later test of this process would fail, too
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """Write a row for a test that ended its process. Processes are replaced by pytest-xdist, which calls this."""
    row = {"task": f"{PREFIX}|{crashitem}", "compiler": COMPILER, "passed": False, "replays": 0}
    _write({**row, "wrong": "the process ended", "crashed": True})


def _write(row: dict[str, Any]) -> None:
    if ROWS:
        with Path(ROWS).open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def _reason(report: Any) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[:200]
