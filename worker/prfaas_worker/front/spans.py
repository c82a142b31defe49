"""Makes a worker's spans in the front, from the engine's reports: the engine traces nothing itself.

    decode             from a request's arrival to its last byte
      prefill.local    one for each prompt, or
      prefill.remote   from asking to the first token
        transfer       at the destination, from the first cache byte to the last
        prefill        at the source, from the announcement to the end

A transfer's report carries the context that it began with, so its span needs no call that is still open.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, Self

from prfaas.errors import RequestError
from prfaas.telemetry.tracing import Span, Tracing
from prfaas.wire.engine import Generate, Started, ToEngine, ToFront, TransferEnded
from prfaas.wire.trace import Parts, TraceContext, named_seconds

NAMES: Final = {"receive": "transfer", "send": "prefill"}


class RequestSpans:
    """The spans of one request. As a context they end with the block."""

    def __init__(self, tracing: Tracing, caller: TraceContext, request_id: str):
        self._tracing = tracing
        self._span = tracing.start("decode", caller, "server")
        self._span.set(request_id=request_id)
        self._prefills: dict[int, Span] = {}
        self._is_source = False

    def begin_source(self) -> TraceContext:
        """Name the span as that of a source's leg; return the context that the engine passes on."""
        self._span.rename("source")
        self._is_source = True
        return self._span.context

    def begin(self, handle: int, message: Generate) -> TraceContext:
        """Begin a prompt's prefill; return the context that the engine passes on."""
        is_remote = message.leg is not None and not message.leg.tokens
        span = self._tracing.start("prefill.remote" if is_remote else "prefill.local", self._span.context)
        span.set(request_id=message.request_id, prompt_tokens=len(message.token_ids))
        self._prefills[handle] = span
        return span.context

    def end_prefills(self, prompts: Sequence[Started], parts: Parts) -> None:
        """End the prefills: the first token of every prompt exists, after these parts of the time to it."""
        for prompt in prompts:
            span = self._prefills.pop(prompt.handle)
            span.set(
                cached_tokens=prompt.cached_tokens,
                kv_bytes=prompt.kv_bytes,
                queue_seconds=prompt.queue_seconds,
                prefill_seconds=prompt.prefill_seconds,
            )
            if prompt.transfer_id:
                span.set(transfer_id=prompt.transfer_id)
            span.end()
        self._span.set(**named_seconds(parts))
        self._span.event("first_token")

    def fail(self, reason: str) -> None:
        for span in (*self._prefills.values(), self._span):
            span.fail(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, asyncio.CancelledError):
            if (
                self._is_source
            ):  # perhaps because the answer has ended: the transfer's span says whether it got its cache
                self._span.event("left")
            else:
                self.fail("the client left")
        elif error is not None and not isinstance(error, RequestError):  # a wrong request is no failure of ours
            self.fail(str(error) or repr(error))
        for span in self._prefills.values():
            span.end()
        self._span.end()


class TransferSpans:
    """Makes spans of transfers. Listens to the engine if there is tracing."""

    def __init__(self, tracing: Tracing):
        self._tracing = tracing

    def on_sent(self, message: ToEngine) -> None:
        """Do nothing: no message to the engine ends a transfer."""

    def on_received(self, message: ToFront) -> None:
        if isinstance(message, TransferEnded):
            self._report(message)

    def _report(self, transfer: TransferEnded) -> None:
        subject, began, moments = transfer.subject, transfer.began_at, dict(transfer.marks)
        sends = transfer.direction == "send"
        at = began if sends else began + moments.get("first_byte", 0.0)
        span = self._tracing.start(NAMES[transfer.direction], subject.trace, "server" if sends else "internal", at)
        span.set(
            request_id=subject.request_id,
            outcome=transfer.outcome,
            bytes=transfer.payload_bytes,
            codecs=",".join(transfer.codecs),
            breaks=transfer.breaks,
            peer=subject.peer,
        )
        if transfer.transfer_id:
            span.set(transfer_id=transfer.transfer_id)
        if transfer.flow_seconds:
            span.set(mbps=transfer.payload_bytes * 8 / transfer.flow_seconds / 1e6)
        for mark, seconds in transfer.marks:
            if began + seconds >= at:
                span.event(mark, began + seconds)
        span.event(transfer.outcome, began + transfer.seconds)
        if transfer.outcome != "delivered":
            span.fail(transfer.reason)
        span.end(began + transfer.seconds)
