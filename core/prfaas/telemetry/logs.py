"""One form of log lines for every process: time, level and place, then words, then key=value pairs.

    2026-11-02 10:00:00,000 INFO hub/decode/d-1 decode engine: transfer received request_id=r1 bytes=9731072 ...

The pairs are logfmt, which log collectors split without a rule of ours: a value that is no plain word is a JSON string.
In JSON the same stands in `time`, `level`, `place`, `logger` and `message`, one object a line.
No secret has a place in a line: grants, tokens and keys are never values.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, Literal

from prfaas.errors import ConfigError

LogFormat = Literal["text", "json"]
FORMAT_VARIABLE: Final = "PRFAAS_LOG_FORMAT"
LEVEL_VARIABLE: Final = "PRFAAS_LOG_LEVEL"
LEVELS: Final[Mapping[str, int]] = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING}
OURS: Final = ("prfaas", "prfaas_gateway", "prfaas_operator", "prfaas_scheduler", "prfaas_worker")
"""Packages whose lines the level is about: nobody wants to see what libraries say while they search for an error."""
MAX_VALUE_CHARACTERS: Final = 500

# Printable ASCII without quotation mark, equals sign and backslash.
_PLAIN: Final = re.compile(r"[!#-<>-\[\]-~]+")

Value = str | int | float | None
KeysOf = Callable[[logging.LogRecord], Mapping[str, str]]


def no_keys(_record: logging.LogRecord) -> Mapping[str, str]:
    """Return the keys that are added to a line: none."""
    return {}


def configure_logs(place: str, log_format: LogFormat = "text", keys_of: KeysOf = no_keys) -> logging.Handler:
    """Log to standard error, from INFO up, or from what the environment variable PRFAAS_LOG_LEVEL says.

    Args:
        place: what the process is, in every line.
        log_format: how lines are written.
        keys_of: what else a record is about, added to its line.

    Returns:
        The one handler, for filters.

    Raises:
        ConfigError: PRFAAS_LOG_LEVEL is no level.

    """
    wanted = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if wanted not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE} is {wanted!r}: set it to {', '.join(LEVELS)}, or not at all")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonFormatter if log_format == "json" else TextFormatter)(place, keys_of))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # Nobody prints these.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name in OURS:
        logging.getLogger(name).setLevel(LEVELS[wanted])
    return handler


class TextFormatter(logging.Formatter):
    """Writes time, level, place, words and keys."""

    def __init__(self, place: str, keys_of: KeysOf = no_keys):
        super().__init__(f"%(asctime)s %(levelname)s {place.replace('%', '%%')}: %(message)s")
        self._keys_of = keys_of

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        """Return the line without a traceback."""
        words, keys = super().formatMessage(record), self._keys_of(record)
        return line(words, **keys) if keys else words


class JsonFormatter(logging.Formatter):
    """Writes one JSON object a line, with a traceback in `exception` where there is one."""

    def __init__(self, place: str, keys_of: KeysOf = no_keys):
        super().__init__()
        self._place = place
        self._keys_of = keys_of

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "place": self._place,
            "logger": record.name,
            "message": record.getMessage(),
            **self._keys_of(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def tell(log: logging.Logger, text: str) -> None:
    """Log at INFO what is said for every request, without looking for the caller's file and line."""
    log.handle(log.makeRecord(log.name, logging.INFO, "", 0, text, (), None))


def line(words: str, /, **fields: Value) -> str:
    """Return a message: what happened, then the fields that say something, in their order. Seconds have four digits."""
    told = {
        name: f"{value:.4f}" if isinstance(value, float) else str(value)[:MAX_VALUE_CHARACTERS]
        for name, value in fields.items()
        if value is not None and value != ""
    }
    if not _PLAIN.fullmatch("".join(told.values())):  # of most lines all are: looking at each costs a third more
        told = {name: text if _PLAIN.fullmatch(text) else json.dumps(text) for name, text in told.items()}
    return words + "".join([f" {name}={text}" for name, text in told.items()])
