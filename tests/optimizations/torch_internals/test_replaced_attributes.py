"""Attributes are replaced in blocks, which threads may end in any order."""

from __future__ import annotations

from optimizations import torch_internals


def test_blocks_of_threads_may_end_in_any_order() -> None:
    class Owner:
        pass

    first, second = (torch_internals.replaced_attribute(Owner, "name", value) for value in "ab")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert vars(Owner)["name"] == "b"
    second.__exit__(None, None, None)
    assert "name" not in vars(Owner)

    a, plain, b, plain_too = (torch_internals.replaced_attribute(Owner, "name", value) for value in "apbp")
    for one in (a, plain, b, plain_too):
        one.__enter__()
    for one, there in [(plain_too, "b"), (a, "b"), (plain, "b"), (b, None)]:
        one.__exit__(None, None, None)
        assert vars(Owner).get("name") == there


def test_other_replacements_in_the_block_stay() -> None:
    class Owner:
        name = "before"

    with torch_internals.replaced_attribute(Owner, "name", "in the block"):
        Owner.name = "theirs"
        with torch_internals.replaced_attribute(Owner, "name", "inner"):
            assert Owner.name == "inner"
        assert Owner.name == "theirs"
    assert Owner.name == "theirs"
