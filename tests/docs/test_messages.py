"""Every error, warning and reason that a user may read is in a table, and is written in plain words."""

from __future__ import annotations

import re

from tests.docs.messages import TABLE, collect

MOST_WORDS = 70
UNCLEAR = re.compile(
    r"\b(behind|another one|others? in each|nobody|somebody|whoever|in vain|looked at|handed|of before"
    r"|in turns|dear|otherwise than)\b"
)
"""Words that a message must not have. Code may, where they mean something else."""


def test_table_has_every_message() -> None:
    assert collect() == TABLE.read_text(encoding="utf-8").splitlines(), "run python -m tests.docs.messages and read it"


def test_messages_are_short_and_plain() -> None:
    messages = [line.split(" | ", 2)[2] for line in collect()]
    assert len(messages) > 300
    assert [one for one in messages if UNCLEAR.search(one)] == []
    assert [one for one in messages if len(one.split()) > MOST_WORDS] == []
