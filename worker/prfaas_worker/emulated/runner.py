"""Takes the time of steps without computing them: a `StepRunner` of the step loop. See `StepTimes`.

A prefill for another instance leaves layer by layer, spread over the chunks' time, as from a model.

Steps lie on a line: while there is work, each begins where the one before should have ended. So neither a late wake-up
nor the loop's own work adds up, and only what a long pause of the machine takes is lost. How late each step ends is
counted against the line, with what was lost before it: emulated time that does not keep up is no measure of anything.

A token is a hash of the tokens before it and of how many they are. So an answer is the same wherever its prompt was
computed, and whoever continues it.
"""

import hashlib
import os
import time
from array import array
from bisect import bisect_left
from collections import abc
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prfaas.measure.steps import StepChunk
from prfaas.wire.engine import TokenLogprob
from prfaas.wire.stats import LATE_BOUNDS, EmulationStats, Lateness
from prfaas_worker.cache.blocks import Lease
from prfaas_worker.cache.transfer_frames import CachePlace
from prfaas_worker.emulated.instance import EmulatedInstance
from prfaas_worker.emulated.memory import EmulatedMemory
from prfaas_worker.engine.remote import export_of
from prfaas_worker.engine.sequences import Sequence
from prfaas_worker.engine.steps import Drawn, ModelFacts, StepWork

TOKENS: Final = range(65, 91)
"""What is drawn: each is one ASCII character to tokenizers of bytes, and to byte-level ones."""
_READ_TOKENS: Final = 64
"""Of the tokens before one, as many make it."""
_CAUGHT_UP_SECONDS: Final = 0.05
"""A step begins no longer ago than this, wherever the line is."""


class EmulatedStep:
    """A step whose outputs are those of its sequences' tokens."""

    def draw(self, _rows: abc.Sequence[int], sequences: abc.Sequence[Sequence]) -> list[Drawn]:
        return [_draw(sequence) for sequence in sequences]


class EmulatedRunner:
    """Takes the time of one instance's steps, which have `step_tokens` where a prompt is alone. `sleep` waits for
    seconds of `clock`."""

    def __init__(
        self,
        model: ModelFacts,
        memory: EmulatedMemory,
        instance: EmulatedInstance,
        step_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.model, self.memory = model, memory
        self._prefills, self._decodes = Lateness(), Lateness()
        self._cpu_before: tuple[float, float, float] | None = None
        self._instance, self._step_tokens = instance, step_tokens
        self._clock, self._sleep = clock, sleep
        self._ends_at: float | None = None
        """Where the line is; None while there is nothing to compute."""

    def place(self, lease: Lease) -> CachePlace:
        return CachePlace(self.memory, lease.slot, lease.pages, state_pages=lease.state_pages)

    def run(self, work: StepWork) -> EmulatedStep:
        if self._cpu_before is None:
            self._cpu_before = _cpu_seconds()
        now = self._clock()
        due_at = now if self._ends_at is None else self._ends_at
        begins_at = max(due_at, now - _CAUGHT_UP_SECONDS)
        prefill_seconds, seconds = self._seconds_of(work)
        self._send_layers(work, begins_at, prefill_seconds)
        self._ends_at = ends_at = begins_at + seconds
        self._wait_until(ends_at)
        late_seconds = begins_at - due_at + self._clock() - ends_at
        self._count(work, late_seconds / max(seconds, self._instance.least_step_seconds))
        for sequence, _ in work.chunks:
            sequence.request.prefill_seconds += seconds
        return EmulatedStep()

    def rest(self) -> None:
        self._ends_at = None

    def emulation(self) -> EmulationStats:
        now, before = _cpu_seconds(), self._cpu_before or _cpu_seconds()
        cpu = (end - begin for begin, end in zip(before, now, strict=True))
        names = self._instance.profile.name, self._instance.cache_scale, self._instance.stretch
        return EmulationStats(*names, self._prefills, self._decodes, *cpu)

    def _seconds_of(self, work: StepWork) -> tuple[float, float]:
        """Return how long a step computes prompts, and how long it lasts. A chunk of one token, as behind a cache that
        was fetched, is one more decode. Beyond the largest known batch it takes no time: few steps have such a chunk.
        """
        chunks = [_chunk(sequence, tokens) for sequence, tokens in work.chunks if tokens > 1]
        decodes = [*work.decodes, *(sequence for sequence, tokens in work.chunks if tokens == 1)]
        context_tokens = sum(sequence.computed_tokens for sequence in decodes)
        batch = min(len(decodes), self._instance.profile.times.decode_steps[-1].batch)
        return self._instance.step_seconds(chunks, batch, context_tokens, self._step_tokens)

    def _send_layers(self, work: StepWork, begins_at: float, seconds: float) -> None:
        """Send each layer of prefills for other instances when it would be computed."""
        places = ((sequence, tokens, self.place(sequence.held)) for sequence, tokens in work.chunks)
        exports = [export for one in places if (export := export_of(*one))]
        layers = len(self.model.layers) if exports else 0
        for layer in range(layers):
            self._wait_until(begins_at + seconds * (layer + 1) / layers)
            for export in exports:
                export(layer, None)

    def _wait_until(self, at: float) -> None:
        if (left := at - self._clock()) > 0:
            self._sleep(left)

    def _count(self, work: StepWork, late_share: float) -> None:
        """Count how late a step was; a prompt's last few tokens as if they took as long as a decode."""
        if work.chunks:
            self._prefills = _with(self._prefills, late_share)
        else:
            self._decodes = _with(self._decodes, late_share)


def _chunk(sequence: Sequence, tokens: int) -> StepChunk:
    computed = sequence.computed_tokens
    ends_at = min(cut for cut in (*sequence.cuts, len(sequence.token_ids)) if cut > computed)
    return StepChunk(computed, tokens, ends_at - computed, not sequence.request.prefill_seconds)


def _with(lateness: Lateness, late_share: float) -> Lateness:
    counts = list(lateness.counts)
    counts[bisect_left(LATE_BOUNDS, late_share)] += 1
    return Lateness(tuple(counts), lateness.total + max(0.0, late_share))


def _cpu_seconds() -> tuple[float, float, float]:
    """Return the seconds that this process had a core, and that the machine's cores were busy and idle."""
    words = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, idle, waiting, *others = (int(word) / os.sysconf("SC_CLK_TCK") for word in words[1:9])
    return time.process_time(), user + nice + system + sum(others), idle + waiting


def _draw(sequence: Sequence) -> Drawn:
    """Draw a sequence's next token. It ends the answer only where a request says so of that token."""
    sampler = sequence.ready_sampler
    chance = [] if sampler.greedy else [sampler.sampling.seed & 0x7FFF_FFFF_FFFF_FFFF, sampler.choice]
    known = array("q", [*chance, len(sequence.token_ids), *sequence.token_ids[-_READ_TOKENS:]])
    number = int.from_bytes(hashlib.blake2b(known.tobytes(), digest_size=8).digest(), "big")
    banned = sampler.ends if sampler.hold_back > 0 else frozenset[int]()
    tokens = [token for token in TOKENS if token not in banned] or TOKENS
    token = tokens[number % len(tokens)]
    sampler.accept(token)
    logprob = TokenLogprob(0.0, [(token, 0.0)][: sampler.logprobs]) if sampler.logprobs >= 0 else None
    return Drawn(token, logprob)
