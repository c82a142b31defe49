"""`prfaas cluster revoke` reports a success only where the hub refuses the member's certificates and routes nothing
there.

Each case lacks one part of the first one, which is the control.
"""

from typing import Any

import pytest
from tests.tables import make_instance, make_table

from prfaas.api import MemberCluster
from prfaas.wire.routes import Cluster
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
