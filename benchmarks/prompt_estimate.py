"""How near the gateway's estimate of a prompt's length is to the exact count, and what it costs.

    uv pip install 'mistral-common[sentencepiece]'     # its package holds both vocabularies
    prfaas bench prompt_estimate [--save FILE]

Pieces of English, Chinese, code and JSON, from this repository, are counted by the vocabularies of 32K and 131K tokens
of Mistral's models. One client sends every other piece, in random order, and its estimator learns the exact counts.
The figure of a kind is the mean error of its other pieces, in per cent of their tokens; the rival is the error of an
estimator that has learnt nothing. JSON has other JSON in its strings, as results of tools do.

The cost is processor time for KB of a body: small chats, and bodies of 16 MB. The rival is the decoding of their JSON.

`--save` writes the pieces with their counts: the tests read them, and need no tokenizer.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from benchmarks.report import Figure, run

from prfaas.errors import ConfigError
from prfaas.routing.estimate import TokenEstimator
from prfaas.routing.prompt_size import PromptSize, prompt_size, prompt_values

ROOT = Path(__file__).parents[1]
VOCABULARIES = {"32K": "mistral_instruct_tokenizer_240323.model.v3", "131K": "tekken_240911.json"}
PIECE_CHARACTERS = {"english": 1500, "chinese": 220, "code": 1500, "json": 1500}
MOST_PIECES = 8
NAMES = frozenset(("prompt", "messages"))
REACH_PERCENT = 15.0
LARGE_BYTES = 16 << 20
SMALL_CHATS = 2000

Pieces = Mapping[str, list[str]]
Save = Annotated[Path | None, typer.Option(help="Also write the pieces and their counts to this file.")]


class Counted(msgspec.Struct):
    """A piece of text with its exact length in each vocabulary."""

    text: str
    tokens: dict[str, int]


def pieces_of(kind: str, text: str) -> list[str]:
    """Cut a text into pieces, at most so many, from all over it."""
    size = PIECE_CHARACTERS[kind]
    cut = [text[at : at + size] for at in range(0, len(text) - size + 1, size)]
    return cut[:: max(1, len(cut) // MOST_PIECES)][:MOST_PIECES]


def prose(page: str) -> str:
    """Return the paragraphs of a page, without tables, headings and code."""
    lines = (line for line in page.splitlines() if line[:1].isalpha() or line[:1] == "*")
    return "\n".join(lines) + "\n"


def json_in_json(document: str) -> str:
    """Return a chat's record whose strings hold JSON."""
    found = msgspec.json.decode(document.encode())
    parts = [{"role": "tool", "content": json.dumps({name: one}), "seconds": 0.25} for name, one in found.items()]
    return json.dumps(parts, indent=1)


def texts() -> Pieces:
    english = "".join(prose(page.read_text()) for page in sorted((ROOT / "docs").glob("*/*.md")))
    sources = [*sorted((ROOT / "core/prfaas").glob("*/*.py")), *sorted((ROOT / "gateway").glob("*/static/*.js"))]
    code = "".join(file.read_text() for file in sources)
    documents = "".join(json_in_json(file.read_text()) for file in sorted((ROOT / "docs/openapi").glob("*.json")))
    chinese = (ROOT / "benchmarks/chinese.txt").read_text()
    found = {"english": english, "chinese": chinese, "code": code, "json": documents}
    return {kind: pieces_of(kind, text) for kind, text in found.items()}


def counters() -> dict[str, Callable[[str], int]]:
    """Return what counts the tokens of a text, by vocabulary."""
    try:
        import mistral_common
        from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    except ImportError as error:
        raise ConfigError(f"uv pip install 'mistral-common[sentencepiece]' first: {error}") from error
    data = Path(mistral_common.__file__).parent / "data"
    small = SentencePieceTokenizer(data / VOCABULARIES["32K"])
    large = Tekkenizer.from_file(data / VOCABULARIES["131K"])
    return {
        "32K": lambda text: len(small.encode(text, bos=True, eos=False)),
        "131K": lambda text: len(large.encode(text, bos=True, eos=False)),
    }


def size_of(body: bytes) -> PromptSize:
    return measured(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))


def measured(fields: Mapping[str, msgspec.Raw]) -> PromptSize:
    return prompt_size(prompt_values(fields, NAMES))


def errors_percent(counted: Mapping[str, list[Counted]], vocabulary: str) -> dict[str, tuple[float, float]]:
    """Return by kind the error of a client's estimates, and of those before it learnt."""

    def error(estimator: TokenEstimator, one: Counted) -> float:
        return abs(estimator.tokens(size_of(json.dumps({"prompt": one.text}).encode())) - one.tokens[vocabulary])

    learnt, new = TokenEstimator(), TokenEstimator()
    lessons = [one for pieces in counted.values() for one in pieces[::2]]
    for _ in range(3):
        random.Random(1).shuffle(lessons)
        for one in lessons:
            learnt.observe(size_of(json.dumps({"prompt": one.text}).encode()), one.tokens[vocabulary])
    found: dict[str, tuple[float, float]] = {}
    for kind, pieces in counted.items():
        total = sum(one.tokens[vocabulary] for one in pieces[1::2]) / 100
        after, before = (sum(error(each, one) for one in pieces[1::2]) / total for each in (learnt, new))
        found[kind] = after, before
    return found


def per_kb(work: Callable[[], object], size_bytes: int, times: int) -> float:
    """Return the microseconds of processor time for KB."""
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times / (size_bytes / 1000) * 1e6


def costs() -> Iterator[Figure]:
    """Measure what the size of a prompt costs, for KB of its body."""
    chat = {"messages": [{"role": "user", "content": "How are you? " * 20}] * 12}
    bodies = {
        f"chat of {len(json.dumps(chat)) // 1000} KB": (json.dumps(chat).encode(), SMALL_CHATS),
        "16 MB of English": (json.dumps({"prompt": "the words of a text, " * (LARGE_BYTES // 21)}).encode(), 3),
        "16 MB of escaped Chinese": (json.dumps({"prompt": "\u4e2d\u6587" * (LARGE_BYTES // 12)}).encode(), 3),
        "16 MB of token ids": (json.dumps({"prompt": list(range(100_000, 2_100_000))}).encode(), 3),
    }
    for name, (body, times) in bodies.items():
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        sizes = per_kb(partial(measured, fields), len(body), times)
        decodes = per_kb(partial(msgspec.json.decode, body), len(body), times)
        yield Figure(name=name, value=sizes, unit="us/KB", rival="JSON decoding", rival_value=decodes)


def measure(save: Save = None) -> Iterator[Figure]:
    count = counters()
    counted = {
        kind: [Counted(piece, {name: counts(piece) for name, counts in count.items()}) for piece in pieces]
        for kind, pieces in texts().items()
    }
    if save is not None:
        save.write_bytes(msgspec.json.format(msgspec.json.encode(counted), indent=1) + b"\n")
    for vocabulary in VOCABULARIES:
        for kind, (after, before) in errors_percent(counted, vocabulary).items():
            name = f"error, {kind}, {vocabulary}"
            yield Figure(
                name=name, value=after, unit="%", reach=REACH_PERCENT, rival="nothing learnt", rival_value=before
            )
    yield from costs()


if __name__ == "__main__":
    run("prompt_estimate", __doc__, measure)
