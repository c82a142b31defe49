"""Proves what nodes' labels and allocatable devices are taken for, and that the largest packet is found exactly."""

import pytest

from prfaas.util import MIB
from prfaas_operator.preflight.facts import accelerators, kind_of
from prfaas_operator.preflight.probe import SCRAPE, SMALLEST_BYTES, largest_crossing


def node(product: str = "", count: int | str = 8, mib: str = "", *, is_closed: bool = False, resource="nvidia.com/gpu"):
    labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": mib}
    spec = {"unschedulable": True} if is_closed else {}
    return {"metadata": {"labels": labels}, "spec": spec, "status": {"allocatable": {resource: str(count), "cpu": "8"}}}


@pytest.mark.parametrize(
    ("product", "mib", "kind"),
    [
        ("NVIDIA-H200", 143_771, "h200"),
        ("NVIDIA-H100-80GB-HBM3", 81_559, "h100"),
        ("nvidia-h100-80gb", None, "h100"),
        ("NVIDIA-L40S", 46_068, "l40s"),
        ("NVIDIA-A100-SXM4-80GB", 81_920, "a100"),
        ("NVIDIA-A100-SXM4-40GB", 40_960, None),
        ("NVIDIA-H20", 97_871, "h20"),
        ("NVIDIA-H20", 143_771, "h20-141"),
        ("NVIDIA-GB200", None, "gb200"),
        ("NVIDIA-B200", None, "b200"),
        ("NVIDIA-GH200-480GB", None, None),
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", 9_728, None),
        ("NVIDIA-H100-80GB-HBM3-SHARED", None, None),
        ("AMD-Instinct-MI300X", None, None),
        ("", None, None),
    ],
)
def test_a_product_is_a_kind_of_the_planner_only_if_it_is_that_device(product, mib, kind):
    assert kind_of(product, mib * MIB if mib else None) == kind


def test_equal_devices_are_counted_over_nodes_that_take_pods():
    nodes = [node("NVIDIA-L40S", 4), node("NVIDIA-H200", 8, "143771"), node("NVIDIA-H200", 8, "143771")]
    most, other = accelerators([*nodes, node("NVIDIA-H200", 8, is_closed=True), node("NVIDIA-H200", 0), node(count=0)])
    assert (most.kind, most.devices, most.nodes) == ("h200", 16, (8, 8))
    assert (other.kind, other.devices) == ("l40s", 4)


def test_amds_devices_are_counted_too():
    (found,) = accelerators([node(count=8, resource="amd.com/gpu")])
    assert (found.resource, found.devices, found.kind) == ("amd.com/gpu", 8, None)


@pytest.mark.parametrize("largest", [576, 577, 1280, 1304, 1499])
@pytest.mark.parametrize("lost", [1500, 9000])
def test_the_largest_packet_is_found_to_the_byte(largest, lost):
    assert largest_crossing(lambda size: size <= largest, lost) == largest


def test_where_not_even_the_smallest_packet_crosses_none_is_named():
    assert largest_crossing(lambda _: False, 1500) == 0
    assert largest_crossing(lambda _: True, SMALLEST_BYTES) == 0


def test_the_scrape_interval_is_the_global_one():
    jobs = "scrape_configs:\n- job_name: a\n  scrape_interval: 1s\n"
    found = SCRAPE.search(f"global:\n  scrape_timeout: 10s\n  scrape_interval: 15s\n  evaluation_interval: 1m\n{jobs}")
    assert found
    assert found[1] == "15s"
    assert SCRAPE.search(f"global:\n  scrape_timeout: 10s\n{jobs}") is None
