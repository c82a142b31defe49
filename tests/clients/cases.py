"""What clients ask for, and what a plain HTTP request gets for it."""

import json
import secrets
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

AGENT: Final = "pydantic-ai"
STREAMED: Final = {"stream": True, "stream_options": {"include_usage": True}}
SHORT: Final = {"max_tokens": 12, "temperature": 0}
HELLO: Final = [{"role": "user", "content": "hello"}]
CALL: Final = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"city":"Paris"}'}}
HISTORY: Final = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
]
REFUSED: Final = "refused"
OFFLOADED: Final = "offloaded"
"""How the names of cases begin whose prompt is prefilled in the other cluster."""
LONG: Final = [{"role": "user", "content": " ".join(f"Line {number} says {number**2}." for number in range(120))}]
"""2,263 characters, each a token of the models that ship along."""


@dataclass(frozen=True)
class Seen:
    """An answer: text, tokens (with logprobs) and finish_reason of each choice, tokens of prompt and answer, and the
    status, which is 0 for an error after the head. Chunks and the client's words for an error are not compared.
    """

    choices: list[dict[str, Any]]
    usage: list[int] | None
    status: int = 200
    chunks: int = field(default=0, compare=False)
    error: str = field(default="", compare=False)


class Case(NamedTuple):
    """One request. Fields of `extra` have no name in a client's own API."""

    name: str
    body: dict[str, Any]
    api: str = "chat"
    extra: dict[str, Any] = {}  # noqa: RUF012  # nobody changes it

    @property
    def is_streamed(self) -> bool:
        return "stream" in self.body

    def suits(self, client: str) -> bool:
        """Whether a client can ask for it: an agent chats, and its answer is one choice."""
        return client != AGENT or (self.api == "chat" and "n" not in self.body)

    def check(self, plain: Seen) -> None:
        """Raise AssertionError if an answer is not what the case asks for."""
        if self.name == REFUSED:
            assert plain.status == 400, plain
            return
        assert (plain.status, len(plain.choices)) == (200, self.body.get("n", 1)), plain
        assert plain.usage, plain
        assert min(plain.usage) > 0, plain
        for one in plain.choices:
            assert one["finish_reason"] in ("stop", "length"), plain
            assert bool(one["tokens"]) == ("logprobs" in self.body), plain

    def make_request(self) -> dict[str, Any]:
        """Return what a program is sent: a request of which nothing is cached."""
        extra = self.extra | {"cache_salt": secrets.token_hex(8)}
        return {"api": self.api, "body": {"model": "tiny"} | self.body, "extra": extra}


def make_cases(drawn: dict[str, Any]) -> tuple[Case, ...]:
    """Return all cases; with the fields `drawn` an engine draws the same two answers each time."""
    two = drawn | {"n": 2, "max_tokens": 12, "temperature": 1}
    return (
        Case("whole", SHORT | {"messages": HELLO}),
        Case("streamed", SHORT | STREAMED | {"messages": HELLO}),
        Case("two choices", two | {"messages": HELLO}),
        Case("two choices streamed", two | STREAMED | {"messages": HELLO}),
        Case("logprobs", SHORT | {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
        Case("logprobs streamed", SHORT | STREAMED | {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
        Case("past calls", SHORT | {"messages": HISTORY}),
        Case("past calls streamed", SHORT | STREAMED | {"messages": HISTORY}),
        Case("completions", SHORT | {"prompt": "def main(", "logprobs": 1}, "completions"),
        Case("completions streamed", two | STREAMED | {"prompt": "def main(", "logprobs": 1}, "completions"),
        Case(REFUSED, STREAMED | {"messages": HELLO, "temperature": -1}),
        Case(OFFLOADED, SHORT | {"messages": LONG}),
        Case(f"{OFFLOADED} streamed", SHORT | STREAMED | {"messages": LONG}),
    )


def ask_plainly(url: str, case: Case) -> Seen:
    """Ask as no client does: read the lines that the API's page describes."""
    request = case.make_request()
    path = "/v1/chat/completions" if case.api == "chat" else "/v1/completions"
    data = json.dumps(request["body"] | request["extra"]).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url + path, data, {"content-type": "application/json"}), timeout=120
        ) as answer:
            lines = [line[6:] for line in answer if line.startswith(b"data: ")] if case.is_streamed else [answer.read()]
    except urllib.error.HTTPError as error:
        error.close()
        return Seen([], None, error.code)
    if case.is_streamed:
        assert lines.pop() == b"[DONE]\n", "a stream has an end"
    return read_events([json.loads(line) for line in lines])


def read_events(events: list[dict[str, Any]]) -> Seen:
    """Add the chunks of a stream up; a whole answer is one chunk."""
    found: dict[int, dict[str, Any]] = {}
    usage: dict[str, int] | None = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            own = found.setdefault(choice["index"], {"text": "", "tokens": [], "finish_reason": None})
            message = choice.get("delta") or choice.get("message") or {}
            own["text"] += choice.get("text") or message.get("content") or ""
            logprobs = choice.get("logprobs") or {}
            own["tokens"] += logprobs.get("tokens") or [one["token"] for one in logprobs.get("content") or ()]
            own["finish_reason"] = choice["finish_reason"] or own["finish_reason"]
    tokens = [usage["prompt_tokens"], usage["completion_tokens"]] if usage else None
    return Seen([found[index] for index in sorted(found)], tokens)
