"""What kopf keeps in annotations of our objects, read as anybody's words: who may edit an object may edit them.

kopf trusts them, and what it cannot read keeps it from the object for ever, its deletion too. Here that counts as not
there: handlers start anew, which is harmless, as every reconcile starts from what it observes. So does a delay that
another machine's clock has put far into the future: no deletion waits for it.
"""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import kopf
import msgspec


class Record(msgspec.Struct):
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


class Metadata(msgspec.Struct, frozen=True):
    """What an essence keeps of the metadata."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Essence(msgspec.Struct):
    """What kopf remembers of the object that it handled last."""

    spec: dict[str, Any] = {}
    metadata: Metadata = Metadata()


UNREADABLE = (ValueError, RecursionError, OverflowError)
"""What reading hostile JSON and dates raises; msgspec's and json's errors are ValueErrors."""
LONGEST_DELAY: Final = timedelta(minutes=5)
"""Several times what any handler of ours is delayed for."""


class Progress(kopf.AnnotationsProgressStorage):
    """Progress in annotations; a record that is none counts as absent."""

    def fetch(self, **kwargs: Any) -> Any:
        """Return a handler's record."""
        try:
            found: Any = super().fetch(**kwargs)
            record = msgspec.convert(found or {}, Record)
            for moment in filter(None, (record.started, record.stopped)):
                datetime.fromisoformat(moment)
            if record.delayed and _is_far(datetime.fromisoformat(record.delayed)):
                return None
        except UNREADABLE:
            return None
        return found


def _is_far(moment: datetime) -> bool:
    return moment.astimezone(UTC) > datetime.now(UTC) + LONGEST_DELAY


class DiffBase(kopf.AnnotationsDiffBaseStorage):
    """The last handled state in an annotation; one that is none counts as absent."""

    def fetch(self, **kwargs: Any) -> Any:
        """Return the last handled essence."""
        try:
            found: Any = super().fetch(**kwargs)
            msgspec.convert(found or {}, Essence)
        except UNREADABLE:
            return None
        return found
