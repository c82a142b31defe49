"""A client wants the checks of its own request to stall the gateway: by a text that is read again and again."""

import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final
from unittest.mock import Mock

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from prfaas.bounds import requests
from prfaas.bounds.bodies import HeldBytes
from prfaas.bounds.requests import KNOWN_BYTES, MAX_GUIDE_BYTES, MAX_VALUES, check_fields, check_grammar, check_pattern
from prfaas.errors import RequestError
from prfaas.telemetry.tracing import OFF
from prfaas.wire.trace import read_trace
from prfaas_gateway import request
from prfaas_gateway.limits import Limits
from prfaas_gateway.request import Progress, ReadingWay, receive

SIZE: Final = MAX_GUIDE_BYTES
TOO_MANY: Final = "a: (b c){400} | (d e){400} "
"""So many repetitions that the alternatives of a rule are looked for."""
SHAPES: Final = {
    "spaces after a bracket": "x{" + " " * SIZE,
    "digits after a bracket": "x{" + "1" * SIZE,
    "zeros after a bracket": "x{" + "0" * SIZE,
    "spaces after a comma": "x{1," + " " * SIZE,
    "digits after a comma": "x{1," + "1" * SIZE,
    "brackets": "{" * SIZE,
    "brackets with spaces": "{ " * (SIZE // 2),
    "spaces after a tilde": "x ~" + " " * SIZE,
    "tildes": "~1" * (SIZE // 2),
    "repetitions": "x{1}" * (SIZE // 4),
    "lines": "\n" * SIZE,
    "names without a colon": "\n" + "a" * SIZE,
    "lines of names": "\na" * (SIZE // 2),
    "lines of spaces": "\n" + " " * SIZE,
    "colons": ":" * SIZE,
    "alternatives": TOO_MANY + "|a" * (SIZE // 2),
    "lines of alternatives": TOO_MANY + "\n|" * (SIZE // 2),
    "a literal without an end": TOO_MANY + '|"' + '\\"' * (SIZE // 2),
    "a pattern without an end": TOO_MANY + "|/" + "\\/" * (SIZE // 2),
    "a class without an end": TOO_MANY + "|[" + "a" * SIZE,
    "comments": TOO_MANY + "|" + "#\n" * (SIZE // 2),
    "literals": TOO_MANY + "|" + '""' * (SIZE // 2),
    "brackets that close": TOO_MANY + "|" + "()" * 400 + ")" * SIZE,
    "spaces before a tilde": TOO_MANY + "|x" + " " * SIZE + "~ 3",
    "a long name before a tilde": TOO_MANY + "|" + "x" * SIZE + "~ 3",
}
EXPRESSIONS: Final = [one.pattern for one in vars(requests).values() if isinstance(one, re.Pattern)]
AS_BEFORE: Final = r"(.?)\{\s*([0-9]*)\s*,?\s*([0-9]*)\s*\}"


def gives_back(expression: str, capsys: pytest.CaptureFixture[str]) -> bool:
    """Return whether an expression may read a character again, by the parser's own words."""
    capsys.readouterr()
    re.compile(expression, re.DEBUG)
    tree = capsys.readouterr().out
    assert "LITERAL" in tree
    return re.search(r"\b(MAX|MIN)_REPEAT\b", tree) is not None


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_no_expression_reads_a_character_twice(expression, capsys):
    assert not gives_back(expression, capsys)


def test_control_the_expression_of_before_does(capsys):
    assert len(EXPRESSIONS) == 3
    assert gives_back(AS_BEFORE, capsys)


@pytest.mark.parametrize("check", [check_pattern, check_grammar])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_megabyte_of_any_shape_is_checked(check, shape):
    """A cost that grows by the square would keep this test for hours."""
    with suppress(RequestError):
        check("guided_regex", shape)


def guides(**fields: Any) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in fields.items()}


def test_all_guides_of_a_body_have_one_bound_of_bytes():
    half = "x" * (SIZE // 2 - 2)
    check_fields(guides(tools=half, text=half))
    with pytest.raises(RequestError, match=r"^text and fields like it have \d+ bytes"):
        check_fields(guides(tools=half, text=half + "x"))


def test_all_guides_of_a_body_have_one_bound_of_values():
    most = [0] * (MAX_VALUES // 2 - 1)
    check_fields(guides(tools=most, text=most))
    with pytest.raises(RequestError, match="hold more than 50000 values"):
        check_fields(guides(tools=most, text=[*most, 0]))


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_sequences", "stop_regex"])
def test_a_million_stops_are_not_decoded(name, monkeypatch):
    monkeypatch.setattr(requests, "_decoded", None)
    with pytest.raises(RequestError, match="at most 64 strings"):
        check_fields(guides(**{name: [""] * 1_000_000}))


def posted(body: bytes) -> Any:
    async def pieces() -> AsyncIterator[bytes]:
        yield body

    return make_mocked_request("POST", "/v1/completions", payload=Mock(iter_any=pieces))


async def read_in(body: bytes, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """Return the thread that checks a body and makes its salt."""
    threads: list[threading.Thread] = []

    def salt_of(sent: str) -> str:
        threads.append(threading.current_thread())
        return f"{sent} of a"

    monkeypatch.setattr(request, "check_fields", lambda _: threads.append(threading.current_thread()))
    progress = Progress(OFF.start("request", read_trace({})))
    with HeldBytes(SIZE).place("a", "") as place:
        got, fields = await receive(posted(body), progress, Limits(), place, lambda _: ReadingWay(True, salt_of))
    assert (got.model, bytes(fields["model"]), got.has_every_field) == ("m", b'"m"', True)
    assert json.loads(got.body) == json.loads(body) | {"cache_salt": "s of a"}
    assert got.fields == fields == msgspec.json.decode(got.body, type=dict[str, msgspec.Raw])
    check, salt = threads
    assert check is salt
    return check


async def test_a_large_body_is_checked_beside_the_event_loop(monkeypatch):
    large = json.dumps({"model": "m", "cache_salt": "s", "tools": "x" * KNOWN_BYTES}).encode()
    assert await read_in(large, monkeypatch) is not threading.current_thread()


async def test_control_a_small_one_is_checked_at_once(monkeypatch):
    assert await read_in(b'{"model": "m", "cache_salt": "s"}', monkeypatch) is threading.current_thread()
