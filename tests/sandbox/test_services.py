"""A port of a Service leads to the ready pods behind it, at their own port."""

import pytest

from prfaas.errors import UnreachableError
from prfaas_sandbox.forward import endpoints

SERVICE = {
    "metadata": {"name": "web"},
    "spec": {"ports": [{"name": "http", "port": 80}, {"name": "metrics", "port": 9090}]},
}
SLICE = {
    "ports": [{"name": "http", "port": 8080}, {"name": "metrics", "port": 9091}],
    "endpoints": [
        {"addresses": ["10.244.1.1"], "conditions": {"ready": True}},
        {"addresses": ["10.244.1.2"], "conditions": {"ready": False}},
    ],
}


@pytest.mark.parametrize(("port", "target"), [(80, 8080), ("http", 8080), (9090, 9091)])
def test_ports_are_mapped_and_unready_pods_left_out(port, target):
    assert endpoints(SERVICE, [SLICE], port) == [("10.244.1.1", target)]


def test_a_service_of_one_port_needs_no_name():
    service = {"metadata": {"name": "web"}, "spec": {"ports": [{"port": 80}]}}
    ready = {"addresses": ["10.244.1.1"], "conditions": {"ready": True}}
    assert endpoints(service, [{"ports": [{"name": "", "port": 1}], "endpoints": [ready]}], 80) == [("10.244.1.1", 1)]


def test_nothing_ready_is_an_empty_answer_and_a_wrong_port_an_error():
    assert endpoints(SERVICE, [{"ports": None, "endpoints": None}], 80) == []
    with pytest.raises(UnreachableError, match="web has no port 81; it has: 80, 9090"):
        endpoints(SERVICE, [SLICE], 81)
