"""The recordings that a step has: in which order calls look at them, and when they are freed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence, Set

import torch

from optimizations.capture.device import Device
from optimizations.capture.step.recording import Recording

MOST_STEADY = 4
"""Recordings that a call is compared with one by one, the latest first, before its signature is made."""


class KeptRecordings:
    """Recordings by the signature of the calls that they serve.

    `steady` are those that were used last, the latest first. `dropped` counts those that were freed.
    """

    def __init__(self) -> None:
        self.steady: list[Recording] = []
        self.dropped = 0
        self._by_key: dict[Hashable, list[Recording]] = {}
        self._copied_inputs: dict[Hashable, set[int]] = {}
        self._freed_replays = 0
        self._device: Device | None = None

    def __iter__(self) -> Iterator[Recording]:
        return (recording for found in self._by_key.values() for recording in found)

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def of(self, key: Hashable) -> Sequence[Recording]:
        """The recordings for calls of this signature, in the order in which they were made."""
        return self._by_key.get(key, ())

    @property
    def replays(self) -> int:
        """How often recordings were launched, those included that are freed."""
        return self._freed_replays + sum(recording.replays for recording in self)

    def add(self, device: Device, key: Hashable, recording: Recording) -> None:
        """Keep a recording, and look at it first."""
        self._device = device
        self._by_key.setdefault(key, []).append(recording)
        self.comes_first(recording)

    def comes_first(self, recording: Recording) -> None:
        """Look at this recording first from now on."""
        self.steady = [recording, *(other for other in self.steady if other is not recording)][:MOST_STEADY]

    def copied_inputs(self, key: Hashable) -> Set[int]:
        """Inputs of calls of this signature that were the same tensors for a while, and then others."""
        return self._copied_inputs.get(key, set())

    def drop_moved(self) -> None:
        """Free those that can never be used again."""
        for key, recordings in list(self._by_key.items()):
            usable = [recording for recording in recordings if not recording.is_over()]
            self._free([recording for recording in recordings if recording not in usable])
            self._by_key[key] = usable

    def drop_with_moved_inputs(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> None:
        """Inputs that were the same tensors and are others now are copied from now on."""
        for recording in list(self._by_key.get(key, ())):
            if moved := recording.moved_inputs(tensors):
                self._copied_inputs.setdefault(key, set()).update(moved)
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
        for recording in recordings:
            self.dropped += 1
            self._freed_replays += recording.replays
            recording.graph.reset()
