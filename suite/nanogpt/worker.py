"""The process of one path: `python -m suite.nanogpt.worker`, started by `suite.nanogpt.run`.

It makes its decoder, generates once, and says that it is ready. Then it answers what it reads, line by line: it settles
if it is asked to, and each configuration is answered by one generation that is timed as a whole, and one whose steps
are.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from models.nanogpt.configurations import NAMED, SIZES, SWEEP
from models.nanogpt.decoding import CompiledDecoder, Decoder, EagerDecoder, ReplayDecoder, generate
from models.nanogpt.network import NanoGPT
from suite.measure.compile_times import start_toolchain
from suite.measure.timing import timer_for
from suite.nanogpt.paths import EAGER, PATHS, REPLAY, DecodePath
from suite.nanogpt.records import QUESTIONS, Answer, Ask, Done, Failed, Generation, Ready, Settle, Settled

STEADY_GENERATIONS = 2
"""Generations after the first one, before a path is ready."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="suite.nanogpt.worker", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", required=True, choices=PATHS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--size", required=True, choices=SIZES)
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--read", required=True, type=int, metavar="FD")
    parser.add_argument("--write", required=True, type=int, metavar="FD")
    options = parser.parse_args()
    faulthandler.enable()

    def say(answer: Answer) -> None:
        os.write(options.write, answer.model_dump_json().encode() + b"\n")

    try:
        path = Program(PATHS[options.path], torch.device(options.device), options.size, options.seed)
        say(path.warm_up())
        with os.fdopen(options.read) as questions:
            for line in questions:
                question = QUESTIONS.validate_json(line)
                say(
                    path.settle(question.most_s)
                    if isinstance(question, Settle)
                    else Done(generation=path.generations(question))
                )
    except Exception as error:  # whatever a path fails with is its result
        text = " ".join(str(error).split()) or "(no message)"
        say(Failed(error=f"{type(error).__name__}: {text}"[:2000]))
        raise
    return 0


class Program:
    """One path of the program, on one device."""

    def __init__(self, path: DecodePath, device: torch.device, size: Any, seed: int) -> None:
        self._path, self._device, self._seed = path, device, seed
        self._shape = SIZES[size]
        torch.manual_seed(seed)
        self._model = NanoGPT(self._shape).eval().to(device)
        self._timer = timer_for(device)

    def warm_up(self) -> Ready:
        """Make the decoder and generate, until the path has met all lengths of prompts."""
        if self._path.mode is not None:
            start_toolchain(self._device)
        ask = Ask(prompt=4, new_tokens=NAMED[0].within(self._shape.context).new_tokens)
        self._timer.synchronize()
        begun = time.perf_counter()
        self._decoder = self._make_decoder()
        self._generate(ask)
        self._timer.synchronize()
        warm_up_s = time.perf_counter() - begun
        for _ in range(STEADY_GENERATIONS):
            self._generate(ask)
        # The first prompt of a length loads kernels, and would lengthen the first round of its configurations.
        for prompt in sorted({one.within(self._shape.context).prompt for one in (*NAMED, *SWEEP)}):
            self._generate(Ask(prompt=prompt, new_tokens=1))
        device = torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu"
        return Ready(warm_up_s=warm_up_s, device=device)

    def settle(self, most_s: float) -> Settled:
        """Generate until Encore has nothing pending, or time is up.

        A user's graphs are looked at once they have been in use for ten times as long as that takes. Here nobody waits
        for that, as in other runs of the suite.
        """
        import optimizations
        from optimizations.in_place.budget import spent_at_once

        longest = max((one.within(self._shape.context) for one in (*NAMED, *SWEEP)), key=lambda one: one.new_tokens)
        ask = Ask(prompt=longest.prompt, new_tokens=longest.new_tokens)
        begun = time.perf_counter()
        with spent_at_once():
            while not optimizations.settled() and time.perf_counter() - begun < most_s:
                self._generate(ask)
            self._timer.synchronize()
        return Settled(settled=optimizations.settled())

    def generations(self, ask: Ask) -> Generation:
        """One generation timed as a whole, and one whose steps are.

        Raises:
            RuntimeError: they sampled different tokens.
        """
        self._timer.synchronize()
        begun = time.perf_counter()
        whole = self._generate(ask)
        self._timer.synchronize()
        total_s = time.perf_counter() - begun
        watch = StepTimes(self._device)
        stepwise = self._generate(ask, watch)
        if not torch.equal(whole, stepwise):
            raise RuntimeError("two generations from one seed sampled different tokens")
        return Generation(
            tokens=whole[0, ask.prompt :].tolist(),
            total_s=[total_s],
            prompt_us=[watch.prompt_us],
            step_us=[watch.step_us],
            call_us=[watch.call_us],
        )

    def _generate(self, ask: Ask, watch: StepTimes | None = None) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(self._seed)
        prompt = torch.randint(self._shape.vocabulary, (1, ask.prompt), generator=drawn).to(self._device)
        return generate(self._model, self._decoder, prompt, ask.new_tokens, self._seed, watch)

    def _make_decoder(self) -> Decoder:
        if self._path.name == EAGER:
            return EagerDecoder(self._model)
        if self._path.name == REPLAY:
            return ReplayDecoder(self._model)
        mode = self._path.mode
        assert mode is not None
        backend = mode.backend or "eager"

        def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(step, backend=backend, options=dict(mode.options))

        return CompiledDecoder(self._model, compiled)


class StepTimes:
    """Waits for the device around the prompt and each step, and notes how long they took, in microseconds."""

    def __init__(self, device: torch.device) -> None:
        self._timer = timer_for(device)
        self.prompt_us = 0.0
        self.step_us: list[float] = []
        self.call_us: list[float] = []

    def prompt(self) -> None:
        self._timer.synchronize()
        self._begun = time.perf_counter()

    def prompt_ended(self) -> None:
        self._timer.synchronize()
        self.prompt_us = 1e6 * (time.perf_counter() - self._begun)

    def feeding(self) -> None:
        self._timer.synchronize()
        self._begun = time.perf_counter()

    def step(self) -> None:
        self._called = time.perf_counter()
        self._timer.start()

    def step_ended(self) -> None:
        self._timer.stop()
        self._timer.synchronize()
        ended = time.perf_counter()
        device_us = self._timer.elapsed_us()
        self.step_us.append(1e6 * (ended - self._begun))
        self.call_us.append(1e6 * (ended - self._called) if device_us is None else device_us)


if __name__ == "__main__":
    sys.exit(main())
