"""An API server in memory, for the operator's own reconciles."""

# ruff: noqa: ARG002  # it takes what the Protocol passes
import copy
import itertools
import math
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from prfaas.kube.session import ObjectKind
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.errors import InvalidObjectError


class MemoryCluster:
    """`clusters.api.Cluster` over a dict; an apply replaces what it names, which is enough for one writer."""

    namespace = "ns"

    def __init__(self, *objects: Object):
        self.objects = {(one["kind"], one["metadata"]["name"]): one for one in objects}
        self._versions = itertools.count(1)
        self.kept: Counter[ObjectKind] = Counter()
        self.applied: list[Object] = []
        self.tried: list[str] = []
        self.refuses = ""
        self.failure: Exception | None = None
        self.clock = lambda: datetime.now(UTC)

    def now(self) -> datetime:
        return self.clock()

    def room(self, kind: ObjectKind) -> float:
        return math.inf

    async def get(self, kind: ObjectKind, name: str) -> Object | None:
        if self.failure:
            raise self.failure
        return self._newer(self.objects.get((kind.name, name)))

    async def list_all(self, kind: ObjectKind, *, selector: str = "") -> list[Object]:
        return [one for (name, _), one in self.objects.items() if name == kind.name]

    async def apply(self, body: Object, *, subresource: str = "", dry_run: bool = False) -> Object:
        if dry_run:
            self.tried.append(body["kind"])
            if body["kind"] == self.refuses:
                raise InvalidObjectError("not here")
            return body
        self.applied.append(body)
        key = (body["kind"], body["metadata"]["name"])
        live = self.objects.setdefault(key, {"metadata": {"uid": "u", "generation": 1, "resourceVersion": "1"}})
        for part, value in body.items():
            live[part] = {**live["metadata"], **value} if part == "metadata" else value
        return self._newer(live)

    def _newer(self, live: Object | None) -> Any:
        """Return a copy; whatever a test did to the object in between, it is a newer version."""
        found = copy.deepcopy(live)
        if found is not None:
            found["metadata"]["resourceVersion"] = str(next(self._versions))
        return found

    async def create(self, kind: ObjectKind, body: Object) -> Object:
        self.applied.append(body)
        return body

    async def delete(self, kind: ObjectKind, name: str, *, uid: str = "") -> None:
        self.objects.pop((kind.name, name), None)
