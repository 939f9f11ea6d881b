"""Keep the recordings of a step: in which order calls look at them, when they are freed, and which share memory.

Note [Who shares a pool]. What a recording computes on its way lies in its pool, where another recording may have put
what outlives its launch, for that memory was free. Results are copied out, so that is the `.grad` of parameters. A
launch leaves all of its own parameters the gradients that belong to it, so nothing is lost where another recording is
of the very same parameters. Where it is not, such as that of a step that is given one of two models, it has a pool of
its own. Workspaces of cuBLAS lie in neither (`side_stream`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from optimizations.capture.device import Device
from optimizations.capture.signature import is_gone
from optimizations.capture.step.gradients import Gradients
from optimizations.capture.step.host_state import HostState
from optimizations.capture.step.recording import Recording

MOST_STEADY = 4
"""Recordings that a call is compared with one by one, the latest first, before its signature is made."""
WORTH = 4
"""Replays for which a recording was worth making."""
LONG_IN_USE = 64
"""Replays of the last recording, after which one that served no call meanwhile makes room for the next."""


class KeptRecordings:
    """Hold recordings by the signature of the calls that they serve.

    `steady` are those that were used last, the latest first. `dropped` counts those that were freed, and `little_used`
    those of them that had hardly been used. `follow` is the device's.
    """

    def __init__(self) -> None:
        self.steady: list[Recording] = []
        self.dropped = self.little_used = 0
        self._by_key: dict[Hashable, list[Recording]] = {}
        self._spoiled: list[Any] = []
        self._freed_replays = 0
        self._last: Recording | None = None
        self._replays_then: dict[int, int] = {}
        self._device: Device | None = None
        self._outlived: list[tuple[Any, Gradients]] = []
        self.follow: Callable[[], bool] = lambda: True

    def __iter__(self) -> Iterator[Recording]:
        return (recording for found in self._by_key.values() for recording in found)

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def of(self, key: Hashable) -> Sequence[Recording]:
        """Return the recordings for calls of this signature, in the order in which they were made."""
        return self._by_key.get(key, ())

    @property
    def replays(self) -> int:
        """Return how often recordings were launched, those included that are freed."""
        return self._freed_replays + sum(recording.replays for recording in self)

    def pool_for(self, parameters: Sequence[torch.Tensor]) -> Any:
        """Return the pool of those for the very same parameters; None if there is none. Note [Who shares a pool]."""
        wanted = set(map(id, parameters))
        same = [one.pool for one in self if set(map(id, one.gradients.parameters)) == wanted]
        return next((pool for pool in reversed(same) if pool not in self._spoiled), None)

    def spoil(self, pool: Any) -> None:
        """Note that a capture into this pool failed: no other is made there."""
        self._spoiled.append(pool)

    def add(self, device: Device, key: Hashable, recording: Recording) -> None:
        """Keep a recording, and look at it first."""
        self._device, self.follow = device, device.follow
        self._by_key.setdefault(key, []).append(recording)
        self.comes_first(recording)
        self._last, self._replays_then = recording, {id(one): one.replays for one in self}

    def comes_first(self, recording: Recording) -> None:
        """Look at this recording first from now on."""
        self.steady = [recording, *(other for other in self.steady if other is not recording)][:MOST_STEADY]

    def drop_moved(self, key_now: Hashable, state: HostState) -> list[str]:
        """Free recordings that can never be used again, and return the names of what stands elsewhere.

        `state`: what a call of the signature `key_now` reaches.
        """
        names: list[str] = []
        for key, recordings in list(self._by_key.items()):
            now = state if key == key_now else None
            usable = [recording for recording in recordings if not recording.is_over(now)]
            over = [recording for recording in recordings if recording not in usable]
            names += [name for recording in over for name in recording.watch.differing()]
            self._free(over)
            self._by_key[key] = usable
        return list(dict.fromkeys(names))

    def drop_gone(self) -> None:
        """Free recordings of calls whose arguments held an object that was freed since, such as an earlier model."""
        for key in list(filter(is_gone, self._by_key)):
            self._free(self._by_key.pop(key))

    def referenced_gradient(self, recording: Recording) -> str | None:
        """Return the name of a parameter whose gradient the program holds and a launch of this recording may overwrite.

        Recordings that share a pool may write over gradients of each other: that memory was free when they were made.
        """
        if self._outlived:
            self._outlived = [(pool, one) for pool, one in self._outlived if one.held() is not None]
        others = [one.gradients for one in self if one.pool == recording.pool and one is not recording]
        others += [one for pool, one in self._outlived if pool == recording.pool]
        return next((name for one in [recording.gradients, *others] if (name := one.held()) is not None), None)

    def invalidate(self) -> None:
        """Compare all that the step reaches before the next replay of each: more is compared from now on."""
        for recording in self:
            recording.watch.invalidate()

    def drop_idle(self) -> bool:
        """Free one that served no call while the last that was made served many. Return whether there was one.

        Such as that for a learning rate of long ago. Where all are used in turn, none makes room for another.
        """
        if self._last is None or self._last.replays < LONG_IN_USE:
            return False
        for key, recordings in self._by_key.items():
            for recording in recordings:
                if self._replays_then.get(id(recording)) == recording.replays:
                    self.drop(key, recording)
                    return True
        return False

    def drop_with_moved_inputs(self, key: Hashable, tensors: list[torch.Tensor]) -> None:
        """Free recordings that read inputs in place which are other tensors now: the next one copies these."""
        for recording in list(self._by_key.get(key, ())):
            if recording.moved_inputs(tensors):
                self.drop(key, recording)

    def drop(self, key: Hashable, recording: Recording) -> None:
        """Free one, once no launch of it is under way."""
        self._by_key[key].remove(recording)
        self._free([recording])

    def drop_all(self) -> None:
        """Free all, once no launch of them is under way."""
        for recordings in self._by_key.values():
            self._free(recordings)
        self._by_key.clear()

    def _free(self, recordings: Sequence[Recording]) -> None:
        self.steady = [recording for recording in self.steady if recording not in recordings]
        if recordings and self._device is not None:
            self._device.wait()
        if self._last in recordings:
            self._last = None
        others = [one.pool for one in self if one not in recordings]
        for recording in recordings:
            if recording.pool in others and recording.gradients.held() is not None:
                self._outlived.append((recording.pool, recording.gradients))
            self.dropped += 1
            self.little_used += recording.replays < WORTH
            self._freed_replays += recording.replays
            recording.graph.reset()
