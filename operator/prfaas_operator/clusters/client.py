"""`api.Cluster` over kubernetes.aio's dynamic client.

The hard part is the half-dead server, which accepts a connection and answers nothing: the library's default waits for
five minutes. Here every call and every watch carries a total timeout, and everything the client or the network can
raise becomes an error of ours with the server's own sentence in it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.watch import Watch

from prfaas.names import FIELD_MANAGER_OPERATOR
from prfaas_operator import errors
from prfaas_operator.clusters.api import BY_NAME, Kind, Object, Page, WatchEvent

log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 4.0
CALL_SECONDS: Final = 5.0
WATCH_SECONDS: Final = 60
WATCH_SLACK_SECONDS: Final = 5.0
PAGE_LIMIT: Final = 500

NOT_FOUND: Final = 404
CONFLICT: Final = 409
GONE: Final = 410
TOO_BUSY: Final = frozenset({429, 502, 503, 504})


class KubernetesCluster:
    """One namespace of one API server; see `api.Cluster` for what each call promises.

    Args:
        client: an ApiClient with address and credentials; closed by `close`.
        namespace: everything namespaced is read and written here.
        label: how error messages call this cluster, for example "cluster prefill-eu".
        field_manager: who owns the fields that `apply` sends; every writer needs its own, because an apply removes
            what the same manager sent before and leaves out now.

    """

    def __init__(self, client: ApiClient, namespace: str, label: str, field_manager: str = FIELD_MANAGER_OPERATOR):
        self.namespace = namespace
        self._label = label
        self._field_manager = field_manager
        self._client = client
        self._dynamic = DynamicClient(client)

    async def version(self) -> str:  # noqa: D102  # documented in the Protocol, as are the methods below
        return str((await self._call("get", "/version", "version")).get("gitVersion", ""))

    async def get(self, kind: Kind, name: str) -> Object | None:  # noqa: D102
        try:
            return await self._call("get", kind.path(self.namespace, name), f"{kind.name} {name}")
        except _NotFoundError:
            return None

    async def page(self, kind: Kind, *, selector: str = "", after: str = "") -> Page:  # noqa: D102
        try:
            answer = await self._call(
                "get",
                kind.path(self.namespace),
                kind.plural,
                label_selector=selector or None,
                limit=PAGE_LIMIT,
                _continue=after or None,
            )
        except _NotFoundError as error:
            raise errors.InvalidObjectError(
                f"{self._label} does not know {kind.api_version} {kind.name}; install its CRD"
            ) from error
        metadata = answer["metadata"]
        return Page(answer.get("items") or [], metadata.get("resourceVersion", ""), metadata.get("continue", ""))

    async def list_all(self, kind: Kind, *, selector: str = "") -> list[Object]:  # noqa: D102
        page = await self.page(kind, selector=selector)
        items = page.items
        while page.next_page:
            page = await self.page(kind, selector=selector, after=page.next_page)
            items += page.items
        return items

    async def apply(self, body: Object, *, subresource: str = "") -> Object:  # noqa: D102
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
            )
        except _NotFoundError as error:
            raise self._missing(subresource, error) from error

    async def create(self, kind: Kind, body: Object) -> Object:  # noqa: D102
        try:
            return await self._call("post", kind.path(self.namespace), f"{kind.name}", body=body)
        except _NotFoundError as error:
            raise self._missing("", error) from error

    async def delete(self, kind: Kind, name: str, *, uid: str = "") -> None:  # noqa: D102
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._call("delete", kind.path(self.namespace, name), f"{kind.name} {name}", body=options)
        except (_NotFoundError, errors.ConflictError):
            return

    async def watch(self, kind: Kind, *, selector: str, since: str) -> AsyncIterator[WatchEvent]:  # noqa: D102
        watch = Watch()
        # The server ends the stream first; the client's own limit is for a server that forgot us.
        limit = aiohttp.ClientTimeout(total=WATCH_SECONDS + WATCH_SLACK_SECONDS, sock_connect=CONNECT_SECONDS)
        read = partial(self._dynamic.request, "get", kind.path(self.namespace), serialize=False, _request_timeout=limit)
        try:
            with self._translate(f"watch of {kind.plural}"):
                async for event in watch.stream(
                    read, label_selector=selector, resource_version=since, timeout_seconds=WATCH_SECONDS
                ):
                    if not isinstance(event, dict):
                        raise ValueError(f"a watch line is no JSON: {event[:100]!r}")  # noqa: TRY004  # not a type of ours
                    yield WatchEvent(event["type"], event["object"])
        finally:
            await watch.close()

    async def close(self) -> None:  # noqa: D102
        await self._client.close()

    async def _call(self, method: str, path: str, what: str, **parameters: Any) -> Object:
        limit = aiohttp.ClientTimeout(total=CALL_SECONDS, sock_connect=CONNECT_SECONDS)
        with self._translate(what):
            response = await self._dynamic.request(method, path, serialize=False, _request_timeout=limit, **parameters)
            return msgspec.json.decode(await response.read())

    def _missing(self, subresource: str, error: Exception) -> Exception:
        """Say what a 404 on a write means: the namespace is missing, or the object of a subresource has gone."""
        if subresource:
            return errors.ConflictError(str(error))
        return errors.NamespaceNotFoundError(
            f"{self._label}: namespace {self.namespace} does not exist; create it, or set spec.namespace ({error})"
        )

    @contextmanager
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
    """404; every call says itself what that means."""


def _server_message(error: ApiException) -> str:
    """Return the sentence of the API server's Status object, or what the client has in its place."""
    try:
        return str(msgspec.json.decode(error.body or b"")["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"{error.status} {error.reason}"
