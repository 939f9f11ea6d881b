"""A value that a step reads, and that is another in each call, keeps it from being replayed: it is named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from name_programs import read, run_read

from optimizations.capture.step.changing_values import MOST_VALUES
from optimizations.capture.step.progress import MOST_SIGNATURES

UNUSED = "def weigh(batch):\n    u\n    return 2.0\n"
KEPT = {
    "a variable": ("u = 0\n" + UNUSED, "global u; u += 1", "u"),
    "an attribute": (
        "class C: pass\nc = C(); c.count = 0\ndef weigh(batch):\n    c.count\n    return 2.0\n",
        "c.count += 1",
        "C.count",
    ),
    "an entry": ("u = {'k': 0}\n" + UNUSED, "u['k'] += 1", "u.k"),
}


def warned(source: str, calls: int) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, report = run_read(source, graphed=True, calls=calls, changes=range(calls))
    return report, [str(one.message) for one in caught if "CUDA graph" in str(one.message)]


@pytest.mark.parametrize("name", KEPT)
def test_a_value_that_changes_in_each_call_is_named(name: str) -> None:
    body, change, value = KEPT[name]
    report, messages = warned(read(body, change), MOST_VALUES + 6)
    (refusal,) = report.refusals
    assert report.replays == 1 and value.split(".")[-1] in refusal.reason and "in each call" in refusal.reason
    assert len(messages) == 1 and refusal.reason in messages[0]


def test_it_is_looked_at_again_for_a_while_and_then_no_more() -> None:
    body, change, _ = KEPT["a variable"]
    report, messages = warned(read(body, change), MOST_SIGNATURES + 10)
    assert len(report.refusals) == len(messages) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, report = run_read(read(body, change), graphed=True, calls=40, changes=range(30))
    assert report.replays >= 5, "it has come to rest"


def test_few_values_are_no_reason() -> None:
    body, change, _ = KEPT["a variable"]
    report, messages = warned(read(body, change.replace("u += 1", "u = 1 - u")), MOST_VALUES * 2)
    assert report.refusals == () and not messages and report.replays > MOST_VALUES


def test_a_number_that_decides_is_named_next_to_the_line() -> None:
    _, (message,) = warned(read("u = 0\ndef weigh(batch): return u\n", "global u; u += 1"), 12)
    assert "differ" in message and "it reads u, which is another value" in message


def test_a_tensor_that_is_another_in_each_call_is_named() -> None:
    source = read("u = {'k': torch.ones(1)}\ndef weigh(batch): return u['k']\n", "u['k'] = u['k'] + 1")
    _, (message,) = warned(source, 50)
    assert "recorded again and again" in message and "u.k" in message
