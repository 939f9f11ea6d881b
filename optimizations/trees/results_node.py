"""The results of a recording: the tensors that its replays hand out, and who holds them.

Note [A reset of stock's]. Stock tells autograd about tensors that its nodes keep, in a registry of the process that is
switched off when stock's managers are ended (`torch.compiler.reset`), and raises an error if it is used after that.
Encore's managers may still be alive, so they switch it on before they use it.

Note [Held for a backward]. A replay hands out the same tensor objects each time. Stock counts Python's references to
tell whether somebody holds one, and ignores a reference that C++ may have: after a forward, the results that the caller
let go of still refer to its backward, which refers to all that was saved. But that reference alone keeps the saved
tensors of a backward that is pending, or was told to retain its graph, and the next replay of the forward would write
over them. So here that reference counts, once results that nobody holds have lost their history, which the next replay
would take from them anyway. What was let go of during a recording, and is held in a call, speaks against the graph in
that call.

Note [Whatever the program does meanwhile]. A history is let go of in the midst of what the program does: in inference
mode or in an operator of its own, where `detach_` would do nothing; in a transform, where it is refused; in a mode,
which would see it. So it is done apart from all that. And letting go may run anything, such as a finalizer of the
program's that ends all graphs.

Note [Results without memory]. Stock hands out the recorded object of a result that has no bytes. Its holder may have
given it another shape, memory (`resize_`) or hooks, which would all be in the next call. So each call gets a new one.

Note [Results that were changed]. The tensor objects that replays hand out again and again are also the caller's, who
may have given one another shape, other memory or a history in place. `handed_out` finds those, and they are made again:
when they are to be handed out the next time, and when somebody asks whether one is held that lies elsewhere by now.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.apart import apart_from_the_program
from optimizations.trees.borrowed import Borrowed
from optimizations.trees.copies_out import CopiesOut, copies_out
from optimizations.trees.function import RecordableFunction
from optimizations.trees.handed_out import HandedOut
from optimizations.trees.lean import MANY, Many, Reference, nobody_holds, rearranged
from optimizations.trees.returned import ReturnedInPlace, found_in, repeated

CUDAGraphNode: Any = torch_internals.cudagraph_trees.CUDAGraphNode
_hooks_of_saved_tensors: Callable[[bool], object] = torch_internals.top_saved_tensors_hooks


class ResultsNode(CUDAGraphNode):
    """A node of CUDAGraph Trees that makes results again which their holders have changed."""

    _handed_out: HandedOut | None = None
    returned_in_place = ReturnedInPlace()
    _kept_when_sorted: Sequence[bool] = ()
    """What `unaliased_in_all_paths` was in `_sort_places`."""
    _constant: Sequence[tuple[int, Any]] = ()
    """Outputs that are the same in each call, and no kept tensors: their places and what they are."""
    _made: Sequence[int] = ()
    """Places of outputs that share memory with others. As in stock, each call gets new tensors."""
    _repeated: Sequence[tuple[int, int]] = ()
    """Places of outputs that are the very tensor of an earlier place. Note [Results that a backward reads]."""
    _empty: Sequence[tuple[Sequence[int], Callable[[], torch.Tensor]]] = ()
    """Places of outputs that are one tensor without memory, and what makes it. Note [Results without memory]."""
    _handed_on: Sequence[int] = ()
    """Places of outputs that are inputs which an earlier graph made."""
    _copies_out: CopiesOut | None = None
    """How what the program keeps is copied; None as long as it keeps nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._cached_storages: list[Any] = []  # of stock's cached tensors, at the same places
        super().__init__(*args, **kwargs)

    @property
    def function(self) -> RecordableFunction:
        """What is recorded here."""
        function: RecordableFunction = self.wrapped_function.model
        return function

    @functools.cached_property
    def lone_outputs(self) -> frozenset[int]:
        """Places of outputs that share memory with nothing and fill it without gaps: a plain clone is a full copy."""
        trees = torch_internals.cudagraph_trees
        shared = {one.index for one in self.output_storage_alias if isinstance(one, trees.AliasesNewOutput)}
        return frozenset(
            place
            for place, (alias, metadata) in enumerate(
                zip(self.output_storage_alias, self.outputs_metadata, strict=True)
            )
            if alias is trees.UnaliasedStorage
            and place not in shared
            and isinstance(metadata, dict)
            and _is_dense(metadata["size"], metadata["stride"])
        )

    # Who holds them

    def all_outputs_are_dead(self) -> bool:
        """As stock's. Note [Held for a backward]."""
        return bool(super().all_outputs_are_dead() or (self.forget_histories() and super().all_outputs_are_dead()))

    def forget_histories(self) -> bool:
        """Let go of the backwards that results on the path refer to which nobody holds. Whether there was any."""
        found = False
        for node in self._path_from_root:
            found |= node.forget_own_histories()
        return found

    def forget_own_histories(self) -> bool:
        """The same for the results of this node alone. Note [Whatever the program does meanwhile]."""
        cached, storages = self.cached_tensor_outputs, self._cached_storages
        with torch_internals.disable_torch_function():
            places = [place for place in range(len(cached)) if _is_last_of_its_history(cached, storages, place)]
        if not places:
            return False

        def forget() -> None:
            for place in places:
                if place < len(cached) and _is_last_of_its_history(cached, storages, place):
                    cached[place].detach_()

        apart_from_the_program(forget)
        return True

    # Handing them out

    def copy_out(self, results: list[Any]) -> bool:
        """Put copies into this list where the program keeps results. False, and nothing is done, where some of them
        share memory or have gaps. Note [Kept results] in `pool_manager`.

        If memory is too short for copies, none is made: the graph has run, and results that are held keep the next one
        from writing over them.
        """
        function = self.function
        copies = self._copies_out
        if copies is None or copies.count != len(function.kept_outputs):  # there are ever more
            copies = self._copies_out = copies_out(results, function.kept_outputs, self.lone_outputs)
        if copies.make is None:
            return False
        try:
            copies.make(results)
        except torch.OutOfMemoryError:
            return True
        function.kept_copies += copies.count
        function.kept_bytes += copies.bytes
        return True

    def cached_results(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a replay on `inputs`, as `reconstruct_outputs` gives them, and the call's own parameters."""
        handed_out = self._handed_out
        if handed_out is None or self.unaliased_in_all_paths != self._kept_when_sorted:
            results: list[Any] = self.reconstruct_outputs()
        else:
            results = self._results_by_place(handed_out)
        self.hand_out_the_calls_own(results, inputs)
        return results

    def hand_out_the_calls_own(self, results: list[Any], inputs: Sequence[Any] | Mapping[int, Any]) -> None:
        """Put a call's own inputs where the function returns them (Notes in `returned`), and what has no memory."""
        for places, make in self._empty:
            made = make()
            for place in places:
                results[place] = made
        self.returned_in_place.hand_out(results, inputs)
        for place in self._handed_on:
            self._is_now(place, results[place])

    def _results_by_place(self, handed_out: HandedOut) -> list[Any]:
        """As `reconstruct_outputs`, without a look at each output in Python."""
        cached: list[Any] = self.cached_tensor_outputs
        if handed_out.changed(cached):
            self._restore_results()
        if handed_out.asks_some and _hooks_of_saved_tensors(False) is not None:
            handed_out.ask_all()
        # Of others `handed_out` asks.
        if self.function.direction == "forward":
            tensors = handed_out.tensors(cached)
            if list(map(_hooks, tensors)).count(None) != len(tensors):
                for output in tensors:
                    output._backward_hooks = None
            del tensors
        results = cached.copy()
        for place, value in self._constant:
            results[place] = value
        for place in self._made:
            self._make(place, results)
        self._repeat(results)
        return results

    def _repeat(self, results: list[Any]) -> None:
        for place, first in self._repeated:
            results[place] = results[first]
            self._is_now(place, results[first])

    def _is_now(self, place: int, result: torch.Tensor) -> None:
        """Have stock ask this tensor's memory whether somebody holds the output."""
        self.outputs_weakrefs[place].swap_weakref(result.untyped_storage()._weak_ref())

    def _make(self, place: int, results: list[Any]) -> None:
        """Put an output there that shares memory with one before it, or with another recording's, as stock does."""
        metadata = self.outputs_metadata[place]
        owner = self.prepare_alias_info_for_tensor_construction(self.output_storage_alias[place], metadata)
        storage = results[owner].untyped_storage() if isinstance(owner, int) else owner
        results[place] = made = self._reconstruct_from_tensor_metadata(metadata, storage)
        self._is_now(place, made)

    def reconstruct_outputs(self) -> Any:
        """As stock's; what a caller changed of a result is not there the next time."""
        self._restore_results()
        results: list[Any] = super().reconstruct_outputs()
        if self._handed_out is not None and _hooks_of_saved_tensors(False) is not None:
            self._handed_out.ask_all()
        self._repeat(results)
        return results

    def let_go_of_inputs(
        self,
        outputs: Sequence[Any],
        fixed: Mapping[int, torch.Tensor],
        managed: Mapping[int, weakref.ref[torch.Tensor]],
    ) -> None:
        """To be called once recorded. Notes in `returned`.

        Args:
            outputs: what the function returned.
            fixed: the inputs at fixed addresses.
            managed: the inputs that earlier graphs made, and that this one may have let go of.
        """
        made_earlier = {id(reference()): index for index, reference in managed.items() if reference() is not None}
        handed_on = {
            place: made_earlier[id(output)]
            for place, output in enumerate(outputs)
            if id(output) in made_earlier and self.preserved_aliased_inputs[made_earlier[id(output)]]
        }
        self.returned_in_place = found_in(self.static_output_tensors, fixed, handed_on)
        self._handed_on = list(handed_on)
        self._repeated = [
            (place, first)
            for place, first in repeated(outputs)
            if place not in handed_on and self.static_output_tensors[place] is None
        ]
        for one in self.returned_in_place.found:
            if one.output not in handed_on:  # those are no static outputs
                self.static_output_tensors[one.output] = self.borrowed(self.static_output_tensors[one.output])
        self._let_go_of_empty_results()

    def _let_go_of_empty_results(self) -> None:
        """Note [Results without memory]."""
        inputs = {one.output for one in self.returned_in_place.found if one.is_input}
        found: dict[int, list[int]] = {}
        for place, output in enumerate(self.static_output_tensors):
            if output is not None and place not in inputs and not output.untyped_storage().data_ptr():
                found.setdefault(id(output), []).append(place)
        empty = []
        for places in found.values():
            output = self.static_output_tensors[places[0]]
            like = {"dtype": output.dtype, "device": output.device}
            make = functools.partial(torch.empty_strided, output.shape, output.stride(), **like)
            empty.append((places, make))
            for place in places:
                self.static_output_tensors[place] = make()
        self._empty = empty

    def _restore_results(self) -> None:
        """Make tensors again that a caller did something to beyond their values. Note [Results that were changed]."""
        if self._handed_out is not None and self.cached_tensor_outputs:
            for place in self._handed_out.changed(self.cached_tensor_outputs):
                self._make_result_again(place)

    def _make_result_again(self, place: int) -> None:
        assert self._handed_out is not None
        torch_internals.remove_cached_tensor(self.cached_tensor_outputs[place])
        metadata, inference = self.outputs_metadata[place], self._handed_out.was_inference(place)

        def make() -> torch.Tensor:
            with torch_internals.InferenceMode(inference):
                made: torch.Tensor = self._reconstruct_from_tensor_metadata(metadata, self.create_storage(metadata))
                self._is_now(place, made)
                return made

        made = apart_from_the_program(make)
        torch_internals.add_cached_tensor(made)
        self.cached_tensor_outputs[place] = made
        self._cached_storages[place] = made.untyped_storage()

    def is_unused(self, place: int) -> bool:
        """Whether nobody holds what was handed out there. What was given other memory is nobody's any more."""
        if self._handed_out is not None and self._handed_out.has_moved(self.cached_tensor_outputs, place):
            self._make_result_again(place)
        return nobody_holds(self.cached_tensor_outputs, self._cached_storages, place)

    @functools.cached_property
    def results_alive(self) -> Sequence[Reference]:
        """Where the references to all results are that are alive after the graph."""
        return self.references(self.live_indices_after_graph)

    def references(self, indices: Sequence[tuple[int, int]]) -> Sequence[Reference]:
        """Where the references to these results are, given as stock does (depth in the path, place)."""
        cached = [(node.cached_tensor_outputs, node._cached_storages) for node in self._path_from_root]
        found = [(self.path_weakrefs[depth], place, *cached[depth]) for depth, place in indices]
        return Many(found) if len(found) > MANY else found

    def _initialize_cached_tensors(self) -> None:
        torch_internals.set_cached_tensors_enabled(True)  # Note [A reset of stock's]
        try:
            self._make_cached_tensors()
        except BaseException:  # an interrupt, and the program goes on: the next call makes all of them
            self.remove_node_cached_tensors()
            raise

    def _make_cached_tensors(self) -> None:
        super()._initialize_cached_tensors()
        self._cached_storages[:] = [
            None if tensor is None else tensor.untyped_storage() for tensor in self.cached_tensor_outputs
        ]
        rearranged()
        for place, tensor in enumerate(self.cached_tensor_outputs):
            if tensor is not None:
                unused = functools.partial(_unused, weakref.ref(self), place)
                self.outputs_weakrefs[place].extra_ref_check = unused
        function = self.function
        self._handed_out = HandedOut(self.cached_tensor_outputs, function.direction, function.callers_get)
        self._sort_places()

    def _sort_places(self) -> None:
        """By what a call hands out there."""
        of_the_call = {one.output for one in self.returned_in_place.found if one.is_input}
        of_the_call.update(place for place, _ in self._repeated)
        constant: list[tuple[int, Any]] = []
        made = []
        for place, metadata in enumerate(self.outputs_metadata):
            if self.cached_tensor_outputs[place] is not None or place in of_the_call:
                continue
            if not isinstance(metadata, dict):
                constant.append((place, metadata))
            elif self.static_output_tensors[place] is not None:
                constant.append((place, self.static_output_tensors[place]))
            else:
                made.append(place)
        self._constant, self._made = constant, made
        self._kept_when_sorted = list(self.unaliased_in_all_paths)

    def remove_node_cached_tensors(self) -> None:
        torch_internals.set_cached_tensors_enabled(True)  # Note [A reset of stock's]
        self._handed_out = None
        self._constant = self._made = ()
        self._cached_storages.clear()
        rearranged()
        super().remove_node_cached_tensors()

    def _mark_prior_graph_output_as_aliased(self, index: tuple[int, int]) -> None:
        super()._mark_prior_graph_output_as_aliased(index)
        rearranged()

    # Tensors over memory that they do not own

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor over the same memory, which it does not own."""
        metadata = self._tensor_metadata(tensor, ignore_storage_offset=False)
        return self._reconstruct_from_tensor_metadata(metadata)

    def borrowing(self, inputs: Sequence[Any]) -> Borrowed:
        """The same for each of the inputs, when it is asked for. It does not keep the node."""
        reference = weakref.ref(self)

        def make(metadata: Mapping[str, Any]) -> torch.Tensor:
            node = reference()
            if node is None:
                raise ReferenceError("this recording is gone")
            made: torch.Tensor = node._reconstruct_from_tensor_metadata(metadata)
            return made

        return Borrowed(inputs, functools.partial(self._tensor_metadata, ignore_storage_offset=False), make)

    def borrowed_storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """All bytes of the storage of `tensor` (uint8), which it does not own."""
        metadata = self._tensor_metadata(tensor)
        whole = {"size": (metadata["nbytes"],), "stride": (1,), "dtype": torch.uint8}
        return self._reconstruct_from_tensor_metadata({**metadata, **whole})

    def output_tensors(self) -> dict[int, torch.Tensor]:
        """By place: the tensors among the outputs, as the graph leaves them, by stock's metadata of them.

        Those in the memory of inputs at fixed addresses lie where these did at the recording.
        """
        return {
            place: self.static_output_tensors[place]
            if self.static_output_tensors[place] is not None
            else self._reconstruct_from_tensor_metadata(metadata)
            for place, metadata in enumerate(self.outputs_metadata)
            if isinstance(metadata, dict)
        }


def _unused(reference: weakref.ref[ResultsNode], place: int) -> bool:
    """Notes [Held for a backward] and [Results that were changed]."""
    node = reference()
    return node is not None and node.is_unused(place)


def _is_last_of_its_history(cached: list[Any], storages: list[Any], place: int) -> bool:
    """Whether a result refers to a backward, and nobody holds it. No variable may hold it here, either."""
    return cached[place] is not None and cached[place].grad_fn is not None and nobody_holds(cached, storages, place)


_hooks = operator.attrgetter("_backward_hooks")


def _is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor fills its memory once, in whatever order of dimensions."""
    expected = 1
    for extent, step in sorted(zip(size, stride, strict=True), key=lambda one: one[1]):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True
