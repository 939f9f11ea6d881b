"""Observe every operator of a step: what a graph could not repeat, which tensors are read, what is written.

Note [Refused before it runs]. If a GPU value is read on the host during a capture, the driver invalidates the capture,
and PyTorch's generators and allocator remain in capture mode. So the observer is active during the capture too, and
raises before such an operator runs. The capture then ends properly and is discarded.

Note [Compiled modules]. Operators inside compiled code are not dispatched. The compiler takes care of what could break
their capture. The origin of their outputs is unknown, so a step with compiled code may read tensors of unknown origin.

Note [How two calls are compared]. Operators are compared by their names, numbers, and the shapes and dtypes of their
tensors. Tensors that live throughout the call (the batch, what the step reaches, earlier gradients) are compared by
their names. All other tensors count as equal: the allocator reuses addresses, so an address does not identify the
origin of a tensor. Operators that only allocate memory are skipped.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.device import Device
from optimizations.capture.step.audit import Operation, short
from optimizations.capture.step.user_code import ADVICE_ON_CTC, TUNERS, advice_by_caller, called_from, current_line
from optimizations.concurrency.launch_log import LaunchLog
from optimizations.report.steps import Refusal, StepRefused
from optimizations.written_operands import tensors_in, written

Holds = Callable[[torch.Tensor], bool]
"""A predicate that is true of tensors on the GPU."""


class StepDiffers(StepRefused):
    """Report that a captured call differs from the calls before it."""


SETS_UP = Refusal(
    "compiles code, or times kernels to choose among them, in call after call",
    "see why with TORCH_LOGS=recompiles; pass what differs as tensors, or mark sizes as dynamic",
)
"""Why a call does not count, and why a step whose calls never count is refused. See `forbidden_calls`."""


class Observer(torch_internals.TorchDispatchMode):
    """Observe operators while a step runs. With `forbid`, raise `StepRefused` before one that cannot be captured.

    Attributes:
        forbids: whether the step is captured.
        as_captured: the value that the step gets if it queries whether it is captured. See `forbidden_calls`.
        queries_capture: whether it made this query before anything was refused.
        queries_random_state: whether it read or set the GPU's random state.
        operations: the operators that ran, in order.
        refusals: what a graph could not repeat.
        outside: storages that were read and not allocated by the step: the line of the read by address.
        read: the tensors of these that were read first, as long as the call is observed.
        draws: whether random numbers of the GPU were drawn.
        draws_by_default: whether the default generator drew on the GPU.
        in_backward: whether an operator ran in a backward.
        in_region: whether autocast may cache casts of earlier calls, which no graph may read.
        compiling: whether PyTorch is compiling at the moment.
        set_up: whether something was compiled, or kernels were timed, so that the call does not count.
        log: records what adds nodes to the graph during a capture; None without a capture.
        before_write: is called with each tensor that an operator is about to write.
        structure: the structure of the results, after an eager call.
        makes_gradients: ids of parameters with a new gradient, if such a call dropped all earlier gradients unread.

    Args:
        known: names of tensors that live throughout the call, by the addresses of their storages.
    """

    def __init__(self, device: Device, known: Mapping[int, str], *, forbid: bool, as_captured: bool = False) -> None:
        super().__init__()
        self.holds, self._keeps_workspace = device.holds, device.streams.keeps_workspace
        self._known = known
        self._unseen = 0
        self.log: LaunchLog | None = None
        self.in_region = _inside_autocast()
        self.forbids, self.as_captured = forbid, as_captured
        self.queries_capture = self.queries_random_state = False
        self._made: set[int] = set()
        self._random_states: set[int] = set()
        self.operations: list[Operation] = []
        self.refusals: list[Refusal] = []
        self.outside: dict[int, str | None] = {}
        self.read: dict[int, weakref.ref[torch.Tensor]] = {}
        self.draws = self.draws_by_default = self.in_backward = False
        self.before_write: Callable[[torch.Tensor], None] | None = None
        self.structure: Hashable = None
        self.makes_gradients: set[int] = set()
        self.compiling = self.set_up = False

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Skip operators that run in the block: they are Encore's own and not part of the step."""
        self._unseen += 1
        try:
            yield
        finally:
            self._unseen -= 1

    def refuse(self, reason: str, advice: str) -> None:
        """Record a refusal for the line that runs; raise it during a capture.

        Operators of PyTorch's compiler itself do not count. See `forbidden_calls`.
        """
        if self.compiling or called_from(*TUNERS):
            self.set_up = True
            if self.forbids:
                raise StepDiffers(SETS_UP)
            return
        refusal = Refusal(reason, advice_by_caller() or advice, current_line())
        if refusal not in self.refusals:
            self.refusals.append(refusal)
        if self.forbids:
            raise StepRefused(refusal)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, torch_internals.FakeTensor) for kind in types):
            return func(*args, **kwargs)  # it has no data, and its own mode handles it
        if any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # a wrapper subclass: its operators on the inner tensors are observed
        name = str(func)
        if name.startswith("profiler.") or self._unseen or self.compiling:
            return func(*args, **kwargs)
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        self.in_backward = self.in_backward or torch_internals.current_autograd_node() is not None
        drawing = draws(func, args, kwargs)
        self._check_operator(name, func, args, kwargs, inputs, drawing=drawing)
        made_from = {storage(tensor) for tensor in inputs}
        if name.startswith(_SETS_MEMORY):  # the result is in existing memory
            made_from.update(one.data_ptr() for one in args if isinstance(one, torch.UntypedStorage))
        if name.startswith(_LIFTS):
            self._made.add(storage(args[0]))
            self._random_states.discard(storage(args[0]))
        line = current_line()
        compared = not name.startswith(_UNCOMPARED) or (name.startswith(_DETACH) and inputs[0].requires_grad)
        if compared:
            summaries = self._summaries((args, kwargs))
            self.operations.append(Operation(name, (*summaries, *self._numbers_in(inputs)), line))
        for tensor in inputs:
            address = storage(tensor)
            if address not in self._made and address not in self.outside:
                self.outside[address], self.read[address] = line, weakref.ref(tensor)
                if self.in_region and not self._name(tensor) and _may_be_cached_cast(tensor):
                    self.refuse(
                        "reads a weight as autocast keeps it from an earlier call",
                        "enter autocast inside of the step, or around each call",
                    )
        if self.before_write is not None:
            for tensor in _written(func, args, kwargs):
                self.before_write(tensor)
        if self.log is None:
            result = func(*args, **kwargs)
        else:
            result = self.log.operator(func, args, kwargs, lambda: func(*args, **kwargs), made_from)
        if any(isinstance(tensor, torch_internals.FakeTensor) for tensor in tensors_in(result)):
            return result  # made in a mode of the program
        results = list(tensors_in(result))
        of_gpu = any(map(self.holds, inputs))
        for place in (storage(one) for one in results if not self.holds(one)):
            (self._random_states.add if of_gpu else self._random_states.discard)(place)
        on_gpu = of_gpu or any(map(self.holds, results))
        self.draws_by_default |= drawing and on_gpu and not has_own_state(func)
        self._made.update(place for place in map(storage, results) if place not in made_from)
        return result

    def _name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor from before the call; "" for other tensors and for empty ones.

        Empty tensors have no memory in a capture.
        """
        address = storage(tensor) if tensor.numel() else 0
        return self._known.get(address, "")

    def _numbers_in(self, inputs: Sequence[torch.Tensor]) -> Iterator[Any]:
        """Yield the values of CPU tensors of one element, which kernels take as a parameter.

        An operator on the GPU that returns a CPU tensor returns the random state that its backward needs. That of
        attention differs from call to call, and lies on the GPU in a capture.
        """
        for tensor in inputs if any(map(self.holds, inputs)) else ():
            is_number = tensor.device.type == "cpu" and not self.holds(tensor) and tensor.numel() == 1
            if is_number and storage(tensor) not in self._random_states:
                with self.unseen():
                    yield from self._summaries(tensor.item())

    def _check_operator(
        self, name: str, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], *, drawing: bool
    ) -> None:
        """Refuse an operator that a graph cannot repeat."""
        on_gpu = [tensor for tensor in inputs if self.holds(tensor)]
        tags = getattr(func, "tags", ())
        if drawing:
            self.draws = True
            if kwargs.get("generator") is not None:
                self.refuse(
                    "draws random numbers from a generator of its own",
                    "draw from the default one (without `generator=`), which torch.manual_seed seeds",
                )
        if on_gpu and (name in _HOST_READS or torch.Tag.data_dependent_output in tags):
            self.refuse(
                "reads a value of the GPU on the host (`.item()`, `float()`, `print` or `if` of a tensor)",
                "return the tensor and read it after the step, or decide on the GPU with torch.where",
            )
        if any(tensor.is_nested for tensor in inputs):
            self.refuse(
                "computes with a nested tensor, whose sizes are in CPU memory",
                "pad it, and pass the lengths or a mask, or use torch.nested with layout=torch.jagged",
            )
            return
        if on_gpu and _size_depends_on_values(name, tags, args, kwargs, self.holds):
            self.refuse(
                f"{short(name)} has a result whose size depends on values",
                ADVICE_ON_CTC if "ctc_loss" in name else _OF_SIZES,
            )
        if name.startswith(_LIFTS) and any(tensor.numel() for tensor in on_gpu):
            self.refuse(
                "makes a tensor on the GPU from Python values",
                "make it once before the step, or use torch.full",
            )
        if on_gpu and name.startswith(_MULTIPLIES) and not self._keeps_workspace():
            self.refuse(
                "multiplies matrices on a stream or in a thread of its own: what cuBLAS computes in there is not kept "
                "for a graph",
                "multiply on the stream that the step is called on; everything else may be done on others",
            )
        self._check_transfers(name, args, kwargs)
        self._check_host_tensors(name, func, args, kwargs, inputs, bool(on_gpu))

    def _check_transfers(self, name: str, args: Any, kwargs: Any) -> None:
        if name.startswith("aten.copy_.") or name.startswith("aten._copy_from"):
            target, source = args[0], args[1]
            to_gpu, from_gpu = self.holds(target), self.holds(source)
        elif name == "aten._to_copy.default" and kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            if device.type == args[0].device.type:
                return
            to_gpu, from_gpu = device.type == "cuda", self.holds(args[0])
        elif name.startswith(_COPY_NUMBERS):
            held = [*map(self.holds, tensors_in(args))]
            to_gpu, from_gpu = any(held), all(held) or _fills_by_a_mask(name, args, self.holds)
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

    def _check_host_tensors(
        self, name: str, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], with_gpu: bool
    ) -> None:
        # Of a tensor of one element that the step made, kernels take the number, which is compared.
        found = [one for one in inputs if storage(one) not in self._made or (with_gpu and one.numel() > 1)]
        outside = [one for one in found if not self.holds(one) and storage(one) not in self._random_states]
        if not outside or any(tensor.device.type == "meta" for tensor in outside):
            return
        written = {id(tensor) for tensor in _written(func, args, kwargs)}
        if any(id(tensor) in written for tensor in outside):
            self.refuse(
                f"{short(name)} changes a CPU tensor, which a graph does not repeat",
                "keep it on the GPU; optimizers count their steps there with capturable=True",
            )
        elif with_gpu or name in _HOST_READS:
            self.refuse(
                f"{short(name)} reads a CPU tensor, whose value a graph would keep",
                "keep it on the GPU; an optimizer's learning rate too",
            )

    def _summaries(self, nest: Any) -> Iterator[Any]:
        if isinstance(nest, torch.Tensor):
            yield str(nest.dtype), () if nest.is_nested else tuple(nest.shape), self._name(nest)
        elif isinstance(nest, (list, tuple)):
            for member in nest:
                yield from self._summaries(member)
        elif isinstance(nest, dict):
            for key, value in nest.items():
                yield key
                yield from self._summaries(value)
        elif isinstance(nest, (bool, int, float, complex, str)) or nest is None:
            # True equals 1, 0.0 equals -0.0, and NaN does not equal itself, so these are compared as text.
            ambiguous = isinstance(nest, (bool, float)) and (nest in (0, 1) or nest != nest)
            yield str(nest) if ambiguous or isinstance(nest, complex) else nest
        else:
            yield str(nest) if isinstance(nest, (torch.dtype, torch.device)) else type(nest).__name__


def _inside_autocast() -> bool:
    """Return whether the call is inside an autocast region, or `set_autocast_enabled` enabled autocast."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    on = depth > 0 or torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    return on and torch.is_autocast_cache_enabled()


def _may_be_cached_cast(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of unknown origin may be a cast, which autocast caches until the region ends.

    No graph may read such a cast: its lifetime is unknown to Encore.
    """
    made_by = tensor.grad_fn
    cast = tensor.is_leaf if made_by is None else type(made_by).__name__ == "ToCopyBackward0"
    return cast and tensor.dtype in (torch.bfloat16, torch.float16)


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
_DETACH = "aten.detach."
_UNCOMPARED = ("aten.empty", "aten.new_empty", _DETACH)
"""Operators that run nothing on the GPU, and by which calls are not compared. Compiled code detaches an argument that
it saves for a backward if that is a view, such as a row of a data set. A placeholder is no view, and the next batch may
be none. A detach of a tensor that requires a gradient is compared: it stops the gradient."""
_OF_SIZES = "use a form of fixed size: torch.where, masked_fill, or an output_size"
_INDEXING = ("aten.index.", "aten.index_put", "aten._index_put_impl_")
_OF_MASKS = (torch.bool, torch.uint8)
_COPY_NUMBERS = (*_INDEXING[1:], "aten.where.")
"""Operators that copy a number in CPU memory to the GPU. Others pass it to their kernels as a parameter."""

_LIFTS = "aten.lift_fresh."
"""Operators by which PyTorch makes tensors from Python numbers."""


def storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 for one without memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        return 0


def _size_depends_on_values(name: str, tags: Any, args: Any, kwargs: Any, holds: Holds) -> bool:
    if name.startswith(_INDEXING):
        masks = any(index is not None and index.dtype in _OF_MASKS for index in args[1])
        return masks and not _fills_by_a_mask(name, args, holds)
    if name.startswith("aten.repeat_interleave") and kwargs.get("output_size") is not None:
        return False
    return torch.Tag.dynamic_output_shape in tags


def _fills_by_a_mask(name: str, args: Any, holds: Holds) -> bool:
    """Return whether an operator writes a host number at the places of one mask, which needs no copy to the GPU."""
    if not name.startswith(_INDEXING[1:]) or (len(args) > 3 and args[3]):
        return False
    indices = [index for index in args[1] if index is not None]
    number = args[2].numel() == 1 and not holds(args[2])
    return number and holds(args[0]) and len(indices) == 1 and indices[0].dtype in _OF_MASKS


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield tensors that an operator writes."""
    if hasattr(func, "_schema"):  # operators that run whole graphs have none
        yield from tensors_in(list(written(func, args, kwargs)))


_SETS_MEMORY = "aten.set_."
"""Operators that set the memory of a tensor, also to a storage that no other tensor has."""


_PROBABILITY = "dropout_p"
"""The argument that operators of attention have. At 0, which is its default, they draw nothing."""


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator may draw random numbers with these arguments.

    PyTorch tags operators that may. Attention draws for its dropout only. So a step that recomputes attention without
    dropout in its backward needs no random state.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = [argument.name for argument in func._schema.arguments]
    if _PROBABILITY not in names:
        return True
    place = names.index(_PROBABILITY)
    given = args[place] if place < len(args) else kwargs.get(_PROBABILITY, 0)
    return not isinstance(given, (int, float)) or given != 0


def has_own_state(func: Any) -> bool:
    """Return whether an operator keeps a random state of its own, so that a generator stays as it is when it draws."""
    return str(func).startswith("aten._cudnn_rnn.")
