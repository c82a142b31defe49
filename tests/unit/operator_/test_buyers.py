"""Proves that what the hub's Secret keeps of buyers is what they have: no certificate too few, and none too many."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.memory_cluster import MemoryCluster
from typer.testing import CliRunner, Result

from prfaas import identity
from prfaas.errors import ConfigError
from prfaas_operator import cli
from prfaas_operator.clusters import buyers
from prfaas_operator.clusters.connect import KubeContext
from prfaas_operator.errors import ConflictError
from prfaas_operator.plan import certificates_read as read
from prfaas_operator.plan.certificates import SoldCertificate, Terms

NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)
TERMS = Terms(life=24 * HOUR, authority_life=8760 * HOUR, settling=timedelta(minutes=3))
HERE = KubeContext(None, None, "ns")


class Hub(MemoryCluster):
    """The hub's API server with an authority; somebody writes its Secret between `conflicts` reads and writes."""

    def __init__(self) -> None:
        self.conflicts = 0
        pair = read.make_authority("one", NOW, TERMS, "ours.prfaas.io")
        store = read.first_store(identity.by_digest(pair.certificate), "ours.prfaas.io", pair.key)
        data = {name: base64.b64encode(content).decode() for name, content in store.data.items()}
        super().__init__({"kind": "Secret", "metadata": {"name": "prfaas-ca"}, "data": data})

    async def merge(self, _: Any, name: str, patch: Any) -> None:
        if self.conflicts:
            self.conflicts -= 1
            raise ConflictError("somebody was faster")
        self.objects["Secret", name]["data"] |= patch["data"]

    @property
    def sold(self) -> dict[str, SoldCertificate]:
        """What the Secret keeps of buyers, as the operator reads it."""
        return dict(read.read_store(self.objects["Secret", "prfaas-ca"], self.now()).buyers)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    server = Hub()

    @asynccontextmanager
    async def opened(_: KubeContext) -> AsyncIterator[Hub]:
        yield server

    monkeypatch.setattr(buyers, "open_context", opened)
    return server


def buy(out: Path) -> Result:
    return CliRunner().invoke(cli.app, ["buyer", "acme", "--out", str(out)])


def test_a_certificate_that_cannot_be_kept_is_not_made(hub: Hub, tmp_path: Path):
    (tmp_path / "tls.crt").write_text("another's")
    for out, why in ((tmp_path, "has tls.crt already"), (tmp_path / "tls.crt", "cannot be written")):
        ended = buy(out)
        assert isinstance(ended.exception, ConfigError)
        assert why in str(ended.exception)
    assert hub.sold == {}


def test_the_control_one_that_can_be_kept_is_made_and_known(hub: Hub, tmp_path: Path):
    assert buy(tmp_path / "new" / "acme").exit_code == 0
    assert {file.name for file in (tmp_path / "new" / "acme").iterdir()} == set(buyers.FILES)
    assert hub.sold.keys() == {"acme"}


@pytest.mark.parametrize(("hours", "known"), [((24, 1), [1, 24]), ((1, 24), [24]), ((24, 2, 1), [1, 2, 24])])
async def test_every_certificate_that_a_buyer_may_still_use_is_known(hub: Hub, hours: tuple[int, ...], known: Any):
    """The second one is the control: what ends before the last one is not kept."""
    for life in hours:
        await buyers.sell(HERE, "acme", life * HOUR)
    hub.clock = lambda: NOW + HOUR / 2
    ends = [one.ends for sold in hub.sold.values() for one in (sold, *sold.earlier)]
    assert [round((end - NOW) / HOUR) for end in ends] == known
    holders = read.read_store(hub.objects["Secret", "prfaas-ca"], hub.now()).buyers_at(hub.now())
    assert [one.held.leaf.validity.not_after for one in holders if one.held and one.held.leaf] == ends


async def test_an_earlier_certificate_is_known_until_it_ends_whatever_is_written_meanwhile(hub: Hub):
    for life in (24, 1):
        await buyers.sell(HERE, "acme", life * HOUR)
    for hour, known in ((2, {"acme", "other"}), (25, {"other"})):
        hub.clock = lambda hour=hour: NOW + hour * HOUR
        await buyers.sell(HERE, "other", HOUR)
        assert hub.sold.keys() == known


async def test_a_write_of_somebody_else_in_between_fails_nothing(hub: Hub):
    hub.conflicts = buyers.TRIES - 1
    await buyers.sell(HERE, "acme", HOUR)
    hub.conflicts = 1
    assert await buyers.cut_off(HERE, "acme", 0)
    assert hub.sold["acme"].refused_before is not None


async def test_whoever_always_writes_in_between_ends_the_tries(hub: Hub):
    hub.conflicts = buyers.TRIES
    with pytest.raises(ConflictError):
        await buyers.sell(HERE, "acme", HOUR)
    assert hub.sold == {}
