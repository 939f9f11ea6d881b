"""Steady calls of a recording: from the function to the launch with what must be looked at, and nothing else.

A manager of stock's finds out in each call, in Python, what to do with it. A `SteadyCall` is made when that is known:
after a recording, or a replay that went the full way. From then on a call in the same circumstances takes few steps:
one comparison in C++ of everything at a fixed address, one of what is read in place, a look at the results that
somebody might hold, the launch, and the list of results. If anything differs, the call goes the full way before
anything was done for it, so stock's behaviour is kept.

Note [Loops]. A function may be called where it was never recorded: nothing of it follows the current recording. If
nobody holds a result of the current path any more, stock then starts a new path with the function, although the
iteration goes on. This happens in each round of a loop that calls a compiled block and keeps no results. A steady call
starts a path there in the same way as at the beginning of an iteration.

`SKIPPED` lists what a full call does in PyTorch 2.11, and why a steady call may go without or where it does the same.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from optimizations import torch_internals
from optimizations.calls.turns import LENT, is_lent
from optimizations.in_place.session import Stage
from optimizations.one_line import one_line
from optimizations.torch_internals.apart import in_a_new_thread
from optimizations.torch_internals.stock_trees import compared_inputs
from optimizations.trees import inner_graphs
from optimizations.trees.readable_seeds import any_on_host

if TYPE_CHECKING:
    from optimizations.trees.function import RecordableFunction
    from optimizations.trees.manager import EncoreManager
    from optimizations.trees.node import EncoreNode

trees = torch_internals.cudagraph_trees

MOST_KEPT = 64
"""Steady calls that are kept for one function behind one recording: one for each that takes turns with others there.
To check one more on the fast path takes a hundredth of what the slow path does.
"""


NOT_RECORDED = "no recording of it is steady yet"
NOT_EXECUTING = "graphs were being recorded or warmed up before it"
RESULTS_HELD = "results of the iteration before are held"
EARLIER_RESULT_HELD = "a result of an earlier graph is held that was dead when this one was recorded"
SEEDS_ON_HOST = "its forward ran without a graph and left random state on the host"
OTHER_ORDER = "no recording of it follows the one before it"
CHANGED = "what its recording reads in place has changed"
FIXED_INPUT_MOVED = "an input at a fixed address moved"
INPUT_STILL_HELD = "the program holds an input that the graph would overwrite"
CAPTURED = "the program captures"
NOT_FOLLOWED = "an address in its graph could not be changed"
BACKWARD_PENDING = "a forward waits for its backward, and no step was marked"
ANOTHER_FOLLOWS = "it was recorded as a second call of an iteration, too"
WORK_IS_DUE = "work on its recording was due"
FORWARD_MODE = "derivatives are taken in forward mode"
OTHER_GEOMETRY = "an input at a fixed address has another shape, other strides or another dtype"
"""Why a call went the full way, in addition to a function's own reason to run without a graph."""

Reference = tuple[list[Any], int, list[Any], list[Any]]
"""To a result of a recording: a list of stock's references, the place in it, and at the same places stock's tensors and
the storages of these, as objects of Python."""


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
        "EncoreManager.enter",
        "notes the thread, makes the device's context current in it, and waits for the stream of the last call",
        "a steady call does so in a thread's first call of a direction, and where the stream is another one",
    ),
    Skipped(
        "StorageWeakRefWrapper.expired",
        "finds out from counts of references whether somebody holds a result",
        "a steady call reads the same counts, and asks the node where they are not those of a result that nobody holds",
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
        "CUDAGraphNode._copy_inputs_and_remove_from_src",
        "copies inputs, which fails for one that has a derivative in forward mode",
        "while derivatives are taken in forward mode, calls go the full way",
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


class SteadyCall:
    """The call of one recording that is as the one before, with what is looked at on the way laid out.

    Attributes:
        node: the recording; `state`: its state when this was made. Another one now: this is not valid any more.
        addresses, compared: where inputs at fixed addresses and results of earlier graphs lie, and their places.
        dead_before, dead_after: references to results that must have died before the graph, and when it runs.
        dying: places of inputs that are results of earlier graphs, and are let go before the launch.
    """

    __slots__ = (
        "addresses",
        "compared",
        "dead_after",
        "dead_before",
        "dying",
        "graph",
        "node",
        "seeds",
        "session",
        "state",
        "tracker",
    )

    def __init__(self, node: EncoreNode) -> None:
        self.node = node
        self.state = node.state
        self.addresses = node.static_input_data_ptrs
        self.compared = sorted(compared_inputs(node))  # results of earlier graphs are among them
        # At an address of the GPU that is compared, no seed can lie on the host.
        self.seeds = [index for index in node.function.code().seeds if index not in self.compared]
        self.dead_before = node.references(node.expected_dead_indices_before_graph)
        self.dead_after = node.references(node.expected_dead_indices_after_graph)
        self.dying = [index for index in node.cudagraph_managed_idxs if not node.preserved_aliased_inputs[index]]
        self.tracker = node.tracker
        self.session = node.session
        self.graph: Any = node.graph

    @property
    def valid(self) -> bool:
        """Whether the recording is what it was when this was made."""
        return bool(self.state == self.node.state)


def steady_call(node: EncoreNode) -> SteadyCall | None:
    """The steady call of a recording, if it can have one now."""
    options = torch_internals.inductor_config.triton
    debugging = options.fast_path_cudagraph_asserts or options.force_cudagraph_sync or options.force_cudagraphs_warmup
    if debugging or node.function.returned_inputs or node.reads_what_is_gone or node.graph is None:
        return None
    return SteadyCall(node)


def steadily(manager: EncoreManager, full: functools.partial[Any]) -> Callable[[list[Any]], Any]:
    """What is called in place of `full`, a function of a manager's: steady calls where there can be such.

    One function holds all that a steady call does, in the order of a full one, because a call between functions of
    Python costs as much as a check. Whatever is not as it was is counted with its reason, and goes the full way.
    """
    function_id = full.keywords["function_id"]
    function: RecordableFunction = manager.ids_to_funcs[function_id].model
    if not function.lean:
        return full
    calls = manager.steady_calls(function_id)
    mode = manager.id_to_mode[function_id]
    is_forward, is_backward = mode is trees.CompilationMode.FORWARD, mode is trees.CompilationMode.BACKWARD
    turn, entered, device_index = manager.turn, manager.entered, manager.device_index
    entered_as = "backward" if is_backward else "forward"
    executing, steps = trees.ExecutionState.EXECUTION, trees.MarkStepBox
    generations, done = trees.GenerationTracker, Stage.DONE
    data_ptrs_equal, lent = torch_internals.data_ptrs_equal, LENT
    forward_mode = torch_internals.forward_ad
    is_capturing = torch.cuda.is_current_stream_capturing

    def call(inputs: list[Any]) -> Any:
        if inner_graphs.at_rest_now:
            return full(inputs)
        if lent and is_lent(turn):
            return full(inputs)
        with turn:
            if manager.running:  # it is called from within a call that goes the full way
                return full(inputs)
            if not calls:
                return in_full(inputs, NOT_RECORDED)
            # As `EncoreManager.enter`, for a thread that has been here before.
            if not hasattr(entered, entered_as):
                manager.enter(function_id)
                setattr(entered, entered_as, True)
            elif torch_internals.current_raw_stream(device_index) != manager.last_stream:
                manager.enter(function_id)
            if is_capturing():  # the program may capture on the stream that its calls were on before
                return in_full(inputs, CAPTURED)
            if forward_mode._current_level >= 0:
                return in_full(inputs, FORWARD_MODE)
            if function.geometry is None or not function.geometry.holds(inputs):
                return in_full(inputs, OTHER_GEOMETRY)
            if manager.path_state is not executing:
                return in_full(inputs, NOT_EXECUTING)
            if function.without_graph is not None:
                return in_full(inputs, function.without_graph)
            if manager.held_in_generation is not None:
                return in_full(inputs, RESULTS_HELD)
            current: EncoreNode = manager._current_node
            generation = steps.mark_step_counter or generations.generation
            begins = generation != manager.current_gen
            following = calls.get(None if begins else current)
            if following is None and manager.may_begin_within_iteration():
                following, begins = calls.get(None), True  # Note [Loops]

            chosen: SteadyCall | None = None
            to_patch: list[SteadyCall] = []
            why = OTHER_ORDER
            for one in following or ():
                if one.state != one.node.state:
                    why = CHANGED
                    continue
                if one.compared and not data_ptrs_equal(inputs, one.addresses, one.compared):
                    why = FIXED_INPUT_MOVED
                    continue
                if one.seeds and any_on_host(inputs, one.seeds):
                    why = SEEDS_ON_HOST
                    continue
                if one.dead_before and still_alive(one.node, one.dead_before):
                    why = EARLIER_RESULT_HELD
                    continue
                tracker = one.tracker
                if tracker is None or not tracker.fixed or tracker.fixed_in_place(inputs):
                    chosen = one
                    break
                to_patch.append(one)
            in_place = chosen is not None
            if chosen is None:
                # Whether one can be patched takes a look at each input: only where no other has these addresses.
                for one in to_patch:
                    tracker = one.tracker
                    if tracker is not None and not tracker.refuses(inputs):
                        chosen = one
                        break
                    why = FIXED_INPUT_MOVED
                if chosen is None:
                    return in_full(inputs, why)
            if begins:
                if manager.running_forwards_with_pending_backwards and not steps.mark_step_counter:
                    return in_full(inputs, BACKWARD_PENDING)
                if current.children and current.children.get(function_id):
                    return in_full(inputs, ANOTHER_FOLLOWS)
                if still_alive(current, current.results_alive):
                    return in_full(inputs, RESULTS_HELD)
            session = chosen.session
            # One that is done may have been left with a graph that was not changed to the end.
            if session is not None and (session.stage is not done or session.unusable) and not session.rests(inputs):
                return in_full(inputs, WORK_IS_DUE)

            node = chosen.node
            for index in chosen.dying:
                inputs[index] = None
            if chosen.dead_after and still_alive(node, chosen.dead_after):
                node.give_back_inputs(inputs)
                function.went_the_full_way(INPUT_STILL_HELD)
                return manager.run_without_graph(inputs, function_id, INPUT_STILL_HELD)

            # From here on the call is served, as by `CUDAGraphTreeManager.execute_node` and `CUDAGraphNode.run`. The
            # manager's `mode` and `compile_id` are left as they are: they are read behind `run` only, which sets them.
            manager._current_node = node
            manager.current_gen = generation
            node.replays += 1
            node.copied_bytes += node.copied_per_replay
            tracker = chosen.tracker
            if tracker is not None:
                try:
                    tracker.follow(inputs, fixed_in_place=in_place)
                except Exception as error:
                    not_followed = f"{NOT_FOLLOWED}: {one_line(error)}"
                    function.went_the_full_way(not_followed)
                    return manager.not_launched(node, not_followed, True, inputs, function_id)
            if node.non_static_input_idx:
                node.copy_recording_inputs(inputs)
            chosen.graph.replay()
            if tracker is not None and tracker.pending:
                tracker.launched()
            outputs: list[Any] = node.cached_results(inputs)
            if not node.is_latest:
                manager.replays_another(node)
            inputs.clear()
            if is_forward:
                manager.running_forwards_with_pending_backwards = True
            elif is_backward:
                manager.running_forwards_with_pending_backwards = False
            if function.kept_outputs and not node.copy_out(outputs):
                outputs = manager.kept_copied(function, outputs)
            if manager.forgetting_is_due:
                manager.forget_due_histories()
            return outputs

    def in_full(inputs: list[Any], reason: str) -> Any:
        function.went_the_full_way(reason)
        return full(inputs)

    return call


MANY = 4
"""More references than that are asked about together (`Many`)."""


class Many(list[Reference]):
    """So many references that asking one by one takes longer than all else of a call.

    The counts are kept that were there when nobody held any result; where they are those, nobody does. `rearranged`
    begins that again.
    """

    __slots__ = ("_arrangement", "_idle")

    def __init__(self, references: Sequence[Reference]) -> None:
        super().__init__(references)
        self._idle: list[Idle] | None = None
        self._arrangement = 0

    def idle(self) -> bool:
        """Whether it is plain that nobody holds any."""
        found = self._idle
        return found is not None and self._arrangement == _arrangement and all(map(Idle.stand, found))

    def are_idle(self) -> None:
        """To be told that nobody holds any."""
        self._idle, self._arrangement = Idle.of(self), _arrangement


_arrangement = 0
"""Counts how often the references that stock keeps became others. They may not, between two calls of one recording."""


def rearranged() -> None:
    """To be called when tensors that stock keeps were made or let go, or their references are counted otherwise."""
    global _arrangement
    _arrangement += 1


class Idle:
    """Counts of references to results of one recording while nobody holds them."""

    __slots__ = ("_cached", "_objects", "_pick", "_storage_counts", "_storages", "_tensor_counts", "_weak")

    def __init__(self, references: Sequence[Reference]) -> None:
        known = [(held[place], place) for held, place, _, _ in references if held[place] is not None]
        kept = [place for reference, place in known if reference.extra_ref_check is not None]
        self._weak = [reference.ref for reference, _ in known]
        self._cached, self._objects = references[0][2:]
        self._pick = _picker(kept)
        self._storages = list(map(_storage_use_count, map(_cdata, self._weak)))
        self._tensor_counts = list(map(sys.getrefcount, self._pick(self._cached)))
        self._storage_counts = list(map(sys.getrefcount, self._pick(self._objects)))

    @staticmethod
    def of(references: Sequence[Reference]) -> list[Idle]:
        """By recording."""
        found: dict[int, list[Reference]] = {}
        for one in references:
            found.setdefault(id(one[2]), []).append(one)
        return [Idle(some) for some in found.values()]

    def stand(self) -> bool:
        """Whether the counts are these still."""
        return (
            list(map(_storage_use_count, map(_cdata, self._weak))) == self._storages
            and list(map(sys.getrefcount, self._pick(self._cached))) == self._tensor_counts
            and list(map(sys.getrefcount, self._pick(self._objects))) == self._storage_counts
        )


def _picker(places: Sequence[int]) -> Callable[[list[Any]], list[Any]]:
    """What picks these places of a list."""
    if places and list(places) == list(range(places[0], places[-1] + 1)):
        return operator.itemgetter(slice(places[0], places[-1] + 1))
    return lambda values: [values[place] for place in places if place < len(values)]


_cdata = operator.attrgetter("cdata")


def still_alive(node: EncoreNode, references: Sequence[Reference]) -> bool:
    """The same for results on the path of `node`, by more than a backward that nobody holds."""
    return any_alive(references) and (not node.forget_histories() or any_alive(references))


def any_alive(references: Sequence[Reference]) -> bool:
    """Whether one of these references is to a result that somebody holds."""
    many = type(references) is Many and _HOLDERS_ARE_COUNTED
    if many and references.idle():  # type: ignore[attr-defined]
        return False
    for held, place, cached, storages in references:
        reference = held[place]
        if reference is None:
            continue
        still_unused = reference.extra_ref_check
        # Where stock keeps the tensor, two references are its own; see `StorageWeakRefWrapper.expired`.
        if _storage_use_count(reference.ref.cdata) > (0 if still_unused is None else 2):
            return True
        if still_unused is None:
            continue
        # What nobody but stock's list refers to needs no closer look, which takes longer.
        if (
            _HOLDERS_ARE_COUNTED
            and place < len(cached)
            and _references(cached, place) == _UNUSED
            and _references(storages, place) == _UNUSED_STORAGE
        ):
            continue
        if not still_unused():
            return True
    if many:
        references.are_idle()  # type: ignore[attr-defined]
    return False


def nobody_holds(cached: list[Any], storages: list[Any], place: int) -> bool:
    """Whether only this list refers to a tensor in it, in Python and in C++, and only the other one to its storage.

    Who has nothing but the storage (`y.untyped_storage()`) holds the memory, too. That does not show in the counts of
    C++: the object of Python is there as long as the storage, whether somebody refers to it or not.
    """
    return (
        _references(cached, place) == _UNUSED
        and _references(storages, place) == _UNUSED_STORAGE
        and torch_internals.tensor_use_count(cached[place]) == 1
    )


def _references(values: list[Any], place: int) -> int:
    return sys.getrefcount(values[place])


def _holders_are_counted() -> bool:
    """Whether what holds a tensor in C++ shows in the references to its Python object."""
    held = [torch.zeros(1, device="cpu")]
    before = _references(held, 0)
    product = torch.ones(1, device="cpu", requires_grad=True) * held[0]  # saves it for a backward
    counted = _references(held, 0) > before
    del product
    return counted


def _references_to_storage() -> int:
    held = torch.zeros(1, device="cpu")
    return _references([held.untyped_storage()], 0)


_storage_use_count = torch_internals.storage_use_count
_UNUSED = _references([object()], 0)
"""References to something that only a list refers to, as this Python counts them."""
_UNUSED_STORAGE = in_a_new_thread(_references_to_storage)
"""The same for the storage of a tensor, to whose object C++ may refer as well."""
_HOLDERS_ARE_COUNTED = in_a_new_thread(_holders_are_counted)
