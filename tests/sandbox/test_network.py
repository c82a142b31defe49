"""Addresses never repeat within a cluster or between clusters, and a link has a rate that is possible."""

import ipaddress

import pytest

from prfaas.errors import BadInputError
from prfaas_sandbox.network import CLUSTERS, HUB, MEMBER, checked_rate


def test_pod_addresses_are_distinct_and_inside_their_cluster():
    seen = {HUB.pod_address(index) for index in range(254 * 254)}
    assert len(seen) == 254 * 254
    assert HUB.address not in seen
    assert all(ipaddress.ip_address(address) in ipaddress.ip_network(HUB.range) for address in list(seen)[:500])
    assert HUB.pod_address(254 * 254) == HUB.pod_address(0)


def test_the_clusters_do_not_overlap():
    assert not ipaddress.ip_network(HUB.range).overlaps(ipaddress.ip_network(MEMBER.range))
    assert len({cluster.service_prefix for cluster in CLUSTERS}) == len(CLUSTERS)


@pytest.mark.parametrize("mbps", [0, -5, float("nan"), float("inf"), "fast", None])
def test_rates_that_no_link_has_are_refused(mbps):
    with pytest.raises(BadInputError):
        checked_rate(mbps)
