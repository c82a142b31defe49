"""All that a draw has to know of one answer: its parameters, its place in the random numbers, and what was drawn.

A sampler is a function of (request, choice, tokens generated): made anew from these, here or on another instance, it
goes on as the old one would have. It holds nothing of the model's cache, so a preempted request keeps its sampler.
"""

from collections.abc import Sequence
from typing import NamedTuple

from prfaas.errors import RequestError
from prfaas.wire.engine import Generate
from prfaas_worker.engine.grammar import Matcher
from prfaas_worker.engine.sampling.chance import Stream
from prfaas_worker.engine.sampling.edits import Table, needs_table


class Outputs(NamedTuple):
    """What a model can draw: the width of its logits, and the tokens that end an answer."""

    vocab_size: int
    eos_ids: tuple[int, ...]


class Sampler:
    """One choice of a request.

    With a grammar, `matcher` stands at its beginning, and `ignore_eos` has no effect: a whole answer has to end.

    The request's tokens are the model's: `check_tokens` says so.

    Raises:
        RequestError: `generated` does not follow the grammar.

    """

    __slots__ = (
        "ends",
        "generated",
        "greedy",
        "hold_back",
        "logprobs",
        "matcher",
        "sampling",
        "stream",
        "table",
    )

    def __init__(
        self,
        generate: Generate,
        choice: int,
        outputs: Outputs,
        matcher: Matcher | None = None,
        generated: Sequence[int] = (),
    ):
        sampling = generate.sampling
        self.sampling = sampling
        self.greedy = sampling.temperature == 0 or sampling.top_k == 1
        self.logprobs = generate.logprobs
        eos_ids = () if generate.ignore_eos and matcher is None else outputs.eos_ids
        self.ends = frozenset(eos_ids) | frozenset(generate.stop_token_ids)
        self.hold_back = generate.min_tokens - len(generated) if self.ends else 0
        self.matcher = matcher
        self.generated = len(generated)
        self.table = Table(sampling, generate.token_ids) if needs_table(sampling) else None
        if self.table is not None:
            for token in generated:
                self.table.count(token)
        if matcher is not None and generated:
            matcher.accept(generated)
        position = len(generate.token_ids) + len(generated)
        self.stream = None if self.greedy else Stream(sampling.seed, choice, position)

    @property
    def complete(self) -> bool:
        """Whether the grammar allows no more text: the answer ends with the token drawn last, which belongs to it."""
        return self.matcher is not None and self.matcher.complete

    def accept(self, token: int) -> None:
        """Go on over a drawn token. A token in `ends` is the last: it is no part of the text.

        Raises:
            RequestError: the grammar has become too complex to go on.

        """
        self.generated += 1
        self.hold_back -= 1
        if self.table is not None:
            self.table.count(token)
        if self.matcher is not None and token not in self.ends:
            self.matcher.accept([token])


def check_tokens(generate: Generate, vocab_size: int) -> None:
    """Raise RequestError for a request whose parameters name tokens that a model with such wide logits lacks."""
    for name, tokens in (
        ("logit_bias", [token for token, _ in generate.sampling.logit_bias]),
        ("stop_token_ids", generate.stop_token_ids),
    ):
        if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
            raise RequestError(f"{name}: token {wrong[0]} is none of the model's {vocab_size}", param=name)
