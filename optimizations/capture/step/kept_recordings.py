"""Store the recordings of a step: the order in which they are tried, when they are freed, and which share a pool.

Note [Which recordings share a pool]. The intermediate tensors of a recording may overlap tensors of another recording
in the same pool that outlive its launch, because that memory was free during the capture. Results are copied out, so
only the `.grad` of parameters outlive a launch. Every launch sets the gradients of all its parameters. So recordings
of exactly the same parameters can share a pool. Others, such as those of a step that is called with one of two models,
have separate pools. Workspaces of cuBLAS are in no pool (`side_stream`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from optimizations.capture.signature import is_gone
from optimizations.capture.step.host_state import HostState
from optimizations.capture.step.recording import Recording

WORTH = 4
"""Replays after which a recording was worth its cost."""
LONG_IN_USE = 64
"""Replays of the last recording after which one that was not replayed meanwhile is freed for a new one."""


class KeptRecordings:
    """Store the recordings of a step.

    Attributes:
        tried: the recordings, in the order in which calls try them.
        spoiled: pools into which a capture failed.
        dropped: number of freed recordings; `little_used`: those of them that were hardly used.
    """

    def __init__(self) -> None:
        self.tried: list[Recording] = []
        self.dropped = self.little_used = 0
        self.spoiled: list[Any] = []
        self._freed_replays = 0

    def of(self, key: Hashable) -> Sequence[Recording]:
        """Return the recordings for calls of this signature."""
        return [one for one in self.tried if one.key == key]

    @property
    def replays(self) -> int:
        """Return the number of replays, including those of freed recordings."""
        return self._freed_replays + sum(recording.replays for recording in self.tried)

    def pool_for(self, parameters: Sequence[torch.Tensor]) -> Any:
        """Return the pool of recordings of exactly these parameters, or None. Note [Which recordings share a pool]."""
        wanted = set(map(id, parameters))
        same = [one.graph.pool for one in self.tried if set(map(id, one.gradients.parameters)) == wanted]
        return next((pool for pool in same if pool not in self.spoiled), None)

    def add(self, recording: Recording) -> None:
        """Store a recording, and try it first."""
        self.tried.insert(0, recording)
        for one in self.tried:
            one.replays_then = one.replays

    def drop_unusable(self, key_now: Hashable, state: HostState) -> list[str]:
        """Free recordings that can never be used again, and return the names of what was replaced.

        An argument of theirs was freed, such as an earlier model, or a tensor that they read was moved or replaced.

        `state`: the state that a call of the signature `key_now` reaches.
        """
        gone = [one for one in self.tried if is_gone(one.key)]
        states = [state if one.key == key_now else None for one in self.tried]
        pairs = zip(self.tried, states, strict=True)
        over = [one for one, reached in pairs if one.watch.is_over(reached) or one.gradients.lost()]
        names = [name for recording in over if recording not in gone for name in recording.watch.differing()]
        self.drop([*gone, *over])
        return list(dict.fromkeys(names))

    def referenced_gradient(self, recording: Recording) -> str | None:
        """Return a parameter whose gradient the program references and this recording, which fits, may overwrite.

        Recordings that share a pool may overwrite gradients of each other: that memory was free during their captures.
        """
        if (name := recording.gradients.held()) is not None:
            return name
        others = (one for one in self.tried if one.graph.pool == recording.graph.pool and one is not recording)
        return next((name for one in others if (name := one.gradients.made_and_held()) is not None), None)

    def drop_idle(self) -> bool:
        """Free a recording that was not replayed while the latest one was replayed often. Return whether there was one.

        An example is the recording for an old learning rate. If all recordings are used alternately, none is freed.
        """
        if self.tried[0].replays < LONG_IN_USE:
            return False
        idle = [one for one in reversed(self.tried) if one.replays_then == one.replays]
        self.drop(idle[:1])
        return bool(idle)

    def drop(self, recordings: Sequence[Recording]) -> None:
        """Free these recordings after their launches have finished.

        If the program references a gradient of one, all of its pool are freed: they may overwrite it.
        """
        held = [one.graph.pool for one in recordings if one.gradients.made_and_held() is not None]
        dropped = [one for one in self.tried if one in recordings or one.graph.pool in held]
        self.tried = [one for one in self.tried if one not in dropped]
        if dropped:
            dropped[0].graph.device.wait()
        for recording in dropped:
            self.dropped += 1
            self.little_used += recording.replays < WORTH
            self._freed_replays += recording.replays
            recording.graph.captured.reset()
