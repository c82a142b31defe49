"""Days of the operator's passes over certificates, by a clock of their own: how long each one lives and is used, who
accepts whom meanwhile, and what is asked of an issuer."""

import base64
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from tests.memory_cluster import MemoryCluster

from prfaas import identity
from prfaas.errors import IdentityError
from prfaas.names import AUTHORITY_SECRET, GATEWAY_TLS_SECRET, HUB, TLS_SECRET, TLS_SETTLE
from prfaas.rights import GATEWAY, WORKER
from prfaas.telemetry.tracing import OFF
from prfaas_operator.controller.queue import ReconcileQueue
from prfaas_operator.options import OperatorOptions
from prfaas_operator.plan.certificates import CertificateMode
from prfaas_operator.plan.conditions import CERTIFICATE_READY
from prfaas_operator.reconcile.certificates import Certificates
from prfaas_operator.serve import assemble

START: Final = datetime(2026, 3, 1, tzinfo=UTC)
HOUR: Final = timedelta(hours=1)
MINUTE: Final = timedelta(minutes=1)
LATE: Final = 3 * MINUTE
"""An instance may read a Secret this long after it was written, by default."""
SECRETS: Final = (TLS_SECRET, GATEWAY_TLS_SECRET)


class Days:
    """An operator with the default flags, and the time."""

    def __init__(self, server: MemoryCluster | None = None, **flags: Any):
        self.server = server or MemoryCluster()
        self.now = START
        self.server.clock = lambda: self.now
        options = OperatorOptions("ns", "reg/g:1", "reg/w:1", "reg/c:1", **flags)
        self.certificates: Certificates = assemble(
            self.server,  # pyright: ignore[reportArgumentType]  # only what this test needs
            lambda *_: pytest.fail("there is no member"),
            ReconcileQueue(),
            options,
            OFF,
        ).certificates

    async def pass_at(self, now: datetime) -> None:
        self.now = now
        await self.certificates._pass()

    def files(self, secret: str) -> dict[str, bytes]:
        data = self.server.objects["Secret", secret]["data"]
        return {name: base64.b64decode(text) for name, text in data.items()}

    def facts(self, secret: str, now: datetime) -> identity.CertificateFacts:
        """Check a Secret as peers of its instances do; raises where they refuse it."""
        files = self.files(secret)
        return identity.check(files["tls.crt"], files["tls.key"], files["ca.crt"], now)


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


def accepts(one: dict[str, bytes], other: dict[str, bytes], now: datetime) -> bool:
    """Return whether who holds these files takes the certificate of who holds the others."""
    der = x509.load_pem_x509_certificate(other["tls.crt"]).public_bytes(Encoding.DER)
    try:
        return identity.check_peer(der, one["ca.crt"], now, identity.PeerRules()).cluster == HUB
    except IdentityError:
        return False


@pytest.mark.parametrize(("hours", "rotations", "all_accept"), [(0.25, 6, True), (1 / 15, 20, False)])
async def test_in_an_hour_of_six_rotations_nobody_refuses_another_however_late_it_reads(
    hours: float, rotations: int, all_accept: bool
):
    """The control: a third of four minutes is less than an instance may be late, whatever the operator was given."""
    days, held = (
        Days(certificate_hours=hours, certificate_settle_seconds=60),
        {secret: list[tuple[datetime, dict[str, bytes]]]() for secret in SECRETS},
    )
    await days.pass_at(START)
    refusals = 0
    for minute in range(61):
        now = START + minute * MINUTE
        await days.pass_at(now)
        for secret, versions in held.items():
            if not versions or versions[-1][1] != days.files(secret):
                versions.append((now, days.files(secret)))
        present = [
            files
            for versions in held.values()
            for at, (_, files) in enumerate(versions)
            if at + 1 == len(versions) or now - versions[at + 1][0] < LATE
        ]
        refusals += sum(not accepts(one, other, now) for one in present for other in present)
    assert {len(versions) - 1 for versions in held.values()} == {rotations}
    assert (refusals == 0) is all_accept


async def test_instances_hear_within_what_time_all_of_them_have_read_a_secret():
    days = Days(certificate_settle_seconds=600)
    for _ in range(2):
        await days.pass_at(START)
    assert {days.files(secret)[TLS_SETTLE] for secret in SECRETS} == {b"600"}


ISSUER: Final = {"certificates": CertificateMode.ISSUER, "certificate_issuer": "Issuer.cert-manager.io/ours"}
DOMAIN: Final = "ours.example"
SIGNER: Final = identity.make_authority("an issuer", identity.valid_for(START, 365))


def issue(days: Days, part: str, ends: datetime) -> None:
    """Do what cert-manager would."""
    name = "prfaas-hub-issued" if part == WORKER else "prfaas-hub.gateway-issued"
    pair = identity.issue(SIGNER, HUB, identity.Validity(START, ends), part, DOMAIN)
    data = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": SIGNER.certificate}
    encoded = {entry: base64.b64encode(text).decode() for entry, text in data.items()}
    metadata = {"name": name, "uid": name, "resourceVersion": "1"}
    days.server.objects["Secret", name] = {"kind": "Secret", "metadata": metadata, "data": encoded}


@pytest.fixture
async def issued() -> Days:
    """A hub with both certificates of an issuer, which end together."""
    made = Days(**ISSUER, trust_domain=DOMAIN)
    for part in (WORKER, GATEWAY):
        issue(made, part, START + 24 * HOUR)
    for _ in range(2):
        await made.pass_at(START)
    assert {made.facts(secret, START).domain for secret in SECRETS} == {DOMAIN}
    return made


def asked(days: Days) -> set[str]:
    """Return the identities that the issuer is asked for."""
    return {
        uri for (kind, _), one in days.server.objects.items() if kind == "Certificate" for uri in one["spec"]["uris"]
    }


async def test_an_issuer_is_asked_for_nothing_else_while_the_authorities_are_lost(issued: Days):
    """An operator that starts then knows no trust domain, and would ask for another one's identities."""
    before, backup = asked(issued), issued.server.objects.pop(("Secret", AUTHORITY_SECRET))
    again = Days(issued.server, **ISSUER)
    await again.pass_at(START + HOUR)
    assert asked(again) == before == {f"spiffe://{DOMAIN}/cluster/hub/{part}" for part in (WORKER, GATEWAY)}
    assert again.certificates.conditions(HUB)[CERTIFICATE_READY].reason == "AuthorityMissing"
    issued.server.objects["Secret", AUTHORITY_SECRET] = backup
    await again.pass_at(START + 2 * HOUR)
    assert asked(again) == before
    assert again.certificates.conditions(HUB)[CERTIFICATE_READY].reason == "Issued"


async def test_two_certificates_of_an_issuer_that_end_apart_are_reported_once(
    issued: Days, caplog: pytest.LogCaptureFixture
):
    """The control: two that end within ten minutes of each other, as peers run out, are not."""
    for ends, reports in ((5 * MINUTE, 0), (HOUR, 1)):
        issue(issued, GATEWAY, START + 24 * HOUR + ends)
        for _ in range(3):
            await issued.pass_at(START + HOUR)
        warnings = [one.message for one in caplog.records if "cmctl renew prfaas-hub prfaas-hub.gateway" in one.message]
        assert len(warnings) == reports
