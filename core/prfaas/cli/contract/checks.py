"""The checks: a claim each, and the calls that test it, of an engine alone and of a pair that hands requests over.

Of a pair one prefills, and the other fetches its cache and answers. Both legs leave at once, as from a gateway. The
promise is the same whatever goes wrong: the answer is that of one engine, no cache is used that is not the right one,
and both hold nothing afterwards. A check returns what it saw, or raises PeerError where its claim does not hold.

Answers are compared by their scores, see scores.py. `prfaas verify` uses these checks, and more of them.
"""

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from prfaas.cli.contract.calls import CheckedAnswer, CheckedEngine, Running, require
from prfaas.errors import PeerError
from prfaas.measure.scores import NOISE_NATS, difference
from prfaas.wire.prefill import LegParams, new_transfer

LENGTHS: Final = (20, 700, 6000)
"""Characters of prompts: less than a page of a cache, some, and many."""
_LONG_TOKENS: Final = 32_768
_TOKENS: Final = 12
_CALLED: Final = ("source", "destination", "source and destination")
SCORED: Final[Mapping[str, Any]] = {"max_tokens": _TOKENS, "logprobs": 5}


def text_of(length: int) -> str:
    """Return a text of so many characters, another one each time."""
    return secrets.token_hex(length)[:length]


def _require_same(answer: CheckedAnswer, scores: dict[str, Any], noise_nats: float = NOISE_NATS) -> str:
    nats = difference(answer.scores, scores)
    require(nats < noise_nats, f"the answer differs by {nats:.3g} nats from that of one engine")
    return f"{answer.usage.get('prompt_tokens')} tokens, {nats:.2g} nats off"


def _counts(engine: CheckedEngine) -> str:
    prompt = text_of(100)
    answers = [engine.ask(prompt=prompt, max_tokens=_TOKENS, stream=stream) for stream in (False, True)]
    for answer in answers:
        reason, counted = answer.choice.get("finish_reason"), answer.usage.get("completion_tokens")
        require(reason == "length", f"an answer that is cut ends with {reason!r}")
        require(counted == _TOKENS, f"an answer of {_TOKENS} tokens counts as {counted}")
    first, second = (answer.usage.get("prompt_tokens") for answer in answers)
    require(first and first == second, f"one prompt counts as {first} tokens whole, and as {second} in a stream")
    return f"{first} and {_TOKENS} tokens"


def _gives_token_ids(engine: CheckedEngine) -> str:
    for ask in ({"prompt": text_of(100)}, {"messages": [{"role": "user", "content": text_of(100)}]}):
        require(not any(engine.ask(**ask).ids), "token ids come although nobody asked for them")
        for stream in (False, True):
            answer = engine.ask(**ask, max_tokens=_TOKENS, return_token_ids=True, stream=stream)
            (prompt_ids, ids), counted = answer.ids, answer.usage.get("prompt_tokens")
            require(len(ids) == _TOKENS, f"an answer of {_TOKENS} tokens gives {len(ids)} token_ids")
            require(len(prompt_ids) == counted, f"{len(prompt_ids)} prompt_token_ids come of {counted} tokens")
    return "of prompt and answer, whole and in a stream"


def _continues(engine: CheckedEngine) -> str:
    """As a gateway continues a broken stream: by a completion from all ids so far."""
    whole = engine.ask(prompt=text_of(300), return_token_ids=True, **SCORED | {"max_tokens": 2 * _TOKENS})
    prompt_ids, ids = whole.ids
    rest = engine.ask(prompt=[*prompt_ids, *ids[:_TOKENS]], **SCORED)
    return _require_same(rest, {name: values[_TOKENS:] for name, values in whole.scores.items() if values})


def _counts_cached(engine: CheckedEngine) -> str:
    prompt = text_of(2000)
    first, again, other = (engine.ask(prompt=prompt, cache_salt=salt) for salt in ("one", "one", "other"))
    most = again.usage.get("prompt_tokens", 0)
    require(first.cached_tokens == 0, f"{first.cached_tokens} tokens of a new prompt count as cached")
    require(0 < again.cached_tokens < most, f"{again.cached_tokens} of {most} tokens of a known prompt count as cached")
    require(other.cached_tokens == 0, f"{other.cached_tokens} tokens are found under another cache_salt")
    return f"{again.cached_tokens} of {most}"


def _refuses_wrong(engine: CheckedEngine) -> str:
    wrong: tuple[dict[str, Any], ...] = ({"model": "no such model"}, {"max_tokens": -1}, {"temperature": -1})
    for fields in (*wrong, {"prompt": [1] * (engine.context_tokens + 1)}):
        answer, wanted = engine.ask(**{"prompt": "a"} | fields), 404 if "model" in fields else 400
        error: dict[str, Any] = answer.body.get("error") or {}
        require(answer.status == wanted, f"a wrong {', '.join(fields)} is answered by HTTP {answer.status}")
        require(error.get("message"), f"HTTP {answer.status} comes without error.message")
    return "by 404 and 400, with sentences"


def _frees(engine: CheckedEngine) -> str:
    engine.wait_idle()
    for stream in (False, True):
        length = min(engine.context_tokens, _LONG_TOKENS) // 8
        running = engine.begin(prompt=text_of(length), max_tokens=length, stream=stream)
        engine.wait_busy(running)
        running.leave()
        if running.is_refused:  # one that was not even begun frees nothing
            require(running.answer().choice, "a request is refused")
        engine.wait_idle()
    return "nothing is held"


class EnginePair(NamedTuple):
    """A source, a destination, and the port at which the source gives its caches: at `data_host`, or where its API
    is."""

    source: CheckedEngine
    destination: CheckedEngine
    data_port: int
    noise_nats: float = NOISE_NATS
    data_host: str = ""

    def name_transfer(self, tokens: int = 0) -> LegParams:
        """Name a new transfer, in the destination's words; with `tokens` that of a prefix."""
        host = self.data_host or urlsplit(self.source.url).hostname or ""
        place: dict[str, Any] = {"host": host, "port": self.data_port}
        return LegParams(role="destination", **new_transfer(), **place, tokens=tokens)

    def begin_source(self, named: LegParams, prompt: Any) -> Running:
        leg = msgspec.to_builtins(replace(named, role="source", host="", port=0))
        return self.source.begin(prompt=prompt, max_tokens=1, kv_transfer_params={"prfaas": leg})

    def begin_destination(self, named: LegParams, prompt: Any, **fields: Any) -> Running:
        params = {"prfaas": msgspec.to_builtins(named)}
        return self.destination.begin(prompt=prompt, kv_transfer_params=params, **{**SCORED, **fields})

    def hand_off(self, prompt: Any, named: LegParams | None = None, **fields: Any) -> tuple[Running, Running]:
        """Send both legs at once; return those of source and destination."""
        named = named or self.name_transfer()
        return self.begin_source(named, prompt), self.begin_destination(named, prompt, **fields)

    def require_same(self, answer: CheckedAnswer, prompt: Any, is_fetched: bool | None = None) -> str:
        """Raise PeerError unless the destination answers the prompt so by itself, too, with the same usage, and a cache
        came, or none did."""
        wanted = self.destination.ask(prompt=prompt, cache_salt=secrets.token_hex(4), **SCORED)
        words = _require_same(answer, wanted.scores, self.noise_nats)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            mine, theirs = answer.usage.get(name), wanted.usage.get(name)
            require(mine == theirs, f"{name} is {mine} after a hand-off, and {theirs} without")
        wrong = "no cache came to the destination" if is_fetched else "a cache came that is not the right one"
        require(is_fetched is None or is_fetched == answer.has_fetched, wrong)
        return words

    def wait_idle(self) -> None:
        self.source.wait_idle()
        self.destination.wait_idle()


def hands_off(length: int, pair: EnginePair) -> str:
    prompt = text_of(min(length, pair.destination.context_tokens // 2))
    given, answered = (leg.answer() for leg in pair.hand_off(prompt))
    require(given.status == 200, f"the source answers by HTTP {given.status}: {given.body}")
    pair.require_same(answered, prompt, is_fetched=True)
    _, answered = (leg.answer() for leg in pair.hand_off(prompt))  # it has the cache by now, and declines
    return pair.require_same(answered, prompt)


def _refuses(what: str, pair: EnginePair) -> str:
    """What does not name the transfer brings nothing and ends nothing. A cache of another prompt has the same shape."""
    prompt, named, is_named = text_of(700), pair.name_transfer(), what == "prompt"
    require(pair.begin_source(named, text_of(700) if is_named else prompt).answer().choice, "the source has no choice")
    wrong: dict[str, Any] = new_transfer() | {"port": 9}
    theirs = named if is_named else replace(named, **{what: wrong[what]})
    words = pair.require_same(pair.begin_destination(theirs, prompt).answer(), prompt, is_fetched=False)
    right = pair.begin_destination(named, prompt, cache_salt="right").answer()
    require(right.has_fetched != is_named, "the right one does not come afterwards")
    return words


def _answers_repeated(pair: EnginePair) -> str:
    prompt, named = text_of(700), pair.name_transfer()
    given = [pair.begin_source(named, prompt).answer().status for _ in range(2)]
    answered = [pair.begin_destination(named, prompt, cache_salt=f"leg {number}") for number in range(2)]
    require(given[0] == 200 and given[1] in {200, 409}, f"a leg that is sent twice is answered by HTTP {given}")
    return " and ".join(pair.require_same(leg.answer(), prompt) for leg in answered)


def _frees_both(leaves: str, pair: EnginePair) -> str:
    """A gateway that dies leaves both. Where the source's caller leaves, the destination computes. One that leaves
    before an engine has read its request says nothing to it; then the source keeps its cache for a lease."""
    pair.wait_idle()
    prompt = text_of(min(12_000, pair.destination.context_tokens // 3))
    given, answered = pair.hand_off(prompt)
    pair.source.wait_busy(given)
    pair.destination.wait_busy(answered)
    if "source" in leaves:
        given.leave()
    if "destination" not in leaves:
        return pair.require_same(answered.answer(), prompt)
    answered.leave()
    return "nothing is held"


def _gives_prefix(port: int, pair: EnginePair) -> str:
    """A prefix crosses; at a port where nobody answers it does not, and the prompt is computed."""
    beginning = text_of(2000)
    _, known = (pair.source.ask(prompt=beginning).cached_tokens for _ in range(2))
    named, prompt = pair.name_transfer(known), beginning + text_of(100)
    given, answered = pair.hand_off(prompt, replace(named, port=port or named.port))
    answer = answered.answer()
    words = pair.require_same(answer, prompt, is_fetched=not port)
    require(port or answer.cached_tokens >= known > 0, f"{answer.cached_tokens} of {known} tokens came")
    require(pair.begin_destination(named, prompt).answer().choice, "it answers no more")
    given.answer()
    return words


def _leaves_idle(run: Callable[[EnginePair], str], pair: EnginePair) -> str:
    """Run a check, and wait until nothing is held. What a failed one leaves may be held for a lease; it is waited for,
    so that the next check begins anew."""
    try:
        words = run(pair)
    except PeerError:
        for _ in range(2):
            with suppress(PeerError):
                pair.wait_idle()
        raise
    pair.wait_idle()
    return words


ALONE: Final[Mapping[str, Callable[[CheckedEngine], str]]] = {
    "counts prompt and answer the same, whole and in a stream": _counts,
    "gives token ids to callers who ask for them": _gives_token_ids,
    "continues an answer from its token ids": _continues,
    "counts cached tokens, by salt": _counts_cached,
    "refuses what is wrong by a sentence": _refuses_wrong,
    "holds nothing for a caller that left": _frees,
}
_PAIR: Final[Mapping[str, Callable[[EnginePair], str]]] = {
    **{f"hands off a prompt of {length:,} characters": partial(hands_off, length) for length in LENGTHS},
    **{f"refuses a wrong {one}": partial(_refuses, one) for one in ("epoch", "token", "transfer_id", "port", "prompt")},
    "answers legs that are repeated": _answers_repeated,
    **{f"frees both when the caller of {who} leaves": partial(_frees_both, who) for who in _CALLED},
    "hands over a prefix": partial(_gives_prefix, 0),
    "computes a prefix that does not come": partial(_gives_prefix, 9),
}
PAIR: Final = {claim: partial(_leaves_idle, run) for claim, run in _PAIR.items()}
