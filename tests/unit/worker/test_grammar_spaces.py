"""JSON's spaces are bounded wherever a schema becomes a grammar, or a small model writes nothing else."""

import pytest

from prfaas.errors import RequestError
from prfaas.wire.engine import Grammar
from prfaas_worker.engine.grammar import Grammars, Vocabulary
from prfaas_worker.grammars import check_grammar, lark_of_schema

OBJECT = '{"type":"object","properties":{"a":{"const":1}},"required":["a"]}'
OWN = '{"x-guidance":{"whitespace_pattern":" *"},' + OBJECT[1:]
BYTES = Vocabulary([bytes([byte]) for byte in range(256)], frozenset(), (256,), 264)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: BYTES)


def takes(grammars: Grammars, grammar: Grammar, answer: str) -> bool:
    check_grammar(grammar)
    try:
        grammars.prepare(grammar).result().matcher().accept(answer.encode())
    except RequestError:
        return False
    return True


AS_SCHEMA = Grammar("json_schema", OBJECT)
IN_LARK = Grammar("lark", f"start: {lark_of_schema(OBJECT)}")


@pytest.mark.parametrize("grammar", [AS_SCHEMA, IN_LARK])
@pytest.mark.parametrize("answer", ['{"a":1}', '{"a": 1}', '{\n    "a": 1\n}'])
def test_what_writers_of_json_write_fits(grammars: Grammars, grammar: Grammar, answer: str):
    assert takes(grammars, grammar, answer)


@pytest.mark.parametrize("grammar", [AS_SCHEMA, IN_LARK])
@pytest.mark.parametrize("answer", ['{"a":  1}', '{\n\n"a":1}', "{\n" + " " * 17])
def test_more_spaces_do_not(grammars: Grammars, grammar: Grammar, answer: str):
    assert not takes(grammars, grammar, answer)


def test_a_schema_may_say_itself_what_spaces_it_wants(grammars: Grammars):
    assert takes(grammars, Grammar("json_schema", OWN), '{"a":' + " " * 40 + "1}")


@pytest.mark.parametrize("schema", ["true", "["])
def test_what_is_no_object_is_left_to_the_check(schema: str):
    assert lark_of_schema(schema) == f"%json {schema}"
