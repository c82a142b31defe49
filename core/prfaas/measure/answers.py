"""What a server says: its model, the tokens of an answer as they stream in, who else it serves, the size of its caches.

Anything may listen at an address that a person types. So what is not understood ends in a sentence, never in a figure.
Tokens are counted by the usage that vLLM, SGLang and our worker send with each piece, as a piece may hold several.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Annotated, Final, NamedTuple

import msgspec

from prfaas.capacity.builtin import all_builtins
from prfaas.capacity.models import MODEL_CACHES
from prfaas.errors import ConfigError, ProtocolError, RequestError
from prfaas.util import decode_json

OWNER: Final = "prfaas"
"""Of the models in our worker's list."""
WANTED: Final = "give the URL of a vLLM, an SGLang or a prfaas worker"
# Requests that run or wait, where these figures are of this moment. SGLang's may be half a minute old.
LOADS: Final = frozenset(
    {
        *("vllm:num_requests_running", "vllm:num_requests_waiting"),
        *("prfaas_requests_running", "prfaas_requests_waiting", "prfaas_prefills_running", "prfaas_prefills_waiting"),
    }
)
_CACHE_BYTES: Final = "prfaas_profile_cache_bytes"
_SAMPLE: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? ([-+.\w]+)")
_ACTIVE: Final = re.compile(r"-a\d+b$")  # parameters that a token activates, which no two models differ by alone
# What may follow a model's name without another size of its caches.
_VARIANT: Final = re.compile(
    r"(-(a\d+b|(nv|mx)?fp\d+|bf16|int\d|w\d+a\d+|awq|gptq|instruct|thinking|base|chat|it|dynamic|quantized|\d{4}))*"
)
_MOST_LINE_BYTES: Final = 1 << 20
_TOKENS: Final = re.compile(r'tokens="(\d+)"')


class ServedCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the list of a server; `root` is where its weights come from."""

    id: str
    max_model_len: int | None = None
    owned_by: str = ""
    root: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether our worker serves it."""
        return self.owned_by == OWNER


class CacheBytes(NamedTuple):
    """The size of a model's caches, and where it is known from."""

    state_bytes: int
    token_bytes: int
    source: str


class TokenMark(NamedTuple):
    """So many tokens of an answer had come at this time."""

    seconds: float
    tokens: int


class StreamedAnswer(NamedTuple):
    """The answer to one prompt: when it was sent, and when tokens came, by one clock."""

    began_seconds: float
    marks: tuple[TokenMark, ...]
    prompt_tokens: int
    cached_tokens: int

    @property
    def first_seconds(self) -> float:
        """Time to the first token."""
        return self.marks[0].seconds - self.began_seconds


class _Cards(msgspec.Struct, frozen=True):
    data: list[ServedCard]


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: _Count = 0
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class TokenStream:
    """Reads the events of one answer as its bytes come."""

    def __init__(self, url: str, began_seconds: float) -> None:
        self.is_done = False
        self._url = url
        self._began_seconds = began_seconds
        self._rest = b""
        self._marks: list[TokenMark] = []
        self._usage = _Usage()
        self._cached_tokens = 0

    def feed(self, piece: bytes, now_seconds: float) -> None:
        """Take bytes that came now. Raises RequestError where the server says that it failed."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MOST_LINE_BYTES:
            raise ProtocolError(f"{self._url}/v1/completions streams a line without an end; {WANTED}")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_seconds)

    @property
    def tokens(self) -> int:
        """How many have come."""
        return self._marks[-1].tokens if self._marks else 0

    def end(self) -> StreamedAnswer:
        """Return the answer. Raises ProtocolError if it is not whole."""
        if not self.is_done or not self._marks:
            raise ProtocolError(f"{self._url}: an answer ended before its last token; look into the server's log")
        return StreamedAnswer(self._began_seconds, tuple(self._marks), self._usage.prompt_tokens, self._cached_tokens)

    def _take(self, event: bytes, now_seconds: float) -> None:
        if event == b"[DONE]":
            self.is_done = True
            return
        read = decode_json(event, _Event, f"{self._url}/v1/completions streams something else", f"; {WANTED}")
        if bytes(read.error) not in {b"", b"null"}:
            raise RequestError(f"{self._url} failed: {bytes(read.error)[:300].decode(errors='replace')}")
        before = self.tokens
        tokens = before + bool(read.choices)
        if (usage := read.usage) is not None:
            self._usage = usage
            if usage.completion_tokens is not None:
                tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self._cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        if tokens > before:
            self._marks.append(TokenMark(now_seconds, tokens))


def read_card(document: bytes, url: str) -> ServedCard:
    """Return the first model of GET /v1/models; further ones are adapters of it."""
    cards = decode_json(document, _Cards, f"{url}/v1/models answers something else", f"; {WANTED}").data
    if not cards:
        raise ProtocolError(f"{url}/v1/models lists no model; {WANTED}")
    if not (cards[0].id.isprintable() and cards[0].owned_by.isprintable()):
        raise ProtocolError(f"{url}/v1/models has a name that cannot be printed; {WANTED}")
    return cards[0]


def read_loads(metrics: str) -> int | None:
    """Return how many requests run or wait; None where the metrics do not say."""
    loads = [value for name, _, value in samples_of(metrics) if name in LOADS]
    return round(sum(loads)) if loads else None


def read_cache_bytes(metrics: str, where: str) -> CacheBytes | None:
    """Return the line through the cache sizes that our worker and our connector publish; None without them."""
    sizes: dict[int, float] = {}
    for name, labels, value in samples_of(metrics):
        if name == _CACHE_BYTES and (found := _TOKENS.search(labels)):
            tokens = int(found[1])
            sizes[tokens] = max(value, sizes.get(tokens, 0.0))  # every rank says the whole
    if len(sizes) < 2:
        return None
    short, long = min(sizes), max(sizes)
    token_bytes = max(0.0, (sizes[long] - sizes[short]) / (long - short))
    return CacheBytes(max(0, round(sizes[short] - token_bytes * short)), round(token_bytes), f"the metrics of {where}")


@cache
def known_caches() -> dict[str, CacheBytes]:
    """Return the sizes of the published models' caches, by name."""
    known = {name: CacheBytes(one.state_bytes, one.token_bytes, f"model {name}") for name, one in MODEL_CACHES.items()}
    for one in all_builtins():
        name = _ACTIVE.sub("", one.model.lower())
        known[name] = CacheBytes(one.state_bytes, one.token_bytes, f"model {name}")
    return known


def cache_bytes_by_name(*names: str | None) -> CacheBytes | None:
    """Return the sizes of the known model that one of the names says."""
    model = known_model(*names)
    return None if model is None else known_caches()[model]


def known_model(*names: str | None) -> str | None:
    """Return the known model that one of the names says: the last part of a path, with its variant."""
    for name in filter(None, names):
        last = name.rstrip("/").rpartition("/")[2].lower()
        for known in known_caches():
            if last.startswith(known) and _VARIANT.fullmatch(last, len(known)):
                return known
    return None


def cache_bytes_given(model: str | None, state_bytes: int | None, token_bytes: int | None) -> CacheBytes | None:
    """Return what the command line says; raises ConfigError where that is half of it, twice, or an unknown name."""
    if token_bytes is None and state_bytes is not None:
        raise ConfigError("--state-bytes needs --token-bytes beside it: the bytes of the cache for each token")
    if model is not None and token_bytes is not None:
        raise ConfigError("--model gives the size of its caches: leave --token-bytes and --state-bytes out")
    if model is not None and model not in known_caches():
        raise ConfigError(f"--model is {model!r}; there are: {', '.join(known_caches())}")
    if model is not None:
        return known_caches()[model]
    return None if token_bytes is None else CacheBytes(state_bytes or 0, token_bytes, "the command line")


def unknown_cache_bytes(name: str) -> ConfigError:
    """Return the question for the size of a model's caches."""
    return ConfigError(
        f"how large the caches of {name!r} are is not known: give --model ({', '.join(known_caches())}), "
        "--cache-metrics with the URL of our connector's metrics (port 8002 of a vLLM on one GPU), "
        "or --token-bytes and --state-bytes"
    )


def samples_of(metrics: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels and value of each sample in the text of Prometheus."""
    for line in metrics.splitlines():
        if found := _SAMPLE.match(line):
            with suppress(ValueError):
                if math.isfinite(value := float(found[3])):
                    yield found[1], found[2] or "", value
