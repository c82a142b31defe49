"""Compiles grammars, computes the allowed next tokens, and detects a complete answer.

llguidance walks the tokenizer's tokens as a trie beside an Earley parser, so a mask takes tens of microseconds. Two
things take long and run in threads, so that the step loop never waits for them. Compiling a grammar takes milliseconds,
for a huge schema seconds. The first grammar of a process builds the trie of all tokens. That holds the interpreter's
lock (0.35 to 0.75 s for 129,280 tokens). An engine that cannot afford that pause calls `Grammars.warm` first.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from prfaas.errors import InternalError, PrfaasError
from prfaas.wire.engine import Grammar
from prfaas_worker.grammars import llguidance_text, refusal, with_deep_stack
from prfaas_worker.tokenizer import Tokenizer

KEPT_GRAMMARS: Final = 32
COMPILE_THREADS: Final = 2
# Without the parser's state in its errors, which would repeat the user's whole schema.
_LIMITS: Final = LLParserLimits(verbose_errors=False)


class Vocabulary(NamedTuple):
    """Facts about a tokenizer that grammars need.

    `tokens[i]` holds the bytes of token i, the name of a special token, or b"" for an id without a token. `size` is the
    logits' width, at least len(tokens). `encode` splits forced text as the tokenizer would, without special tokens. If
    it is missing or its tokens do not spell the text, the longest tokens are used.
    """

    tokens: Sequence[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    size: int
    encode: Callable[[str], Sequence[int]] | None = None


def read_vocabulary(tokenizer: Tokenizer, eos_ids: tuple[int, ...], size: int) -> Vocabulary:
    """Return a tokenizer's vocabulary for logits of width `size`; special tokens that add text count as text."""
    tokens = [tokenizer.token_bytes(token) for token in range(size)]
    specials = {token: text for text, token in tokenizer.specials.items() if token < size and not tokens[token]}
    for token, text in specials.items():
        tokens[token] = text.encode()
    return Vocabulary(tokens, frozenset(specials), eos_ids, size, lambda text: tokenizer.encode(text, framed=False))


class Matcher:
    """The position of one answer in its grammar."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher):
        self._grammar = grammar
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """True if the answer is whole and no text may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fill(self, words: np.ndarray, ends: Collection[int], *, hold_back: bool) -> None:
        """Write the mask of allowed tokens: bit i % 32 of word i // 32 for token i, int32 [ceil(size / 32)].

        The tokens `ends` are allowed where the grammar may stop; with `hold_back` only where it must. Raises
        RequestError if the grammar is too complex or no token fits.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        if self._matcher.is_accepting():
            for token in ends:
                words[token // 32] |= _bit(token)
        if hold_back:
            without = words.copy()
            for token in ends:
                without[token // 32] &= ~_bit(token)
            if without.any():
                words[:] = without
        if not words.any():
            raise refusal(self._grammar, "no token of this model can go on from what was generated")

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance over drawn tokens. Raises RequestError if one does not fit or the grammar is too complex."""
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise refusal(self._grammar, self._matcher.get_error())


class Compiled:
    def __init__(self, grammar: Grammar, prototype: LLMatcher):
        self._grammar = grammar
        self._prototype = prototype

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning; takes about 0.1 ms."""
        return Matcher(self._grammar, self._prototype.deep_copy())


class Grammars:
    """Compiles grammars in threads, and caches the latest ones."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary]):
        self._load_vocabulary = load_vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._building = threading.Lock()
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._kept: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()

    def prepare(self, grammar: Grammar) -> Future[Compiled]:
        """Compile in a thread; called from one thread only. The future raises only PrfaasError.
        `Future.add_done_callback` runs in the compiling thread, or at once if it is done."""
        future = self._kept.get(grammar)
        if future is None or (future.done() and future.exception() is not None):
            future = self._kept[grammar] = self._pool.submit(self._compile, grammar)
        self._kept.move_to_end(grammar)
        if len(self._kept) > KEPT_GRAMMARS:
            self._kept.popitem(last=False)
        return future

    def warm(self) -> LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                self._tokenizer = build_tokenizer(self._load_vocabulary())
            return self._tokenizer

    def _compile(self, grammar: Grammar) -> Compiled:
        try:
            tokenizer, text = self.warm(), llguidance_text(grammar)
            prototype = with_deep_stack(grammar, lambda: LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS))
        except PrfaasError:
            raise
        except BaseException as error:  # a panic of the library's is no Exception
            raise InternalError(f"the grammar library failed on a {grammar.kind}: {error!r}") from error
        if prototype.is_error():
            raise refusal(grammar, prototype.get_error())
        return Compiled(grammar, prototype)


def build_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    # llguidance wants some end, a tokenizer without one too: a special token, or the last id.
    eos_ids = vocabulary.eos_ids or (max(vocabulary.special_ids, default=vocabulary.size - 1),)
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary, eos_ids[0])), eos_token=list(eos_ids))


class _Tokens:
    """The vocabulary as llguidance reads it; llguidance calls it to split forced text."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_id: int):
        self.eos_token_id = eos_id
        # Logits are often wider than the vocabulary: no text has an empty token.
        self.tokens = [*vocabulary.tokens, *[b""] * (vocabulary.size - len(vocabulary.tokens))]
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode
        texts = ((i, token) for i, token in enumerate(self.tokens) if token and i not in vocabulary.special_ids)
        self._ids = {token: i for i, token in texts}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        if self._encode is not None:
            found = list(self._encode(text.decode(errors="replace")))
            if b"".join(self.tokens[i] for i in found) == text:
                return found
        return self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """Split a text greedily; stop at a byte without a token."""
        found: list[int] = []
        while text:
            lengths = range(min(self._longest, len(text)), 0, -1)
            length = next((n for n in lengths if text[:n] in self._ids), 0)
            if not length:
                break
            found.append(self._ids[text[:length]])
            text = text[length:]
        return found


def _bit(token: int) -> np.int32:
    return np.int32(np.uint32(1 << token % 32).view(np.int32))
