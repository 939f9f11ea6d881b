"""Extend a node of CUDAGraph Trees, which is one recording, so that it can read inputs in place.

Stock's code creates and replays the node. In addition the captured graph is retained (`keep_graph`). After the capture
`in_place.session` examines the recording. From then on inputs with a tracker are read in place: their addresses are
updated in the graph instead of copying them.

Note [Addresses that cannot be changed]. The driver may refuse to update a node of the graph, at the first call whose
input moved or at any later one. The addresses in the graph are then undefined, so the recording is discarded. The call
runs without a graph, and the function is recorded again with copied inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.concurrency.branches import Branches
from optimizations.concurrency.launch_log import HAS_COLLECTIVES, IS_NARROW, LaunchLog, log_of_capture, noted
from optimizations.graph.device import DeviceTools
from optimizations.graph.memory import MemoryRanges, storage_of
from optimizations.graph.pools import in_order, pool_memory
from optimizations.graph.prelude_check import device_tools
from optimizations.graph.recapture import Recaptured, recapture, register_generators
from optimizations.in_place.addresses import AddressTracker
from optimizations.in_place.budget import waiting_for_memory
from optimizations.in_place.description import RESTING, describe
from optimizations.in_place.examination import Recorded
from optimizations.in_place.session import Session, Stage
from optimizations.in_place.without_placeholder import without_placeholder
from optimizations.race import Race, mark
from optimizations.report.recordings import RecordingReport
from optimizations.stack_trace import one_line
from optimizations.torch_internals.stock_trees import (
    INPUT_COPY_IDXS,
    STATIC_INPUT_IDXS,
    checks_deaths_when_running,
    compared_inputs,
    refuse_derivatives,
    with_globals,
)
from optimizations.trees.function import RecordableFunction
from optimizations.trees.liveness import MANY, Many, Reference, rearranged
from optimizations.trees.readable_seeds import any_on_host
from optimizations.trees.reasons import INPUT_STILL_HELD, NOT_FOLLOWED, NotLaunched
from optimizations.trees.results import Results
from optimizations.uncollected import uncollected

CUDAGraphNode: Any = torch_internals.cudagraph_trees.CUDAGraphNode
_stocks_copy = CUDAGraphNode._copy_inputs_and_remove_from_src


class EncoreNode(CUDAGraphNode):
    """Hold a recording of a `RecordableFunction`. It is the `examination.Host` of its session.

    Attributes:
        results: makes the tensors that replays return.
        replays: how often the graph was replayed for a call; `full_replays`: replays on the slow path.
        replayed_at: replays of all recordings of the function when this one was last replayed, while work is left.
        copied_bytes: bytes copied into placeholders by these replays.
        copied_per_replay: bytes that the next replay copies; inputs with a tracker are not copied.
        tracker: updates the graph's addresses for moved inputs; None if all are copied.
        session: examines the recording and prepares in-place reading; None after `release`, or if it could not begin.
        takes_fast_path: whether `fast_path` may replay it. `expect_again` sets this; whatever changes how replays run
            clears it.
        function, options, code: the recorded function, the user's options, and the facts from its generated source.
    """

    wrapped_function: Any
    non_static_input_idx: list[int]
    non_managed_static_input_idxs: list[int]
    reconstructed_inputs: list[Any]
    input_copy_idxs = INPUT_COPY_IDXS
    static_input_idxs = STATIC_INPUT_IDXS

    def __init__(self, wrapped_function: Any, *args: Any, **kwargs: Any) -> None:
        self.function: RecordableFunction = wrapped_function.model
        self.options, self.code = self.function.options, self.function.code()
        self.results = Results(self, self.function)
        self.tracker: AddressTracker | None = None
        self.session: Session | None = None
        self._given: dict[int, Any] = {}  # inputs of the recorded call that it may return
        self._fixed_storages: list[weakref.ref[torch.UntypedStorage]] = []
        self._in_place: frozenset[int] = frozenset()
        self._copying: bool | None = None
        self._copies: tuple[list[int], list[int], list[torch.Tensor], bool] | None = None
        self._without_placeholder: frozenset[int] = frozenset()
        # The launches of the capture; later, and where it has none, why they are a chain.
        self._log: LaunchLog | str = "its launches were not noted when it was captured"
        self.replays = self.full_replays = self.replayed_at = self.copied_bytes = 0
        self.takes_fast_path = False
        started = time.perf_counter()
        with_globals(CUDAGraphNode.__init__)(self, wrapped_function, *args, **kwargs)
        seconds = time.perf_counter() - started
        self._copied = list(self.non_static_input_idx)
        self.copied_per_replay = self._bytes_of(self._copied)
        # The call has already run here. An exception would make it run twice.
        try:
            self._begin_session(seconds)
            self.function.recorded(self)
            self.function.plan_is_there(self)
        except Exception as error:
            self.session = None
            reason = one_line(error)
            warnings.warn(f"Encore leaves a CUDA graph as it is; {reason}. This is a defect of Encore.", stacklevel=2)

    @property
    def tools(self) -> DeviceTools:
        """Return the tools of the device."""
        return device_tools(self.device)

    def describe(self) -> RecordingReport:
        """Return the report of this recording."""
        session = self.session  # another thread may release it at any time
        if session is None:
            raise ReferenceError("this recording is gone, or its session could not begin")
        return describe(session, self, str(self._log))

    # Recording

    def _record(self, model: Any, inputs: list[Any]) -> Any:
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        register_generators(self.graph, inputs, self.device)
        fixed = {index: inputs[index] for index in self._tensors(self.non_managed_static_input_idxs)}
        managed = {index: weakref.ref(inputs[index]) for index in self.cudagraph_managed_idxs}
        # By storage, not by address: an output may reuse the memory of an input that died during the capture.
        placeholders = {
            index: weakref.ref(inputs[index].untyped_storage()) for index in self._tensors(self.non_static_input_idx)
        }
        self._log = self._launch_log(inputs)
        if isinstance(self._log, LaunchLog):
            model = noted(self._log, model, self.function.generated, self.cuda_graphs_pool)
        # Stock requires each input that is not static to be in the pool before a capture. One without a placeholder is
        # not, and is never returned as an output, because only Triton kernels use it.
        stocks: Any = self.wrapped_function
        if self._without_placeholder:
            static = [*stocks.static_input_idxs, *self._without_placeholder]
            self.wrapped_function = dataclasses.replace(stocks, static_input_idxs=static)
        try:
            with uncollected(), in_order(self.stream):
                outputs = super()._record(model, inputs)
        finally:
            self.wrapped_function = stocks
        self._fixed_storages = [weakref.ref(value.untyped_storage()) for value in fixed.values()]
        self.results.recorded(outputs, fixed, managed, placeholders)
        return outputs

    def _tensors(self, indices: Iterable[int]) -> list[int]:
        """Return which of these inputs are tensors."""
        return [index for index in indices if isinstance(self.reconstructed_inputs[index], torch.Tensor)]

    def _bytes_of(self, indices: Iterable[int]) -> int:
        return sum(self.reconstructed_inputs[index].nbytes for index in self._tensors(indices))

    def _allocate_and_copy_recording_inputs(self, inputs: list[Any]) -> list[Any]:
        """Copy inputs as stock does, without placeholders for some. Note [Inputs without a placeholder]."""
        ordinary, function = self.non_static_input_idx, self.function
        returned = [index for index in ordinary if self.code.returns(index)]
        self._given = {index: inputs[index] for index in (*returned, *self.non_managed_static_input_idxs)}
        if not function.records_on_inputs or function.not_followed is not None or function.decision == "copies":
            return super()._allocate_and_copy_recording_inputs(inputs)
        mutated = [inputs[index] for index in self.wrapped_function.mutated_input_idxs]
        written = [storage_of(one) for one in mutated if isinstance(one, torch.Tensor)]
        chosen = without_placeholder(
            self.code,
            inputs,
            ordinary,
            lambda: MemoryRanges([*pool_memory(self.cuda_graphs_pool), *written]),
            selects=self.options.selection == "rule",
        )
        given = {index: inputs[index] for index in chosen}
        static: list[int] = self.static_input_idxs
        self.static_input_idxs = [*static, *chosen]
        self.non_static_input_idx = [index for index in ordinary if index not in given]
        try:
            recording_inputs: list[Any] = super()._allocate_and_copy_recording_inputs(inputs)
        finally:
            self.static_input_idxs = static
        self._without_placeholder = frozenset(
            index for index, value in given.items() if recording_inputs[index] is value
        )
        for index in self._without_placeholder.symmetric_difference(given):  # this PyTorch made a placeholder anyway
            recording_inputs[index].copy_(given[index].detach())
            self.non_static_input_idx = sorted([*self.non_static_input_idx, index])
        return recording_inputs

    def run_first_inputs(self, new_inputs: list[Any]) -> Any:
        """Return the results of the recording as stock does, with the caller's own inputs among them."""
        outputs = list(super().run_first_inputs(new_inputs))
        self.results.returned.return_results(outputs, self._given)
        self._given = {}
        return outputs

    def _launch_log(self, inputs: Sequence[Any]) -> LaunchLog | str:
        """Return a log for the capture's launches, or why they stay a chain."""
        if self.code.collective:
            return HAS_COLLECTIVES
        if self.function.chain is not None:
            return self.function.chain
        moving = [*self.non_static_input_idx, *self._without_placeholder]
        try:
            return log_of_capture(inputs, moving, self.device, self.tools.driver)
        except Exception as error:
            return one_line(error)

    def _branches(self) -> Branches | None:
        log = self._log
        if isinstance(log, str):
            return None
        self._log = log.failure or ""
        if log.failure is not None:
            return None
        branches = Branches(log, self.graph, self.tools.driver, Race, functools.partial(mark, self.device))
        if branches.is_narrow:
            self.function.chain = IS_NARROW  # noting its launches would make each recording longer
        return branches

    def _begin_session(self, seconds: float) -> None:
        mutated = set(self.wrapped_function.mutated_input_idxs)
        recorded = Recorded(
            graph=self.graph,
            inputs=self.reconstructed_inputs,
            copied=sorted([*self._tensors(self._copied), *self._without_placeholder]),
            written=self._tensors(index for index in self.non_managed_static_input_idxs if index in mutated),
            returned=self.results.shared_copied,
            pool=self.cuda_graphs_pool,
            seconds=seconds,
            without_placeholder=self._without_placeholder,
        )
        # A reference to the node would be a cycle, which would keep the graph and its memory alive.
        self.session = Session(recorded, weakref.proxy(self), self._branches())
        if self.function.not_followed is not None:
            self.session.decline(self.function.not_followed)
        elif self.function.decision == "copies":
            self.session.decline(RESTING)
        if self._without_placeholder:
            self.session.settle_by_name()
            if self.session.unusable is not None:
                self.function.records_on_inputs = False

    # Results and their liveness

    def reconstruct_outputs(self) -> Any:
        """Leave the results to `run`, which has the inputs of the call."""
        return []

    def expect_again(self) -> None:
        """Let the next call with equal inputs take the fast path, if that covers all that a replay needs."""
        options = torch_internals.inductor_config.triton
        debugging = (
            options.fast_path_cudagraph_asserts or options.force_cudagraph_sync or options.force_cudagraphs_warmup
        )
        unfit = debugging or self.reads_what_is_gone or self.graph is None
        self.takes_fast_path = self.options.lean and not unfit

    # What `fast_path` compares. It is computed when it is first needed, and not while the call is recorded.

    @functools.cached_property
    def compared(self) -> list[int]:
        """Return the inputs whose addresses are compared, including results of earlier graphs."""
        return sorted(compared_inputs(self))

    @functools.cached_property
    def seeds(self) -> list[int]:
        """Return the attention seeds that may be in host memory, as their addresses are not compared."""
        return [index for index in self.code.seeds if index not in self.compared]

    @functools.cached_property
    def dying(self) -> list[int]:
        """Return the inputs that are results of earlier graphs, and are released before the launch."""
        return [index for index in self.cudagraph_managed_idxs if not self.preserved_aliased_inputs[index]]

    @functools.cached_property
    def dead_before(self) -> Sequence[Reference]:
        """Return references to results that must have died before the graph runs."""
        return self.references(self.expected_dead_indices_before_graph)

    @functools.cached_property
    def dead_after(self) -> Sequence[Reference]:
        """Return references to results that must have died when the graph runs."""
        return self.references(self.expected_dead_indices_after_graph)

    @functools.cached_property
    def results_alive(self) -> Sequence[Reference]:
        """Return references to all results that are alive after the graph. At the end of a long path they are many."""
        return self.references(self.live_indices_after_graph)

    def references(self, indices: Sequence[tuple[int, int]]) -> Sequence[Reference]:
        """Return references to these results, given as stock does (depth in the path, place)."""
        cached = [(node.cached_tensor_outputs, node.results.storages) for node in self._path_from_root]
        found = [(self.path_weakrefs[depth], place, *cached[depth]) for depth, place in indices]
        return Many(found) if len(found) > MANY else found

    def _initialize_cached_tensors(self) -> None:
        torch_internals.set_cached_tensors_enabled(True)  # Note [A reset of stock's] in `results`
        try:
            super()._initialize_cached_tensors()
            self.results.cached()
        except BaseException:  # e.g. an interrupt that the program handles: the next call makes all of them
            self.remove_node_cached_tensors()
            raise

    def remove_node_cached_tensors(self) -> None:
        torch_internals.set_cached_tensors_enabled(True)  # Note [A reset of stock's] in `results`
        self.results.uncached()
        super().remove_node_cached_tensors()

    # Stock looks each input up among all results of the path, one after the other. Results keep their addresses.

    @functools.cached_property
    def results_at(self) -> Mapping[int, list[tuple[int, int]]]:
        """Return, by address, the results of the path (depth in it, place). First read when all of them are there."""
        found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for depth, references in enumerate(self.path_weakrefs):
            for place, reference in enumerate(references):
                if reference is not None:
                    found[reference.data_ptr()].append((depth, place))
        return dict(found)

    @functools.cached_property
    def _earlier(self) -> Mapping[int, list[tuple[int, int]]]:
        return {} if self.parent is None else self.parent.results_at

    def _is_cuda_graph_recorded_tensor(self, t: torch.Tensor) -> bool:
        if not self._earlier and not self.outputs_weakrefs:
            return False
        address = t.untyped_storage().data_ptr()
        own = (reference for reference in self.outputs_weakrefs if reference is not None)
        return address in self._earlier or any(reference.data_ptr() == address for reference in own)

    def _is_alias_of_live_recorded_tensor(self, t: torch.Tensor) -> tuple[int, int] | None:
        if self.outputs_weakrefs:
            found: tuple[int, int] | None = super()._is_alias_of_live_recorded_tensor(t)
            return found
        for depth, place in self._earlier.get(t.untyped_storage().data_ptr(), ()) if self._earlier else ():
            if torch_internals.cudagraph_trees.is_live(self.path_weakrefs[depth][place]):
                return depth, place
        return None

    def _mark_prior_graph_output_as_aliased(self, index: tuple[int, int]) -> None:
        super()._mark_prior_graph_output_as_aliased(index)
        rearranged()

    # Replay

    def run(self, new_inputs: list[Any]) -> Any:
        refuse_derivatives([new_inputs[index] for index in (*self._copied, *self._without_placeholder)])
        self.replays += 1
        self.full_replays += 1
        self.copied_bytes += self.copied_per_replay
        inputs, session = list(new_inputs), self.session
        if session is None or session.stage is Stage.DONE:
            super().run(new_inputs)
        else:
            session.run(new_inputs, super().run)
            self.function.plan_is_there(self)
        return self.results.of_call(inputs)

    def moved_inputs(self, inputs: Sequence[Any]) -> list[int]:
        """Return the inputs whose address differs from the fixed address that the graph reads."""
        recorded = self.static_input_data_ptrs
        return [
            index
            for index in self.non_managed_static_input_idxs
            if isinstance(inputs[index], torch.Tensor) and inputs[index].data_ptr() != recorded[index]
        ]

    def may_come_back(self) -> bool:
        """Return whether all inputs at fixed addresses of the recording are alive, so a call may pass them again."""
        return all(storage() is not None for storage in self._fixed_storages)

    def run_graph(self) -> None:
        branches = self.session.branches if self.session is not None else None
        if branches is not None and branches.is_racing:
            branches.launch(super().run_graph)
        else:
            super().run_graph()
        if self.tracker is not None:
            self.tracker.launched()

    def check_invariants(self, inputs: list[Any]) -> Any:
        """Check inputs as stock does, and refuse inputs that this recording cannot read."""
        statuses = torch_internals.cudagraph_utils.CheckInvariantStatus
        if self.reads_what_is_gone:
            return statuses.StaticInputIdxMismatch, lambda: "it reads inputs of the call that was recorded"
        self._require_usable()
        try:
            self._follow_the_function()
        except Exception as error:
            raise self.not_followed(error) from error
        if any_on_host(inputs, self.code.seeds):
            return statuses.StaticInputIdxMismatch, lambda: "its seeds of attention are in host memory"
        status, describe = super().check_invariants(inputs)  # raises NotLaunched
        if status is statuses.SUCCESS and checks_deaths_when_running():  # then the copies have already been made
            self._check_liveness(self.expected_dead_indices_after_graph, self.path_weakrefs)
        return status, describe

    def _check_liveness(self, indices: Any, output_refs: Any) -> bool:
        """Check as stock does.

        Raises:
            NotLaunched: an input is live that must be dead before the graph runs.
        """
        if CUDAGraphNode._check_liveness(indices, output_refs):
            return True
        if indices is self.expected_dead_indices_after_graph:
            raise NotLaunched(self, INPUT_STILL_HELD)
        return False

    @property
    def reads_what_is_gone(self) -> bool:
        """Return whether the graph can only read the inputs of the recorded call."""
        return bool(self._without_placeholder) and self.tracker is None

    def give_back_inputs(self, inputs: list[Any]) -> None:
        """Restore the inputs that `check_invariants` removed from the list, as copies outside of the pool.

        An input that the function writes is not copied: the program reads it at its address afterwards.
        """
        mutated = self.wrapped_function.mutated_input_idxs
        for index in self.cudagraph_managed_idxs:
            if inputs[index] is None:
                seen = self.reconstructed_inputs[index]
                inputs[index] = seen if index in mutated else torch_internals.clone_preserve_strides(seen)

    def _require_usable(self) -> None:
        """Require that the graph may be replayed.

        Raises:
            NotLaunched: an update of the graph's nodes began and failed.
        """
        if self.session is not None and self.session.unusable is not None:
            raise self.not_followed(RuntimeError(self.session.off or self.session.unusable))

    def not_followed(self, error: Exception) -> NotLaunched:
        """Return the exception to raise if addresses in the graph cannot be updated."""
        return NotLaunched(self, f"{NOT_FOLLOWED}: {one_line(error)}", of_no_use=True)

    def _copy_inputs_and_remove_from_src(self, dsts: list[Any], srcs: list[Any]) -> None:
        self._require_usable()
        if self.tracker is not None:
            try:
                self.tracker.follow(srcs)
            except Exception as error:
                raise self.not_followed(error) from error
        super()._copy_inputs_and_remove_from_src(dsts, srcs)

    def copy_recording_inputs(self, inputs: list[Any]) -> None:
        """Copy inputs that are not read in place into the graph's placeholders.

        Stock's loop takes longer than the rest of the call if there are many inputs. So what it finds in each call, the
        tensors among the inputs and their placeholders, is stored, unless one of them is expanded. Who wraps stock's
        method to count copies, as the suite does, sees all of them.
        """
        if self._copies is None or self._copies[0] is not self.non_static_input_idx:
            chosen = self._tensors(self.non_static_input_idx)
            targets = [self.reconstructed_inputs[index] for index in chosen]
            expanded = any(self.expanded_dims[index] for index in chosen)
            self._copies = self.non_static_input_idx, chosen, targets, expanded
        _, chosen, targets, expanded = self._copies
        if expanded or CUDAGraphNode._copy_inputs_and_remove_from_src is not _stocks_copy:
            super()._copy_inputs_and_remove_from_src(self.reconstructed_inputs, list(inputs))
        elif targets:
            torch_internals.foreach_copy_(targets, [inputs[index] for index in chosen])

    def release(self) -> None:
        """Release what the node holds in addition to the graph. It cannot be replayed afterwards."""
        if self.session is None:
            return
        self.function.freed(self)
        self.takes_fast_path = False
        self.session = self.tracker = None

    # Tensors over memory that they do not own

    # As stock does, with the offset of inputs too: some are read at their address after the recording.
    _tensor_metadata = staticmethod(functools.partial(CUDAGraphNode._tensor_metadata, ignore_storage_offset=False))

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same metadata and address that does not own its memory."""
        return self._reconstruct_from_tensor_metadata(self._tensor_metadata(tensor))

    # See `examination.Host`

    def has_one_caller(self) -> bool:
        """Return whether only one thread calls the function, so that no other draws random numbers in a capture."""
        return len(self.function.callers) <= 1

    def is_seldom(self) -> bool:
        """Note a replay. Return whether other recordings were replayed many times since the previous one of this."""
        replays = self.function.replays()
        seldom, self.replayed_at = self.function.is_idle(self, replays), replays
        return seldom

    def capture_again(self, inputs: Sequence[Any]) -> Recaptured:
        """Capture the function once more with these inputs."""
        random = self.code.random or any(isinstance(value, torch.Generator) for value in inputs)
        driver = self.tools.driver
        return recapture(self.function, inputs, random=random, device=self.device, stream=self.stream, driver=driver)

    def at_address(self, index: int, address: int) -> torch.Tensor:
        """Return a tensor with the metadata of recording input `index` at `address`."""
        metadata = self._tensor_metadata(self.reconstructed_inputs[index])
        moved = {"data_ptr": address, "storage_offset": 0}
        return self._reconstruct_from_tensor_metadata({**metadata, **moved})

    def fill(self, values: Mapping[int, torch.Tensor]) -> None:
        """Copy values into placeholders, as stock does before a replay."""
        non_static, self.non_static_input_idx = self.non_static_input_idx, sorted(values)
        try:
            CUDAGraphNode._copy_inputs_and_remove_from_src(self, self.reconstructed_inputs, dict(values))
        finally:
            self.non_static_input_idx = non_static

    def use_tracker(self, tracker: AddressTracker, unused: frozenset[int]) -> None:
        """Read the tracker's inputs in place. If interrupted, no later call replays a graph with old addresses."""
        self.takes_fast_path = False
        self._copying = None
        self._in_place = frozenset({*tracker.indices, *unused})
        self.tracker = tracker
        self._follow_the_function()

    def _follow_the_function(self) -> None:
        """Copy all inputs, as stock does, or read some in place, as the function now says.

        If interrupted, it is done again before the next replay (`check_invariants`).
        """
        tracker, copying = self.tracker, self.function.copies_inputs
        if tracker is None or self._copying is copying:
            return
        self._copying = None
        tracker.rest(copying)
        self.non_static_input_idx = [one for one in self._copied if copying or one not in self._in_place]
        self.copied_per_replay = self._bytes_of(self.non_static_input_idx)
        self._copying = copying

    def short_of_memory(self) -> str | None:
        """Return why calls should not be tried without the graph if memory is short, else None.

        Without a graph a call allocates at most as much as the whole pool holds.
        """
        pool_bytes = sum(one.size_bytes for one in pool_memory(self.cuda_graphs_pool))
        return waiting_for_memory(pool_bytes, self.tools.free_bytes())

    @property
    def result_bytes(self) -> int:
        """Return the size of the results in bytes."""
        return sum(one["nbytes"] for one in self.outputs_metadata if isinstance(one, dict))
