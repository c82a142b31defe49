"""The operator's log lines: each names the object that it is about, as words for people or as JSON for collectors.

Which object that is stands in a context variable: every object has a task of its own, so that nobody passes it along.
kopf's lines bring the object themselves, and get the same keys.
"""

import json
import logging
import os
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from prfaas.errors import ConfigError
from prfaas.telemetry.logs import LEVEL_VARIABLE, LEVELS, line

OBJECT: ContextVar[dict[str, str] | None] = ContextVar("OBJECT", default=None)
KEYS: Final = ("kind", "namespace", "name", "cluster", "uid")
KOPF_OBJECTS: Final = "kopf.objects"
KOPF_CLIENT: Final = "kopf._cogs.clients"
"""Where kopf's errors of API calls live; it offers no name for them."""


class LogFormat(StrEnum):
    """How lines are written."""

    TEXT = "text"
    JSON = "json"


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


class TextFormatter(logging.Formatter):
    """Time, level, logger, words, and the object as key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        """Return the line without a traceback."""
        return line(super().formatMessage(record), **keys_of(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with a traceback in `exception` where there is one."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **keys_of(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def is_refusal(error: BaseException | None) -> bool:
    """Tell whether kopf raised an error because of an API server's answer."""
    return type(error).__module__.startswith(KOPF_CLIENT)


def drop_traceback(record: logging.LogRecord) -> bool:
    """Have kopf say what an API server refused in a sentence: that is no bug, and a traceback says nothing more."""
    if record.exc_info and is_refusal(record.exc_info[1]):
        record.exc_info = None
    return True


def configure(form: LogFormat) -> None:
    """Log to standard error from INFO up, or from what the environment variable PRFAAS_LOG_LEVEL says.

    Raises:
        ConfigError: it says something else than a level.

    """
    wanted = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if wanted not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE} is {wanted!r}: set it to {', '.join(LEVELS)}, or not at all")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    handler.addFilter(drop_traceback)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("prfaas", "prfaas_operator"):
        logging.getLogger(name).setLevel(LEVELS[wanted])
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # A line for every event of every object, and a warning for each loop that it cancels on purpose.
    logging.getLogger(KOPF_OBJECTS).setLevel(logging.ERROR)
