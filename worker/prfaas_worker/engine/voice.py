"""From logits to what the front hears: draws a step's tokens, and decides which answers end with them.

What a sequence has drawn stands in its `token_ids` before the front is told, so that whoever takes its memory at any
time can compute it anew and go on with the next token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from prfaas.errors import PrfaasError, RequestError
from prfaas.wire.engine import Failed, FinishReason, Started, ToFront, Tokens
from prfaas_worker.engine import sequences
from prfaas_worker.engine.grammar import Compiled
from prfaas_worker.engine.sampling import Drawn, Outputs, Sampler, check_tokens, sample
from prfaas_worker.transfer.fetch import Fetched

CODE_ENGINE_FAILED = "engine_failed"


class Heard(NamedTuple):
    """What to tell the front of one sequence, and whether that ends the sequence, or its whole request."""

    message: ToFront
    sequence_ends: bool
    request_ends: bool


class Voice:
    """Speaks for the sequences of one model."""

    def __init__(self, outputs: Outputs):
        self._outputs = outputs

    def check(self, request: sequences.Request) -> None:
        """Raise RequestError for a request whose parameters name tokens that the model does not have."""
        check_tokens(request.generation, self._outputs.vocab_size)

    def sampler(self, request: sequences.Request, choice: int, grammar: Compiled | None) -> Sampler:
        """Return what draws for a choice, from what it has drawn elsewhere on.

        Raises:
            RequestError: that does not follow the grammar.

        """
        generate, matcher = request.generation, grammar.matcher() if grammar else None
        return Sampler(generate, choice, self._outputs, matcher, generate.generated)

    def draw(self, drawing: Sequence[sequences.Sequence], logits: torch.Tensor) -> list[Heard]:
        """Draw a token for each sequence from logits fp32 [B, vocab_size]; one row may serve all. May change them."""
        rows = logits.expand(len(drawing), -1)
        drawn = sample(rows, [sequence.voice for sequence in drawing])
        return [_heard(sequence, one) for sequence, one in zip(drawing, drawn, strict=True)]


def _heard(sequence: sequences.Sequence, drawn: Drawn) -> Heard:
    generate, sampler = sequence.request.generation, sequence.voice
    if drawn.error is not None:
        return Heard(failure(generate.handle, drawn.error), sequence_ends=True, request_ends=True)
    sequence.token_ids.append(drawn.token)
    stopped = drawn.token in sampler.ends
    reason: FinishReason | None = None
    if stopped or sampler.complete:
        reason = "stop"
    elif sequence.generated_tokens == generate.max_tokens:
        reason = "length"
    token_ids = [] if stopped else [drawn.token]
    logprobs = [drawn.logprob] if drawn.logprob is not None and not stopped else []
    message = Tokens(generate.handle, sequence.index, token_ids, logprobs, reason)
    return Heard(message, sequence_ends=reason is not None, request_ends=False)


def started(request: sequences.Request, fetched: Fetched | None) -> Started:
    """Return what the front hears once a prompt is computed, here or where it was fetched from."""
    came = fetched or request.prefix
    return Started(
        handle=request.handle,
        cached_tokens=request.cached_tokens,
        kv_bytes=came.received_bytes if came else 0,
        prefill_seconds=request.prefill_seconds,
        transfer_seconds=came.transfer_seconds if came else 0.0,
        first_byte_seconds=fetched.done.first_byte_seconds if fetched else 0.0,
        queue_seconds=request.queue_seconds or 0.0,
        transfer_id=came.transfer_id if came else "",
    )


def failure(handle: int, error: PrfaasError) -> Failed:
    """Return what the front hears of a request that cannot go on."""
    if isinstance(error, RequestError):
        return Failed(handle, error.status, error.code, str(error))
    return Failed(handle, 500, CODE_ENGINE_FAILED, str(error))
