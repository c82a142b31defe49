"""Proves that an informer keeps the server's latest state in any order of the news."""

# ruff: noqa: ARG002  # the fake takes what the Protocol passes
import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from prfaas.kube.session import ObjectKind
from prfaas.kube.watch import ExpiredError, WatchEvent
from prfaas_operator.clusters.informer import Informer
from prfaas_operator.clusters.kinds import DEPLOYMENT, POD, Object
from prfaas_operator.controller.hub import HubView
from prfaas_operator.controller.queue import ReconcileQueue
from prfaas_operator.errors import ClusterUnreachableError, ConflictError
from prfaas_operator.plan.credentials import Access
from prfaas_operator.plan.pod_facts import NOT_ENDED
from prfaas_operator.reconcile.members import MemberConnection


class Script:
    """A server whose lists and watches follow a script; an exception in it is raised."""

    def __init__(self, lists: list[Any], watches: list[Any]):
        self._lists = iter(lists)
        self._watches = iter(watches)
        self.done = asyncio.Event()
        self.kept: Counter[ObjectKind] = Counter()
        self.counted: list[int] = []
        """What it had counted before each page."""
        self.fields: list[str] = []
        """The field selector of each list and watch."""

    def room(self, kind: ObjectKind) -> float:
        return math.inf

    async def pages(
        self, kind: ObjectKind, *, selector: str = "", fields: str = ""
    ) -> AsyncIterator[tuple[list[Object], str]]:
        self.fields.append(fields)
        for page in next(self._lists):
            self.counted.append(self.kept[kind])
            if isinstance(page, Exception):
                raise page
            yield page

    async def watch(
        self, kind: ObjectKind, *, selector: str, since: str, fields: str = ""
    ) -> AsyncIterator[WatchEvent]:
        self.fields.append(fields)
        step = next(self._watches, None)
        if step is None:
            self.done.set()
            await asyncio.Event().wait()
        for event in step or ():
            if isinstance(event, Exception):
                raise event
            yield event


def thing(name: str, version: str) -> Object:
    return {"metadata": {"name": name, "resourceVersion": version}}


def informer_of(script: Script, reported: list[str]) -> Informer[str]:
    return Informer(
        script,  # pyright: ignore[reportArgumentType]
        POD,
        "",
        lambda one: f"{one['metadata']['name']}@{one['metadata']['resourceVersion']}",
        reported.append,
    )


async def run(script: Script, *written: Object) -> tuple[dict[str, str], list[str]]:
    """Run an informer to the end of a script, and have it learn; return its items and what it reported."""
    reported: list[str] = []
    informer = informer_of(script, reported)
    task = asyncio.create_task(informer.run())
    await asyncio.wait_for(script.done.wait(), 30)
    for one in written:
        informer.learn(one)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return informer.items, reported


async def test_an_informer_follows_pages_and_events():
    script = Script(
        [[([thing("a", "1")], "2"), ([thing("b", "2")], "2")]],
        [[WatchEvent("MODIFIED", thing("a", "3")), WatchEvent("DELETED", thing("b", "4"))], []],
    )
    items, reported = await run(script)
    assert items == {"a": "a@3"}
    assert sorted(reported[:2]) + reported[2:] == ["a@1", "b@2", "a@3", "b@4"]


@pytest.mark.parametrize(("length", "kept"), [(4000, {"b"}), (5000, {"a"})], ids=["control: not long", "long"])
async def test_a_list_with_an_object_that_takes_much_memory_is_refused(monkeypatch, length: int, kept: set[str]):
    monkeypatch.setattr("prfaas.kube.watch.FIRST_PAUSE_SECONDS", 0)
    script = Script([[([thing("b" * length, "1")], "1")], [([thing("a", "2")], "2")]], [])
    items, _ = await run(script)
    assert {name[:1] for name in items} == kept


async def test_what_it_keeps_is_counted_while_it_lists_and_while_it_watches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prfaas.kube.watch.FIRST_PAUSE_SECONDS", 0)
    first, second = ([thing("a", "1"), thing("b", "1")], "2"), ([thing("c", "2")], "2")
    deleted, added = WatchEvent("DELETED", thing("b", "3")), WatchEvent("ADDED", thing("d", "4"))
    script = Script([[first, ClusterUnreachableError("cut")], [first, second]], [[deleted], [added]])
    await run(script)
    assert script.counted == [0, 2, 0, 2], "what a list that was cut held does not count any more"
    assert script.kept == {POD: 3}


async def test_an_informer_lists_again_when_its_version_expired_and_tells_what_it_missed():
    script = Script(
        [[([thing("a", "1"), thing("b", "1")], "1")], [([thing("a", "5")], "5")]], [[ExpiredError("too old")]]
    )
    items, reported = await run(script)
    assert items == {"a": "a@5"}
    assert sorted(reported[2:]) == ["a@5", "b@1"]


async def test_an_informer_keeps_what_it_saw_while_the_server_is_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prfaas.kube.watch.FIRST_PAUSE_SECONDS", 0)
    cut = ClusterUnreachableError("cut")
    script = Script([[([thing("a", "1")], "1")], [cut], [ConflictError("x")], [([thing("a", "1")], "9")]], [[cut]])
    items, reported = await run(script)
    assert items == {"a": "a@1"}
    assert reported == ["a@1"], "nothing changed, so it reports nothing"


async def test_an_answer_that_comes_after_newer_news_changes_nothing():
    script = Script([[([thing("a", "9")], "9")]], [[WatchEvent("MODIFIED", thing("a", "11"))]])
    items, reported = await run(script, thing("a", "10"))
    assert items == {"a": "a@11"}
    assert reported == ["a@9", "a@11"]


async def test_knows_what_was_written_before_the_watch_does_and_reports_it_once():
    script = Script([[([thing("a", "9")], "9")]], [[]])
    items, reported = await run(script, thing("a", "10"), thing("deleted", "11"))
    assert items == {"a": "a@10"}
    assert reported == ["a@9", "a@10"]


async def test_news_older_than_what_was_written_changes_nothing():
    class Late(Script):
        async def watch(self, kind: ObjectKind, **asked: str) -> AsyncIterator[WatchEvent]:
            informer.learn(thing("a", "12"))
            async for event in super().watch(kind, **asked):
                yield event

    script = Late([[([thing("a", "9")], "9")]], [[WatchEvent("MODIFIED", thing("a", "11"))]])
    reported: list[str] = []
    informer = informer_of(script, reported)
    task = asyncio.create_task(informer.run())
    await asyncio.wait_for(script.done.wait(), 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert reported == ["a@9", "a@12"]


@pytest.mark.parametrize(
    "malformed", [{"metadata": {"resourceVersion": "2"}}, thing("b" * 5000, "2")], ids=["no name", "a long name"]
)
async def test_an_object_that_cannot_be_read_ends_no_informer(monkeypatch: pytest.MonkeyPatch, malformed: Object):
    monkeypatch.setattr("prfaas_operator.clusters.informer.ERROR_SECONDS", 0.01)
    script = Script([[([thing("a", "1")], "1")], [([thing("a", "5")], "5")]], [[WatchEvent("MODIFIED", malformed)]])
    items, reported = await run(script)
    assert items == {"a": "a@5"}
    assert reported == ["a@1", "a@5"]


@pytest.mark.parametrize("where", ["hub", "member"])
async def test_pods_that_have_ended_are_neither_listed_nor_watched(make: Any, where: str):
    """Kubernetes keeps more of them than a member may list. The control are children, which end only by removal."""
    for kind, fields in ((POD, NOT_ENDED), (DEPLOYMENT, "")):
        script, queue = Script([[([], "1")]], []), ReconcileQueue()
        server: Any = script
        member = MemberConnection(make.member(), Access("", ""), server, queue)
        view = HubView(server, queue) if where == "hub" else member
        task = asyncio.create_task((view.pods if kind == POD else view.children.followed[kind]).run())
        await asyncio.wait_for(script.done.wait(), 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert script.fields == [fields, fields]
