"""Patch a recording for inputs at fixed addresses that keep moving and that no copy can replace.

A function that writes an input writes the caller's memory, so a graph of it must be given the address. The graph is
read by name, or the function is captured once more and the graphs are compared, as for ordinary inputs. Nothing is
tried out: an input is patched only where every use is known by construction, as an argument of Triton kernels or of
products (`GeneratedCode.products`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from optimizations.graph.plan import Choice
from optimizations.in_place.examination import Findings
from optimizations.in_place.session import Session
from optimizations.one_line import one_line

USES_UNKNOWN = "it moves and cannot be copied, and not every use of its address is known by construction"


class PatchedInputs:
    """Keep the inputs at fixed addresses that one recording is patched for.

    Args:
        session: the recording's.
        excluded: inputs that must not be patched, and why.

    Attributes:
        refused: why nothing more is patched; None while nothing speaks against it.
        indices: the inputs that the recording is patched for, ascending.
    """

    def __init__(self, session: Session, excluded: Mapping[int, str]) -> None:
        self._session = session
        self._excluded = excluded
        self.refused: str | None = None
        self.indices: tuple[int, ...] = ()

    def patch(self, moved: Iterable[int]) -> None:
        """Make replays read these inputs wherever they are; `refused` says why not."""
        session = self._session
        if self.refused is not None or session.inside():
            return
        wanted = sorted({*self.indices, *moved})
        refused = next((reason for index, reason in self._excluded.items() if index in wanted), None)
        if refused is not None:
            self.refused = refused
            return
        try:
            self._patch(wanted)
        except BaseException as error:  # an interrupt, and the program goes on
            if not isinstance(error, torch.OutOfMemoryError):
                self.refused = one_line(error)
            if not isinstance(error, Exception):
                raise

    def _patch(self, wanted: list[int]) -> None:
        session = self._session
        if session.edited:
            self.refused = "the graph updates its own nodes, which cannot be set from the host as well"
            return
        findings = self._findings(wanted)
        if findings is None:
            return
        known = {*findings.in_place, *findings.unused} - set(session.examination.unproven(findings, wanted))
        if not known.issuperset(wanted):
            self.refused = USES_UNKNOWN
            return
        keep = {*wanted, *session.in_place}
        session.commit(session.examination.restricted(findings, keep, Choice.HOST, self._excluded))
        self.indices = tuple(wanted)
        session.resume_with(index for index in wanted if index in findings.in_place)

    def _findings(self, wanted: list[int]) -> Findings | None:
        """Return what is known of these inputs and of those that are read in place; None where `refused` says why."""
        session = self._session
        examination = session.examination
        candidates = examination.candidates([*session.recorded.copied, *session.recorded.fixed])
        by_name = all(index in examination.code.triton_uses for index in (*wanted, *session.in_place))
        if by_name:
            session.stop()
            return examination.by_name(candidates, "it has other uses", Choice.HOST)
        self.refused = examination.not_captured_again()
        if self.refused is None and examination.short_of_memory(candidates) is None:
            session.stop()
            return examination.compare(candidates, Choice.HOST)
        return None
