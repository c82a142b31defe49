"""Sends the demo's requests: one streamed completion each, of real text of a given length, with times and headers.

The text is the language reference in every Python installation. The shipped model reads bytes, so n ASCII characters
make a prompt of about n tokens.
"""

import time
import uuid
from collections.abc import Callable
from functools import cache

import openai

from prfaas.wire import headers
from prfaas_sandbox.demo.records import UNKNOWN, RequestRecord

TIMEOUT_SECONDS = 600.0  # a busy machine is slow, which is no failure of prfaas


class DemoClient:
    """Sends prompts to one gateway; `url` is without /v1."""

    def __init__(self, url: str, model: str):
        self.model = model
        # The gateway ends failures by itself: a client that retried would hide them. It is on this machine: no proxy.
        direct = openai.DefaultAsyncHttpxClient(trust_env=False)
        self._openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_SECONDS, http_client=direct
        )

    async def close(self) -> None:
        await self._openai.close()

    async def ask(
        self,
        prompt: str,
        *,
        act: str,
        max_tokens: int = 24,
        offload: str = "auto",
        on_text: Callable[[str, int], None] | None = None,
    ) -> RequestRecord:
        """Stream one completion; a failure becomes a record with its reason as outcome, never an exception.

        `on_text` is told the instance that decodes, and how many events with text have come.
        """
        request_id = f"demo-{uuid.uuid4().hex[:8]}"
        started = time.monotonic()
        try:
            raw = await self._openai.completions.with_raw_response.create(
                model=self.model,
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={headers.REQUEST_ID: request_id, headers.OFFLOAD: offload},
            )
            first: float | None = None
            pieces: list[str] = []
            usage = None
            async for chunk in raw.parse():
                usage = chunk.usage or usage
                if chunk.choices:
                    first = first or time.monotonic()
                    pieces.append(chunk.choices[0].text)
                    if on_text is not None:
                        on_text(raw.headers.get(headers.DECODE_INSTANCE, ""), len(pieces))
            if usage is None or first is None:
                return RequestRecord(id=request_id, act=act, outcome="failed: the stream ended early")
        except openai.OpenAIError as error:
            return RequestRecord(id=request_id, act=act, outcome=f"failed: {error}")
        head = raw.headers
        return RequestRecord(
            id=request_id,
            act=act,
            tokens=usage.prompt_tokens,
            cached_tokens=int(head.get(headers.CACHED_TOKENS, 0)),
            decision=head.get(headers.DECISION, UNKNOWN),
            prefilled_in=head.get(headers.PREFILL_CLUSTER, UNKNOWN),
            decoded_by=head.get(headers.DECODE_INSTANCE, UNKNOWN),
            threshold_tokens=int(head.get(headers.THRESHOLD_TOKENS, 0)),
            kv_bytes=int(head.get(headers.KV_BYTES, 0)),
            ttft_seconds=round(first - started, 4),
            total_seconds=round(time.monotonic() - started, 4),
            output_tokens=usage.completion_tokens,
            prefill_seconds=float(head.get(headers.PREFILL_SECONDS, 0)),
            first_byte_seconds=float(head.get(headers.FIRST_BYTE_SECONDS, 0)),
            transfer_seconds=float(head.get(headers.TRANSFER_SECONDS, 0)),
            outcome=head.get(headers.OUTCOME, UNKNOWN),
            text="".join(pieces),
        )


@cache
def _corpus() -> str:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return text.encode("ascii", "ignore").decode("ascii")


def text_of(tokens: int, *, start: int = 0) -> str:
    """Return `tokens` characters of prose from a paragraph near `start`; equal arguments give equal text."""
    corpus = _corpus()
    begin = corpus.find("\n\n", start % (len(corpus) - tokens - 4096)) + 2
    return corpus[begin : begin + tokens]
