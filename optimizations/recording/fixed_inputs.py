"""Inputs at fixed addresses that move after all: parameters that are swapped, caches that are allocated again.

Stock records again whenever one has moved. From the third address on the graph is patched instead:

1. the function is captured once more, with these inputs elsewhere too, and the graphs are compared;
2. one call is served by an uncaptured run of the function, next to which a copy of the graph, patched to this call's
   addresses, runs on the same inputs, and on copies of those that it writes;
3. if both gave the same bits, the recorded graph is patched from then on (from the host, node by node).

Note [Moved as they are]. An address that was missed would be read where it was recorded. That shows in a trial only if
something else lies there than what the input holds now. Weights that were moved as they are (to the CPU and back, say)
leave their bytes behind. So where an input is used by more than Triton kernels and products (`GeneratedCode.products`),
the two are compared, and calls are tried until they differed. What never did, and what never moved, is not followed.
Where that moves later, another recording is looked at.
Memory that was recorded may be gone; what the allocator does not have is not looked at.

Until then calls that the recorded graphs do not fit run without a graph. Where anything speaks against it stock's way
is taken: another recording, with the reason in the report. An output in the memory of an input that moved is handed out
in the memory of the call's own; the call that an uncaptured run serves shows whether it lies there. Where it is not
known how the two lie to each other, the input is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.captured.displaced import memory_of, size_bytes
from optimizations.captured.pools import are_allocated
from optimizations.indirection.plan import Choice
from optimizations.one_line import one_line
from optimizations.recording.examination import Findings
from optimizations.recording.session import Session
from optimizations.recording.trial import Candidate, Pending, differs

MOST_PUT_OFF = 8
"""Calls that are not tried out because memory is short, before that is final."""

MOST_TRIALS = 8
"""Calls that are tried out until inputs hold something else than what lies where they were recorded."""

MOVED_AS_IT_IS = "it held the same data as what lies where it was recorded, in each trial call in which it had moved"


class Answer(StrEnum):
    """What is to be done with a call that no recording fits because an input at a fixed address moved."""

    SERVED = "served"
    REPLAY = "replay"
    RECORD = "record"


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A trial: numbers for each tensor of the outcome, then for each of the inputs `compared`."""

    numbers: Pending
    compared: tuple[int, ...]


class FixedInputs:
    """The inputs at fixed addresses of one recording, whose other inputs `session` looks after.

    Args:
        session: of the recording.
        excluded: inputs that are not to be followed, and why.

    Attributes:
        refused: why they are not followed; None while nothing speaks against it.
        looked_in_vain: whether they are not for a reason that most likely goes for other recordings of the function as
            well, and that was found by capturing it once more.
        following: the inputs that are, ascending; empty before stage 3.
    """

    def __init__(self, session: Session, excluded: Mapping[int, str]) -> None:
        self._session = session
        self._excluded = excluded
        self._findings: Findings | None = None
        self._captured_again = False
        self._candidate: Candidate | None = None
        self._pending: _UnderWay | None = None
        self._trials = 0
        self._unproven: frozenset[int] = frozenset()
        self._moved: set[int] = set()
        self._differed: set[int] = set()
        self._put_off = 0
        self.refused: str | None = None
        self.looked_in_vain = False
        self.following: tuple[int, ...] = ()

    def moved(self, inputs: list[Any], run: Callable[[list[Any]], Any]) -> tuple[Answer, Any]:
        """A call on `inputs`, of which one at a fixed address moved. `run` serves it without a graph.

        Returns:
            What to do, and the results where it is served.
        """
        if self._session.inside():
            return Answer.SERVED, run(inputs)
        if self.refused is None and not self.following:
            try:
                if self._pending is not None:
                    self._judge()
                    if self._pending is not None:
                        return Answer.SERVED, run(inputs)
                elif self._findings is None:
                    self._look()
            except Exception as error:
                self._refuse_after(error)
        if self.refused is not None:
            return Answer.RECORD, None
        if self.following:
            # Inputs that are not followed, or that lie where they cannot be read, are left to stock.
            return (Answer.REPLAY if self._fits(inputs) else Answer.RECORD), None
        if not self._fits(inputs):
            return Answer.RECORD, None
        return Answer.SERVED, self._trial(inputs, run)

    @property
    def looked(self) -> bool:
        """Whether it is known how they may be followed."""
        return self._findings is not None

    def may_serve(self, inputs: Sequence[Any], *, may_look: bool) -> bool:
        """Whether `moved` is to be asked about a call on these inputs; not to look for the first time unless that may
        be done."""
        return self._fits(inputs) if self.following else (may_look or self.looked)

    def close(self) -> None:
        """Give back what is held on the device."""
        candidate, self._candidate = self._candidate, None
        self._pending = None
        if candidate is not None:
            candidate.close()

    def _refuse(self, reason: str, *, passing: bool = False) -> None:
        """`passing`: another recording may find it otherwise."""
        self.refused = reason
        self.looked_in_vain = self._captured_again and not passing
        self.close()

    def _refuse_after(self, error: BaseException) -> None:
        """Memory may be there the next time, and nobody interrupt."""
        passing = isinstance(error, torch.OutOfMemoryError) or not isinstance(error, Exception)
        self._refuse(one_line(error), passing=passing)

    def _look(self) -> None:
        session = self._session
        self.close()  # of a look that was interrupted
        if session.edited:
            self._refuse("the graph updates its own nodes, which cannot be set from the host as well")
            return
        examination, recorded = session.examination, session.recorded
        refusal = examination.not_captured_again()
        if refusal is not None:
            self._refuse(refusal)
            return
        candidates = examination.candidates([*recorded.copied, *recorded.fixed])
        short = examination.short_of_memory(candidates)
        if short is not None:
            self._refuse(f"not looked at: {short}")
            return
        session.stop()
        self._captured_again = True
        findings = examination.compare(candidates, Choice.HOST)
        keep = {*recorded.fixed, *session.in_place} - self._excluded.keys()
        findings = examination.restricted(findings, keep, Choice.HOST, self._excluded)
        fixed = [index for index in findings.in_place if index in recorded.fixed]
        if not fixed:
            reasons = [
                reason.message for one in findings.plan.inputs if one.input in recorded.fixed for reason in one.reasons
            ]
            self._refuse(reasons[0] if reasons else "no input at a fixed address can be followed")
            return
        if not self._follows_what_is_passed(findings):
            self._refuse("an input that it writes cannot be followed")
            return
        self._unproven = frozenset(examination.unproven(findings, fixed))
        self._candidate = examination.candidate(findings)
        self._findings = findings

    def _fits(self, inputs: Sequence[Any]) -> bool:
        """Whether everything at a fixed address that moved can be read where it is now."""
        findings = self._findings
        assert findings is not None
        session = self._session
        tracked = {one.index: one for one in session.examination.tracked(findings)}
        owned = session.examination.owned()
        for index in session.recorded.fixed:
            value = inputs[index]
            if not isinstance(value, torch.Tensor) or value.data_ptr() == session.recorded.inputs[index].data_ptr():
                continue
            if index in findings.unused:
                continue
            one = tracked.get(index)
            if one is None or value.data_ptr() % one.alignment_bytes or value.data_ptr() in owned:
                return False
        return True

    def _trial(self, inputs: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        """Serve the call without a graph, and run the patched graph next to it. Nobody waits for the device.

        What it writes and follows it writes in copies: the program may write to the same memory meanwhile. What it
        copies it reads in its placeholders: the call's own may lie where it cannot be read in place.
        """
        session, candidate = self._session, self._candidate
        assert candidate is not None
        recorded = session.recorded
        tensors = {index: value for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        try:
            effects = session.host.effects(inputs)
            written = dict(zip(recorded.written, effects.written, strict=True))
            followed = {index: one for index, one in written.items() if index in candidate.inputs}
            others = [one for index, one in written.items() if index not in followed]
            changed = [*effects.destroyed, *others]
            moved = self._moved_unproven(tensors)
            needed = sum(map(size_bytes, followed.values())) + 2 * sum(one.nbytes for one in changed)
            needed += 2 * max((size_bytes(tensors[index]) for index in moved), default=0)
            short = session.examination.short_of_memory_beside_a_run(needed) if needed else None
        except Exception as error:
            self._refuse_after(error)
            return run(inputs)
        if short is not None:
            self._refuse_in_the_end(f"not tried out: {short}")
            return run(inputs)
        try:
            copies = {index: torch_internals.clone_preserve_strides(one) for index, one in followed.items()}
            before = [one.clone() for one in changed]
            after = [torch.empty_like(one) for one in changed]
            session.host.fill({index: tensors[index] for index in recorded.copied if index in tensors})
        except Exception as error:
            self._refuse_after(error)
            return run(inputs)
        read = {**tensors, **{index: recorded.inputs[index] for index in recorded.copied}, **copies}
        addresses = {index: read[index].data_ptr() for index in candidate.inputs}
        given = list(inputs)
        results = run(inputs)
        for kept, now in zip(after, changed, strict=True):
            kept.copy_(now)
        try:
            for kept, now in zip(before, changed, strict=True):
                now.copy_(kept)
            readable = are_allocated(memory_of(recorded.inputs[index]) for index in moved) if moved else ()
            compared = tuple(index for index, is_there in zip(moved, readable, strict=True) if is_there)
            held = [differs(read[index], recorded.inputs[index]) for index in compared]
            candidate.launch(addresses)
            pairs = [
                *self._outputs(results, given),
                *zip(after[len(effects.destroyed) :], others, strict=True),
                *zip(followed.values(), copies.values(), strict=True),
            ]
            numbers = Pending([*(differs(one, other) for one, other in pairs), *held], session.device)
            self._moved |= set(moved)
            self._pending = _UnderWay(numbers, compared)
        except Exception as error:
            self._refuse_after(error)
        finally:
            for kept, now in zip(after, changed, strict=True):
                now.copy_(kept)
        return results

    def _moved_unproven(self, tensors: Mapping[int, torch.Tensor]) -> list[int]:
        """Inputs that moved and whose uses are not known by construction."""
        recorded = self._session.recorded.inputs
        return [index for index in sorted(self._unproven) if tensors[index].data_ptr() != recorded[index].data_ptr()]

    def _refuse_in_the_end(self, reason: str) -> None:
        """Memory may be short for a moment only."""
        self._put_off += 1
        if self._put_off >= MOST_PUT_OFF:
            self._refuse(reason, passing=True)

    def _outputs(self, results: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs to compare: the results of an uncaptured run on these inputs, and what the graph leaves.

        What lies in the memory of an input holds what that does; here it is compared where it lies.

        Raises:
            ValueError: there are others, or they lie elsewhere.
        """
        expected = {place: value for place, value in enumerate(results) if isinstance(value, torch.Tensor)}
        values = dict(self._session.host.values())
        if expected.keys() != values.keys():
            raise ValueError(f"{len(values)} outputs in the graph, {len(expected)} without it")
        for place, returned in self._session.host.returned(inputs).items():
            del values[place]
            if _position(expected[place]) != _position(returned):
                raise ValueError(f"output {place} lies elsewhere in the memory of an input than it was recorded")
        return [(expected[place], value) for place, value in values.items()]

    def _judge(self) -> None:
        assert self._pending is not None and self._findings is not None
        numbers = self._pending.numbers.take()
        if numbers is None:
            return
        compared, self._pending = self._pending.compared, None
        tensors = len(numbers) - len(compared)
        if any(numbers[:tensors]):
            place = next(index for index, number in enumerate(numbers) if number)
            self._refuse(f"patched to other addresses, tensor {place} of its outcome was not that of an uncaptured run")
            return
        self._trials += 1
        self._differed |= {index for index, number in zip(compared, numbers[tensors:], strict=True) if number}
        if not self._moved <= self._differed and self._trials < MOST_TRIALS:
            return
        try:
            self.close()
            findings = self._proven(self._findings)
            fixed = set(self._session.recorded.fixed)
            if fixed.isdisjoint(findings.in_place) or not self._follows_what_is_passed(findings):
                self._refuse(MOVED_AS_IT_IS, passing=True)
                return
            self._findings = findings
            self._session.commit(findings)
            self.following = tuple(
                sorted(index for index in fixed if index in findings.unused or index in findings.in_place)
            )
            self._session.resume_with(one for one in findings.in_place if one in fixed)
        except BaseException as error:  # an interrupt, and the program goes on
            if not self.following:
                self._refuse_after(error)
            raise

    def _follows_what_is_passed(self, findings: Findings) -> bool:
        """Whether each input of the program's that the function writes is followed, or not used by the graph."""
        return self._session.recorded.passed <= {*findings.in_place, *findings.unused}

    def _proven(self, findings: Findings) -> Findings:
        """What of them the trials have proven. Note [Moved as they are]."""
        left = self._unproven - self._differed
        if not left:
            return findings
        keep = set(findings.in_place) - left
        reasons = dict.fromkeys(left, MOVED_AS_IT_IS)
        return self._session.examination.restricted(findings, keep, Choice.HOST, reasons)


def _position(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
