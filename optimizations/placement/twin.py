"""Check a rewritten graph: compare each node with its original, and check that nothing kept is written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optimizations.placement.observe import Observation, TensorFacts
from optimizations.placement.original import Original


class RewriteFailed(RuntimeError):
    """The rewritten graph is not the original's twin on the GPU; `node` is where this shows."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node
        self.reason = reason


def compare(original: Original, after: Observation) -> None:
    """Compare each node of the rewritten graph with its original.

    Raises:
        RewriteFailed: one differs in shape, strides, dtype or device from what it should be.
    """
    before = original.observed.tensors
    for name, facts in after.tensors.items():
        if name in before:
            _compare(name, before[name], facts)


def _compare(name: str, before: Sequence[TensorFacts], after: Sequence[TensorFacts]) -> None:
    """Raise unless `after` is as `before`."""
    if len(before) != len(after):
        raise RewriteFailed(name, "holds another number of tensors on the GPU")
    for old, new in zip(before, after, strict=True):
        for what, expected, found in (
            ("device", old.device, new.device),
            ("dtype", old.dtype, new.dtype),
            ("shape", old.shape, new.shape),
            ("stride", old.stride, new.stride),
        ):
            if not _same(expected, found):
                raise RewriteFailed(name, f"has {what} {found} on the GPU where it should have {expected}")


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, tuple):
        return len(expected) == len(found) and all(map(_same, expected, found))
    if isinstance(expected, torch.SymInt) or isinstance(found, torch.SymInt):
        return statically_known_true(expected == found)
    return bool(expected == found)


def new_alias(node: torch.fx.Node, before: Observation, after: Observation) -> bool:
    """Return whether `node` shares memory with an operand that it did not share memory with before."""
    for operand in node.all_input_nodes:
        shared_before = operand.name in before.tensors and before.share_memory(node.name, operand.name)
        if after.share_memory(node.name, operand.name) and not shared_before:
            return True
    return False


def check_kept(fed: Iterable[torch.fx.Node], given_out: Iterable[Any], after: Observation) -> None:
    """Check that no node writes to what is kept for later calls, and that the caller does not get it.

    `fed` are the inputs that are kept, `given_out` what the graph returns to the caller.

    Raises:
        RewriteFailed: a node writes to one of them, or a result shares its memory.
    """
    kept = {facts.storage for node in fed for facts in after.tensors[node.name]}
    for name, effects in after.effects.items():
        if not effects.writes.isdisjoint(kept):
            raise RewriteFailed(name, "would write to a value that is kept for later calls")
    for node in given_out:
        if isinstance(node, torch.fx.Node) and any(facts.storage in kept for facts in after.tensors[node.name]):
            raise RewriteFailed(node.name, "would give out a value that is kept for later calls")


def check_passed(original: Original, passed: Sequence[str], present: Collection[str]) -> None:
    """Check that no value of `passed` shares memory that the graph writes with another argument.

    Generated code assumes that arguments do not overlap. `passed` are values that are evaluated before the graph,
    `present` the nodes that are in it.

    Raises:
        RewriteFailed: two of them do.
    """
    written = original.written_by(present)
    inputs = (name for name in original.placeholders if name in present and original.observed.tensors.get(name))
    given = [*passed, *inputs]
    for name in passed:
        shared = original.storages(name) & written
        other = next((one for one in given if one != name and shared & original.storages(one)), None)
        if other is not None:
            raise RewriteFailed(name, f"shares memory with {other}, and the graph writes it")
