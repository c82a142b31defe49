"""Reads our custom resources, which another version of this project may have written.

An object that this version does not understand is not acted upon: its status says so, and its children stay. A status
is only an observation, so an unreadable one counts as none and is written again. An object that is being deleted needs
no settings: unreadable parts are left out, so that the deletion can proceed.
"""

import contextlib
import copy
import logging
from collections.abc import Iterable
from typing import TypeVar

from pydantic import ValidationError

from prfaas.api.base import Resource
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.errors import InvalidObjectError

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Resource)


def read(model: type[R], body: Object) -> R:
    """Read an object of the hub. Raises InvalidObjectError: this version does not know a part of it."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        if all(each["loc"][:1] == ("status",) for each in error.errors()):
            return model.model_validate({**body, "status": {}})
        if "deletionTimestamp" in body["metadata"]:
            with contextlib.suppress(ValidationError):
                return model.model_validate(_without(body, [each["loc"] for each in error.errors()]))
        name = f"{model.kind_name} {body['metadata']['name']}"
        raise InvalidObjectError(f"{name} does not fit this version of prfaas: {error}") from error


def _without(body: Object, locations: Iterable[tuple[str | int, ...]]) -> Object:
    """Return an object without the parts of its spec at some locations, or without their nearest existing parent.

    The fields that name the cluster of an object's children stay: the children would not be found otherwise.
    """
    spec = copy.deepcopy(body.get("spec") or {})
    for _, *steps in (
        location for location in locations if location[0] == "spec" and location[1:2] not in ((), ("clusterName",))
    ):
        holder = spec
        while len(steps) > 1 and isinstance(inner := holder.get(steps[0]), dict) and steps[1] in inner:
            holder = inner
            steps.pop(0)
        holder.pop(steps[0], None)
    return {**body, "spec": spec}


def read_each(model: type[R], bodies: Iterable[Object]) -> list[R]:
    """Read objects of a kind; an unreadable one is left out here and reports itself in its own reconcile."""
    found: list[R] = []
    for body in bodies:
        try:
            found.append(read(model, body))
        except InvalidObjectError as error:
            log.warning("left out: %s", error)
    return found
