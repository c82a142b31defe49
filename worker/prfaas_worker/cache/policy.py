"""Where a prompt's prefill should keep its state, and which states have had their day. Pure.

A state is right at exactly one length, so what matters is that it stands where a later prompt parts from this one. Two
such places are known: the end of the prompt, where a conversation goes on, and a branch, where an earlier prompt parted
from this one, which shows as attention blocks that reach further than any state. States at regular distances mostly
land in tokens that no other prompt has, and give no hits for the room that they take.

A state weighs as much as thousands of tokens of attention (5,380 for Kimi Linear 48B). Even so no high bar pays: on the
conversation trace, asking that a state save 1,024 tokens costs a tenth of the hits at 128 GB and at 512 GB alike
(`prfaas bench prefix_cache`; the trace cannot tell less than 512). So the rule by bytes is a low one: each page that a
state takes must save a token.
"""


def checkpoint_blocks(
    attention_blocks: int, state_blocks: int, last_block: int, tokens_per_block: int, pages_per_state: int
) -> tuple[int, ...]:
    """Return the lengths, in blocks and ascending, at which to keep the state of a prompt that is to be computed.

    Attention blocks of the prompt are cached up to `attention_blocks`, and a state at `state_blocks`, from where it is
    computed. `last_block` is the last full block that a repetition of the prompt could start from.
    """
    if not pages_per_state:
        return ()
    kept: list[int] = []
    reached = state_blocks
    for blocks in (attention_blocks, last_block):
        if (blocks - reached) * tokens_per_block >= pages_per_state:
            kept.append(blocks)
            reached = blocks
    return tuple(kept)


def is_spent(uses: int) -> bool:
    """Tell whether a state that a sequence started from is of no more use once that sequence has kept a later one.

    The sequence went on, as conversations do: the next turn starts from the later state. Two that started here make
    the place a branch, as its first sight counts for a state that was kept at one: more may follow.
    """
    return uses < 2
