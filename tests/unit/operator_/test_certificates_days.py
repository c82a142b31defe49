"""Days of the operator's passes over certificates, by a clock of their own: how long each one lives and is used."""

import base64
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from tests.memory_cluster import MemoryCluster

from prfaas import identity
from prfaas.errors import IdentityError
from prfaas.names import GATEWAY_TLS_SECRET, TLS_SECRET
from prfaas.telemetry.tracing import OFF
from prfaas_operator.controller.queue import ReconcileQueue
from prfaas_operator.options import OperatorOptions
from prfaas_operator.reconcile.certificates import Certificates
from prfaas_operator.serve import assemble

START: Final = datetime(2026, 3, 1, tzinfo=UTC)
HOUR: Final = timedelta(hours=1)
SECRETS: Final = (TLS_SECRET, GATEWAY_TLS_SECRET)


class Days:
    """An operator with the default flags, and the time."""

    def __init__(self, server: MemoryCluster | None = None, **flags: Any):
        self.server = server or MemoryCluster()
        self.now = START
        self.server.clock = lambda: self.now
        options = OperatorOptions("ns", "reg/g:1", **flags)
        self._certificates: Certificates = assemble(
            self.server,  # pyright: ignore[reportArgumentType]  # only what this test needs
            lambda *_: pytest.fail("there is no member"),
            ReconcileQueue(),
            options,
            OFF,
        ).certificates

    async def pass_at(self, now: datetime) -> None:
        self.now = now
        await self._certificates._pass()

    def facts(self, secret: str, now: datetime) -> identity.CertificateFacts:
        """Check a Secret as peers of its instances do; raises where they refuse it."""
        data = self.server.objects["Secret", secret]["data"]
        certificate, key, trusted = (base64.b64decode(data[name]) for name in ("tls.crt", "tls.key", "ca.crt"))
        return identity.check(certificate, key, trusted, now)


@pytest.fixture
async def days() -> Days:
    made = Days()
    for _ in range(2):  # the authority, then what it signs
        await made.pass_at(START)
    return made


@pytest.mark.parametrize("secret", SECRETS)
async def test_for_days_every_certificate_is_renewed_hours_before_its_end(days: Days, secret: str):
    lives, ends = set[timedelta](), set[datetime]()
    for hour in range(1, 10 * 24):
        now = START + hour * HOUR
        await days.pass_at(now)
        begin, end = days.facts(secret, now).validity
        assert end - now > 7 * HOUR
        lives.add(end - begin - identity.CLOCK_SKEW)
        ends.add(end)
    assert lives == {24 * HOUR}
    assert len(ends) == 10 * 24 // 16, "each is used for 16 hours"


async def test_control_an_operator_that_is_away_for_a_day_leaves_nothing_valid(days: Days):
    assert days.facts(TLS_SECRET, START + 23.9 * HOUR)
    with pytest.raises(IdentityError, match="expired"):
        days.facts(TLS_SECRET, START + 24.1 * HOUR)
    await days.pass_at(START + 25 * HOUR)
    assert days.facts(TLS_SECRET, START + 25 * HOUR), "and it heals"


async def test_certificates_of_longer_lives_are_replaced_at_once():
    before = Days(certificate_hours=90 * 24)
    for _ in range(2):
        await before.pass_at(START)
    assert before.facts(TLS_SECRET, START).validity.not_after == START + 90 * 24 * HOUR
    after = Days(before.server)
    await after.pass_at(START + HOUR)
    for secret in SECRETS:
        assert after.facts(secret, START + HOUR).validity.not_after == START + 25 * HOUR


@pytest.mark.parametrize("lost", SECRETS)
async def test_the_hubs_two_certificates_end_together_also_after_one_of_them_was_lost(days: Days, lost: str):
    """Whose own is good refuses an expired one: between two ends gateways would reach no instance."""
    now = START + 8 * HOUR
    await days.pass_at(now)
    del days.server.objects["Secret", lost]
    for _ in range(2):
        await days.pass_at(now)
    assert {days.facts(secret, now).validity.not_after for secret in SECRETS} == {now + 24 * HOUR}
