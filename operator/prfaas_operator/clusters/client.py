"""`api.Cluster` over kubernetes.aio's dynamic client.

The hard part is the half-dead server, which accepts a connection and answers nothing: the library's default waits for
five minutes. Here every call and every watch carries a total timeout, and everything the client or the network can
raise becomes an error of ours with the server's own sentence in it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.watch import Watch

from prfaas.names import API_VERSION, FIELD_MANAGER_OPERATOR
from prfaas_operator import errors
from prfaas_operator.clusters.api import BY_NAME, SERVICE_ACCOUNT, Kind, Object, Page, WatchEvent
from prfaas_operator.clusters.clock import ServerClock
from prfaas_operator.clusters.throttle import Throttle, asked_rest_seconds

log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 4.0
CALL_SECONDS: Final = 5.0
WATCH_SECONDS: Final = 60
WATCH_SLACK_SECONDS: Final = 5.0
PAGE_LIMIT: Final = 500
TRIES: Final = 3
MIN_TOKEN_SECONDS: Final = 600  # an API server refuses to grant less

NOT_FOUND: Final = 404
CONFLICT: Final = 409
GONE: Final = 410
TOO_BUSY: Final = frozenset({429, 502, 503, 504})


class Probe(NamedTuple):
    """An answer to the simplest question: the server's version and clock (whole seconds), when and how long it took."""

    version: str
    date: datetime
    asked_at: datetime
    seconds: float


class Gate(NamedTuple):
    """What stands between a process and its writes, and who is told of its calls: (cluster, verb, code)."""

    may_write: Callable[[], bool]
    count: Callable[[str, str, str], None]


OPEN: Final = Gate(lambda: True, lambda *_: None)


class KubernetesCluster:
    """One namespace of one API server; see `api.Cluster` for what each call promises.

    Args:
        client: an ApiClient with address and credentials; closed by `close`.
        namespace: everything namespaced is read and written here.
        label: how error messages call this cluster, for example "cluster prefill-eu".
        field_manager: who owns the fields that `apply` sends; every writer needs its own, because an apply removes
            what the same manager sent before and leaves out now.
        gate: whether writing is allowed, asked right before each write; and who counts the calls.

    """

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        label: str,
        field_manager: str = FIELD_MANAGER_OPERATOR,
        *,
        gate: Gate = OPEN,
    ):
        self.namespace = namespace
        self._gate = gate
        self._label = label
        self._field_manager = field_manager
        self._client = client
        self._dynamic = DynamicClient(client)
        self._throttle = Throttle()
        self._clock = ServerClock()

    async def version(self) -> str:  # documented in the Protocol, as are the methods below
        return str((await self._call("get", "/version", "version", at_once=True)).get("gitVersion", ""))

    def now(self) -> datetime:
        return self._clock.now()

    async def get(self, kind: Kind, name: str) -> Object | None:
        try:
            return await self._call("get", kind.path(self.namespace, name), f"{kind.name} {name}")
        except _NotFoundError:
            return None

    async def page(self, kind: Kind, *, selector: str = "", after: str = "") -> Page:
        answer = await self._call(
            "get",
            kind.path(self.namespace),
            kind.plural,
            label_selector=selector or None,
            limit=PAGE_LIMIT,
            _continue=after or None,
        )
        metadata = answer["metadata"]
        return Page(answer.get("items") or [], metadata.get("resourceVersion", ""), metadata.get("continue", ""))

    async def try_list(self, kind: Kind, *, selector: str = "") -> None:
        path = kind.path(self.namespace)
        await self._call("get", path, kind.plural, at_once=True, label_selector=selector or None, limit=1)

    async def check_served(self, kinds: Collection[Kind]) -> None:
        """Raise unless objects of our kinds can be listed, and are told of by discovery, which kopf goes by."""
        for kind in kinds:
            await self.try_list(kind)
        answer = await self._call("get", f"/apis/{API_VERSION}", API_VERSION, at_once=True)
        told = {each["name"] for each in answer["resources"]}
        for kind in kinds:
            if kind.plural not in told:
                raise errors.KindNotServedError(f"{self._label} does not tell of {kind.plural} in its discovery yet")

    async def list_all(self, kind: Kind, *, selector: str = "") -> list[Object]:
        page = await self.page(kind, selector=selector)
        items = page.items
        while page.next_page:
            page = await self.page(kind, selector=selector, after=page.next_page)
            items += page.items
        return items

    async def apply(self, body: Object, *, subresource: str = "", dry_run: bool = False) -> Object:
        kind = BY_NAME[body["kind"]]
        name = body["metadata"]["name"]
        try:
            return await self._call(
                "patch",
                kind.path(self.namespace, name, subresource),
                f"{kind.name} {name}",
                body=body,
                content_type="application/apply-patch+yaml",
                field_manager=self._field_manager,
                force_conflicts=True,
                dry_run="All" if dry_run else None,
            )
        except _NotFoundError as error:
            raise self._missing(subresource, error) from error

    async def create(self, kind: Kind, body: Object) -> Object:
        try:
            return await self._call("post", kind.path(self.namespace), f"{kind.name}", body=body)
        except _NotFoundError as error:
            raise self._missing("", error) from error

    async def merge(self, kind: Kind, name: str, patch: Object) -> Object:
        try:
            return await self._call(
                "patch",
                kind.path(self.namespace, name),
                f"{kind.name} {name}",
                body=patch,
                content_type="application/merge-patch+json",
            )
        except _NotFoundError as error:
            raise errors.ConflictError(str(error)) from error

    async def create_token(self, account: str, seconds: int) -> str:
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": max(seconds, MIN_TOKEN_SECONDS)},
        }
        path = SERVICE_ACCOUNT.path(self.namespace, account, "token")
        answer = await self._call("post", path, f"token of ServiceAccount {account}", body=request)
        return str(answer["status"]["token"])

    def use_token(self, token: str) -> None:
        self._client.configuration.api_key["BearerToken"] = f"Bearer {token}"

    async def delete(self, kind: Kind, name: str, *, uid: str = "") -> None:
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._call("delete", kind.path(self.namespace, name), f"{kind.name} {name}", body=options)
        except (_NotFoundError, errors.ConflictError):
            return

    async def watch(self, kind: Kind, *, selector: str, since: str) -> AsyncIterator[WatchEvent]:
        watch = Watch()
        # The server ends the stream first; the client's own limit is for a server that forgot us.
        limit = aiohttp.ClientTimeout(total=WATCH_SECONDS + WATCH_SLACK_SECONDS, sock_connect=CONNECT_SECONDS)
        read = partial(self._dynamic.request, "get", kind.path(self.namespace), serialize=False, _request_timeout=limit)
        try:
            if not await self._throttle.turn():
                raise self._overdue(f"watch of {kind.plural}")
            with self._translate(f"watch of {kind.plural}"), self._counted("watch") as answer:
                async for event in watch.stream(
                    read, label_selector=selector, resource_version=since, timeout_seconds=WATCH_SECONDS
                ):
                    if not isinstance(event, dict):
                        raise ValueError(f"a watch line is no JSON: {event[:100]!r}")  # noqa: TRY004  # not a type of ours
                    answer["code"] = "200"
                    yield WatchEvent(event["type"], event["object"])
        finally:
            await watch.close()

    async def probe(self) -> Probe:
        """Return what a server says of itself, how long that took, and what its clock says."""
        limit = aiohttp.ClientTimeout(total=CALL_SECONDS, sock_connect=CONNECT_SECONDS)
        asked_at, started = datetime.now(UTC), time.monotonic()
        with self._translate("version"):
            response = await self._dynamic.request("get", "/version", serialize=False, _request_timeout=limit)
            seconds = time.monotonic() - started
            date = parsedate_to_datetime(response.headers["Date"])
            answer = msgspec.json.decode(await response.read())
        return Probe(str(answer.get("gitVersion", "")), date, asked_at, seconds)

    async def may(self, attributes: Mapping[str, str]) -> bool:
        """Ask whether these credentials may do something in the namespace; fields as in a SelfSubjectAccessReview."""
        spec = {"resourceAttributes": {**attributes, "namespace": self.namespace}}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool((await self._call("post", path, "access review", body=review))["status"]["allowed"])

    async def try_create(self, kind: Kind, body: Object) -> None:
        """Go through everything that creating an object goes through, without creating it; raises as `create` does."""
        try:
            await self._call("post", kind.path(self.namespace), kind.name, body=body, dry_run="All")
        except _NotFoundError as error:
            raise self._missing("", error) from error

    async def close(self) -> None:
        await self._client.close()

    async def _call(self, method: str, path: str, what: str, *, at_once: bool = False, **parameters: Any) -> Object:
        """Make a call in its turn, and again where the server had no time for it: then nothing has been done."""
        for _ in range(TRIES):
            # Those who wait in line have not begun: a thousand objects at once are no sign of a dead server.
            async with self._throttle.under_way(at_once=at_once) as may_call:
                if not may_call:
                    raise self._overdue(what)
                if method != "get" and not self._gate.may_write():
                    raise errors.NotLeaderError(f"{self._label}, {what}: not written, another replica may lead by now")
                with contextlib.suppress(_BusyError):
                    return await self._call_once(method, path, what, **parameters)
        raise errors.ClusterUnreachableError(f"{self._label} is too busy, also after {TRIES} tries ({what})")

    def _overdue(self, what: str) -> errors.ClusterUnreachableError:
        rest = self._throttle.rests_for_seconds
        why = f"asks to be left alone for {rest:.0f} s" if rest else "does not keep up with the calls of this operator"
        return errors.ClusterUnreachableError(f"{self._label} {why} ({what})")

    async def _call_once(self, method: str, path: str, what: str, **parameters: Any) -> Object:
        limit = aiohttp.ClientTimeout(total=CALL_SECONDS, sock_connect=CONNECT_SECONDS)
        with self._translate(what), self._counted(method) as answer:
            response = await self._dynamic.request(method, path, serialize=False, _request_timeout=limit, **parameters)
            answer["code"] = str(response.status)
            self._clock.heard(response.headers)
            return msgspec.json.decode(await response.read())

    @contextlib.contextmanager
    def _counted(self, verb: str) -> Iterator[dict[str, str]]:
        """Tell of a call once it has ended; the caller writes down the `code` of an answer that is no error."""
        answer = {"code": "none"}
        try:
            yield answer
        except ApiException as error:
            answer["code"] = str(error.status or "none")
            self._clock.heard(error.headers)
            raise
        finally:
            self._gate.count(self._label.removeprefix("cluster "), verb, answer["code"])

    def _missing(self, subresource: str, error: Exception) -> Exception:
        """Say what a 404 on a write means: the namespace is missing, or the object of a subresource has gone."""
        if subresource:
            return errors.ConflictError(str(error))
        return errors.NamespaceNotFoundError(
            f"{self._label}: namespace {self.namespace} does not exist; create it, or set spec.namespace ({error})"
        )

    @contextlib.contextmanager
    def _translate(self, what: str) -> Iterator[None]:
        """Turn whatever the client or the network raises into an error of ours."""
        try:
            yield
        except ApiException as error:
            raise self._refusal(what, error) from error
        except TimeoutError as error:
            raise errors.ClusterUnreachableError(
                f"{self._label} did not answer in {CALL_SECONDS:g} s ({what})"
            ) from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise errors.ClusterUnreachableError(f"{self._label} is not reached: {error} ({what})") from error
        except (msgspec.DecodeError, ValueError) as error:
            raise errors.ClusterUnreachableError(f"{self._label} answered with no JSON: {error} ({what})") from error

    def _refusal(self, what: str, error: ApiException) -> Exception:
        status = error.status or 0
        rest_seconds = asked_rest_seconds(status, error.headers)
        if rest_seconds is not None:
            self._throttle.rest(rest_seconds)
            return _BusyError(f"{self._label} is too busy: {_server_message(error)} ({what})")
        # A path that nobody serves is answered by a line of text.
        if status == NOT_FOUND and _answer(error).get("kind") != "Status":
            return errors.KindNotServedError(f"{self._label} does not serve this kind ({what}); install its CRD")
        message = f"{self._label}, {what}: {_server_message(error)}"
        if status in TOO_BUSY:
            return errors.ClusterUnreachableError(message)
        by_status = {
            401: errors.UnauthorizedError,
            403: errors.ForbiddenError,
            NOT_FOUND: _NotFoundError,
            CONFLICT: errors.ConflictError,
            GONE: errors.ExpiredError,
            500: errors.ServerFailedError,
        }
        return by_status.get(status, errors.InvalidObjectError)(message)


class _NotFoundError(errors.ConflictError):
    """404 from a kind that is served; every call says itself what that means."""


class _BusyError(errors.ClusterUnreachableError):
    """The server asked to be left alone for a while, which all calls to it heed."""


def _answer(error: ApiException) -> Object:
    """Return the object in a refusal, the API server's Status; an empty one where there is none."""
    try:
        found = msgspec.json.decode(error.body or b"")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _server_message(error: ApiException) -> str:
    """Return the sentence of the API server's Status object, or what the client has in its place."""
    return str(_answer(error).get("message", f"{error.status} {error.reason}"))
