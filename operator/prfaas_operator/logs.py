"""The operator's log lines: each names the object that it is about.

A context variable holds the object. Every object has its own task, so no function passes the object along. The
lines of kopf carry their object themselves, and get the same keys.
"""

import logging
import traceback
from contextvars import ContextVar
from typing import Final

from prfaas.telemetry.logs import LogFormat, configure_logs

OBJECT: ContextVar[dict[str, str] | None] = ContextVar("OBJECT", default=None)
KEYS: Final = ("kind", "namespace", "name", "cluster", "uid")
KOPF_OBJECTS: Final = "kopf.objects"
KOPF_CLIENT: Final = "kopf._cogs.clients"
"""The module of kopf's errors of API calls; it has no public name."""
KOPF_CANCELS: Final = "request_cancel_callback"


def about(**keys: str) -> None:
    """Set the object that the present task works for, by `KEYS`; empty values are left out."""
    OBJECT.set({key: keys[key] for key in KEYS if keys.get(key)})


def add(**keys: str) -> None:
    """Add fields to the present task's object."""
    about(**{**(OBJECT.get() or {}), **keys})


def keys_of(record: logging.LogRecord) -> dict[str, str]:
    """Return the object of a line: the task's object, or the one that kopf attached."""
    found = OBJECT.get()
    if found is None:
        reference = getattr(record, "k8s_ref", None) or {}
        found = {key: str(reference[key]) for key in KEYS if reference.get(key)}
    return found


def is_refusal(error: BaseException | None) -> bool:
    """Return true if kopf raised an error because of an API server's answer."""
    return type(error).__module__.startswith(KOPF_CLIENT)


def is_missed_cancellation(error: BaseException) -> bool:
    """Return true for kopf's error when it ends a watch that has not begun: its callback finds no task to cancel.

    `handlers.run_kopf` cancels that watch.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_name == KOPF_CANCELS


def drop_traceback(record: logging.LogRecord) -> bool:
    """Log a refusal of an API server, and a cancellation that kopf missed, without traceback: neither is a bug."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and (is_refusal(error) or is_missed_cancellation(error)):
        record.exc_info = None
    return True


def configure(place: str, log_format: LogFormat) -> None:
    """Configure logging as in every process, with each line's object; kopf logs only what our lines lack.

    Raises ConfigError: PRFAAS_LOG_LEVEL is no level.
    """
    configure_logs(place, log_format, keys_of).addFilter(drop_traceback)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # kopf logs a line for every event of every object, and a warning for each loop that it cancels on purpose.
    logging.getLogger(KOPF_OBJECTS).setLevel(logging.ERROR)
