"""One namespace of one API server, over `prfaas.kube`: rate limit, write gate, the server's clock, and typed errors.

The hard part is the half-dead server, which accepts a connection and never answers. Every call and every watch has a
total timeout. Every failure of the session becomes an error of ours with the server's own sentence in it.
"""

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from prfaas.errors import ProtocolError, UnreachableError
from prfaas.kube.session import KubeSession, ObjectKind, OnAnswer, StatusError, bearer, encode_body, read_answer
from prfaas.kube.watch import ExpiredError, WatchEvent, watch_events
from prfaas.names import API_VERSION, FIELD_MANAGER_OPERATOR
from prfaas_operator import errors, metrics
from prfaas_operator.clusters.kinds import BY_NAME, POD, SERVICE_ACCOUNT, Object
from prfaas_operator.clusters.throttle import Throttle, requested_pause_seconds

CALL_SECONDS: Final = 5.0
PAGE_LIMIT: Final = 50
MAX_PAGES: Final = 250
MAX_OBJECTS: Final = 10_000
"""Of all kinds in one member: 5,000 pods, as many as Kubernetes lets a cluster have nodes, and as many other children.

A hostile server must not list for ever; the hub's own may list what it has. Pods that have ended do not count, since
they are not asked for: Kubernetes keeps up to 12,500 of them.
"""
MAX_LOG_BYTES: Final = 1 << 20
TRIES: Final = 3
MIN_TOKEN_SECONDS: Final = 600  # API servers refuse to grant less

NOT_FOUND: Final = 404
TOO_BUSY: Final = frozenset({429, 502, 503, 504})
ERROR_BY_STATUS: Final[Mapping[int, type[Exception]]] = {
    401: errors.UnauthorizedError,
    403: errors.ForbiddenError,
    409: errors.ConflictError,
    500: errors.ServerFailedError,
}


MayWrite = Callable[[], bool]
"""Returns false while another process may write instead of this one."""


def always() -> bool:
    """Permit every write: this process has no rival."""
    return True


class ServerClock:
    """The clock of one API server, from its answers; this machine's clock until the first answer.

    The server dates tokens, deletions and fields. These times are compared with no other clock: the operator's machine
    may be hours off, and so may the next leader's. An answer carries whole seconds and arrives a little later, so this
    clock is a second or two slow. So whatever has expired by this clock has expired.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic):
        self._monotonic = monotonic
        self._ahead_seconds: float | None = None

    def set_from(self, headers: Mapping[str, str]) -> None:
        """Set the clock from an answer's headers; some proxies send no date, which changes nothing."""
        with contextlib.suppress(ValueError, OverflowError):
            self._ahead_seconds = parsedate_to_datetime(headers.get("Date", "")).timestamp() - self._monotonic()

    def now(self) -> datetime:
        if self._ahead_seconds is None:
            return datetime.now(UTC)
        return datetime.fromtimestamp(self._ahead_seconds + self._monotonic(), UTC)


class ClusterClient:
    """One namespace of one API server.

    Every call ends within a hard timeout. All raise from `prfaas_operator.errors`: ClusterUnreachableError,
    TooManyObjectsError, ServerFailedError, UnauthorizedError, ForbiddenError, InvalidObjectError, ConflictError,
    NamespaceNotFoundError.

    Args:
        session: address and credentials; closed by `close`.
        namespace: of every namespaced object that is read or written here.
        label: the cluster's name in error messages, for example "cluster prefill-eu".
        field_manager: owner of the fields that `apply` sends; every writer needs its own, because an apply removes
            the fields that the same manager sent before and leaves out now.
        may_write: allows or refuses each write right before it.
        is_trusted: reads all that the server lists, as only the hub's own may make us do.
    """

    def __init__(
        self,
        session: KubeSession,
        namespace: str,
        label: str,
        field_manager: str = FIELD_MANAGER_OPERATOR,
        *,
        may_write: MayWrite = always,
        is_trusted: bool = False,
    ):
        self.session = session
        self.kept: Counter[ObjectKind] = Counter()
        """The objects of each kind that an informer keeps, or is about to."""
        self._max_objects = math.inf if is_trusted else session.bound(MAX_OBJECTS)
        self.namespace = namespace
        self._label = label
        self._field_manager = field_manager
        self._may_write = may_write
        self._throttle = Throttle(label)
        self._clock = ServerClock()

    def now(self) -> datetime:
        """Return the server's time, or this machine's before the first answer. It dates everything written there."""
        return self._clock.now()

    def use_token(self, token: str) -> None:
        self.session.authorization = bearer(token)

    async def close(self) -> None:
        await self.session.close()

    async def version(self) -> str:
        """Return the server's version, for example v1.34.4; the cheapest proof that it answers."""
        return str((await self._call("GET", "/version", "version", at_once=True)).get("gitVersion", ""))

    async def get(self, kind: ObjectKind, name: str) -> Object | None:
        try:
            return await self._call("GET", kind.path(self.namespace, name), f"{kind.name} {name}")
        except _NotFoundError:
            return None

    async def pages(
        self, kind: ObjectKind, *, selector: str = "", fields: str = ""
    ) -> AsyncIterator[tuple[list[Object], str]]:
        """Yield the objects that selectors of labels and of fields choose page by page, each with the version of the
        whole list.

        All pages are of one moment.
        """
        query = {"labelSelector": selector, "fieldSelector": fields, "limit": PAGE_LIMIT, "continue": ""}
        objects = 0
        for _ in itertools.count() if math.isinf(self._max_objects) else range(MAX_PAGES):
            answer = await self._call("GET", kind.path(self.namespace), kind.plural, query=query)
            metadata, items = answer["metadata"], answer.get("items") or []
            version, after = metadata.get("resourceVersion", ""), metadata.get("continue")
            del answer, metadata
            objects += len(items)
            if objects > self.room(kind):
                break
            yield items, version
            if not after:
                return
            query["continue"] = after
            del items  # not beside the next page
        bounds = f"more than {self._max_objects} objects, with its {kind.plural}, or {MAX_PAGES} pages of these"
        raise errors.TooManyObjectsError(f"{self._label} lists {bounds}: delete some, or look at its API server")

    def room(self, kind: ObjectKind) -> float:
        """Return how many objects of a kind may be read here, beside those of all other kinds that are kept."""
        return self._max_objects - self.kept.total() + self.kept[kind]

    async def list_all(self, kind: ObjectKind, *, selector: str = "") -> list[Object]:
        return [one async for items, _ in self.pages(kind, selector=selector) for one in items]

    async def try_list(self, kind: ObjectKind, *, selector: str = "") -> None:
        """List one object of a kind, to test the rights only."""
        query = {"labelSelector": selector, "limit": 1}
        await self._call("GET", kind.path(self.namespace), kind.plural, at_once=True, query=query)

    async def check_served(self, kinds: Collection[ObjectKind]) -> None:
        """Raise unless objects of our kinds can be listed and appear in the discovery, which kopf uses."""
        for kind in kinds:
            await self.try_list(kind)
        answer = await self._call("GET", f"/apis/{API_VERSION}", API_VERSION, at_once=True)
        served = {each["name"] for each in answer["resources"]}
        for kind in kinds:
            if kind.plural not in served:
                raise errors.KindNotServedError(f"{self._label} does not list {kind.plural} in its discovery yet")

    async def apply(self, body: Object, *, subresource: str = "", dry_run: bool = False) -> Object:
        """Apply a manifest under the connection's field manager, taking over contested fields; return the live object.

        With `dry_run` the server does all but store it: defaults, validation, webhooks and quotas.
        """
        kind, name = BY_NAME[body["kind"]], body["metadata"]["name"]
        path, what = kind.path(self.namespace, name, subresource), f"{kind.name} {name}"
        query = {"fieldManager": self._field_manager, "force": "true", "dryRun": "All" if dry_run else ""}
        sent = encode_body(body)
        return await self._call("PATCH", path, what, may_create=not subresource, query=query, body=sent)

    async def create(self, kind: ObjectKind, body: Object, *, dry_run: bool = False) -> Object:
        """Create an object; ConflictError when it exists. With `dry_run` the server does all but store it."""
        query, path = {"dryRun": "All" if dry_run else ""}, kind.path(self.namespace)
        return await self._call("POST", path, kind.name, may_create=True, query=query, body=body)

    async def merge(self, kind: ObjectKind, name: str, patch: Object) -> Object:
        """Apply a JSON merge patch; ConflictError when it names an old resourceVersion, or the object is gone."""
        return await self._call("PATCH", kind.path(self.namespace, name), f"{kind.name} {name}", body=patch)

    async def create_token(self, account: str, seconds: int) -> str:
        """Return a new token of a ServiceAccount for `seconds`, or for as long as the server allows."""
        spec = {"expirationSeconds": max(seconds, MIN_TOKEN_SECONDS)}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = SERVICE_ACCOUNT.path(self.namespace, account, "token")
        answer = await self._call("POST", path, f"token of ServiceAccount {account}", body=body)
        return str(answer["status"]["token"])

    async def delete(self, kind: ObjectKind, name: str, *, uid: str = "") -> None:
        """Delete one object after its dependants (foreground); do nothing if it is gone or has another uid."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if uid:
            options["preconditions"] = {"uid": uid}
        with contextlib.suppress(errors.ConflictError):
            await self._call("DELETE", kind.path(self.namespace, name), f"{kind.name} {name}", body=options)

    async def log(self, pod: str) -> str:
        """Return what the only container of a pod has written, of a long text the beginning."""
        async with self._throttle.under_way():
            path, what = POD.path(self.namespace, pod, "log"), f"log of Pod {pod}"
            with self._exchange("get", what) as note:
                async with self.session.stream("GET", path, timeout_seconds=CALL_SECONDS, on_answer=note) as response:
                    return (await read_answer(response, MAX_LOG_BYTES)).decode(errors="replace")

    async def watch(
        self, kind: ObjectKind, *, selector: str, since: str, fields: str = ""
    ) -> AsyncIterator[WatchEvent]:
        """Yield changes after resource version `since` for a window of time; ExpiredError when that is too old.

        An object that the selectors choose no longer is DELETED.
        """
        path, query = kind.path(self.namespace), {"labelSelector": selector, "fieldSelector": fields}
        await self._throttle.turn()
        with self._exchange("watch", f"watch of {kind.plural}") as note:
            async for event in watch_events(self.session, path, query, since, note):
                yield event
                del event  # as in list_and_watch

    async def _call(
        self, method: str, path: str, what: str, *, at_once: bool = False, may_create: bool = False, **sent: Any
    ) -> Object:
        """Make a call in its turn, and retry while the server is too busy: then the call had no effect."""
        for _ in range(TRIES):
            # Calls in the queue have not begun: a thousand objects at once are no sign of a dead server.
            async with self._throttle.under_way(at_once=at_once):
                # Here and not before the queue, where a call may wait for longer than the Lease lasts.
                if method != "GET" and not self._may_write():
                    raise errors.NotLeaderError(f"{self._label}, {what}: not written, another replica may lead by now")
                translated = self._exchange(method.lower(), what, may_create=may_create)
                with contextlib.suppress(_BusyError), translated as note:
                    return await self.session.call(method, path, timeout_seconds=CALL_SECONDS, on_answer=note, **sent)
        raise errors.ClusterUnreachableError(f"{self._label} is too busy, also after {TRIES} tries ({what})")

    @contextlib.contextmanager
    def _exchange(self, verb: str, what: str, *, may_create: bool = False) -> Iterator[OnAnswer]:
        """Note an answer's code and date, count the call at its end, and translate its failure into an error of ours.

        ExpiredError passes unchanged. Where the call `may_create` the object, only the namespace can be missing.
        """
        code = "none"

        def note(status: int, headers: Mapping[str, str]) -> None:
            nonlocal code
            code = str(status)
            self._clock.set_from(headers)  # A refusal has a date, too.

        try:
            yield note
        except StatusError as error:
            raise self._refusal(what, error, may_create=may_create) from error
        except UnreachableError as error:
            late = isinstance(error.__cause__, TimeoutError)
            why = f"did not answer in {CALL_SECONDS:g} s" if late else f"cannot be reached: {error.__cause__}"
            raise errors.ClusterUnreachableError(f"{self._label} {why} ({what})") from error
        except ExpiredError:
            raise
        except (ProtocolError, ValueError) as error:
            raise errors.ClusterUnreachableError(f"{self._label} did not answer with JSON: {error} ({what})") from error
        finally:
            metrics.API_REQUESTS.labels(self._label.removeprefix("cluster "), verb, code).inc()

    def _refusal(self, what: str, error: StatusError, *, may_create: bool) -> Exception:
        pause_seconds = requested_pause_seconds(error.status, error.headers)
        if pause_seconds is not None:
            self._throttle.rest(pause_seconds)
            return _BusyError(f"{self._label} is too busy: {error.message} ({what})")
        message = f"{self._label}, {what}: {error.message}"
        if error.status in TOO_BUSY:
            return errors.ClusterUnreachableError(message)
        if error.status == NOT_FOUND:
            if error.answer.get("kind") != "Status":  # A path that is not served is answered by a line of text.
                return errors.KindNotServedError(f"{self._label} does not serve this kind ({what}); install its CRD")
            if not may_create:
                return _NotFoundError(message)
            cure = f"namespace {self.namespace} does not exist; create it, or set spec.namespace"
            return errors.NamespaceNotFoundError(f"{self._label}: {cure} ({message})")
        return ERROR_BY_STATUS.get(error.status, errors.InvalidObjectError)(message)


class _NotFoundError(errors.ConflictError):
    """404 from a kind that is served; each call decides what it means."""


class _BusyError(errors.ClusterUnreachableError):
    """The server asked for a pause, which holds for all calls to it."""
