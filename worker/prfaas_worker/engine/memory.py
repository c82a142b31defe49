"""What a sequence's way through the engine means for its memory in the prefix cache."""

from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.engine.sequences import Phase, Sequence


def keep(cache: HybridCache, sequence: Sequence) -> None:
    """Let the prefix cache have the blocks that are complete now, and the state where it is wanted."""
    if not sequence.is_exact:
        return
    blocks, rest = divmod(sequence.computed_tokens, sequence.chain.block_tokens)
    decoding = sequence.computed_tokens > sequence.request.prompt_tokens
    if decoding:
        if rest:
            return
        sequence.chain.extend(sequence.token_ids[sequence.chain.tokens : sequence.computed_tokens])
    cache.publish(sequence.held, sequence.chain, blocks)
    if rest == 0 and (decoding or sequence.computed_tokens in sequence.cuts):
        cache.checkpoint(sequence.held, sequence.chain.hashes, blocks, rolling=decoding)


def give_back(cache: HybridCache, sequence: Sequence) -> None:
    """Take a sequence's memory, and let it begin anew when its turn comes."""
    cache.close(sequence.held)
    sequence.lease, sequence.computed_tokens, sequence.phase = None, 0, Phase.WAITING
