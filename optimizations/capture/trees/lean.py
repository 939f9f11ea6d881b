"""Steady calls of a recording: from the function to the launch with what must be looked at, and nothing else.

A manager of stock's finds out in each call, in Python, what to do with it. A `SteadyCall` is made when that is known:
after a recording, or a replay that went the full way. From then on a call that is as it was takes few steps: one
comparison in C++ of everything at a fixed address, one of what is read in place, a look at the results that somebody
might hold, the launch, and the list of results. Whatever is not as it was goes the full way, before anything was done
for the call, so nothing of stock's behaviour is lost.

`SKIPPED` lists what a full call does in PyTorch 2.11, and why a steady call may go without or where it does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from optimizations import torch_internals

if TYPE_CHECKING:
    from optimizations.capture.trees.node import EncoreNode

trees = torch_internals.cudagraph_trees

MOST_KEPT = 8
"""Steady calls that are kept for one function: one for each recording that takes turns with others."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that a full call does, and why a steady one does not."""

    name: str
    does: str
    why: str


SKIPPED = (
    Skipped(
        "CUDAGraphTreeManager._run",
        "ends a recording or a warm-up that is under way",
        "steady calls are taken in the state EXECUTION only",
    ),
    Skipped(
        "CUDAGraphTreeManager._run",
        "asks whether the function changes inputs that it has not recorded",
        "the answer is kept with the place in the tree, and was no when this recording was made there",
    ),
    Skipped(
        "CUDAGraphTreeManager._run",
        "tries the recordings that follow the current one before it begins a new path",
        "a steady call begins a path only where none of the same function follows",
    ),
    Skipped(
        "CUDAGraphTreeManager.can_start_new_generation",
        "asks whether an iteration has begun, and whether backwards are pending",
        "the steady call asks the same",
    ),
    Skipped(
        "EncoreManager._look_for_held_results",
        "looks which results of the iteration before somebody holds",
        "the steady call looks at the same references; if one is alive the call goes the full way",
    ),
    Skipped(
        "CUDAGraphNode.check_invariants",
        "compares addresses, and looks at results that must have died",
        "the steady call does the same, with one comparison instead of two",
    ),
    Skipped(
        "CUDAGraphNode.check_static_inputs_are_stable",
        "raises where inputs at fixed addresses moved and may not",
        "such a call does not fit, and the full way raises",
    ),
    Skipped(
        "CUDAGraphNode.run",
        "checks and waits for the device if Inductor's debugging options say so",
        "there are no steady calls while one of these options is on",
    ),
    Skipped(
        "Session.run",
        "does the work that follows a recording, when it is due",
        "the steady call counts itself, and goes the full way when something is due",
    ),
)


class Fit(Enum):
    """Whether a steady call can serve inputs."""

    NO = 0
    YES = 1
    PATCHED = 2
    """Inputs at fixed addresses moved to where the graph can be pointed."""


class SteadyCall:
    """The call of one recording that is as the one before.

    Attributes:
        parent: the recording that was replayed before it in the same iteration; None where it begins one.
        mode: of stock's: inference, forward or backward.
    """

    __slots__ = (
        "_addresses",
        "_compared",
        "_dead_after",
        "_dead_before",
        "_dying",
        "_graph",
        "_session",
        "_state",
        "_tracker",
        "compile_id",
        "mode",
        "node",
        "parent",
    )

    def __init__(self, node: EncoreNode, mode: Any, compile_id: Any) -> None:
        self.node = node
        self._state = node.state
        self.mode = mode
        self.compile_id = compile_id
        self.parent: Any = node.parent
        self._addresses = node.static_input_data_ptrs
        self._compared = sorted({*node.static_input_idxs, *node.cudagraph_managed_idxs})
        self._dead_before = node.references(node.expected_dead_indices_before_graph)
        self._dead_after = node.references(node.expected_dead_indices_after_graph)
        self._dying = [index for index in node.cudagraph_managed_idxs if not node.preserved_aliased_inputs[index]]
        self._tracker = node.tracker
        self._session = node.session
        self._graph = node.graph

    @property
    def valid(self) -> bool:
        """Whether the recording is what it was when this was made."""
        return bool(self._state == self.node.state)

    def fits(self, inputs: Sequence[Any]) -> Fit:
        """Whether the call can be served as the one before was. Changes nothing."""
        if not _data_ptrs_equal(inputs, self._addresses, self._compared) or any_alive(self._dead_before):
            return Fit.NO
        tracker = self._tracker
        if tracker is None or tracker.fixed_in_place(inputs):
            return Fit.YES
        if tracker.refuses(inputs) or self.node.prefers_recording(inputs):
            return Fit.NO
        return Fit.PATCHED

    def rests(self) -> bool:
        """Whether the recording's session has nothing to do in this call. It is told of the call then."""
        session = self._session
        return session is None or session.rests()

    def run(self, inputs: list[Any]) -> list[Any]:
        """Serve a call that fits."""
        node = self.node
        for index in self._dying:
            inputs[index] = None
        if any_alive(self._dead_after):
            raise RuntimeError(
                "A result of an earlier CUDA graph that this one writes over is still held; it was not when the graph "
                "was recorded. This is a defect of Encore or of CUDAGraph Trees."
            )
        node.replays += 1
        node.copied_bytes += node.copied_per_replay
        if node.non_static_input_idx:
            node._copy_inputs_and_remove_from_src(node.reconstructed_inputs, inputs)
        elif self._tracker is not None:
            self._tracker.follow(inputs)
        self._graph.replay()
        if self._tracker is not None:
            self._tracker.launched()
        outputs: list[Any] = node.cached_results()
        inputs.clear()
        return outputs


def steady_call(node: EncoreNode, mode: Any, compile_id: Any) -> SteadyCall | None:
    """The steady call of a recording, if it can have one now."""
    options = torch_internals.inductor_config.triton
    debugging = options.fast_path_cudagraph_asserts or options.force_cudagraph_sync or options.force_cudagraphs_warmup
    if debugging or node.function.returned_inputs or node.graph is None:
        return None
    return SteadyCall(node, mode, compile_id)


def any_alive(references: Sequence[tuple[list[Any], int]]) -> bool:
    """Whether one of these references (a list of stock's, and a place in it) is to a result that somebody holds."""
    for held, place in references:
        reference = held[place]
        if reference is None:
            continue
        still_unused = reference.extra_ref_check
        # Where stock keeps the tensor, two references are its own; see `StorageWeakRefWrapper.expired`.
        if _storage_use_count(reference.ref.cdata) > (0 if still_unused is None else 2):
            return True
        if still_unused is not None and not still_unused():
            return True
    return False


_data_ptrs_equal = torch_internals.data_ptrs_equal
_storage_use_count = torch_internals.storage_use_count
