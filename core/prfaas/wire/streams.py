"""What makes a stream of our worker the same wherever it continues.

The gateway asks a worker for the ids of an answer's tokens, and keeps them. It sends what a second worker could not
know: a seed, and the time in every chunk.

    {"messages": ..., "prfaas_stream": {"seed": 5, "created": 1795425279}}

The answer's events name their tokens as with vLLM's `return_token_ids`, but not the prompt's: the next worker renders
it again.

If the worker dies, the gateway sends the same request to another one, and what the client has of the answer:

    ... "prfaas_stream": {"seed": 5, "created": 1795425279, "model": "f", "drawn": {"0": [104, 105]}, "ended": [1]}

The next worker renders the prompt again, computes prompt and drawn tokens, and draws the next ones. Random numbers,
penalties and limits count the drawn tokens as the first worker did. It reads the drawn tokens once more without sending
their text, and so has the state of the text, such as a held back beginning of a character or stop string.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

STREAM_FIELD: Final = "prfaas_stream"
SEED_BITS: Final = 63

TokenIds = list[Annotated[int, Meta(ge=0, lt=1 << 32)]]


class StreamParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the gateway sends about a stream. Without `drawn` and `ended` it is the stream's beginning."""

    seed: Annotated[int, Meta(ge=0, le=(1 << SEED_BITS) - 1)]
    """For a request without one."""
    created: Annotated[int, Meta(ge=0, lt=1 << 48)]
    """Unix seconds, of every chunk."""
    model: Annotated[str, Meta(max_length=256)] = ""
    """Fingerprint of the model that began the answer: `system_fingerprint` of its first chunk."""
    drawn: dict[int, TokenIds] = {}
    """The ids of the tokens that the client has, by choice."""
    ended: tuple[int, ...] = ()
    """The choices whose end the client has."""

    @property
    def continues(self) -> bool:
        """Whether the client has a part of the answer."""
        return bool(self.drawn or self.ended)
