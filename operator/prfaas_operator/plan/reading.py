"""Read our custom resources, which another version of this project may have written.

What this version does not understand it does not act upon: the object says so, and what was made of it stays. A status
is another matter: it is only what was observed, so one that cannot be read counts as none and is written anew. And an
object that is being deleted asks for nothing any more: what is not understood is left out, so that it can go.
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
    """Read an object of the hub.

    Raises:
        InvalidObjectError: it asks for what this version does not know.

    """
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
    """Return an object without what stands in its spec at some locations, or else the last that is there on the way.

    Where an object has been is not left out: nowhere else would its children be looked for.
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
    """Read objects of a kind; one that cannot be read is left out here and reports itself."""
    found: list[R] = []
    for body in bodies:
        try:
            found.append(read(model, body))
        except InvalidObjectError as error:
            log.warning("left out: %s", error)
    return found
