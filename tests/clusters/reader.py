"""Reads and creates objects of one API server over a connection that stays open, under the names that kubectl takes.

Tests ask ten times a second whether something has come about. A kubectl process for each question costs more than all
that the question is about: a tenth of a second of a core.
"""

import http.client
import json
import threading
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from prfaas.kube.session import encode_body
from prfaas_sandbox.api import connect
from prfaas_sandbox.credentials import read_kubeconfig

TIMEOUT_SECONDS = 30.0
NOT_FOUND = 404
WRONG_OBJECT = (400, 422)
WRONG_APPLY = (*WRONG_OBJECT, 500)

Object = dict[str, Any]


class Kind(NamedTuple):
    """One kind as the API server's discovery tells it: `group` is a path such as /api/v1."""

    group: str
    plural: str
    names: frozenset[str]
    version: str
    kind: str


class UnansweredError(Exception):
    """The server has no such kind, or did not answer as it should: kubectl may know why."""


class RefusedError(Exception):
    """The server refused an object; the text is what kubectl shows of it."""


class Reader:
    """Gets, creates and patches namespaced objects as the administrator; usable from several threads.

    Every method raises `UnansweredError` for whatever is neither an object nor its absence.
    """

    def __init__(self, kubeconfig: Path):
        found = read_kubeconfig(kubeconfig)
        self._address = urlsplit(found.server).netloc
        self._tls = connect(found)._rest.ssl_context
        self._local = threading.local()
        self._opened: list[http.client.HTTPSConnection] = []
        self._kinds: list[Kind] = []

    def close(self) -> None:
        """Close the connections of all threads."""
        for connection in self._opened:
            connection.close()

    def get(self, namespace: str, name_of_kind: str, name: str) -> Object | None:
        """Return an object; None where there is none."""
        return self._request("GET", f"{_path(self._kind(name_of_kind), namespace)}/{quote(name)}")

    def list_all(self, namespace: str, names_of_kinds: str, labels: str = "", fields: str = "") -> list[Object]:
        """Return the objects of several kinds that selectors of labels and of fields choose."""
        found: list[Object] = []
        query = urlencode({"labelSelector": labels, "fieldSelector": fields})
        for kind in map(self._kind, names_of_kinds.split(",")):
            listed = self._request("GET", f"{_path(kind, namespace)}?{query}")
            items = listed["items"] if listed else []
            found += [{"apiVersion": kind.version, "kind": kind.kind, **item} for item in items]
        return found

    def create(self, body: Object, *, is_dry_run: bool = False) -> Object | None:
        """Create an object as strictly as kubectl does; raises `RefusedError` when the server finds it wrong."""
        kind, namespace = self._kind(body["kind"].lower()), body["metadata"]["namespace"]
        query = "fieldValidation=Strict" + ("&dryRun=All" if is_dry_run else "")
        return self._request("POST", f"{_path(kind, namespace)}?{query}", body)

    def create_namespace(self, name: str) -> None:
        self._request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})

    def apply(self, namespace: str, body: Object, *, is_dry_run: bool = False) -> None:
        """Make an object be as `body` says, and take what others say of these fields.

        Raises `RefusedError` when the server finds it wrong.
        """
        path = f"{_path(self._kind(body['kind'].lower()), namespace)}/{body['metadata']['name']}"
        query = "fieldManager=tests&force=true&fieldValidation=Strict" + ("&dryRun=All" if is_dry_run else "")
        self._request("PATCH", f"{path}?{query}", body, "application/apply-patch+yaml")

    def patch(self, namespace: str, name_of_kind: str, name: str, body: Object, manager: str = "tests") -> None:
        """Merge `body` into an object, as `manager`."""
        path = f"{_path(self._kind(name_of_kind), namespace)}/{name}?fieldManager={quote(manager)}"
        self._request("PATCH", path, body)

    def scale(self, namespace: str, name_of_kind: str, name: str, replicas: int) -> None:
        """Set an object's replicas as `kubectl scale` does; raises `UnansweredError` where the server refuses it."""
        path = f"{_path(self._kind(name_of_kind), namespace)}/{quote(name)}/scale?fieldManager=kubectl"
        self._request("PATCH", path, {"spec": {"replicas": replicas}})

    def delete(self, namespace: str, name_of_kind: str, name: str) -> Object | None:
        """Delete an object and return it as it was last; None where there is none. Some take their time to go."""
        path = f"{_path(self._kind(name_of_kind), namespace)}/{quote(name)}"
        if found := self._request("GET", path):
            self._request("DELETE", f"{path}?propagationPolicy=Background")
        return found

    def patch_status(self, namespace: str, name_of_kind: str, name: str, status: Object) -> Object | None:
        """Merge a status into an object's; return None where there is none."""
        path = f"{_path(self._kind(name_of_kind), namespace)}/{quote(name)}/status"
        return self._request("PATCH", path, {"status": status})

    def token(self, namespace: str, account: str, seconds: int) -> str:
        """Return a new token of a ServiceAccount."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        made = self._request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", body)
        if made is None:
            raise UnansweredError(f"no ServiceAccount {account}")
        return made["status"]["token"]

    def may(self, user: str, attributes: Object) -> bool:
        """Return whether the server lets a user do something, by the attributes of a SubjectAccessReview."""
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": attributes},
        }
        answer = self._request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
        if answer is None:
            raise UnansweredError("no reviews of access")
        return answer["status"]["allowed"]

    def _kind(self, name: str) -> Kind:
        for is_fresh in (False, True):
            if is_fresh or not self._kinds:  # a CRD may have come since
                self._kinds = list(self._discover())
            if found := next((kind for kind in self._kinds if name in kind.names), None):
                return found
        raise UnansweredError(f"no kind {name}")

    def _discover(self) -> list[Kind]:
        listed = self._request("GET", "/apis") or {"groups": []}
        groups = [group["preferredVersion"]["groupVersion"] for group in listed["groups"]]
        paths = ["/api/v1", *(f"/apis/{group}" for group in groups)]
        return [
            Kind(
                path, each["name"], _names(path, each), path.removeprefix("/apis/").removeprefix("/api/"), each["kind"]
            )
            for path in paths
            for each in (self._request("GET", path) or {"resources": []})["resources"]
            if each["namespaced"] and "/" not in each["name"]
        ]

    def _request(self, method: str, path: str, body: Object | None = None, form: str = "") -> Object | None:
        data = None if body is None else encode_body(body)
        usual = {"POST": "application/json", "PATCH": "application/merge-patch+json"}
        headers = {"Content-Type": form or usual[method]} if body else {}
        for is_new in (False, True):  # the server may have closed a connection that was kept
            connection = self._connection(is_new=is_new)
            try:
                connection.request(method, path, data, headers)
                answer = connection.getresponse()
                text = answer.read()
            except (OSError, http.client.HTTPException):
                continue
            if answer.status < 300:
                return json.loads(text)
            # A path that is not served is reported as text, an object that is not there as a Status.
            if answer.status == NOT_FOUND and text.startswith(b"{"):
                return None
            # An apply with two entries of one key is a fault inside the server.
            if (method == "POST" and answer.status in WRONG_OBJECT) or (form and answer.status in WRONG_APPLY):
                raise RefusedError(json.loads(text)["message"])
            break
        raise UnansweredError(f"{method} {path}")

    def _connection(self, *, is_new: bool) -> http.client.HTTPSConnection:
        held = getattr(self._local, "connection", None)
        if is_new and held is not None:
            held.close()
            held = None
        if held is None:
            held = http.client.HTTPSConnection(self._address, context=self._tls, timeout=TIMEOUT_SECONDS)
            self._local.connection = held
            self._opened.append(held)
        return held


def _names(path: str, resource: Object) -> frozenset[str]:
    names = {resource["name"], resource["singularName"], *resource.get("shortNames", ())}
    group = path.removeprefix("/apis/").split("/")[0]
    return frozenset(names | ({f"{resource['name']}.{group}"} if path.startswith("/apis/") else set()))


def _path(kind: Kind, namespace: str) -> str:
    return f"{kind.group}/namespaces/{namespace}/{kind.plural}"
