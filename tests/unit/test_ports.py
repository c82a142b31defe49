"""Ports that a process gets before it listens: different, free, and none that an outgoing connection takes."""

import errno
import socket
from pathlib import Path

import pytest

from prfaas import ports
from prfaas.ports import PART_VARIABLE, PORTS, free_ports


def test_they_are_different_free_and_not_the_kernels_to_give_away():
    found = free_ports(50)
    assert len(set(found)) == 50
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(found) < low
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()


def test_processes_with_different_parts_choose_different_ones(monkeypatch):
    chosen = []
    for part in range(3):
        monkeypatch.setattr(ports, "_chosen", set())
        monkeypatch.setenv(PART_VARIABLE, f"{part}/3")
        monkeypatch.setattr(ports, "PORTS", PORTS[:90])
        chosen.append({port for _ in range(9) for port in free_ports(3)})
    assert [len(one) >= 25 for one in chosen] == [True] * 3, "and no process the same twice while others are left"
    assert sum(map(len, chosen)) == len(set.union(*chosen))


def test_skips_a_port_that_is_taken(monkeypatch):
    monkeypatch.delenv(PART_VARIABLE, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_ports(1)[0]))
        port = taken.getsockname()[1]
        monkeypatch.setattr("prfaas.ports.PORTS", range(port, port + 2))
        assert free_ports(1) == [port + 1]
        with pytest.raises(OSError, match="fewer than 2") as refused:
            free_ports(2)
        assert refused.value.errno == errno.EADDRINUSE


def test_reports_an_address_of_another_machine_at_once():
    with pytest.raises(OSError, match="assign"):
        free_ports(1, "192.0.2.1")


def test_those_of_ipv6_are_found_too():
    assert free_ports(1, "::1")[0] in PORTS
