"""Proves that the check of `helm test` says what is missing, each thing by its name, and waits for what comes late."""

import pytest

from prfaas.errors import PeerError
from prfaas_operator import installed

KINDS = ("memberclusters", "prefillpools", "decodepools", "prfaaspolicies")
SLICE = {
    "ports": [{"name": "metrics", "port": 9090}, {"name": "health", "port": 8081}],
    "endpoints": [
        {"addresses": ["10.0.0.7"], "conditions": {"ready": True}},
        {"addresses": ["10.0.0.8"], "conditions": {"ready": False}},
        {"addresses": ["fd00::9"], "conditions": {"ready": True}},
    ],
}


class Server:
    """Answers calls by the end of their path; an exception is raised once, then what follows it counts."""

    def __init__(self, **answers):
        self.answers = {name: list(replies) for name, replies in answers.items()}

    async def call(self, method: str, path: str, **_: object) -> dict:
        assert method == "GET"
        kind = "kinds" if path.endswith("/v1alpha1") else "deployment" if "deployments" in path else "slices"
        replies = self.answers[kind]
        answer = replies.pop(0) if len(replies) > 1 else replies[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def served(*names: str) -> dict:
    return {"resources": [{"name": name} for name in names]}


def deployment(ready: int) -> dict:
    return {"spec": {"replicas": 1}, "status": {"readyReplicas": ready} if ready else {}}


async def test_every_kind_must_be_served():
    assert "prefillpools" in await installed.kinds_are_served(Server(kinds=[served(*KINDS)]), "ns")
    with pytest.raises(PeerError, match="does not serve decodepools, prfaaspolicies: install the CRDs"):
        await installed.kinds_are_served(Server(kinds=[served(*KINDS[:2])]), "ns")


async def test_an_operator_without_a_ready_pod_is_not_available():
    assert "1 ready pods of 1" in await installed.operator_is_available(Server(deployment=[deployment(1)]), "ns")
    with pytest.raises(PeerError, match="Deployment ns/prfaas-operator has no ready pod of 1"):
        await installed.operator_is_available(Server(deployment=[deployment(0)]), "ns")


async def test_reports_a_service_that_leads_nowhere():
    with pytest.raises(PeerError, match="has no ready pod"):
        await installed.metrics_are_answered(Server(slices=[{"items": [SLICE | {"endpoints": []}]}]), "ns")


def test_reads_metrics_only_of_ready_pods():
    assert installed.addresses(SLICE) == [("10.0.0.7", 9090), ("[fd00::9]", 9090)]


@pytest.fixture
def metrics(monkeypatch):
    """What the operator's /metrics says."""
    texts = {"text": "prfaas_operator_leader 1"}

    async def text(_: str) -> str:
        return texts["text"]

    monkeypatch.setattr(installed, "_text", text)
    monkeypatch.setattr(installed, "POLL_SECONDS", 0)
    return texts


async def test_waits_for_what_comes_late(metrics):
    late = [PeerError("not yet"), served(*KINDS)]
    server = Server(kinds=late, deployment=[deployment(0), deployment(1)], slices=[{"items": [SLICE]}])
    lines: list[str] = []
    assert await installed.check(server, "ns", 60, lines.append)
    assert [line.split()[0] for line in lines] == ["ok"] * 3


async def test_one_failure_does_not_hide_the_next(metrics):
    metrics["text"] = "something_else 1"
    server = Server(kinds=[served()], deployment=[deployment(1)], slices=[{"items": [SLICE]}])
    lines: list[str] = []
    assert not await installed.check(server, "ns", 0, lines.append)
    assert [line.split()[0] for line in lines] == ["FAILED", "ok", "FAILED"]
    assert "another program listens there" in lines[-1]
