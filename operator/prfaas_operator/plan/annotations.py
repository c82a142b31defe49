"""What people say to the operator by annotations; `true` is the only value that says yes."""

from collections.abc import Mapping
from typing import Any, Final

from prfaas.names import GROUP

PAUSED: Final = f"{GROUP}/paused"
"""On an object of ours: nothing that belongs to it is changed until the annotation goes; a deletion still is obeyed."""
ADOPT: Final = f"{GROUP}/adopt"
"""On an object of ours, or on somebody else's that has a child's name: it may be taken over."""
SCALED_BY_POLICY: Final = f"{GROUP}/scaled-by-policy"
"""On a pool: a policy that converts or scales may write replicas that a person wrote, as of then and whenever."""


def says_yes(live: Mapping[str, Any], annotation: str) -> bool:
    """Tell whether a live object carries an annotation with the value `true`."""
    return ((live.get("metadata") or {}).get("annotations") or {}).get(annotation) == "true"
