"""Proves that a token is renewed by what it says of itself, and that what is no token of an account says nothing."""

import base64
import json
from datetime import UTC, datetime, timedelta

import pytest

from prfaas_operator.plan import credentials
from prfaas_operator.render import service_account

ISSUED = 1_700_000_000


def jwt(**claims: object) -> str:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{body}.sig"


def granted(seconds: int) -> str:
    return jwt(sub="system:serviceaccount:there:prfaas-operator", iat=ISSUED, exp=ISSUED + seconds)


def at(seconds: int) -> datetime:
    return datetime.fromtimestamp(ISSUED + seconds, UTC)


def test_the_lifetime_is_the_granted_one_not_the_requested_one():
    facts = credentials.read_token(granted(3600))
    assert facts is not None
    assert (facts.namespace, facts.account, facts.lifetime) == ("there", "prfaas-operator", timedelta(hours=1))


@pytest.mark.parametrize(
    ("second", "due", "ended"), [(0, False, False), (1799, False, False), (1800, True, False), (3600, True, True)]
)
def test_a_token_is_due_at_half_its_life(second, due, ended):
    facts = credentials.read_token(granted(3600))
    assert facts is not None
    assert credentials.is_renewal_due(facts, at(second)) == due
    assert credentials.has_expired(facts, at(second)) == ended


@pytest.mark.parametrize(
    "text",
    [
        "",
        "opaque",
        "a.b.c",
        "e30.e30.x",
        "e30..x",
        jwt(sub="system:serviceaccount:a:b"),
        jwt(sub="user", iat=1, exp=2),
        jwt(sub="system:serviceaccount:a:b", iat="1", exp=2),
        jwt(sub="system:serviceaccount:a:b", iat=1, exp=10**30),
        "e30.WzFd.x",
    ],
)
def test_what_is_no_accounts_token_with_an_end_is_none_and_raises_nothing(text):
    assert credentials.read_token(text) is None
    assert not credentials.has_expired(credentials.read_token(text), datetime.now(UTC))


def test_a_new_token_takes_the_place_of_the_old_and_of_nothing_else():
    authority = "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"
    document = service_account.kubeconfig("eu", "https://1.2.3.4:6443", authority, "old")
    changed = credentials.with_token(document.encode(), "new")
    before, after = credentials.parse_kubeconfig(document.encode()), credentials.parse_kubeconfig(changed)
    assert after.token == "new"
    assert after._replace(token="old") == before
