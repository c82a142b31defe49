"""Addresses never repeat within a cluster or between clusters, and the token bucket fits its rate."""

import ipaddress

import pytest

from prfaas.errors import BadInputError
from prfaas_sandbox.network import CLUSTERS, HUB, MEMBER, checked_rate, lose, token_bucket


def test_pod_addresses_are_distinct_and_inside_their_cluster():
    seen = {HUB.pod_address(index) for index in range(254 * 254)}
    assert len(seen) == 254 * 254
    assert HUB.address not in seen
    assert all(ipaddress.ip_address(address) in ipaddress.ip_network(HUB.range) for address in list(seen)[:500])
    assert HUB.pod_address(254 * 254) == HUB.pod_address(0)


def test_the_clusters_do_not_overlap():
    assert not ipaddress.ip_network(HUB.range).overlaps(ipaddress.ip_network(MEMBER.range))
    assert len({cluster.service_prefix for cluster in CLUSTERS}) == len(CLUSTERS)


@pytest.mark.parametrize(
    ("mbps", "rate", "burst_bytes"),
    [
        (1, "1000000bit", 8 * 1024),
        (40, "40000000bit", 100_000),
        (200, "200000000bit", 256 * 1024),
        (10_000, "10000000000bit", 1_250_000),
    ],
)
def test_bucket(mbps, rate, burst_bytes):
    command = token_bucket(mbps)
    assert command[command.index("rate") + 1] == rate
    assert command[command.index("burst") + 1] == f"{burst_bytes}b"


@pytest.mark.parametrize("mbps", [0, -5, float("nan"), float("inf"), "fast", None])
def test_rates_that_no_link_has_are_refused(mbps):
    with pytest.raises(BadInputError):
        checked_rate(mbps)


def test_whatever_the_neighbour_was_before_it_is_lost_and_found_again():
    lost, found = (lose("10.0.0.1", "eth0", lost=lost) for lost in (True, False))
    assert found[:1] == lost  # so that there is one to delete
    assert found[1] == ["ip", "neighbour", "del", "10.0.0.1", "dev", "eth0"]
