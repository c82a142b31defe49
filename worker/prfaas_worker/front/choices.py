"""One choice of an answer while it is generated: its text, its calls of tools, and why it ended."""

from collections.abc import Sequence

from prfaas.wire.engine import Tokens
from prfaas_worker.front.answers import Piece, Scored
from prfaas_worker.front.openai import Job
from prfaas_worker.front.text import TextOffsets, TextStream
from prfaas_worker.front.tools.events import Called, Event, Said, random_id
from prfaas_worker.front.tools.use import hidden_marks
from prfaas_worker.tokenizer import Tokenizer


class Choice:
    """Turns the engine's tokens into pieces. `index` counts over all prompts of the request."""

    def __init__(self, index: int, job: Job, echo: str, tokenizer: Tokenizer):
        self.index = index
        self.stream = TextStream(
            tokenizer, job.stop, unstopped_tokens=job.min_tokens, shown=hidden_marks(job.tools, tokenizer)
        )
        self._offsets = TextOffsets(tokenizer, len(echo))
        self._tools = job.tools
        self._parser = job.tools.known.parser(random_id) if job.tools else None
        self._scores = job.logprobs >= 0
        self._echo = echo
        self._first = True
        self._called = False

    def piece(self, tokens: Tokens) -> Piece:
        """Take tokens in. The piece has a reason if the choice ended, by the engine's word or by a stop string."""
        final = tokens.finish_reason is not None
        text = self.stream.push(tokens.token_ids, final=final)
        reason = "stop" if self.stream.stopped else tokens.finish_reason
        events: Sequence[Event] = ()
        if self._parser is not None:
            events, text = self._read(self._parser.push(text, final=reason is not None)), ""
            if reason == "stop" and self._called:
                reason = "tool_calls"
        if self._first:
            text = self._echo + text
        piece = Piece(self.index, text, events, self._scored(tokens), reason, self._first, tokens.token_ids)
        self._first = False
        return piece

    def replay(self, token_ids: Sequence[int]) -> Piece:
        """Take in tokens whose text was sent already, by another instance; returns what that was."""
        # One by one where calls are read: what is said of them then does not depend on how they came.
        parts = [[token] for token in token_ids] if self._parser else [list(token_ids)]
        pieces = [self.piece(Tokens(0, 0, part, [], None)) for part in parts]
        if self._scores:
            self._offsets.push(token_ids)
        text = "".join(piece.text for piece in pieces)
        events = [event for piece in pieces for event in piece.events]
        reason = next((piece.reason for piece in pieces if piece.reason), None)
        return Piece(self.index, text, events, (), reason, first=True)

    def _scored(self, tokens: Tokens) -> list[Scored]:
        if not tokens.logprobs:
            return []
        places = self._offsets.push(tokens.token_ids)
        return [Scored(*one) for one in zip(tokens.token_ids, tokens.logprobs, places, strict=True)]

    def _read(self, events: list[Event]) -> list[Event]:
        """Note calls, and drop those beyond the first where only one is wanted."""
        if self._tools and not self._tools.parallel:
            events = [event for event in events if isinstance(event, Said) or event.index == 0]
        self._called = self._called or any(isinstance(event, Called) for event in events)
        return events
