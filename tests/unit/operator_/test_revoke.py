"""`prfaas cluster revoke` reports a success only where the hub refuses the member's certificates and routes nothing
there.

Each case lacks one part of the first one, which is the control.
"""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.memory_cluster import MemoryCluster
from tests.tables import make_instance, make_table
from typer.testing import CliRunner, Result

from prfaas.api import MemberCluster
from prfaas.errors import ConfigError
from prfaas.kube.session import ObjectKind
from prfaas.names import ROUTES_KEY
from prfaas.wire.routes import Cluster, encode
from prfaas_operator import cli, join
from prfaas_operator.clusters.kinds import CONFIG_MAP, Object
from prfaas_operator.errors import ForbiddenError
from prfaas_operator.join import missing_for_revocation

from .conftest import member

EU = Cluster(name="eu", capacity_mbps=1, utilisation_query="")
ELSEWHERE = make_table(clusters=(Cluster(name="us", capacity_mbps=1, utilisation_query=""),))


def condition(kind: str, reason: str, generation: int = 3) -> dict[str, Any]:
    return {
        "type": kind,
        "status": "False",
        "reason": reason,
        "message": "why",
        "observedGeneration": generation,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


READY, REFUSED = condition("Ready", "Revoked"), condition("CertificateReady", "Revoked")


def cut_off(*conditions: dict[str, Any], revoked: bool = True, **status: Any) -> MemberCluster:
    found = member(revoked=revoked).model_dump(by_alias=True)
    return MemberCluster.model_validate(found | {"status": {"conditions": list(conditions), **status}})


@pytest.mark.parametrize("conditions", [(READY, REFUSED), (READY,)])
def test_nothing_is_missing_where_all_of_it_is_done(conditions):
    """The second one is an installation that issues no certificates."""
    assert missing_for_revocation(cut_off(*conditions), {"kimi": ELSEWHERE}) == ""


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        (cut_off(READY, REFUSED, revoked=False), "spec.revoked is not set"),
        (cut_off(), "no operator has reconciled it"),
        (cut_off(condition("Ready", "Revoked", 2), REFUSED), "no operator has reconciled it"),
        (cut_off(condition("Ready", "AllReady"), REFUSED), "older than this command, reports AllReady: why"),
        (cut_off(condition("Ready", "Paused"), REFUSED), "reports Paused"),
        (cut_off(READY, REFUSED, admittedTime="2026-01-01T00:00:00Z"), "reports Revoked"),
        (cut_off(READY, condition("CertificateReady", "Revoking")), "CertificateReady is Revoking: why"),
    ],
)
def test_what_is_missing_is_named(found, missing):
    assert missing in missing_for_revocation(found, {})


@pytest.mark.parametrize("table", [make_table(clusters=(EU,)), make_table(make_instance("x0"))])
def test_a_policy_that_still_routes_there_is_named(table):
    missing = missing_for_revocation(cut_off(READY, REFUSED), {"a": ELSEWHERE, "kimi": table})
    assert missing.startswith("PrfaaSPolicy kimi still routes prompts there")


class Hub(MemoryCluster):
    """A hub whose operator has cut the member off, with one policy; `forbids` a kind."""

    forbids: ObjectKind | None = None

    def __init__(self, table: bytes):
        cluster = cut_off(READY, REFUSED).model_dump(by_alias=True, mode="json", exclude_none=True)
        data = {ROUTES_KEY: base64.b64encode(table).decode()}
        super().__init__(
            {"kind": "MemberCluster", **cluster},
            {"kind": "PrfaaSPolicy", "metadata": {"name": "kimi"}},
            {"kind": "ConfigMap", "metadata": {"name": "kimi-routes"}, "binaryData": data},
        )

    async def merge(self, kind: ObjectKind, name: str, patch: Object) -> None:
        self.objects[kind.name, name]["spec"] |= patch["spec"]

    async def get(self, kind: ObjectKind, name: str) -> Object | None:
        if kind == self.forbids:
            raise ForbiddenError("not for you")
        return await super().get(kind, name)


def revoke(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Result:
    @asynccontextmanager
    async def opened(_: Any) -> AsyncIterator[Hub]:
        yield hub

    monkeypatch.setattr(join, "open_context", opened)
    return CliRunner().invoke(cli.app, ["revoke", "eu", "--wait-seconds", "0"])


def test_a_success_says_whether_the_tables_were_looked_into(monkeypatch: pytest.MonkeyPatch):
    hub = Hub(encode(ELSEWHERE))
    looked = revoke(monkeypatch, hub)
    hub.forbids = CONFIG_MAP
    did_not = revoke(monkeypatch, hub)
    assert (looked.exit_code, did_not.exit_code) == (0, 0)
    assert "eu is revoked" in looked.output
    assert "routing tables not checked" not in looked.output
    assert "routing tables not checked: your account may not get ConfigMaps" in did_not.output


@pytest.mark.parametrize("table", [b"", b"no table", b'{"format": 2}'])
def test_a_table_that_cannot_be_read_counts_as_one_that_may_have_the_member(monkeypatch: pytest.MonkeyPatch, table):
    ended = revoke(monkeypatch, Hub(table))
    assert isinstance(ended.exception, ConfigError)
    assert "ConfigMap kimi-routes cannot be read by this version" in str(ended.exception)


def test_a_policy_without_a_table_routes_nothing(monkeypatch: pytest.MonkeyPatch):
    hub = Hub(b"")
    del hub.objects["ConfigMap", "kimi-routes"]
    assert revoke(monkeypatch, hub).exit_code == 0


def test_the_control_a_table_with_the_member_is_found(monkeypatch: pytest.MonkeyPatch):
    ended = revoke(monkeypatch, Hub(encode(make_table(clusters=(EU,)))))
    assert isinstance(ended.exception, ConfigError)
    assert "PrfaaSPolicy kimi still routes prompts there" in str(ended.exception)
