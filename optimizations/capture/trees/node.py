"""One recording with indirection: a node of CUDAGraph Trees whose inputs, where proven, are read in place.

Three methods of the stock node are overridden, each around the stock one: recording inputs, record, copy inputs. Two
more get a line for functions that write their inputs: the check of invariants, and the launch; and two one for
Note [A reset of stock's].

Note [Outside of the pool]. Stock counts recording inputs that are not static as memory of the pool, and checks that
every live block there is accounted for. Inputs that lie outside must look static while the graph is recorded: their
indices are put into `static_input_idxs` of the node and of its function, and taken out again afterwards, or a moved
input would be taken for a moved parameter and recorded anew. (`non_managed_static_input_idxs` and
`static_input_data_ptrs` are computed before, and never have them.) An output that aliases such an input would be handed
out as a fixed tensor, so inputs that the scout capture returned an alias of are left to stock; see `recording`.

Note [The first replay]. Stock ends a recording by replaying it, and hands out those results. The graph then already
reads the caller's tensors, which are kept until that replay is enqueued.

Note [Mutated inputs]. Stock skips a graph that writes an input which is neither static nor managed, because it would
write a placeholder. With the input read in place the caller's tensor is written, as without a graph. If it turns out
during the recording that the input must be copied, that call is completed by writing the placeholder back, and from
then on the function runs as stock runs it.

Note [A reset of stock's]. Stock tells autograd about tensors that its nodes keep, in a registry of the process that is
switched off when stock's managers are ended (`torch.compiler.reset`), and whose use is an error from then on. Encore's
managers may be alive, so they switch it on before they use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.captured.placeholders import OutsidePlaceholder
from optimizations.captured.recapture import register_generators, uncollected
from optimizations.recording.attempt import Attempt
from optimizations.replay.addresses import Follower

CUDAGraphNode: Any = torch_internals.cudagraph_trees.CUDAGraphNode


class EncoreNode(CUDAGraphNode):
    """A recording of a `Capturable`."""

    static_input_idxs: list[int]
    non_static_input_idx: list[int]

    def __init__(self, wrapped_function: Any, *args: Any, **kwargs: Any) -> None:
        self._follower: Follower | None = None
        self._held: Sequence[OutsidePlaceholder] = ()
        self._attempt: Attempt | None = None
        super().__init__(wrapped_function, *args, **kwargs)
        if self._follower is not None:
            self._follower.launched()
        if self._attempt is not None:
            self._attempt.first_replay_enqueued()
            self._attempt = None

    @property
    def follower(self) -> Follower | None:
        """What keeps the graph's addresses in step with the inputs; None where all are copied."""
        return self._follower

    def release(self) -> None:
        """Give back what the node holds beside the graph. It cannot be run any more."""
        self._follower = None
        self._held = ()

    def check_invariants(self, inputs: list[Any]) -> Any:
        """As stock's. An input that the function writes must not lie in memory that the graph overwrites."""
        follower = self._follower
        if follower is not None and follower.mutated and follower.writes_owned_memory(inputs):
            status = torch_internals.cudagraph_utils.CheckInvariantStatus.CudagraphManagedIdxMismatch
            return status, lambda: "an input that the function writes lies in the graph's own memory"
        return super().check_invariants(inputs)

    def run_graph(self) -> None:
        super().run_graph()
        if self._follower is not None:
            self._follower.launched()

    def _copy_inputs_and_remove_from_src(self, dsts: list[Any], srcs: list[Any]) -> None:
        if self._follower is not None:
            self._follower.follow(srcs)
        super()._copy_inputs_and_remove_from_src(dsts, srcs)

    def _allocate_and_copy_recording_inputs(self, inputs: list[Any]) -> list[Any]:
        attempt = self._attempt = Attempt(self, inputs)
        outside = attempt.outside
        # Note [Outside of the pool]
        static = [*attempt.function.static_input_idxs, *outside]
        self.wrapped_function = dataclasses.replace(attempt.function, static_input_idxs=static)
        self.static_input_idxs = [*self.static_input_idxs, *outside]
        self.non_static_input_idx = [index for index in self.non_static_input_idx if index not in outside]
        with_placeholders = [outside.get(index, value) for index, value in enumerate(inputs)]
        return super()._allocate_and_copy_recording_inputs(with_placeholders)

    def _record(self, model: Any, inputs: list[Any]) -> Any:
        attempt = self._attempt
        assert attempt is not None, "recording inputs are allocated before anything is recorded"
        if attempt.recording is not None:
            self.graph = torch.cuda.CUDAGraph(keep_graph=True)
            register_generators(self.graph, inputs, self.device)
        memory = attempt.note_memory(self, inputs)
        with uncollected():
            outputs = super()._record(model, inputs)
        outside = attempt.outside
        self.wrapped_function = attempt.function
        self.static_input_idxs = [index for index in self.static_input_idxs if index not in outside]
        outcome = attempt.complete(self, memory, outputs)
        self._follower = outcome.follower
        self._held = tuple(outcome.held.values())
        self.non_static_input_idx = sorted([*self.non_static_input_idx, *outcome.held])
        if self._follower is not None:
            self._follower.follow(attempt.first_inputs)  # Note [The first replay]
        return outputs

    def _initialize_cached_tensors(self) -> None:
        torch_internals.set_cached_tensors_enabled(True)  # Note [A reset of stock's]
        super()._initialize_cached_tensors()

    def remove_node_cached_tensors(self) -> None:
        torch_internals.set_cached_tensors_enabled(True)  # Note [A reset of stock's]
        super().remove_node_cached_tensors()

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor over the same memory, which it does not own."""
        metadata = self._tensor_metadata(tensor, ignore_storage_offset=False)
        return self._reconstruct_from_tensor_metadata(metadata)

    def borrowed_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """All bytes of the storage of `tensor` (uint8), which it does not own."""
        metadata = self._tensor_metadata(tensor)
        whole = {"size": (metadata["nbytes"],), "stride": (1,), "dtype": torch.uint8}
        return self._reconstruct_from_tensor_metadata({**metadata, **whole})
