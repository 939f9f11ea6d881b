"""Prove by outcome that a graph that reads inputs in place may replace the copying one.

Both graphs run on calls of the program, on the inputs of that call: the copying graph gives the result that the program
gets, the candidate runs next to it, while the placeholders of unproven inputs hold the data of an earlier call. A
pointer that was missed reads that, and shows in the outcome if the two calls differ: in the outputs, or in what the
function writes into inputs at fixed addresses.

Where two runs of the copying graph agree bit for bit, so must the candidate. Where they do not (atomic additions, say),
it must stay within `SPREAD_MARGIN` times the largest distance seen between two of them, tensor by tensor. Two runs may
be close by chance, so it takes `OBJECTIONS` calls to refuse; a wrong pointer shows in each.

Note [What the program sees]. The copying graph's results, and nothing else. What either graph changes is put back or
put in place: results of earlier graphs that a run destroys, inputs at fixed addresses that the function writes, and
the outputs. The generator is advanced once, by the copying graph's replay; the candidate is launched by the driver and
draws from the state which that replay set. Nothing waits for the device: outcomes are compared there, and the answer
is fetched by a later call.

Note [What the placeholders hold]. While the candidate runs, the placeholders of unproven inputs hold the data of an
earlier call: values that the program really passed. All others hold this call's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import torch

from optimizations.graph.applied import AppliedPlan, ApplierTools
from optimizations.graph.driver import check
from optimizations.graph.editing import EditableGraph
from optimizations.graph.plan import Plan

SPREAD_MARGIN = 4.0
"""Two runs understate how far runs can lie apart; a wrong pointer is off by far more than this."""

EQUAL_CALLS = 2
"""Calls with equal outcomes that a proof takes. In each of them at least one unproven input differed, and over all of
them every unproven input did."""

PATIENT_CALLS = 6
"""After so many calls with equal outcomes, inputs that held the same data in all of them are left to be copied."""

OBJECTIONS = 6
"""Calls in which the outcome is too far off, before the candidate is refused."""

MOST_CALLS = 12
"""After so many trial calls without a decision the inputs are copied."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Hold what was observed in one trial call.

    Attributes:
        differed: unproven inputs whose data was not that of the earlier call.
        deviations: of the candidate's outcome from the copying graph's, tensor by tensor: 0.0 exactly where it is the
            same bit for bit, infinity where only one of the two is NaN.
        spread: the same of a second run of the copying graph; None where there was none.
    """

    differed: frozenset[int]
    deviations: tuple[float, ...]
    spread: tuple[float, ...] | None = None


class Standing(StrEnum):
    UNDECIDED = "undecided"
    PROVEN = "proven"
    PARTLY = "proven for the inputs that differed"
    REFUSED = "refused"
    GIVEN_UP = "given up"


@dataclass(slots=True)
class Proof:
    """Collect trial calls until they decide.

    Attributes:
        unproven: inputs whose uses are not known by construction.
        needs_spread: whether the next trial call has to run the copying graph twice.
        objection: why the candidate was refused or given up.
    """

    unproven: frozenset[int]
    needs_spread: bool = False
    calls: int = 0
    objection: str | None = None
    _equal: int = 0
    _objections: int = 0
    _seen: set[int] = field(default_factory=set)
    _spread: tuple[float, ...] = ()

    def add(self, observed: Observed) -> Standing:
        """Take one call into account, and return where the proof stands."""
        self.calls += 1
        if any(observed.deviations) and observed.spread is None:
            # The function may not repeat itself. Only a second run of the copying graph can tell.
            self.needs_spread = True
            return self._undecided()
        none = (0.0,) * len(observed.deviations)
        self._spread = tuple(map(max, self._spread or none, observed.spread or none))
        found = objection(self._spread, observed.deviations)
        if found is not None:
            self.objection = found
            self._objections += 1
            return Standing.REFUSED if self._objections >= OBJECTIONS else self._undecided()
        if observed.differed or not self.unproven:
            self._equal += 1
            self._seen |= observed.differed
        if self._equal >= EQUAL_CALLS and self._seen >= self.unproven:
            return Standing.PROVEN
        if self._equal >= PATIENT_CALLS and self._seen:
            return Standing.PARTLY
        return self._undecided()

    @property
    def always_the_same(self) -> frozenset[int]:
        """Return unproven inputs that held the same data in every call so far."""
        return self.unproven - self._seen

    def _undecided(self) -> Standing:
        return Standing.UNDECIDED if self.calls < MOST_CALLS else self.stop()

    def stop(self) -> Standing:
        """Return where the proof stands if there are no more trial calls."""
        if self._equal >= EQUAL_CALLS and self._seen and not self._objections:
            return Standing.PARTLY
        same = sorted(self.always_the_same)
        what = f"input {same[0]} held the same data in each" if same else "their outcomes did not decide"
        self.objection = f"undecided after {self.calls} trial calls: {what}"
        return Standing.GIVEN_UP


def objection(repeated: Sequence[float], candidate: Collection[float]) -> str | None:
    """Return why the outcome of the candidate is not that of the copying graph; None where it is."""
    if len(repeated) != len(candidate):
        raise ValueError(f"{len(candidate)} deviations of the candidate for {len(repeated)} of the copying graph")
    for place, (spread, deviation) in enumerate(zip(repeated, candidate, strict=True)):
        if spread == 0.0:
            if deviation != 0.0:
                return f"tensor {place} of the outcome differs by up to {deviation:g}, two copying runs by nothing"
        elif not math.isfinite(spread):
            return f"tensor {place} of the outcome is a number in one run of the copying graph and none in another"
        elif not deviation <= SPREAD_MARGIN * spread:
            return f"tensor {place} of the outcome differs by up to {deviation:g}, two copying runs by {spread:g}"
    return None


SPREAD_BYTES = 32
"""Bytes for each number of a tensor while the distance of two runs is computed."""

ARITHMETIC_BYTES = 2
"""Floating-point types narrower than this have no arithmetic in PyTorch."""


class TrialTools(ApplierTools, Protocol):
    """Define the tools of a device that a trial uses in addition to those of the updaters."""

    driver: Any

    def stream(self) -> Any:
        """Return the current stream (`CUstream`)."""


class Candidate:
    """Hold a copy of a captured graph, changed as planned and instantiated. Call `close` at the end.

    Raises:
        CudaCallFailed, AddressRefused, TableUnavailable: the plan cannot be carried out.
    """

    def __init__(self, graph: EditableGraph, plan: Plan, tools: TrialTools) -> None:
        self._tools = tools
        self._clone: EditableGraph | None = graph.clone()
        self._executable: Any = None
        self._applied: AppliedPlan | None = None
        self.inputs = tuple(one.input for one in plan.inputs if one.indirect)
        try:
            self._applied = AppliedPlan(self._clone, plan, tools)
            self._executable = check(tools.driver.cuGraphInstantiate, self._clone.graph, 0)
            self._applied.instantiated(self._executable, tools.stream())
        except BaseException:
            self.close()
            raise

    def launch(self, addresses: Mapping[int, int]) -> None:
        """Run it on the current stream, with its inputs (by index) at these addresses."""
        assert self._applied is not None
        self._applied.point({index: addresses[index] for index in self.inputs})
        check(self._tools.driver.cuGraphLaunch, self._executable, self._tools.stream())

    def failure(self) -> str | None:
        """Return what went wrong on the device in an earlier launch. Waits for the device."""
        return self._applied.failure() if self._applied is not None else None

    def still_read(self, stream: torch.cuda.Stream | None = None) -> None:
        """Keep the memory that launches read until the work of a stream is done. See `AppliedPlan.still_read`."""
        if self._applied is not None:
            self._applied.still_read(stream)

    def close(self) -> None:
        """Free both. A launch that is under way ends as it would have."""
        executable, self._executable = self._executable, None
        clone, self._clone = self._clone, None
        if executable is not None:
            self.still_read()
            check(self._tools.driver.cuGraphExecDestroy, executable)
        if clone is not None:
            check(self._tools.driver.cuGraphDestroy, clone.graph)


@dataclass(frozen=True, slots=True)
class Effects:
    """Hold memory that a run of the recorded graph changes and others read. None of these tensors owns it.

    Attributes:
        destroyed: whole storages (uint8) of results of earlier graphs that are inputs.
        written: inputs at fixed addresses that the function writes.
        outputs: whole storages (uint8) of what the function returns.
        values: the outputs as the program sees them.
    """

    destroyed: Sequence[torch.Tensor]
    written: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]

    def copied_bytes(self, *, spread: bool) -> int:
        """Return the bytes that a trial call takes for a while. Distances between runs are computed in 64 bits."""
        changed = (*self.destroyed, *self.written)
        copies = sum(one.nbytes for one in (*changed, *changed, *self.outputs))
        values = (one.numel() * SPREAD_BYTES for one in (*self.values, *self.written))
        return copies + (max(values, default=0) if spread else max((one.nbytes for one in self.outputs), default=0))


_NONE = Effects((), (), (), ())


class Pending:
    """Hold numbers that are being copied from the device. `take` returns them once they are there."""

    def __init__(self, numbers: Sequence[torch.Tensor], device: torch.device) -> None:
        self._event: Any = None
        if not numbers:
            self._host = torch.empty(0, dtype=torch.float64, device="cpu")
            return
        together = torch.stack([number.to(torch.float64) for number in numbers])
        if device.type == "cuda":
            self._host = torch.empty(together.shape, dtype=torch.float64, device="cpu", pin_memory=True)
            self._host.copy_(together, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._host = together

    def take(self) -> list[float] | None:
        """Return the numbers; None while they are under way. Does not wait."""
        if self._event is not None and not self._event.query():
            return None
        return [float(number) for number in self._host.tolist()]


class TrialCall:
    """Run one call on both graphs. Notes [What the program sees], [What the placeholders hold].

    Creating it takes all the memory it needs, and nothing else; then `run`; then, in later calls, `result`.

    Args:
        effects: what a run changes.
        unproven: inputs whose placeholders hold `earlier` data while the candidate runs.
        fill: copies these values, by input, into the placeholders.
        again: launches the copying graph once more as it is, without advancing the generator; None unless the spread of
            two runs is asked for.

    Raises:
        torch.OutOfMemoryError: no memory for copies.
    """

    def __init__(
        self,
        effects: Effects,
        unproven: Sequence[int],
        earlier: Mapping[int, torch.Tensor],
        fill: Callable[[Mapping[int, torch.Tensor]], None],
        again: Callable[[], None] | None,
        device: torch.device,
    ) -> None:
        self._effects = effects
        self._unproven = unproven
        self._earlier = earlier
        self._fill = fill
        self._again = again
        self._device = device
        self._before = [one.clone() for one in (*effects.destroyed, *effects.written)]
        self._after = [torch.empty_like(one) for one in self._outcome]
        self._tensors = len(self._pairs)
        self._pending: Pending | None = None

    def run(self, inputs: Mapping[int, torch.Tensor], replay: Callable[[], Any], candidate: Callable[[], None]) -> Any:
        """Run the program's call and the candidate; return the results of `replay`, the call without a trial.

        `inputs` are the call's own, by input; they are kept until the end.
        """
        results = replay()
        outcome = self._outcome
        for kept, now in zip(self._after, outcome, strict=True):
            kept.copy_(now)
        try:
            differed = [differs(inputs[index], self._earlier[index]) for index in self._unproven]
            spread: list[torch.Tensor] = []
            if self._again is not None:
                self._put_back()
                self._fill(inputs)
                self._again()
                spread = self._deviations()
            self._put_back()
            self._fill({**inputs, **{index: self._earlier[index] for index in self._unproven}})
            candidate()
            self._pending = Pending([*differed, *self._deviations(), *spread], self._device)
        finally:
            # Whatever happened, an interrupt too: the program sees what the copying graph did.
            for kept, now in zip(self._after, outcome, strict=True):
                now.copy_(kept)
            # Later work of this stream may have the memory: outcomes come much later than that, or never.
            self._before, self._after, self._earlier, self._effects = [], [], {}, _NONE
        return results

    def result(self) -> Observed | None:
        """Return what was observed; None while the device computes it. Does not wait."""
        numbers = self._pending.take() if self._pending is not None else None
        if numbers is None:
            return None
        count = len(self._unproven)
        tensors = self._tensors
        differed = frozenset(index for index, one in zip(self._unproven, numbers, strict=False) if one)
        deviations = tuple(numbers[count : count + tensors])
        spread = tuple(numbers[count + tensors :]) if self._again is not None else None
        return Observed(differed, deviations, spread)

    @property
    def _outcome(self) -> list[torch.Tensor]:
        """Return the tensors that must be left as the copying graph left them.

        A result of an earlier graph that the function writes is among those that are `destroyed`.
        """
        return [*self._effects.outputs, *self._effects.written, *self._effects.destroyed]

    @property
    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs to compare: what the copying graph left, and what lies there now."""
        compared = [*self._effects.outputs, *self._effects.written]
        return list(zip(self._after, compared, strict=False))

    def _deviations(self) -> list[torch.Tensor]:
        if self._again is None:
            return [differs(kept, now) for kept, now in self._pairs]
        typed = self._typed()
        return [deviation(kept, now, typed.get(place)) for place, (kept, now) in enumerate(self._pairs)]

    def _typed(self) -> dict[int, torch.Tensor]:
        """Return for each storage an output that has the dtype of its numbers."""
        by_storage = {one.data_ptr(): place for place, one in enumerate(self._effects.outputs)}
        found: dict[int, torch.Tensor] = {}
        for value in self._effects.values:
            place = by_storage.get(value.untyped_storage().data_ptr())
            if place is not None:
                found.setdefault(place, value)
        return found

    def _put_back(self) -> None:
        for before, now in zip(self._before, (*self._effects.destroyed, *self._effects.written), strict=True):
            now.copy_(before)


def differs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return whether two tensors of one shape, strides and dtype differ in a bit, as a bool scalar on their device."""
    return (_bits(first) != _bits(second)).any()


def deviation(first: torch.Tensor, second: torch.Tensor, typed: torch.Tensor | None = None) -> torch.Tensor:
    """Return the largest absolute difference of two tensors of one shape, as a float64 scalar on their device.

    `typed` says what numbers the bytes are where the tensors are whole storages. See `proof.Observed`.
    """
    equal = ~(_bits(first) != _bits(second)).any()
    dtype = typed.dtype if typed is not None else first.dtype
    one, other = first.detach(), second.detach()
    if one.dtype != dtype:
        whole = one.nbytes // dtype.itemsize * dtype.itemsize
        one, other = one.view(-1)[:whole].view(dtype), other.view(-1)[:whole].view(dtype)
    if one.dtype is torch.bool:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.dtype.is_floating_point and one.dtype.itemsize < ARITHMETIC_BYTES:
        one, other = one.float(), other.float()
    same = (one == other) | ((one != one) & (other != other))
    distance = (one.double() - other.double()).abs().masked_fill(same, 0.0)
    largest = torch.nan_to_num(distance, nan=math.inf, posinf=math.inf).amax() if distance.numel() else distance.sum()
    return torch.where(equal, 0.0, torch.clamp(largest, min=math.ulp(0.0)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in words as wide as they can be: comparing them takes a byte of memory for each."""
    dense = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for word in (torch.int64, torch.int32, torch.int16):
        if dense.numel() % word.itemsize == dense.data_ptr() % word.itemsize == 0:
            return dense.view(word)
    return dense
