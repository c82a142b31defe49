"""Whatever the logits, an answer under a grammar is one of the grammar's; bad grammars are the requester's error."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from prfaas.errors import InternalError, RequestError
from prfaas.wire.engine import Generate, Grammar, Sampling
from prfaas_worker.engine.grammar import Compiled, Grammars, Matcher, Vocabulary, build_tokenizer, read_vocabulary
from prfaas_worker.engine.sampling import Drawn, Outputs, Sampler, sample
from prfaas_worker.grammars import MAX_GRAMMAR_BYTES, check_grammar
from prfaas_worker.tokenizer.base import ByteTokenizer
from prfaas_worker.tokenizer.chat_template import Special

pytestmark = pytest.mark.system

BOS, EOS, END = 256, 257, 258
SIZE = 264
SPECIALS = {BOS: b"<bos>", EOS: b"<eos>", END: b"<end>"}
TOKENS = [bytes([i]) for i in range(256)] + list(SPECIALS.values())
BYTES = Vocabulary(TOKENS, frozenset(SPECIALS), (EOS, END), SIZE)
MODEL = Outputs(SIZE, BYTES.eos_ids)
MOST_TOKENS = 600

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "spouse": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "spouse"],
    "additionalProperties": False,
}
POINT = {
    "type": "object",
    "properties": {axis: {"type": "number"} for axis in "xy"},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def is_person(answer: str) -> bool:
    found = json.loads(answer)
    return (
        list(found) == ["name", "age", "tags", "spouse"]
        and len(found["name"]) <= 12
        and type(found["age"]) is int
        and 0 <= found["age"] <= 150
        and 1 <= len(found["tags"]) <= 3
        and set(found["tags"]) <= {"red", "green", "blue"}
        and found["spouse"] in (None, True, False)
    )


def is_point(answer: str) -> bool:
    found = json.loads(answer)
    return list(found) == ["x", "y"] and all(type(found[axis]) in (int, float) for axis in "xy")


def json_schema(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


ANSWERS: dict[str, tuple[Grammar, Callable[[str], Any]]] = {
    "person": (json_schema(PERSON), is_person),
    "point": (json_schema(POINT), is_point),
    "object": (json_schema({"type": "object"}), lambda answer: isinstance(json.loads(answer), dict)),
    "regex": (Grammar("regex", r"[A-Z][a-z]{2,5}-[0-9]{4}"), re.compile(r"[A-Z][a-z]{2,5}-[0-9]{4}").fullmatch),
    "lark": (
        Grammar("lark", 'start: "(" start ")" | "x"'),
        lambda answer: answer == "(" * (n := answer.count("(")) + "x" + ")" * n,
    ),
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: BYTES)


def generate(grammar: Grammar | None, seed: int, **fields: Any) -> Generate:
    sampling = fields.pop("sampling", Sampling(1.0, 1.0, 0, seed))
    return Generate(1, "r", [BOS], 1, 99, sampling, -1, "", grammar=grammar, **fields)


def samplers_of(grammar: Grammar, grammars: Grammars, count: int, **fields: Any) -> list[Sampler]:
    compiled = grammars.prepare(grammar).result()
    return [Sampler(generate(grammar, seed, **fields), 0, MODEL, compiled.matcher()) for seed in range(count)]


def ending_logits(rows: int, step: int) -> torch.Tensor:
    """Random logits of a model that likes to end strings, numbers and lists, and gets no further with blanks."""
    logits = 2 * torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(step))
    logits[:, list(b'",}])')] += 5
    logits[:, list(b" \t\r\n")] -= 5
    logits[:, [EOS, END]] += 3
    return logits


def answers(samplers: list[Sampler]) -> list[str | None]:
    """Run every sampler to its end; None for one that reached none."""
    texts: list[str | None] = [None] * len(samplers)
    running = {row: bytearray() for row in range(len(samplers))}
    for step in range(MOST_TOKENS):
        rows = list(running)
        drawn = sample(ending_logits(len(samplers), step)[rows], [samplers[row] for row in rows]) if rows else []
        for row, one in zip(rows, drawn, strict=True):
            assert one.error is None
            if one.token not in samplers[row].ends:
                running[row] += TOKENS[one.token]
                if not samplers[row].complete:
                    continue
            texts[row] = running.pop(row).decode()
    return texts


@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_to_random_logits_is_one_of_the_grammar(name: str, grammars: Grammars):
    grammar, is_valid = ANSWERS[name]
    check_grammar(grammar)
    found = answers(samplers_of(grammar, grammars, 50))
    assert [text for text in found if text is None or not is_valid(text)] == []
    assert len(set(found)) > 5


def test_without_the_grammar_random_logits_write_no_json():
    bare = [Sampler(generate(None, seed), 0, MODEL) for seed in range(50)]
    logits = [ending_logits(50, step) for step in range(40)]
    drawn = [[one.token for one in sample(step, bare)] for step in logits]
    for tokens in zip(*drawn, strict=True):
        text = b"".join(TOKENS[token] for token in tokens if token < len(TOKENS))
        with pytest.raises(json.JSONDecodeError):
            json.loads(text.decode(errors="replace"))


def test_a_sampler_made_anew_elsewhere_stands_at_the_same_place_of_the_grammar(grammars: Grammars):
    grammar = ANSWERS["person"][0]
    compiled = grammars.prepare(grammar).result()
    (first,) = samplers_of(grammar, grammars, 1)
    generated: list[int] = []
    for step in range(30):
        second = Sampler(generate(grammar, 0), 0, MODEL, compiled.matcher(), generated)
        drawn = sample(ending_logits(1, step), [first])
        assert sample(ending_logits(1, step), [second]) == drawn
        generated.append(drawn[0].token)


def test_rows_with_and_without_grammars_do_not_touch_each_other(grammars: Grammars):
    mixed = [*samplers_of(ANSWERS["regex"][0], grammars, 2), Sampler(generate(None, 7), 0, MODEL)]
    alone = Sampler(generate(None, 7), 0, MODEL)
    for step in range(8):
        logits = ending_logits(3, step)
        expected = sample(logits[2:].clone(), [alone])
        assert sample(logits, mixed)[2:] == expected


def test_an_answer_that_may_go_on_ends_with_eos_or_a_stop_token_and_not_before_min_tokens(grammars: Grammars):
    (sampler,) = samplers_of(Grammar("regex", "a+"), grammars, 1, min_tokens=3, stop_token_ids=(ord("!"),))
    logits = torch.zeros(1, SIZE)
    logits[0, ord("!")] = 99.0
    drawn = [sample(logits.clone(), [sampler])[0].token for _ in range(4)]
    assert drawn == [*b"aaa!"]
    assert sampler.ends == {EOS, END, ord("!")}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_whole_answer_ends_whatever_min_tokens_and_ignore_eos_say(ignore_eos: bool, grammars: Grammars):
    (sampler,) = samplers_of(Grammar("regex", "ab"), grammars, 1, min_tokens=9, ignore_eos=ignore_eos)
    drawn = [sample(torch.zeros(1, SIZE), [sampler])[0].token for _ in range(2)]
    assert drawn == [*b"ab"]
    assert sampler.complete
    assert sample(torch.zeros(1, SIZE), [sampler])[0].token in {EOS, END}


def test_a_grammar_that_no_token_fits_ends_its_own_request_alone():
    # This model has no digits.
    lacking = [b"" if token.isdigit() else token for token in TOKENS]
    grammars = Grammars(lambda: BYTES._replace(tokens=lacking))
    stuck, *others = samplers_of(Grammar("regex", "[0-9]"), grammars, 1) + samplers_of(
        Grammar("regex", "z"), grammars, 1
    )
    drawn = sample(torch.zeros(2, SIZE), [stuck, *others])
    assert isinstance(drawn[0].error, RequestError)
    assert drawn[0].token == -1
    assert drawn[1] == Drawn(ord("z"), None)


def test_tokens_that_do_not_follow_the_grammar_cannot_be_taken_over(grammars: Grammars):
    compiled = grammars.prepare(Grammar("regex", "ab")).result()
    with pytest.raises(RequestError, match="regex"):
        Sampler(generate(Grammar("regex", "ab"), 0), 0, MODEL, compiled.matcher(), [*b"ac"])


BAD = [
    (json_schema({"type": "objekt"}), "response_format", "objekt"),
    (Grammar("json_schema", "{"), "response_format", "json schema"),
    (json_schema({"type": "object", "unevaluatedProperties": False}), "response_format", "unevaluatedProperties"),
    (json_schema({"$ref": "http://elsewhere/schema"}), "response_format", "not present"),
    (json_schema(False), "response_format", "Unsatisfiable"),
    (Grammar("regex", "(a"), "guided_regex", "unclosed"),
    (Grammar("lark", "start: missing"), "guided_grammar", "missing"),
    (Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), "guided_regex", "bytes"),
]


@pytest.mark.parametrize(("grammar", "param", "reason"), BAD)
def test_a_bad_grammar_is_refused_with_its_field_and_reason(grammar: Grammar, param: str, reason: str):
    with pytest.raises(RequestError, match=reason) as raised:
        check_grammar(grammar)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_a_bad_grammar_that_reaches_the_engine_is_its_futures_error(grammars: Grammars):
    with pytest.raises(RequestError, match="unclosed"):
        grammars.prepare(Grammar("regex", "(a")).result()


def test_a_vocabulary_that_cannot_be_used_is_an_error_of_ours_and_not_the_requesters():
    grammars = Grammars(lambda: BYTES._replace(eos_ids=(SIZE + 7,)))
    with pytest.raises(InternalError, match="regex"):
        grammars.prepare(Grammar("regex", "a")).result()


def test_checking_a_grammar_needs_no_torch():
    code = (
        "import sys; from prfaas_worker.grammars import check_grammar; from prfaas.wire.engine import Grammar;"
        "check_grammar(Grammar('regex', 'a'));"
        "sys.exit('torch' in sys.modules or 'prfaas_worker.engine' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CHAIN = """
import itertools, json, sys
from prfaas.errors import RequestError
from prfaas.wire.engine import Grammar
from prfaas_worker.engine.grammar import Grammars, Vocabulary
from prfaas_worker.grammars import check_grammar

names = ["".join(name) for name in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=3)][: int(sys.argv[1])]
chain = {one: {"oneOf": [{"$ref": f"#/$defs/{then}"}]} for one, then in itertools.pairwise(names)}
schema = {"$ref": f"#/$defs/{names[0]}", "$defs": {**chain, names[-1]: {"type": "null"}}}
grammar = Grammar("json_schema", json.dumps(schema))
vocabulary = Vocabulary([bytes([i]) for i in range(256)] + [b"<eos>"], frozenset({256}), (256,), 257)
for work in (lambda: check_grammar(grammar), lambda: Grammars(lambda: vocabulary).prepare(grammar).result()):
    try:
        work()
        print("taken")
    except RequestError as error:
        print("refused")
"""


@pytest.mark.parametrize("length", [100, 2_000, 9_000])
def test_a_chain_of_references_ends_neither_process(length: int):
    ended = subprocess.run([sys.executable, "-c", CHAIN, str(length)], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()[-500:]
    answers = ended.stdout.split()
    assert len(answers) == 2
    assert answers == [b"taken"] * 2 or length > 100


def test_a_grammar_is_compiled_once_and_a_tokenizer_built_once():
    built = []

    def load() -> Vocabulary:
        built.append(1)
        return BYTES

    grammars = Grammars(load)
    assert built == []
    futures = [grammars.prepare(Grammar("regex", pattern)) for pattern in ("a", "b", "a")]
    assert all(isinstance(future.result(), Compiled) for future in futures)
    assert futures[0] is futures[2]
    assert built == [1]


WORDS = [b"{", b'{"', b'{"na', b"na", b"name", b'":', b'"', b":", b"1", b"}", b"1}", b" ", b"n", b"a", b"m", b"e"]


@pytest.mark.parametrize("encode", [None, lambda text: [0] * len(text)])
def test_tokens_of_several_characters_spell_the_grammar(encode: Callable[[str], list[int]] | None):
    vocabulary = Vocabulary([*WORDS, b"<eos>"], frozenset({len(WORDS)}), (len(WORDS),), 40, encode)
    schema = {
        "type": "object",
        "properties": {"name": {"const": 1}},
        "required": ["name"],
        "additionalProperties": False,
    }
    compiled = Grammars(lambda: vocabulary).prepare(json_schema(schema)).result()
    for seed in range(20):
        matcher, text = compiled.matcher(), b""
        generator = np.random.default_rng(seed)
        while not matcher.complete and len(text) < 200:
            words = np.empty(2, dtype=np.int32)
            matcher.fill(words, (), hold_back=False)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            assert allowed.max() < len(WORDS)
            assert len(allowed) <= len(WORDS)
            token = int(generator.choice(allowed))
            text += WORDS[token]
            matcher.accept([token])
        assert json.loads(text) == {"name": 1}


def test_a_tokenizers_vocabulary_has_its_bytes_and_its_special_tokens_apart():
    specials = {text.decode(): Special(token) for token, text in SPECIALS.items()}
    tokenizer = ByteTokenizer(specials, None, None)
    found = read_vocabulary(tokenizer, (EOS, END), SIZE)
    assert list(found.tokens) == TOKENS + [b""] * (SIZE - len(TOKENS))
    assert found[1:4] == (frozenset(SPECIALS), (EOS, END), SIZE)
    assert found.encode is not None
    assert found.encode('{"<eos>') == [*b'{"<eos>']


def test_a_tokenizer_without_an_end_is_usable():
    tokenizer = build_tokenizer(BYTES._replace(eos_ids=()))
    assert tokenizer.vocab_size == SIZE
    assert isinstance(
        Grammars(lambda: BYTES._replace(eos_ids=())).prepare(Grammar("regex", "a")).result().matcher(), Matcher
    )
