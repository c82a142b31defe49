"""The operator's log lines: each names the object that it is about.

Which object that is stands in a context variable: every object has a task of its own, so that nobody passes it along.
kopf's lines bring the object themselves, and get the same keys.
"""

import logging
from contextvars import ContextVar
from typing import Final

from prfaas.telemetry.logs import LogFormat, configure_logs

OBJECT: ContextVar[dict[str, str] | None] = ContextVar("OBJECT", default=None)
KEYS: Final = ("kind", "namespace", "name", "cluster", "uid")
KOPF_OBJECTS: Final = "kopf.objects"
KOPF_CLIENT: Final = "kopf._cogs.clients"
"""Where kopf's errors of API calls live; it offers no name for them."""


def about(**keys: str) -> None:
    """Name the object that the present task works for, by `KEYS`; empty values are left out."""
    OBJECT.set({key: keys[key] for key in KEYS if keys.get(key)})


def add(**keys: str) -> None:
    """Add to what `about` said, once more is known."""
    about(**{**(OBJECT.get() or {}), **keys})


def keys_of(record: logging.LogRecord) -> dict[str, str]:
    """Return the object of a line: of the task that wrote it, or what kopf attached to it."""
    found = OBJECT.get()
    if found is None:
        reference = getattr(record, "k8s_ref", None) or {}
        found = {key: str(reference[key]) for key in KEYS if reference.get(key)}
    return found


def is_refusal(error: BaseException | None) -> bool:
    """Tell whether kopf raised an error because of an API server's answer."""
    return type(error).__module__.startswith(KOPF_CLIENT)


def drop_traceback(record: logging.LogRecord) -> bool:
    """Have kopf say what an API server refused in a sentence: that is no bug, and a traceback says nothing more."""
    if record.exc_info and is_refusal(record.exc_info[1]):
        record.exc_info = None
    return True


def configure(place: str, log_format: LogFormat) -> None:
    """Log as every process does, each line with its object; kopf's own lines only where they tell something new.

    Raises:
        ConfigError: PRFAAS_LOG_LEVEL is no level.

    """
    configure_logs(place, log_format, keys_of).addFilter(drop_traceback)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # A line for every event of every object, and a warning for each loop that it cancels on purpose.
    logging.getLogger(KOPF_OBJECTS).setLevel(logging.ERROR)
