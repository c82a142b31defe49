"""Proves on a real API server that one of two operators works, also when it is killed, frozen or cut off."""

import os
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.clusters.operator_.clock import WrongClock

from prfaas_operator.election import HARD_END_CODE, LEASE

pytestmark = pytest.mark.clusters

# A take-over takes a Lease's 15 s at most, and a look each second; the rest is for a machine with much to do.
TAKE_OVER_SECONDS = 180.0


@dataclass
class Replica:
    """One operator process; the Lease calls it by its name."""

    name: str
    process: subprocess.Popen[bytes]
    metrics_port: int
    log: Path

    def leads(self) -> bool:
        """Tell whether it says that it leads; False where it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=2) as answer:
                return "prfaas_operator_leader 1.0" in answer.read().decode()
        except OSError:
            return False

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(60)


@pytest.fixture
def replicas(ground, operators, tmp_path) -> Iterator[Callable[..., Replica]]:
    """Return a function that starts a replica of the operator."""
    started: list[Replica] = []

    def start(name: str, server: str | None = None, **variables: str) -> Replica:
        kubeconfig = operators.kubeconfig(ground.hub, tmp_path / f"{name}.kubeconfig")
        if server:
            config = yaml.safe_load(kubeconfig.read_text())
            config["clusters"][0]["cluster"]["server"] = server
            kubeconfig.write_text(yaml.safe_dump(config))
        ports, log = operators.free_ports(2), tmp_path / f"{name}.log"
        process = operators.start(ground.hub.name, kubeconfig, log, ports, "--leader-elect", POD_NAME=name, **variables)
        started.append(Replica(name, process, ports[0], log))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            os.kill(each.process.pid, signal.SIGCONT)
            each.end(signal.SIGKILL)
    if ground.hub.exists("lease", LEASE):  # nobody gave it up, and the next test would wait for its end
        ground.hub.delete("lease", LEASE)


def holder(ground) -> str:
    return ground.hub.get("lease", LEASE)["spec"].get("holderIdentity", "")


def transitions(ground) -> int:
    return ground.hub.get("lease", LEASE)["spec"]["leaseTransitions"]


def works(ground, name: str) -> None:
    """Have the leader make and remove a pool."""
    ground.hub.apply(ground.pool("DecodePool", name))
    ground.eventually(lambda: ground.hub.exists("deployment", name), f"Deployment {name}", TAKE_OVER_SECONDS)
    ground.hub.delete("dcpool", name)


def wait_leader(ground, replica: Replica) -> None:
    ground.eventually(replica.leads, f"{replica.name} leads", TAKE_OVER_SECONDS)
    assert holder(ground) == replica.name


@pytest.fixture
def pair(ground, replicas) -> tuple[Replica, Replica]:
    first = replicas("first")
    wait_leader(ground, first)
    second = replicas("second")  # ready, that is, while it stands by
    assert not second.leads()
    return first, second


def test_a_leader_that_ends_gives_the_lease_up_and_a_standby_takes_it(ground, pair):
    first, second = pair
    works(ground, "one")
    assert first.end(signal.SIGTERM) == 0, first.log.read_text()
    wait_leader(ground, second)
    works(ground, "two")
    assert second.end(signal.SIGTERM) == 0, second.log.read_text()
    assert holder(ground) == "", "an orderly end gives the Lease up"
    assert "Traceback" not in second.log.read_text()


def test_a_leader_that_thaws_after_another_took_over_writes_nothing_and_ends(ground, pair):
    first, second = pair
    ground.hub.apply(ground.pool("DecodePool", "frozen"))
    ground.eventually(lambda: ground.hub.exists("deployment", "frozen"), "Deployment frozen")
    first.process.send_signal(signal.SIGSTOP)
    wait_leader(ground, second)
    ground.hub.patch("dcpool", "frozen", {"spec": {"replicas": 3}})
    scaled = lambda: ground.hub.get("deployment", "frozen")["spec"]["replicas"] == 3  # noqa: E731
    ground.eventually(scaled, "the new leader works")
    length, changed = len(first.log.read_text()), transitions(ground)
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(60) == HARD_END_CODE, first.log.read_text()
    assert "Traceback" not in first.log.read_text()[length:]
    assert (holder(ground), transitions(ground)) == ("second", changed)
    ground.hub.delete("dcpool", "frozen")


def test_a_leader_cut_off_from_its_api_server_stops_and_leads_again_later_in_the_same_process(
    ground, hub_tap, replicas
):
    cut = replicas("cut", hub_tap.url)
    wait_leader(ground, cut)
    second = replicas("other")
    hub_tap.freeze()
    ground.eventually(lambda: not cut.leads(), "it knows by itself", TAKE_OVER_SECONDS)
    wait_leader(ground, second)
    hub_tap.thaw()
    works(ground, "elsewhere")
    assert second.end(signal.SIGTERM) == 0
    if cut.process.poll() is None:  # a machine with much to do may have ended it hard, which a kubelet heals
        wait_leader(ground, cut)
        works(ground, "again")
        assert cut.end(signal.SIGTERM) == 0, cut.log.read_text()


def test_a_container_that_starts_again_under_its_pods_name_waits_for_nothing(ground, replicas):
    first = replicas("same")
    wait_leader(ground, first)
    before = transitions(ground)
    first.end(signal.SIGKILL)
    wait_leader(ground, replicas("same"))
    assert transitions(ground) == before


def renewed(ground, times: int) -> None:
    """Wait until the holder of the Lease has renewed it some times."""
    seen: set[str] = set()

    def enough() -> bool:
        seen.add(ground.hub.get("lease", LEASE)["spec"].get("renewTime", ""))
        return len(seen) > times

    ground.eventually(enough, f"{times} renewals", TAKE_OVER_SECONDS)


def test_replicas_whose_clocks_are_hours_apart_keep_one_leader_and_hand_over_once(ground, replicas, tmp_path):
    clocks = {name: tmp_path / name for name in ("fast", "slow")}
    for folder in clocks.values():
        folder.mkdir()
    fast, slow = WrongClock(clocks["fast"], 3 * 3600), WrongClock(clocks["slow"], -3 * 3600)
    first = replicas("fast", **fast.variables)
    wait_leader(ground, first)
    before = transitions(ground)
    second = replicas("slow", **slow.variables)
    renewed(ground, 4)
    fast.set(-5 * 3600)  # the leader's clock jumps
    renewed(ground, 5)  # with those before, for longer than the Lease's 15 s
    assert (holder(ground), transitions(ground)) == ("fast", before)
    works(ground, "in-time")
    first.end(signal.SIGKILL)
    wait_leader(ground, second)
    replicas("fast", **fast.variables)
    renewed(ground, 5)
    assert (holder(ground), transitions(ground)) == ("slow", before + 1)
    works(ground, "in-other-time")
