"""Watch every operator of a step: what a graph could not repeat, which tensors are read, what is written.

Note [Seen before it runs]. A read of a GPU value on the host ends a capture for good: the driver invalidates it, and
PyTorch's generators and allocator are left as inside of a capture. So the observer is on during the capture too, and
raises before such an operator runs; the capture then ends in order and is thrown away.

Note [Compiled modules]. Operators inside of compiled code are not dispatched. The compiler has seen to what could break
a capture of them. Their outputs seem to come from nowhere, so tensors of unknown origin are accepted where a step runs
compiled code.

Note [What two calls are compared by]. Operators by their names, numbers, and the shapes and dtypes of their tensors;
tensors that live as long as the call (the batch, what the step reaches, gradients from before) by their names. All
others count as alike: an address that was freed is given to the next tensor, so it does not tell where a tensor comes
from. Memory that is only allocated says nothing yet, and is left out. Where a step may draw numbers on the host
(`compares_values`), the values of tensors that the host made count too if an operator of the GPU is given them: a
graph would keep them. What operators of the GPU leave in CPU memory, such as the seeds of attention, does not. Nor do
all tensors count as alike then: which of two that it computed a call goes on with may be drawn. So a tensor is told by
the operator that gave it last; by the storage itself, which a weak reference keeps from being given to another.
"""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations import torch_internals
from optimizations.capture.step import casts
from optimizations.capture.step.drawing import draws
from optimizations.capture.step.launches import numbers_of
from optimizations.capture.step.operations import Operation
from optimizations.capture.step.reseeding import Reseeding
from optimizations.capture.step.source_lines import (
    ADVICE_ON_CTC,
    advice_by_caller,
    called_by_the_compiler,
    current_line,
)
from optimizations.concurrency.launch_log import LaunchLog
from optimizations.report.steps import Refusal, StepRefused
from optimizations.torch_internals.generator_identity import identity
from optimizations.written_operands import written

Holds = Callable[[torch.Tensor], bool]
"""Whether a tensor lies on the GPU."""


class StepDiffers(StepRefused):
    """Report that a captured call did something else than the calls before it."""


SETS_UP = Refusal(
    "compiles code, or times kernels to choose among them, in call after call",
    "see why with TORCH_LOGS=recompiles; pass what differs as tensors, or mark sizes as dynamic",
)
"""Why a call does not count, and why a step whose calls never count is refused. See `compilations`."""


class Observer(torch_internals.TorchDispatchMode):
    """Watch operators while a step runs. With `forbid`, what cannot be captured raises `StepRefused` before it runs.

    Attributes:
        operations: what ran, in order.
        refusals: what a graph could not repeat.
        outside: storages that were read and came from outside of the step, by address: a tensor, and the line.
        draws: whether random numbers of the GPU were drawn.
        generators: those other than the default that were passed to operators.
        in_backward: whether an operator ran inside of a backward.
        kept_casts: whether it read what may be a cast that autocast keeps from an earlier call.
        new_casts: whether it made a cast that autocast may keep.
        compiling: whether PyTorch compiles something right now.
        multiplies: whether an operator ran that may compute in a workspace of cuBLAS.
        set_up: whether something was compiled, or kernels were timed, so that the call does not count.
        rates: storages of tensors that stand for learning rates and betas, which are numbers to the program, with what
            they stand for.
        log: notes what puts nodes into a graph that is being captured; None where none is.
        first_states: of `generators`, as they were before they were first drawn from.
        before_write: is given each tensor that an operator is about to write.
        sparse: names of sparse tensors that were there before, by their identities: no operator may be given one.
        gone: whether what lay at an address before the call is gone, and with it the name of what lies there.
        taken_over: those of `outside` where that was so when they were read first: of what lay there nothing was read.
        reseeding: looks at generators around draws; `default_generator` is that of draws that name none.
        compares_values: whether values that the host made, and the GPU reads, are arguments that calls are compared by.
        host_generators: identities of generators of the host whose draws decide nothing.
        given: storages of arguments, of which parts are not told from each other: two may be parts of one storage, at
            another distance in each call.
        returned: storages of what the call returned, or left in `.grad`, once it is through. What an attribute held
            before is read by that, too, without an operator.

    `known`: names of tensors that live as long as the call, by where their storages lie. `keeps_workspace`: see
    `Device`.
    """

    def __init__(
        self,
        holds: Holds,
        known: Mapping[int, str],
        *,
        forbid: bool,
        generators: Sequence[torch.Generator] = (),
        keeps_workspace: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()
        self._keeps_workspace = keeps_workspace
        self.multiplies = False
        self.holds = holds
        self._known = known
        self._unseen = 0
        self.log: LaunchLog | None = None
        self.rates: dict[int, str] = {}
        self._from_rates: dict[int, str] = {}
        self._numbers: dict[int, weakref.ref[torch.Tensor]] = {}
        self._in_region = casts.inside_region()
        self._assigned: complex | None = None
        self._forbid = forbid
        self._made: set[int] = set()
        self.operations: list[Operation] = []
        self.refusals: list[Refusal] = []
        self.outside: dict[int, tuple[weakref.ref[torch.Tensor], str | None]] = {}
        self.draws = False
        self.generators = list(generators)
        self.first_states: list[torch.Tensor] = []
        self.before_write: Callable[[torch.Tensor], None] | None = None
        self.sparse: Mapping[int, str] = {}
        self.gone: Callable[[int], bool] = lambda address: False
        self.taken_over: set[int] = set()
        self.reseeding: Reseeding | None = None
        self.default_generator: torch.Generator | None = None
        self.returned: frozenset[int] = frozenset()
        self.compares_values = False
        self.host_generators: frozenset[int] = frozenset()
        self.given: frozenset[int] = frozenset()
        self._made_by_host: set[int] = set()
        self._origins: dict[tuple[Any, ...], str] = {}
        self._counted_from = 0
        self.in_backward = False
        self.kept_casts = self.new_casts = False
        self.compiling = self.set_up = False

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Leave out what runs in the block: it is the library's own, and no part of the step."""
        self._unseen += 1
        try:
            yield
        finally:
            self._unseen -= 1

    @contextlib.contextmanager
    def by_a_mask(self, number: complex) -> Iterator[None]:
        """Note that a number is written where a mask says, in the block.

        Note [Numbers that are assigned] in `python_values`.
        """
        self._assigned = number
        try:
            yield
        finally:
            self._assigned = None

    def is_kept_cast(self, tensor: torch.Tensor | None) -> bool:
        """Return whether a tensor of unknown origin may be a cast that autocast keeps from an earlier call."""
        return self._in_region and tensor is not None and casts.may_be_kept(tensor)

    def refuse(self, reason: str, advice: str) -> None:
        """Note a finding of the line that runs now; raise it where this is a capture.

        What PyTorch's compiler does for itself does not count. See `compilations`.
        """
        if self.compiling or called_by_the_compiler():
            self.set_up = True
            if self._forbid:
                raise StepDiffers(SETS_UP)
            return
        refusal = Refusal(reason, advice_by_caller() or advice, current_line())
        if refusal not in self.refusals:
            self.refusals.append(refusal)
        if self._forbid:
            raise StepRefused(refusal)

    def _noted(self, func: Any, args: Any, kwargs: Any, storages: set[int]) -> Any:
        if self.log is None:
            return _run(func, args, kwargs)
        given = chain(storages, numbers_of([*args, *kwargs.values()], self.holds))
        return self.log.operator(func, args, kwargs, lambda: _run(func, args, kwargs), given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, torch_internals.FakeTensor) for kind in types):
            return func(*args, **kwargs)  # it holds nothing, and leaves to its own mode what is done with it
        if any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # a tensor that holds others: what it does with them is seen
        name = str(func)
        if name.startswith("profiler.") or self._unseen or self.compiling:
            return func(*args, **kwargs)
        inputs = list(_tensors(args)) + list(_tensors(kwargs.values()))
        assigned: tuple[complex, ...] = ()
        if self._assigned is not None and name.startswith((*_INDEXING[1:], _LIFTS)):
            inputs = [tensor for tensor in inputs if self.holds(tensor)]  # without PyTorch's own of the number
            assigned = (self._assigned,)
        self.in_backward = self.in_backward or torch_internals.current_autograd_node() is not None
        drawing = draws(func, args, kwargs)
        self._look(name, func, args, kwargs, inputs, drawing=drawing)
        drawn_from = self._drawn_from(kwargs) if drawing else None
        if drawn_from is not None and self.reseeding is not None:
            self.reseeding.look(drawn_from)
        made_from = {storage(tensor) for tensor in inputs}
        if name.startswith(_SETS_MEMORY):  # what is behind lies in memory that is there
            made_from.update(one.data_ptr() for one in args if isinstance(one, torch.UntypedStorage))
        line = current_line()
        compared = not name.startswith(_UNCOMPARED) or (name.startswith(_DETACH) and inputs[0].requires_grad)
        if compared:
            values = self._values_for_gpu(inputs) if self.compares_values else ()
            looks = self._summaries((args, kwargs, assigned))
            self.operations.append(Operation(name, (*looks, *values), line))
        for tensor in inputs:
            address = storage(tensor)
            if address not in self._made and address not in self.outside:
                self.outside[address] = weakref.ref(tensor), line
                if self.gone(address):
                    self.taken_over.add(address)
                if self._in_region and not self._name(tensor):
                    self.kept_casts = self.kept_casts or self.is_kept_cast(tensor)
        self.new_casts = self.new_casts or (self._in_region and casts.is_cast_of_a_weight(name, args))
        if self.before_write is not None:
            for tensor in _written(func, args, kwargs):
                self.before_write(tensor)
        result = self._noted(func, args, kwargs, made_from)
        if any(isinstance(tensor, torch_internals.FakeTensor) for tensor in _tensors((result,))):
            return result  # made in a mode of the program's
        if drawn_from is not None and self.reseeding is not None:
            self.reseeding.drew(drawn_from)
        only_rates = bool(self.rates and made_from) and made_from <= {*self.rates, *self._from_rates}
        if self._from_rates and not only_rates:  # `2 * rate` that is written with a tensor would be a tensor
            for tensor in _written(func, args, kwargs):
                self._from_rates.pop(storage(tensor), None)
                self._numbers.pop(id(tensor), None)
        for number, tensor in enumerate(_tensors((result,))):
            made = storage(tensor) not in made_from
            if made:
                self._made.add(storage(tensor))
                if only_rates:
                    self._from_rates[storage(tensor)] = self._stands_for(made_from)
                    if not name.startswith(_COPIES):
                        self._numbers[id(tensor)] = weakref.ref(tensor)
                else:  # of a rate may have been what lay there before
                    self._from_rates.pop(storage(tensor), None)
            if self.compares_values:
                if compared:
                    self._note_origin(tensor, number)
                if made:
                    self._note_who_made(tensor, inputs)
        return result

    def compare_values(self, host_generators: frozenset[int], given: Iterable[torch.Tensor] = ()) -> None:
        """Compare calls by values, too: what is drawn from these generators is said to decide nothing. `given` are
        tensors of which parts are not told from each other."""
        self.compares_values = True
        self.host_generators = host_generators
        self.given = frozenset(map(storage, given))

    def _note_origin(self, tensor: torch.Tensor, number: int) -> None:
        """Note that the tensor is this result of the operator that was noted last."""
        if (place := self._place(tensor)) is not None:
            self._origins[place] = f"result {number} of operator {len(self.operations) - self._counted_from}"

    def _note_who_made(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        """Note that an operator with these inputs made the tensor."""
        self._made_by_host.discard(storage(tensor))
        in_memory = tensor.device.type == "cpu" and not self.holds(tensor) and storage(tensor)
        if in_memory and not any(map(self.holds, inputs)):
            self._made_by_host.add(storage(tensor))

    def forget_origins(self) -> None:
        """Forget where tensors come from: what runs from now on is captured on its own, and they are outside of it."""
        self._origins.clear()
        self._counted_from = len(self.operations)

    def of_results(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return by what results are compared: values that operators of the host made, and which tensors they are."""
        origins = [self._name(one) + self._origin(one) for one in tensors]
        return self.values_made_by_host(tensors), tuple(origins)

    def _name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor that was there before the call; "" of others, and of one without elements.

        A capture gives one without elements no memory.
        """
        address = storage(tensor) if tensor.numel() else 0
        name = self._known.get(address, "")
        return name if name and not self.gone(address) else ""

    def _origin(self, tensor: torch.Tensor) -> str:
        """Return which of the tensors that the call computed it is; "" where that is not known."""
        place = self._place(tensor)
        return "" if place is None else self._origins.get(place, "")

    def _place(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Return a storage, and the part of it that a tensor stands for; None if it has no memory, or was given."""
        if tensor.layout is not torch.strided or tensor.is_nested or storage(tensor) in self.given:
            return None
        return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()

    def values_made_by_host(self, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """Return values of those among these that operators of the host made."""
        found = [one for one in tensors if storage(one) in self._made_by_host and one.layout is torch.strided]
        with self.unseen():
            return tuple(map(_value, found))

    def _values_for_gpu(self, inputs: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """Return values that an operator of the GPU is given by the host."""
        return self.values_made_by_host(inputs) if any(map(self.holds, inputs)) else ()

    def _drawn_from(self, kwargs: Any) -> torch.Generator | None:
        """Return the generator that a drawing operator draws from; None where that is the host's."""
        given: torch.Generator | None = kwargs.get("generator")
        if self._is_of_host(given):
            return None
        return self.default_generator if given is None else given

    def _is_of_host(self, generator: torch.Generator | None) -> bool:
        return generator is not None and identity(generator) in self.host_generators

    def _look(self, name: str, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], *, drawing: bool) -> None:
        """Refuse what a graph cannot repeat."""
        on_gpu = [tensor for tensor in inputs if self.holds(tensor)]
        tags = getattr(func, "tags", ())
        if drawing:
            generator = kwargs.get("generator")
            self.draws = self.draws or not self._is_of_host(generator)
            unknown = generator is not None and not any(generator is known for known in self.generators)
            if unknown and not self._is_of_host(generator):
                if self._forbid:
                    self.refuse("draws from a generator that it did not use before", "use one generator in all calls")
                self.generators.append(generator)
                self.first_states.append(generator.get_state())
        self._look_at_rates(name, func, args, kwargs, on_gpu, tags)
        for path in filter(None, map(self.sparse.get, map(id, inputs))):
            self.refuse(*uses_sparse(path))
        if on_gpu and (name in _HOST_READS or torch.Tag.data_dependent_output in tags):
            self.refuse(
                "reads a value of the GPU on the host (`.item()`, `float()`, `print` or `if` of a tensor)",
                "return the tensor and read it after the step, or decide on the GPU with torch.where",
            )
        if any(tensor.is_nested for tensor in inputs):
            self.refuse(
                "computes with a nested tensor, whose sizes lie in CPU memory",
                "pad it, and pass the lengths or a mask, or use torch.nested with layout=torch.jagged",
            )
            return
        if on_gpu and _size_depends_on_values(name, tags, args, kwargs):
            self.refuse(
                f"{_short(name)} has a result whose size depends on values",
                ADVICE_ON_CTC if "ctc_loss" in name else _OF_SIZES,
            )
        if name.startswith(_LIFTS) and any(tensor.numel() for tensor in on_gpu):
            self.refuse(
                "makes a tensor on the GPU from Python values",
                "make it once before the step, or use torch.full",
            )
        multiplies = bool(on_gpu) and name.startswith(_MULTIPLIES)
        self.multiplies = self.multiplies or multiplies
        if multiplies and not self._keeps_workspace():
            self.refuse(
                "multiplies matrices on a stream or in a thread of its own: what cuBLAS computes in there is not kept "
                "for a graph",
                "multiply on the stream that the step is called on; everything else may be done on others",
            )
        self._look_at_transfers(name, args, kwargs)
        self._look_at_host_tensors(name, func, args, kwargs, inputs, bool(on_gpu))

    def _look_at_rates(
        self, name: str, func: Any, args: Any, kwargs: Any, on_gpu: Sequence[torch.Tensor], tags: Any
    ) -> None:
        found = {storage(tensor) for tensor in on_gpu} if self.rates else set()
        if found.isdisjoint(self.rates) and found.isdisjoint(self._from_rates):
            return
        behind = "it changes from call to call, so a tensor stands for it in the step: do so after the step"
        if name in _HOST_READS or torch.Tag.data_dependent_output in tags:
            self.refuse(f"reads {self._stands_for(found)} of an optimizer in Python", behind)
        written = {storage(tensor) for tensor in _written(func, args, kwargs)}
        if not written.isdisjoint(self.rates):
            self.refuse(f"changes {self._stands_for(written)} of an optimizer", behind)

    def is_number(self, tensor: torch.Tensor) -> bool:
        """Return whether it was computed of learning rates and betas only, and would be a number without these."""
        found = self._numbers.get(id(tensor))
        return found is not None and found() is tensor and tensor.dim() == 0

    def _stands_for(self, storages: set[int]) -> str:
        """Return what a tensor among these stands for, or was made of."""
        return next(name for name in map({**self._from_rates, **self.rates}.get, storages) if name is not None)

    def _look_at_transfers(self, name: str, args: Any, kwargs: Any) -> None:
        if name.startswith("aten.copy_.") or name.startswith("aten._copy_from"):
            target, source = args[0], args[1]
            to_gpu, from_gpu = self.holds(target), self.holds(source)
        elif name == "aten._to_copy.default" and kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            if device.type == args[0].device.type:
                return
            to_gpu, from_gpu = device.type == "cuda", self.holds(args[0])
        else:
            return
        if not args[0].numel():
            return  # nothing is copied
        if from_gpu and not to_gpu:
            self.refuse("copies a tensor to the CPU", "return it and copy it after the step")
        elif to_gpu and not from_gpu:
            self.refuse(
                "copies a CPU tensor to the GPU, of which a graph would repeat the address and not the call",
                "move it before the step and pass it as an argument, or keep it on the GPU",
            )

    def _look_at_host_tensors(
        self, name: str, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], with_gpu: bool
    ) -> None:
        outside = [tensor for tensor in inputs if not self.holds(tensor) and storage(tensor) not in self._made]
        if not outside or any(tensor.device.type == "meta" for tensor in outside):
            return
        written = {id(tensor) for tensor in _written(func, args, kwargs)}
        if any(id(tensor) in written for tensor in outside):
            self.refuse(
                f"{_short(name)} changes a CPU tensor, which a graph does not repeat",
                "keep it on the GPU; optimizers count their steps there with capturable=True",
            )
        elif with_gpu or name in _HOST_READS:
            self.refuse(
                f"{_short(name)} reads a CPU tensor, whose value a graph would keep",
                "keep it on the GPU; an optimizer's learning rate too",
            )

    def _summaries(self, nest: Any) -> Iterator[Any]:
        if isinstance(nest, torch.Tensor):
            look = str(nest.dtype), () if nest.is_nested else tuple(nest.shape), self._name(nest)
            yield (*look, self._origin(nest)) if self.compares_values else look
        elif isinstance(nest, (list, tuple)):
            for member in nest:
                yield from self._summaries(member)
        elif isinstance(nest, dict):
            for key, value in nest.items():
                yield key
                yield from self._summaries(value)
        elif isinstance(nest, (bool, int, float, complex, str)) or nest is None:
            # What equals another number, and is none: True and 1, both zeros. And what does not equal itself.
            alike = isinstance(nest, (bool, float)) and (nest in (0, 1) or nest != nest)
            yield str(nest) if alike or isinstance(nest, complex) else nest
        else:
            yield str(nest) if isinstance(nest, (torch.dtype, torch.device)) else type(nest).__name__


_PLAIN: Any = torch.Tensor.__torch_dispatch__
_HOST_READS = frozenset(
    {"aten._local_scalar_dense.default", "aten.item.default", "aten.equal.default", "aten.is_nonzero.default"}
)
_MULTIPLIES = tuple(
    f"aten.{name}"
    for name in (
        *("mm.", "bmm.", "mv.", "dot.", "vdot.", "addmm", "addmv", "addbmm", "baddbmm", "_addmm_activation"),
        *("_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm", "linear.", "linalg_", "triangular_solve"),
        *("cholesky_solve", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    )
)
"""Operators that may compute in a workspace of cuBLAS. See `side_stream`."""
_LONGEST_VALUE = 64
_DETACH = "aten.detach."
_UNCOMPARED = ("aten.empty", "aten.new_empty", _DETACH)
"""Operators that run nothing on the GPU, and by which calls are not compared. Compiled code detaches an argument that
it saves for a backward where that is a view, such as a row of a data set: a placeholder is none, and the next batch may
be none either. Where a gradient is stopped so, calls are compared by it: it decides where gradients go."""
_OF_SIZES = "use a form of fixed size: torch.where, masked_fill, or an output_size"
_INDEXING = ("aten.index.", "aten.index_put", "aten._index_put_impl_")
_LIFTS = "aten.lift_fresh."
"""What PyTorch makes of one of Python's numbers before it assigns it goes through it."""


def uses_sparse(path: str) -> tuple[str, str]:
    """Return why a sparse tensor that was there before is refused, and what to do."""
    return (
        f"uses a sparse tensor, {path}, which has no memory of its own that a launch could compare",
        "make it dense, or keep its indices and values, and use `index_add_` or `scatter_add_`",
    )


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def operator_that_raised(error: BaseException) -> str | None:
    """Return the operator of a step that raised this, if one did; the innermost one."""
    found: str | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):  # the program's exception is as it was raised
        if frame.f_code is _run.__code__:
            found = _short(str(frame.f_locals["func"]))
    return found


def storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 for one without memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        return 0


def memory(tensor: torch.Tensor) -> int:
    """Return the same number for tensors of one storage. One without memory, as most without elements, has its own."""
    return storage(tensor) or -id(tensor)


def _value(tensor: torch.Tensor) -> str:
    """Return what a tensor in CPU memory holds: as text if that is short, else a number that stands for it."""
    text = str(tensor.detach().tolist())
    return text if len(text) <= _LONGEST_VALUE else f"values {hash(text):#x}"


def _size_depends_on_values(name: str, tags: Any, args: Any, kwargs: Any) -> bool:
    if name.startswith(_INDEXING):
        indices = [index for index in args[1] if index is not None]
        if not any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return False
        adds = len(args) > 3 and args[3]
        of_one = name.startswith(_INDEXING[1:]) and args[2].numel() == 1 and args[2].device.type == "cpu"
        filling = of_one and len(indices) == 1 and not adds
        return not filling or args[0].device.type == "cpu"
    if name.startswith("aten.repeat_interleave") and kwargs.get("output_size") is not None:
        return False
    return torch.Tag.dynamic_output_shape in tags


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield tensors that an operator writes."""
    if hasattr(func, "_schema"):  # operators that run whole graphs have none
        yield from _tensors(written(func, args, kwargs))


_SETS_MEMORY = "aten.set_."
"""Leads a tensor to memory, which may be given without a tensor."""
_COPIES = ("aten.clone", "aten._to_copy", _LIFTS, "aten.empty", "aten.full")
"""What makes a tensor of a number."""


def _short(name: str) -> str:
    return name.removeprefix("aten.").rsplit(".", 1)[0]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
