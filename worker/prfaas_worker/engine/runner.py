"""The model calls of a step: chunks of prompts, one token of every running choice, and copies of a sequence's cache."""

import time
from collections.abc import Sequence

import torch

from prfaas_worker.engine.sequences import Choice, Request
from prfaas_worker.models.base import AttentionCache, Model, SequenceCache
from prfaas_worker.transfer.layout import block_frames, hidden_frame, state_frame
from prfaas_worker.transfer.offers import Offer

GROWTH_TOKENS = 512
"""Rows reserved beyond the prompt, so that a short answer needs no second allocation."""


class Runner:
    """Runs one model. All calls come from the engine's thread."""

    def __init__(self, model: Model):
        self.model = model

    def reserve(self, prompt_tokens: int, more_tokens: int) -> SequenceCache:
        """Return an empty cache with room for a prompt and the beginning of its answer."""
        cache = self.model.new_cache()
        for layer in cache.layers:
            if isinstance(layer, AttentionCache):
                layer.reserve(prompt_tokens + min(more_tokens, GROWTH_TOKENS))
        return cache

    def prefill(self, request: Request, tokens: int) -> torch.Tensor:
        """Append the next prompt tokens of an admitted request; its offer, if it has one, gets every finished layer.

        Returns the hidden state after them, fp32 [hidden_size].
        """
        cache, offer = request.admitted_cache, request.offer
        last = tokens == request.remaining_tokens
        if offer is not None and cache.length == 0:
            offer.computing()
        span = cache.length, cache.length + tokens
        started = time.monotonic()
        hidden = self.model.prefill(
            request.chunk(tokens),
            cache,
            None if offer is None else lambda layer: _export(offer, cache, layer, (*span, last)),
        )
        request.prefill_seconds += time.monotonic() - started
        if offer is not None and last:
            offer.mailbox.put(hidden_frame(offer.manifest, hidden))
        return hidden

    def decode(self, choices: Sequence[Choice]) -> torch.Tensor:
        """Append every choice's last token; returns logits fp32 [len(choices), vocab_size]."""
        tokens = torch.tensor([choice.last_token for choice in choices], dtype=torch.int64)
        return self.model.decode(tokens, [choice.cache for choice in choices])

    def fork(self, cache: SequenceCache) -> SequenceCache:
        """Return an independent copy of a cache."""
        copy = self.reserve(cache.length, GROWTH_TOKENS)
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, AttentionCache):
                copy.attention(index).write(0, layer.rows(0, cache.length))
            else:
                copy.linear(index).load(layer.tensors)
        copy.length = cache.length
        return copy


def _export(offer: Offer, cache: SequenceCache, layer: int, progress: tuple[int, int, bool]) -> None:
    """Queue what a layer has finished: rows of each chunk, and after the last chunk the state."""
    start, end, last = progress
    if isinstance(cache.layers[layer], AttentionCache):
        for frame in block_frames(offer.manifest, cache, layer, (start, end)):
            offer.mailbox.put(frame)
    elif last:
        offer.mailbox.put(state_frame(offer.manifest, cache, layer))
