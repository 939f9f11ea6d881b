"""Return the results of a recording's replays, and check which of them the program still references.

Note [A reset of stock's]. Stock registers the tensors that its nodes keep with autograd, in a registry of the process.
`torch.compiler.reset` ends stock's managers and disables this registry, and using it afterwards raises. Encore's
managers may still be alive, so they enable it before they use it.

Note [New tensors for callers]. Stock returns the same tensor objects in each call. If a caller changed such an object's
shape or memory in place, set attributes, or gave it an autograd history, the next call would return it so. The object
would also keep the last call's backward alive, with the weights of a deleted model and saved results of graphs. So an
inference or a forward returns a new tensor over the same memory, with the same storage and version counter. Saved
tensors are the same objects in each call: only hooks of saved tensors reach them, and these get new ones.

Note [Results without memory]. Stock returns the recorded object for a result without bytes. If a caller changed its
shape, memory (`resize_`) or hooks, the next call would return it so. So each call gets a new tensor.

Note [Results that were changed]. The results of a backward are too many for that, and are the same objects in each
call, which `torch.autograd.grad` and hooks return. So before they are returned again, calls into C++ compare their
metadata and addresses, and Python checks that nothing is attached: attributes, a gradient, hooks (which remain after
`detach_`), or weak references, through which a `WeakTensorKeyDictionary` would find an entry for the next result. If
the program changed one, all of the recording's tensors are made again.

Note [Copies of kept results]. A program whose results are copied holds each result until it has the next, such as a
decoding loop that assigns its result to a name. If such a loop never waits for the GPU, CPU time after the launch costs
as much as CPU time before it. So the layout of the copies is computed once for each recording.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.geometry import is_lazy_view, picker
from optimizations.torch_internals.tensor_guard import MetadataChecks
from optimizations.torch_internals.thread_state import apart_from_the_program
from optimizations.trees.function import RecordableFunction
from optimizations.trees.liveness import is_unreferenced, rearranged
from optimizations.trees.returned import ReturnedInPlace, found_in, in_placeholder, over, repeated

trees = torch_internals.cudagraph_trees
_hooks_of_saved_tensors: Callable[[bool], object] = torch_internals.top_saved_tensors_hooks


class NotReplayable(RuntimeError):
    """Report that an output cannot be reconstructed from its memory and metadata after a replay."""


class Results:
    """Hold the results of one recording.

    It is made before its recording is captured and has no reference to it: a cycle would keep the graph's memory alive.

    Args:
        node: the recording, a `CUDAGraphNode`.
        function: what is recorded.

    Attributes:
        storages: the storages of stock's cached tensors, at the same positions.
        returned: outputs that are inputs at fixed addresses, or share their memory.
        returned_copied: outputs that are copied inputs, or share their memory.
        copies_out: copies the results that the program keeps; None while there are none.
        shared_copied: copied inputs whose placeholder shares memory with an output.
    """

    def __init__(self, node: Any, function: RecordableFunction) -> None:
        self._reference = weakref.ref(node)
        self._function = function
        self.storages: list[Any] = []
        self.returned = self.returned_copied = ReturnedInPlace()
        self.shared_copied: frozenset[int] = frozenset()
        self._for_callers: Sequence[int] = ()  # places of tensors that they get. Note [New tensors for callers]
        # Places of those that are the same objects in each call; a backward's are compared with their addresses and
        # metadata. Note [Results that were changed].
        self._same_objects: Sequence[int] = ()
        self._chosen = picker(())
        self._addresses: list[int | None] = []
        self._metadata = MetadataChecks()
        # Outputs that are equal in each call and not kept as tensors: their positions and values.
        self._constant: Sequence[tuple[int, Any]] = ()
        # Places of outputs that share memory with others. As in stock, each call gets new tensors.
        self._made: Sequence[int] = ()
        # Positions of outputs that are the same object as an earlier one. Note [Results that a backward reads].
        self._repeated: Sequence[tuple[int, int]] = ()
        # Positions of outputs without memory. Note [Results without memory].
        self._empty: Sequence[int] = ()
        # Positions of outputs that are inputs which an earlier graph made.
        self._passed_on: Sequence[int] = ()
        self.copies_out: CopiesOut | None = None

    @property
    def _node(self) -> Any:
        node = self._reference()
        if node is None:
            raise ReferenceError("this recording is gone")
        return node

    # Recording

    def recorded(
        self,
        outputs: Sequence[Any],
        fixed: Mapping[int, torch.Tensor],
        managed: Mapping[int, weakref.ref[torch.Tensor]],
        placeholders: Mapping[int, weakref.ref[torch.UntypedStorage]],
    ) -> None:
        """Store what a function returned in its capture, and release its inputs. Notes in `returned`.

        Args:
            outputs: the results of the function.
            fixed: the inputs at fixed addresses.
            managed: the inputs that earlier graphs made; the capture may have released them.
            placeholders: weak references to the storages of copied inputs.

        Raises:
            NotReplayable: an output is a lazy conjugate or negative, or is quantized; the message says which.
        """
        _require_replayable(outputs)
        node = self._node
        made_earlier = {id(reference()): index for index, reference in managed.items() if reference() is not None}
        passed_on = {
            place: made_earlier[id(output)]
            for place, output in enumerate(outputs)
            if id(output) in made_earlier and node.preserved_aliased_inputs[made_earlier[id(output)]]
        }
        static = node.static_output_tensors
        self.returned = found_in(static, fixed, passed_on)
        self._passed_on = list(passed_on)
        self._repeated = [
            (place, first) for place, first in repeated(outputs) if place not in passed_on and static[place] is None
        ]
        for one in self.returned.found:
            if one.output not in passed_on:  # those are no static outputs
                static[one.output] = node.borrowed(static[one.output])
        inputs = {one.output for one in self.returned.found if one.is_input}
        candidates = ((place, output) for place, output in enumerate(static) if place not in inputs)
        self._empty = [p for p, one in candidates if one is not None and not one.untyped_storage().data_ptr()]
        for place in self._empty:
            static[place] = _empty_like(static[place])
        alive = ((index, reference()) for index, reference in placeholders.items())
        copied = {storage._cdata: index for index, storage in alive if storage is not None and storage.data_ptr()}
        in_copied = [
            in_placeholder(place, output, index, node.reconstructed_inputs[index])
            for place, output in enumerate(outputs if copied else ())
            if isinstance(output, torch.Tensor) and (index := copied.get(output.untyped_storage()._cdata)) is not None
        ]
        self.shared_copied = frozenset(one.input for one in in_copied)
        self.returned_copied = ReturnedInPlace([one for one in in_copied if self._function.code().returns(one.input)])

    @property
    def returned_inputs(self) -> list[int]:
        """Return the inputs that a replay returns."""
        return [one.input for one in (*self.returned.found, *self.returned_copied.found)]

    # Stock's cached tensors

    def cached(self) -> None:
        """Callback: stock made the tensors that it returns in each replay. Sort outputs by what a call returns."""
        node, function = self._node, self._function
        cached = node.cached_tensor_outputs
        self.storages[:] = [None if tensor is None else tensor.untyped_storage() for tensor in cached]
        rearranged()
        of_the_call = {one.output for one in self.returned.found if one.is_input}
        of_the_call.update(place for place, _ in self._repeated)
        for_callers: list[int] = []
        constant: list[tuple[int, Any]] = []
        made: list[int] = []
        same_objects: list[int] = []
        for place, metadata in enumerate(node.outputs_metadata):
            static = node.static_output_tensors[place]
            if cached[place] is not None:
                node.outputs_weakrefs[place].extra_ref_check = functools.partial(_unused, weakref.ref(self), place)
                callers = function.callers_get is None or place in function.callers_get
                if callers and function.direction != "backward":
                    for_callers.append(place)
                else:
                    same_objects.append(place)
            elif place in of_the_call:
                continue
            elif static is not None or not isinstance(metadata, dict):
                constant.append((place, metadata if static is None else static))
            else:
                made.append(place)
        self._for_callers, self._constant, self._made = for_callers, constant, made
        self._same_objects, self._chosen = same_objects, picker(same_objects)
        if function.direction == "backward" and same_objects:
            self._addresses = [None if tensor is None else tensor.data_ptr() for tensor in cached]
            chosen = self._chosen(cached)
            if not any(check(chosen) for check in self._metadata):
                self._metadata.add(chosen)

    def uncached(self) -> None:
        """Callback: stock releases these tensors."""
        self._constant = self._made = self._for_callers = self._same_objects = ()
        self.storages.clear()
        rearranged()

    # Liveness

    def is_unused(self, place: int) -> bool:
        """Return whether the result at a position has no other reference."""
        return is_unreferenced(self._node.cached_tensor_outputs, self.storages, place)

    # Results of a replay

    def of_call(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of a replay on `inputs`, as `reconstruct_outputs` does, and the call's own parameters."""
        node = self._node
        results: list[Any] = self.made() if node.cached_tensor_outputs else node.reconstruct_outputs()
        self.put_in_the_calls_own(results, inputs)
        return results

    def put_in_the_calls_own(self, results: list[Any], inputs: Sequence[Any] | Mapping[int, Any]) -> None:
        """Replace results that are inputs by the call's own (Notes in `returned`), and add results without memory."""
        for place in self._empty:
            results[place] = _empty_like(results[place])
        self.returned.return_results(results, inputs)
        for place in self._passed_on:
            _is_now(self._node, place, results[place])

    def made(self) -> list[Any]:
        """Return the outputs of a replay, as stock's `reconstruct_outputs`, without a Python loop over all of them."""
        node, places = self._node, self._for_callers
        if self._same_objects:
            if self._function.direction == "backward" and self._were_changed(node.cached_tensor_outputs):
                apart_from_the_program(self._make_again)
            if _hooks_of_saved_tensors(False) is not None:
                places = [place for place, tensor in enumerate(node.cached_tensor_outputs) if tensor is not None]
        results: list[Any] = node.cached_tensor_outputs.copy()
        for place, value in self._constant:
            results[place] = value
        for place in self._made:
            _make(node, place, results)
        if _is_transformed():
            apart_from_the_program(lambda: _replace(results, places))
        else:
            _replace(results, places)
        for place, first in self._repeated:
            results[place] = results[first]
            _is_now(node, place, results[first])
        return results

    def _were_changed(self, cached: list[Any]) -> bool:
        """Return whether the program changed more than the values of a tensor. Note [Results that were changed]."""
        chosen = self._chosen(cached)
        if not torch_internals.data_ptrs_equal(cached, self._addresses, self._same_objects):
            return True
        return not any(check(chosen) for check in self._metadata) or _is_anything_attached(chosen)

    def _make_again(self) -> None:
        node = self._node
        node.remove_node_cached_tensors()
        node._initialize_cached_tensors()


_attributes = operator.attrgetter("__dict__")
_grad = operator.attrgetter("grad")
_hooks = operator.attrgetter("_backward_hooks")


def _is_anything_attached(tensors: Sequence[Any]) -> bool:
    """Return whether anything is attached to one of these, which have no history: `grad` would warn."""
    if any(map(weakref.getweakrefcount, tensors)) or any(map(_attributes, tensors)) or any(map(_hooks, tensors)):
        return True
    return list(map(_grad, tensors)).count(None) < len(tensors)


MANY_COPIES = 4
"""From this many results on, one call copies all of them with multi-tensor kernels."""


class CopiesOut:
    """Copy results that the program keeps. Notes [Copies of kept results] here and [Kept results] in `manager`.

    Args:
        results: the results of any call.
        kept: positions of results that the program keeps.
        pool: addresses. Results whose storages begin at one of them are copied; those that share memory share a copy.

    Attributes:
        kept: how many results the program keeps.
        count, bytes: how many copies each call makes, and their size.
    """

    def __init__(self, results: Sequence[Any], kept: Collection[int], pool: Collection[int]) -> None:
        self.kept, self.bytes = len(kept), 0
        self._alone: list[int] = []
        self._shared: list[list[int]] = []
        places_at: defaultdict[int, list[int]] = defaultdict(list)
        for place, result in enumerate(results):
            if isinstance(result, torch.Tensor) and (address := result.untyped_storage().data_ptr()) in pool:
                places_at[address].append(place)
        for places in places_at.values():
            first = results[places[0]]
            if not any(place in kept for place in places):
                continue
            if len(places) == 1 and _is_dense(first):
                self._alone.append(places[0])
                self.bytes += first.nbytes
            else:
                self._shared.append(places)
                self.bytes += first.untyped_storage().nbytes()
        self.count = len(self._alone) + len(self._shared)

    def make(self, results: list[Any]) -> None:
        """Replace the kept results in a list by copies; if this raises, the list is unchanged."""
        made: dict[int, torch.Tensor] = {}
        for places in self._shared:
            storage = results[places[0]].untyped_storage().clone()
            for place in places:
                result = results[place]
                if id(result) not in made:  # repeated results remain one object
                    made[id(result)] = over(storage, result, int(result.storage_offset()))
        copied = copies_of([results[place] for place in self._alone])
        for places in self._shared:
            for place in places:
                results[place] = made[id(results[place])]
        for place, one in zip(self._alone, copied, strict=True):
            results[place] = one


def copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies with the same values, sizes and strides of tensors that fill their memory without gaps."""
    if len(tensors) < MANY_COPIES:
        return [tensor.clone() for tensor in tensors]
    made = [torch.empty_like(tensor) for tensor in tensors]
    torch_internals.foreach_copy_(made, tensors)
    return made


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps or overlap: `empty_like` keeps the strides of such only."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def kept_copied(node: Any, function: RecordableFunction, outputs: Any) -> list[Any]:
    """Return the outputs of a call that ran `node`, with those that the program keeps copied out of the pool.

    If memory is too short for copies, none is made: while results are live, the next iteration runs without graphs.

    Args:
        node: a recording, or stock's node of a warm-up.
        function: the function that returned the outputs.
        outputs: the outputs of a replay, a recording or a warm-up.
    """
    results: list[Any] = outputs if type(outputs) is list else list(outputs)
    del outputs
    recorded: Results | None = getattr(node, "results", None)
    if recorded is not None and node.function is not function:
        recorded = None
    copies = recorded.copies_out if recorded is not None else None
    try:
        if copies is None or copies.kept != len(function.kept_outputs):  # the set only grows
            copies = CopiesOut(results, function.kept_outputs, addresses(node))
            if recorded is not None:
                recorded.copies_out = copies
        copies.make(results)
    except torch.OutOfMemoryError:
        return results
    function.kept_copies += copies.count
    function.kept_bytes += copies.bytes
    return results


def addresses(node: Any) -> set[int]:
    """Return the addresses of results of graphs on the path of a node."""
    return {
        reference.data_ptr()
        for one in node._path_from_root
        for reference in one.outputs_weakrefs
        if reference is not None
    }


def _require_replayable(outputs: Sequence[Any]) -> None:
    """Check that a replay can return what was captured. Trees keep an output's address, dtype and geometry only."""
    for place, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor):
            continue
        if is_lazy_view(output):
            raise NotReplayable(
                f"result {place} is a lazy conjugate or negative, of which a graph keeps only the memory"
            )
        if output.is_quantized:
            raise NotReplayable(f"result {place} is quantized, and a graph keeps no scales")


def _make(node: Any, place: int, results: list[Any]) -> None:
    """Make an output that shares memory with an earlier output or another recording's, as stock does."""
    metadata = node.outputs_metadata[place]
    owner = node.prepare_alias_info_for_tensor_construction(node.output_storage_alias[place], metadata)
    storage = results[owner].untyped_storage() if isinstance(owner, int) else owner
    results[place] = made = node._reconstruct_from_tensor_metadata(metadata, storage)
    _is_now(node, place, made)


def _is_now(node: Any, place: int, result: torch.Tensor) -> None:
    """Make stock's liveness check of the output use this tensor's storage.

    Stock's `swap_weakref` frees the earlier reference first. An interrupt right after that would have it freed again.
    """
    reference, now = node.outputs_weakrefs[place].ref, result.untyped_storage()._weak_ref()
    before, reference.cdata = reference.cdata, now
    reference._free_weak_ref(before)


def _empty_like(result: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)


def _unused(reference: weakref.ref[Results], place: int) -> bool:
    """Return whether a result has no other reference. Note [Results that were changed]."""
    results = reference()
    return results is not None and results._reference() is not None and results.is_unused(place)


def _replace(results: list[Any], places: Sequence[int]) -> None:
    """Replace results that callers get by new tensors. Note [New tensors for callers]."""
    for place in places:
        results[place] = _new_over(_Tensor, results[place])


_new_over, _Tensor = torch_internals.new_over, torch.Tensor
_is_transformed: Callable[[], bool] = torch_internals.are_functorch_transforms_active
