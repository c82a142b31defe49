"""The boundary between kopf and our controller: kopf's watch fills the hub's store, and its daemons run our loops.

kopf watches our four kinds, keeps the finalizer, and starts and ends the loops. Its indexing precedes every daemon:
when the first loop runs, the store holds all objects of all kinds. A daemon runs a living object's loop. At the
object's deletion kopf cancels the daemon, and the deletion handler runs the same loop until nothing is left. That
handler also serves a deletion that began while no operator ran, for which kopf starts no daemon.

kopf keeps its progress in annotations and trusts them. An annotation that kopf cannot read would block the object for
ever, its deletion too. Everybody who may edit an object may edit its annotations, so unreadable ones count as absent
here. The handlers then start anew, which is harmless: every reconcile starts from observed facts. The same holds for a
delay that another machine's clock has put far into the future.

kopf ends when the API server refuses to list a kind. A CRD that is not served for a moment is enough, or a minute of
missing rights. `follow` then restarts kopf as soon as every kind is served. Pods run on meanwhile. Nothing is changed,
because our kinds depend on each other.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from prfaas.errors import PrfaasError
from prfaas.kube.session import ObjectKind
from prfaas.names import FINALIZER, GROUP, VERSION
from prfaas_operator.controller.loop import Controller
from prfaas_operator.controller.queue import Ref
from prfaas_operator.kopf import kopf
from prfaas_operator.logs import is_refusal

log = logging.getLogger(__name__)

ANNOTATION_PREFIX: Final = f"internal.{GROUP}"
CANCEL_SECONDS: Final = 5.0
REQUEST_SECONDS: Final = 30.0
WATCH_TIMEOUT_SECONDS: Final = 60
WATCH_SLACK_SECONDS: Final = 5
ERROR_DELAYS: Final = (1, 1, 2, 3, 5, 8, 13, 21, 34, 60)
SERVED_POLL_SECONDS: Final = 1.0
END_SECONDS: Final = 15.0
"""More than kopf's own graceful end takes, and less than what a process has that was asked to end."""
CANCEL_AGAIN_SECONDS: Final = 1.0
UNREADABLE = (ValueError, RecursionError, OverflowError)
"""Errors of reading malformed JSON and dates; msgspec's and json's errors are ValueErrors."""
LONGEST_DELAY: Final = timedelta(minutes=5)
"""Several times the longest delay of our handlers."""


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: our finalizer and annotations, bounded waits, no cluster-wide watches."""
    chosen = kopf.OperatorSettings()
    chosen.persistence.finalizer = FINALIZER
    chosen.persistence.progress_storage = ProgressStorage(prefix=ANNOTATION_PREFIX)
    chosen.persistence.diffbase_storage = DiffBaseStorage(prefix=ANNOTATION_PREFIX)
    # kopf would post each of its log lines as an Event; ours are posted by events.py.
    chosen.posting.enabled = False
    chosen.scanning.disabled = True
    chosen.networking.request_timeout = REQUEST_SECONDS
    chosen.execution.default_backoff = CANCEL_SECONDS
    chosen.queueing.error_delays = ERROR_DELAYS
    # A watch whose connection died is silent for at most this long; the store is as old.
    chosen.watching.server_timeout = WATCH_TIMEOUT_SECONDS
    chosen.watching.client_timeout = WATCH_TIMEOUT_SECONDS + WATCH_SLACK_SECONDS
    return chosen


def register(controller: Controller, close: Callable[[], Awaitable[None]]) -> kopf.OperatorRegistry:
    """Return the handlers of all kinds; `close` ends the tasks of the loops."""
    registry = kopf.OperatorRegistry()
    for kind in controller.kinds:
        _register_kind(registry, controller, kind)

    @kopf.on.cleanup(registry=registry)
    async def _(**_: Any) -> None:
        # kopf waits 5 s for tasks that outlive it, so the tasks of the loops must end before.
        await close()

    return registry


def _register_kind(registry: kopf.OperatorRegistry, controller: Controller, kind: ObjectKind) -> None:
    resource, hub = (GROUP, VERSION, kind.plural), controller.hub

    @kopf.index(*resource, registry=registry, id="store")
    async def _(body: kopf.Body, **_: Any) -> None:
        # It returns nothing, so that kopf's own index stays empty: the hub's store is the index.
        hub.put(kind, dict(body))

    @kopf.on.event(*resource, registry=registry, id="gone")
    async def _(name: str, uid: str, type: str | None, **_: Any) -> None:  # noqa: A002  # kopf's name
        if type == "DELETED":
            hub.discard(kind, name, uid)

    @kopf.daemon(*resource, registry=registry, id="keep", cancellation_timeout=CANCEL_SECONDS)
    async def _(name: str, uid: str, **_: Any) -> None:
        await controller.run(Ref(kind, name), uid)

    @kopf.on.delete(*resource, registry=registry, id="remove")
    async def _(name: str, uid: str, **_: Any) -> None:
        await controller.run(Ref(kind, name), uid)


async def run_kopf(tasks: Collection[asyncio.Task[Any]], others: Collection[asyncio.Task[Any]]) -> None:
    """Wait until kopf's tasks end: when one of them ends, kopf ends all. `others` are not kopf's; the caller is one.

    A watch of kopf that is cancelled together with its pause-waiter takes that for a pause and goes on, and kopf would
    wait for it for ever. So what is left after a while is cancelled again and again.
    """
    ended = asyncio.create_task(kopf.run_tasks(tasks, ignored=others))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((ended,), timeout=END_SECONDS)
        while not ended.done():
            for task in asyncio.all_tasks().difference(others, (ended,)):
                task.cancel()
            await asyncio.wait((ended,), timeout=CANCEL_AGAIN_SECONDS)
    finally:
        ended.cancel()  # it ends with its caller
        await asyncio.wait((ended,))
    await ended


async def follow(operate: Callable[[asyncio.Event], Awaitable[None]], term: asyncio.Event) -> bool:
    """Run kopf until it ends; return true if an API server's refusal ended it, false if `term` did."""
    try:
        await operate(term)
    except Exception as error:
        if not is_refusal(error):
            raise
        log.error("the watch of our kinds ended: %s; it restarts once the API server serves every one", error)
        return True
    return False


async def until_served(is_served: Callable[[], Awaitable[None]], term: asyncio.Event) -> None:
    """Wait until every kind is served, or until `term`."""
    while not term.is_set():
        try:
            await is_served()
        except PrfaasError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SERVED_POLL_SECONDS):
                    await term.wait()
        else:
            return


class _Progress(msgspec.Struct):
    """One handler's progress, as kopf writes it."""

    started: str | None = None
    stopped: str | None = None
    delayed: str | None = None
    purpose: str | None = None
    retries: int | None = None
    success: bool | None = None
    failure: bool | None = None
    message: str | None = None
    subrefs: list[str] | None = None


class _Metadata(msgspec.Struct, frozen=True):
    """The part of the metadata that an essence keeps."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Essence(msgspec.Struct):
    """The state of an object that kopf handled last."""

    spec: dict[str, Any] = {}
    metadata: _Metadata = _Metadata()


class ProgressStorage(kopf.AnnotationsProgressStorage):
    """Progress in annotations; an unreadable record counts as absent."""

    def fetch(self, **kwargs: Any) -> Any:
        try:
            found: Any = super().fetch(**kwargs)
            record = msgspec.convert(found or {}, _Progress)
            for moment in filter(None, (record.started, record.stopped)):
                datetime.fromisoformat(moment)
            if record.delayed and _is_far(datetime.fromisoformat(record.delayed)):
                return None
        except UNREADABLE:
            return None
        return found


def _is_far(moment: datetime) -> bool:
    return moment.astimezone(UTC) > datetime.now(UTC) + LONGEST_DELAY


class DiffBaseStorage(kopf.AnnotationsDiffBaseStorage):
    """The last handled state in an annotation; an unreadable one counts as absent."""

    def fetch(self, **kwargs: Any) -> Any:
        try:
            found: Any = super().fetch(**kwargs)
            msgspec.convert(found or {}, _Essence)
        except UNREADABLE:
            return None
        return found
