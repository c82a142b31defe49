"""One choice of an answer while it is generated: its text, its calls of tools, and why it ended."""

from collections.abc import Sequence

from prfaas.wire.engine import Tokens
from prfaas_worker.front.answers import Piece
from prfaas_worker.front.openai import Job
from prfaas_worker.front.text import TextStream
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
        self._tools = job.tools
        self._parser = job.tools.known.parser(random_id) if job.tools else None
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
        piece = Piece(self.index, text, events, tokens.token_ids, tokens.logprobs, reason, self._first)
        self._first = False
        return piece

    def _read(self, events: list[Event]) -> list[Event]:
        """Note calls, and drop those beyond the first where only one is wanted."""
        if self._tools and not self._tools.parallel:
            events = [event for event in events if isinstance(event, Said) or event.index == 0]
        self._called = self._called or any(isinstance(event, Called) for event in events)
        return events
