"""Return the results of a recording's replays, and check which of them the program still references.

Note [A reset of stock's]. Stock registers the tensors that its nodes keep with autograd, in a registry of the process.
`torch.compiler.reset` ends stock's managers and disables this registry, and using it afterwards raises. Encore's
managers may still be alive, so they enable it before they use it.

Note [New tensors for callers]. Stock returns the same tensor objects in each call. If a caller changed such an object's
shape or memory in place, set attributes, or gave it an autograd history, the next call would return it so. The object
would also keep the last call's backward alive, with the weights of a deleted model and saved results of graphs. So
callers get a new tensor over the same memory, with the same storage and version counter. Saved tensors are the same
objects in each call: only hooks of saved tensors reach them, and these get new ones.

Note [Results without memory]. Stock returns the recorded object for a result without bytes. If a caller changed its
shape, memory (`resize_`) or hooks, the next call would return it so. So each call gets a new tensor.

Note [Copies of kept results]. A program whose results are copied holds each result until it has the next, such as a
decoding loop that assigns its result to a name. If such a loop never waits for the GPU, CPU time after the launch costs
as much as CPU time before it. So the layout of the copies is computed once for each recording.

Note [Parameters that are returned]. A forward returns the parameters that its backward reads. Their addresses equal
those of the recording, so stock returns the tensor objects of the recording, and keeps them alive. But the program may
have replaced the object over the same memory (`Parameter(old.data)`). Autograd detects a write before the backward by
the version of the saved object, and the old object may have been given other memory: the gradient would be silently
wrong. So each replay returns the tensors of its own call, and none of the recording's is kept alive.

Note [Results that a backward reads]. The same holds for a result that a backward reads, of this graph (`x.exp()`) or of
an earlier one. If the program writes it before the backward, eager raises. The function returns one object at two
positions, or the input itself. Stock makes a separate tensor for each, with its own version counter, and the backward
reads the overwritten values. So replays return one object too, and the call's own input.

Note [Inputs that are returned]. A generated function may return an input unchanged, for a later partition of the same
program to read or write. The graph's own output is then the placeholder and not the caller's tensor. With several
partitions the caller's tensor is returned instead, as the function does without a graph. With one partition nothing
writes the tensor later, and a backward finds its saved tensor in the pool. If the function wrote a result into an
input's memory (Inductor reuses memory of dead inputs), the graph's own output is right: the caller's tensor was not
written.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.geometry import is_lazy_view, picker
from optimizations.trees.function import RecordableFunction
from optimizations.trees.liveness import apart_from_the_program, is_unreferenced, rearranged

trees = torch_internals.cudagraph_trees
_hooks_of_saved_tensors: Callable[[bool], object] = torch_internals.top_saved_tensors_hooks


class Results:
    """Hold the results of one recording.

    It is made before its recording is captured and has no reference to it: a cycle would keep the graph's memory alive.

    Args:
        node: the recording, a `CUDAGraphNode`.
        function: what is recorded.

    Attributes:
        storages: the storages of stock's cached tensors, at the same positions.
        copies_out: copies the results that the program keeps; None while there are none.
        shared_copied: copied inputs whose placeholder shares memory with an output.
        returned: outputs that are inputs, or share their memory.
    """

    def __init__(self, node: Any, function: RecordableFunction) -> None:
        self._node = weakref.proxy(node)
        self._function = function
        self.storages: list[Any] = []
        self.returned = ReturnedInPlace()
        self.shared_copied: frozenset[int] = frozenset()
        self._for_callers: Sequence[int] = ()  # places of tensors that they get. Note [New tensors for callers]
        # All places of tensors, if some are saved for a backward.
        self._with_saved: Sequence[int] = ()
        # Outputs that are equal in each call and not kept as tensors: their positions and values.
        self._constant: Sequence[tuple[int, Any]] = ()
        # Places of outputs that share memory with others. As in stock, each call gets new tensors.
        self._made: Sequence[int] = ()
        # Positions of outputs that are the same object as an earlier one. Note [Results that a backward reads].
        self._repeated: Sequence[tuple[int, int]] = ()
        # Positions of outputs without memory. Note [Results without memory].
        self._empty: Sequence[int] = ()
        # Positions of outputs that are inputs which an earlier graph made, and the inputs.
        self._passed_on: Sequence[tuple[int, int]] = ()
        self.copies_out: CopiesOut | None = None

    # Recording

    def recorded(
        self,
        outputs: Sequence[Any],
        fixed: Mapping[int, torch.Tensor],
        managed: Mapping[int, weakref.ref[torch.Tensor]],
        placeholders: Mapping[int, weakref.ref[torch.UntypedStorage]],
    ) -> None:
        """Store what a function returned in its capture, and release its inputs.

        Args:
            outputs: the results of the function.
            fixed: the inputs at fixed addresses.
            managed: the inputs that earlier graphs made; the capture may have released them.
            placeholders: weak references to the storages of copied inputs.

        Raises:
            RuntimeError: an output is a lazy conjugate or negative, or is quantized; the message says which.
        """
        _require_replayable(outputs)
        node = self._node
        made_earlier = {id(reference()): index for index, reference in managed.items() if reference() is not None}
        self._passed_on = [
            (place, index)
            for place, output in enumerate(outputs)
            if (index := made_earlier.get(id(output))) is not None and node.preserved_aliased_inputs[index]
        ]
        passed_on, static = dict(self._passed_on), node.static_output_tensors
        self._repeated = [
            (place, first) for place, first in repeated(outputs) if place not in passed_on and static[place] is None
        ]
        in_fixed = found_in(static, fixed)
        for one in in_fixed:
            static[one.output] = node.borrowed(static[one.output])
        inputs = {one.output for one in in_fixed if one.is_input}
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
        self.returned = ReturnedInPlace(
            [*in_fixed, *(one for one in in_copied if self._function.code().returns(one.input))]
        )

    # Stock's cached tensors

    def cached(self) -> None:
        """Callback: stock made the tensors that it returns in each replay. Sort outputs by what a call returns."""
        node, function = self._node, self._function
        cached = node.cached_tensor_outputs
        self.storages[:] = [None if tensor is None else tensor.untyped_storage() for tensor in cached]
        rearranged()
        # Copied inputs are made, too: later outputs may be views of them, or the same tensor.
        fixed = {place for place, static in enumerate(node.static_output_tensors) if static is not None}
        of_the_call = {one.output for one in self.returned.found if one.is_input} & fixed
        of_the_call.update(place for place, _ in (*self._repeated, *self._passed_on))
        for_callers: list[int] = []
        with_saved: list[int] = []
        constant: list[tuple[int, Any]] = []
        made: list[int] = []
        for place, metadata in enumerate(node.outputs_metadata):
            static = node.static_output_tensors[place]
            if cached[place] is not None:
                node.outputs_weakrefs[place].extra_ref_check = functools.partial(_unused, weakref.ref(self), place)
                with_saved.append(place)
                if function.callers_get is None or place in function.callers_get:
                    for_callers.append(place)
            elif place in of_the_call:
                continue
            elif static is not None or not isinstance(metadata, dict):
                constant.append((place, metadata if static is None else static))
            else:
                made.append(place)
        self._for_callers, self._constant, self._made = for_callers, constant, made
        self._with_saved = with_saved if len(with_saved) > len(for_callers) else ()

    def uncached(self) -> None:
        """Callback: stock releases these tensors."""
        self._constant = self._made = self._for_callers = self._with_saved = ()
        self.storages.clear()
        rearranged()

    # Results of a replay

    def of_call(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of a replay on `inputs` as stock does, and the call's own inputs among them.

        Most are found without a loop of Python over all of them.
        """
        node = self._node
        if not node.cached_tensor_outputs:
            node._initialize_cached_tensors()
        results: list[Any] = node.cached_tensor_outputs.copy()
        for place, value in self._constant:
            results[place] = value
        for place in self._made:
            _make(node, place, results)
        hooked = self._with_saved and _hooks_of_saved_tensors(False) is not None
        places = self._with_saved if hooked else self._for_callers
        if _is_transformed():
            apart_from_the_program(lambda: _replace(results, places))
        else:
            _replace(results, places)
        for place, first in self._repeated:
            results[place] = results[first]
            _is_now(node, place, results[first])
        for place in self._empty:
            results[place] = _empty_like(results[place])
        self.returned.return_results(results, inputs)
        for place, index in self._passed_on:
            results[place] = inputs[index]
            _is_now(node, place, inputs[index])
        return results


@dataclass(frozen=True)
class InPlace:
    """Describe an output in an input's memory: their positions, whether they are one tensor, the offset in bytes."""

    output: int
    input: int
    is_input: bool
    offset_bytes: int = 0


class ReturnedInPlace:
    """Hold outputs of one recording that share memory with inputs, by position."""

    def __init__(self, found: Sequence[InPlace] = ()) -> None:
        self.found = sorted(found, key=lambda one: one.output)
        self._views = [one for one in self.found if not one.is_input]
        self._same: list[tuple[slice, Callable[[Any], tuple[Any, ...]]]] = []
        # The tensors saved for a backward begin with inputs, so most are adjacent, and one slice assignment moves them.
        same = (one for one in self.found if one.is_input)
        for _, neighbours in itertools.groupby(enumerate(same), lambda pair: pair[1].output - pair[0]):
            run = [one for _, one in neighbours]
            places = slice(run[0].output, run[-1].output + 1)
            self._same.append((places, picker([one.input for one in run])))

    def return_results(self, outputs: list[Any], inputs: Sequence[Any] | Mapping[int, Any]) -> None:
        """Replace recorded tensors by the call's own. Note [Parameters that are returned]."""
        for places, chosen in self._same:
            outputs[places] = chosen(inputs)
        for one in self._views:
            outputs[one.output] = _in_the_memory_of(inputs[one.input], outputs[one.output], one.offset_bytes)


def found_in(outputs: Sequence[torch.Tensor | None], fixed: Mapping[int, torch.Tensor]) -> list[InPlace]:
    """Return the outputs that are inputs, or share their memory.

    Args:
        outputs: those recorded at fixed addresses, None at other positions.
        fixed: inputs at fixed addresses, as they were recorded, by index.
    """
    same = {id(value): index for index, value in fixed.items()}

    @functools.cache
    def starts_in_storages() -> Mapping[int, Mapping[int, int]]:
        near: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for index, value in fixed.items():
            near[value.untyped_storage()._cdata][index] = _offset_bytes(value)
        return near

    found = []
    for place, output in enumerate(outputs):
        if output is None:
            continue
        if id(output) in same:
            found.append(InPlace(place, same[id(output)], is_input=True))
        elif (storage := output.untyped_storage()).data_ptr() and (starts := starts_in_storages().get(storage._cdata)):
            start = _offset_bytes(output)
            # Of the inputs in its storage, the last that begins before it contains it.
            owner = max(starts, key=lambda index: (starts[index] <= start, starts[index]))
            found.append(InPlace(place, owner, is_input=False, offset_bytes=start - starts[owner]))
    return found


def in_placeholder(place: int, output: torch.Tensor, index: int, placeholder: torch.Tensor) -> InPlace:
    """Describe an output in a copied input's memory: the input if the geometry is the same, otherwise a view of it."""
    geometry = output.dtype, output.shape, output.stride(), output.storage_offset()
    is_input = geometry == (placeholder.dtype, placeholder.shape, placeholder.stride(), 0)
    return InPlace(place, index, is_input, _offset_bytes(output))


def repeated(outputs: Sequence[Any]) -> list[tuple[int, int]]:
    """Return positions of repeated tensors, each with the first one. Note [Results that a backward reads]."""
    first: dict[int, int] = {}
    return [
        (place, earlier)
        for place, output in enumerate(outputs)
        if isinstance(output, torch.Tensor) and (earlier := first.setdefault(id(output), place)) != place
    ]


def _offset_bytes(tensor: torch.Tensor) -> int:
    """Return the offset in its storage, in bytes. The address of a tensor without elements does not give it."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _in_the_memory_of(caller: torch.Tensor, output: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """Return an output that shares an input's memory, as a view of the caller's storage."""
    start = _offset_bytes(caller) + offset_bytes
    return over(caller.untyped_storage(), output, start // output.element_size())


def over(storage: torch.UntypedStorage, like: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a tensor with the shape, strides and dtype of `like` at element `offset` of another storage."""
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, offset, like.shape, like.stride())


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
        copies = dict(zip(self._alone, copies_of([results[place] for place in self._alone]), strict=True))
        made: dict[int, torch.Tensor] = {}
        for places in self._shared:
            storage = results[places[0]].untyped_storage().clone()
            for place in places:
                result = results[place]
                if id(result) not in made:  # repeated results remain one object
                    made[id(result)] = over(storage, result, int(result.storage_offset()))
                copies[place] = made[id(result)]
        for place, copy in copies.items():
            results[place] = copy


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


def kept_copied(node: Any, outputs: Any) -> list[Any]:
    """Return the outputs of a call that ran a recording, with those that the program keeps copied out of the pool.

    If memory is too short for copies, none is made: while results are live, the next iteration runs without graphs.
    """
    results: list[Any] = outputs if type(outputs) is list else list(outputs)
    del outputs
    function, copies = node.function, node.results.copies_out
    try:
        if copies is None or copies.kept != len(function.kept_outputs):  # the set only grows
            in_pool = {one.data_ptr() for level in node.path_weakrefs for one in level if one is not None}
            copies = node.results.copies_out = CopiesOut(results, function.kept_outputs, in_pool)
        copies.make(results)
    except torch.OutOfMemoryError:
        return results
    function.kept_copies += copies.count
    function.kept_bytes += copies.bytes
    return results


def _require_replayable(outputs: Sequence[Any]) -> None:
    """Check that a replay can return what was captured. Trees keep an output's address, dtype and geometry only."""
    for place, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor):
            continue
        if is_lazy_view(output) or output.is_quantized:
            kind = "quantized" if output.is_quantized else "a lazy conjugate or negative"
            raise RuntimeError(f"result {place} is {kind}, of which a graph keeps only the memory")


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
    """Return whether a result has no other reference than stock's."""
    results = reference()
    with contextlib.suppress(ReferenceError):  # the recording is gone
        return results is not None and is_unreferenced(results._node.cached_tensor_outputs, results.storages, place)
    return False


def _replace(results: list[Any], places: Sequence[int]) -> None:
    """Replace results that callers get by new tensors. Note [New tensors for callers]."""
    for place in places:
        results[place] = _new_over(_Tensor, results[place])


_new_over, _Tensor = torch_internals.new_over, torch.Tensor
_is_transformed: Callable[[], bool] = torch_internals.are_functorch_transforms_active
