"""Proves that our Kimi Linear computes what transformers' own implementation does, and that its cache is whole.

Logits are compared in fp32 at a standard deviation of about 5: for one prefill, for chunks, for decode, for a batch,
and for decode after the whole cache went through bytes into a fresh one. Comparing tokens would be nearly blind, so
negative controls damage the cache in ways that leave most greedy tokens unchanged and must move the logits far past
the bound.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from prfaas.errors import RequestError
from prfaas_worker.models.base import AttentionCache, Model, SequenceCache

from .conftest import LOGIT_SCALE

BOUND = 1e-4
# What damage must do at the least; measured values are many times larger.
DAMAGE = 100 * BOUND


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(320, (400,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def expected(oracle: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The oracle's logits [400, 320], at each position."""
    with torch.no_grad():
        return oracle(tokens.unsqueeze(0)).logits[0]


def prefill(model: Model, tokens: torch.Tensor, *sizes: int) -> tuple[SequenceCache, torch.Tensor]:
    """A cache filled in chunks of these sizes (one chunk if none is given), and the logits after the last."""
    cache = model.new_cache()
    for chunk in tokens.split(list(sizes) or [len(tokens)]):
        hidden = model.prefill(chunk, cache)
    return cache, model.logits(hidden)


def through_bytes(model: Model, cache: SequenceCache) -> SequenceCache:
    """A fresh cache made from nothing but each tensor's bytes and the layers' specs."""
    fresh = model.new_cache()
    for index, spec in enumerate(model.layers):
        layer = cache.layers[index]
        target = fresh.layers[index]
        if isinstance(layer, AttentionCache):
            payload = layer.rows(0, cache.length).numpy().tobytes()
            (tensor,) = spec.tensors
            target.write(0, restored(payload, (cache.length, *tensor.shape), tensor.dtype))
        else:
            payloads = {tensor.name: layer.tensors[tensor.name].numpy().tobytes() for tensor in spec.tensors}
            target.load({t.name: restored(payloads[t.name], t.shape, t.dtype) for t in spec.tensors})
    fresh.length = cache.length
    return fresh


def restored(payload: bytes, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(payload, dtype).reshape(shape).copy())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def test_logits_have_the_scale_at_which_parity_is_claimed(expected):
    assert expected.std().item() == pytest.approx(LOGIT_SCALE, rel=0.2)


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 200, 400])
def test_one_prefill_matches_the_oracle(model, tokens, expected, length):
    _, logits = prefill(model, tokens[:length])
    assert distance(logits, expected[length - 1]) < BOUND


@pytest.mark.parametrize("sizes", [(1, 399), (200, 200), (37, 1, 2, 130, 229, 1), (100,) * 4])
def test_chunked_prefill_matches_the_oracle(model, tokens, expected, sizes):
    _, logits = prefill(model, tokens, *sizes)
    assert distance(logits, expected[-1]) < BOUND


def test_prefill_longer_than_a_segment_matches_the_oracle(model, oracle):
    tokens = torch.randint(320, (1500,), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = oracle(tokens.unsqueeze(0)).logits[0]
    assert distance(prefill(model, tokens)[1], expected[-1]) < BOUND
    assert distance(prefill(model, tokens, 10, 1100, 390)[1], expected[-1]) < BOUND


def test_decode_from_nothing_and_after_prefill_matches_the_oracle(model, tokens, expected):
    for start in (0, 350):
        cache = prefill(model, tokens[:start])[0] if start else model.new_cache()
        for position in range(start, start + 50):
            logits = model.decode(tokens[position].view(1), [cache])
            assert distance(logits[0], expected[position]) < BOUND


def test_a_batch_of_different_lengths_decodes_each_sequence_as_if_alone(model, tokens, expected):
    lengths = (1, 77, 300, 32)
    caches = [prefill(model, tokens[:length])[0] for length in lengths]
    for step in range(5):
        logits = model.decode(torch.stack([tokens[length + step] for length in lengths]), caches)
        for row, length in zip(logits, lengths, strict=True):
            assert distance(row, expected[length + step]) < BOUND
    assert [cache.length for cache in caches] == [length + 5 for length in lengths]


def test_decode_after_the_cache_went_through_bytes_matches_the_oracle(model, tokens, expected):
    cache = through_bytes(model, prefill(model, tokens[:350], 200, 150)[0])
    for position in range(350, 400):
        logits = model.decode(tokens[position].view(1), [cache])
        assert distance(logits[0], expected[position]) < BOUND


def test_prefill_goes_on_in_a_cache_that_went_through_bytes(model, tokens, expected):
    cache = through_bytes(model, prefill(model, tokens[:123])[0])
    assert distance(model.logits(model.prefill(tokens[123:], cache)), expected[-1]) < BOUND


def test_our_prefill_can_be_decoded_by_the_oracle(model, oracle, tokens, expected):
    from transformers import DynamicCache

    ours, _ = prefill(model, tokens[:350])
    theirs = DynamicCache(config=oracle.config)
    with torch.no_grad():
        oracle(tokens[:2].unsqueeze(0), past_key_values=theirs, use_cache=True)  # allocates every layer's tensors
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        overwrite_oracle_layer(layer, other, ours.length, model.config.latent_size)
    with torch.no_grad():
        logits = oracle(tokens[350:351].unsqueeze(0), past_key_values=theirs, use_cache=True).logits[0, -1]
    assert distance(logits, expected[350]) < BOUND


def overwrite_oracle_layer(layer, other, length: int, latent_size: int) -> None:
    if isinstance(layer, AttentionCache):
        latent, shared = layer.rows(0, length).split([latent_size, layer.width - latent_size], dim=-1)
        other.keys, other.values = latent[None, None].clone(), shared[None, None].clone()
        return
    recurrent, conv = layer.tensors["recurrent"], layer.tensors["conv"]
    (their_conv,) = as_list(other.conv_states)
    (their_recurrent,) = as_list(other.recurrent_states)
    their_recurrent.copy_(recurrent.unsqueeze(0))
    their_conv[..., -conv.shape[-1] :] = conv


def as_list(states) -> list[torch.Tensor]:
    return (
        [states] if isinstance(states, torch.Tensor) else list(states.values() if isinstance(states, dict) else states)
    )


def zero_latents(cache: SequenceCache) -> None:
    for layer in cache.layers:
        if isinstance(layer, AttentionCache):
            layer.rows(0, cache.length)[:, :64].zero_()


def zero_recurrent(cache: SequenceCache) -> None:
    for layer in linear_layers(cache):
        layer.tensors["recurrent"].zero_()


def transpose_recurrent(cache: SequenceCache) -> None:
    for layer in linear_layers(cache):
        layer.tensors["recurrent"].copy_(layer.tensors["recurrent"].mT.clone())


def swap_conv_columns(cache: SequenceCache) -> None:
    for layer in linear_layers(cache):
        layer.tensors["conv"].copy_(layer.tensors["conv"].flip(-1).clone())


def shift_one_row(cache: SequenceCache) -> None:
    for layer in cache.layers:
        if isinstance(layer, AttentionCache):
            layer.rows(0, cache.length)[100:101] = layer.rows(0, cache.length)[101:102].clone()


def zero_one_head_of_one_layer(cache: SequenceCache) -> None:
    linear_layers(cache)[0].tensors["recurrent"][0].zero_()


def linear_layers(cache: SequenceCache) -> list:
    return [layer for layer in cache.layers if not isinstance(layer, AttentionCache)]


@pytest.mark.parametrize(
    "damage",
    [zero_latents, zero_recurrent, transpose_recurrent, swap_conv_columns, shift_one_row, zero_one_head_of_one_layer],
)
def test_a_damaged_cache_moves_the_logits_far_past_the_bound(
    model, tokens, expected, damage: Callable[[SequenceCache], None]
):
    cache = through_bytes(model, prefill(model, tokens[:350])[0])
    damage(cache)
    logits = model.decode(tokens[350].view(1), [cache])
    assert distance(logits[0], expected[350]) > DAMAGE


def test_layers_report_in_order_with_their_rows_and_states_in_place(model, tokens):
    whole, _ = prefill(model, tokens[:300])
    cache, seen = model.new_cache(), []

    def on_layer(index: int) -> None:
        seen.append(index)
        layer, final = cache.layers[index], whole.layers[index]
        if isinstance(layer, AttentionCache):
            assert distance(layer.rows(0, 300), final.rows(0, 300)) < BOUND
        else:
            assert all(distance(layer.tensors[name], final.tensors[name]) < BOUND for name in layer.tensors)

    model.prefill(tokens[:300], cache, on_layer)
    assert seen == list(range(8))


def test_sequences_past_the_context_and_unknown_tokens_are_refused_and_change_nothing(model, tokens):
    cache, _ = prefill(model, tokens[:10])
    rows_before = cache.attention(3).rows(0, 10).clone()
    with pytest.raises(RequestError, match="8193 tokens, the model takes 8192") as refused:
        model.prefill(torch.zeros(8183, dtype=torch.int64), cache)
    assert refused.value.code == "context_length_exceeded"
    for wrong in (torch.tensor([320]), torch.tensor([-1]), torch.empty(0, dtype=torch.int64)):
        with pytest.raises(RequestError):
            model.prefill(wrong, cache)
    assert cache.length == 10
    assert torch.equal(cache.attention(3).rows(0, 10), rows_before)
