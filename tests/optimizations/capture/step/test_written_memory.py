"""Inputs that lie in memory which a recording writes are found; places that were looked at are not looked at again."""

from __future__ import annotations

import torch

from optimizations.capture.step import written_memory
from optimizations.capture.step.written_memory import WrittenMemory


def test_input_in_written_memory_is_found_each_time(monkeypatch):
    written = torch.zeros(64)
    memory = WrittenMemory([written])
    free = [[torch.zeros(4), torch.zeros(8)] for _ in range(3)]
    inside = [torch.zeros(4), written[30:38]]
    for _ in range(2):
        assert [memory.holds_one_of(batch) for batch in (*free, inside)] == [False, False, False, True]
    looked_at = []
    overlap = memory._ranges.overlap
    monkeypatch.setattr(
        memory, "_ranges", Looked(memory._ranges.borders, lambda *at: looked_at.append(at) or overlap(*at))
    )
    assert not any(memory.holds_one_of(batch) for batch in free)
    assert not looked_at
    assert memory.holds_one_of(inside)
    assert looked_at


def test_a_place_that_is_free_for_one_input_is_not_for_another():
    """Inputs differ in size: what lies just before the written memory is free for a small one."""
    whole = torch.zeros(64)
    memory = WrittenMemory([whole[16:]])
    small, large = whole[8:16], whole[8:24]
    assert not memory.holds_one_of([small, torch.zeros(16)])
    assert memory.holds_one_of([torch.zeros(8), large])


def test_no_more_places_are_remembered_than_allowed(monkeypatch):
    monkeypatch.setattr(written_memory, "MOST_CLEAR", 3)
    written = torch.zeros(64)  # kept: its memory would be a batch's
    memory = WrittenMemory([written])
    batches = [torch.zeros(4) for _ in range(8)]
    for batch in batches * 2:
        assert not memory.holds_one_of([batch])
        assert len(memory._clear) <= 3


class Looked:
    def __init__(self, borders, overlap):
        self.borders, self.overlap = borders, overlap
