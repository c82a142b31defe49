"""The stand-in of tests keeps the contract, and whatever it breaks is found by a check: the control of every check; and
`prfaas contract` says so, line by line.
"""

import json
import math
import re

import pytest
import typer
from typer.testing import CliRunner, Result

from prfaas.cli.contract import calls
from prfaas.cli.contract.calls import CheckedEngine
from prfaas.cli.contract.checks import ALONE, PAIR, EnginePair
from prfaas.cli.contract.command import contract
from prfaas.errors import PrfaasError

from . import stand_in
from .stand_in import DATA_PORT, StandIn, stand_ins

pytestmark = pytest.mark.system
app = typer.Typer()
app.command()(contract)

DESTINATIONS = {
    "stops": ("counts prompt and answer the same", "ends with 'stop'"),
    "miscounts": ("counts prompt and answer the same", "12 tokens counts as 13"),
    "loses an id": ("gives token ids", "gives 11 token_ids"),
    "forgets": ("continues an answer from its token ids", "differs by inf nats"),
    "silent": ("counts cached tokens, by salt", "--enable-prompt-tokens-details"),
    "any salt": ("counts cached tokens, by salt", "under another cache_salt"),
    "any model": ("refuses what is wrong", "a wrong model is answered by HTTP 200"),
    "no words": ("refuses what is wrong", "without error.message"),
    "leaks": ("holds nothing for a caller that left", "is not idle again"),
    "stale state": ("hands off a prompt of 700", "differs by 3 nats"),
    "own usage": ("hands off a prompt of 700", "prompt_tokens is 1"),
    "any epoch": ("refuses a wrong epoch", "not the right one"),
    "any token": ("refuses a wrong token", "not the right one"),
    "any transfer_id": ("refuses a wrong transfer_id", "not the right one"),
    "any port": ("computes a prefix that does not come", "not the right one"),
    "any prompt": ("refuses a wrong prompt", "not the right one"),
    "never declines": ("hands off a prompt of 700", "is not idle again"),
    "needs its source": ("refuses a wrong port", "the cache did not come"),
}
SOURCES = {
    "gives nothing": ("hands over a prefix", "no cache came"),
    "twice": ("answers legs that are repeated", "HTTP [200, 500]"),
    "leaks": ("frees both when the caller of source and destination", "is not idle again"),
}


def run(*servers: StandIn, output: str = "text") -> Result:
    return CliRunner().invoke(app, [*(part for one in servers for part in ("--url", one.url)), "-o", output])


def test_a_stand_in_keeps_the_contract_and_every_check_is_listed():
    with stand_ins("", "") as servers:
        result = run(*servers)
    lines = result.stdout.splitlines()
    assert (result.exit_code, [line for line in lines if not line.startswith("ok ")]) == (0, [])
    assert len(lines) == 2 * len(ALONE) + len(PAIR)


@pytest.mark.parametrize(
    ("broken", "found"),
    [(("", name), found) for name, found in DESTINATIONS.items()]
    + [((name, ""), found) for name, found in SOURCES.items()],
)
def test_what_an_engine_breaks_is_found(
    broken: tuple[str, str], found: tuple[str, str], monkeypatch: pytest.MonkeyPatch
):
    # A pair that broke a promise may hold something for ever, and is waited for.
    monkeypatch.setattr(calls, "NOT_IDLE_SECONDS", 1.0)
    monkeypatch.setattr(stand_in, "LEASE_SECONDS", math.inf)
    (claim,) = [one for one in (*ALONE, *PAIR) if one.startswith(found[0])]
    with stand_ins(*broken) as servers:
        source, destination = (CheckedEngine(one.url) for one in servers)
        pair = EnginePair(source, destination, DATA_PORT)
        with pytest.raises(PrfaasError, match=re.escape(found[1])):
            ALONE[claim](destination) if claim in ALONE else PAIR[claim](pair)


def test_the_command_ends_with_1_and_says_what_is_broken():
    with stand_ins("any model") as servers:
        result, listed = run(*servers), run(*servers, output="json")
    assert (result.exit_code, listed.exit_code) == (1, 1)
    assert [one["holds"] for one in json.loads(listed.stdout)].count(False) == 1
    (line,) = [one for one in result.stdout.splitlines() if one.startswith("FAIL")]
    assert "refuses what is wrong by a sentence: a wrong model is answered by HTTP 200" in line
