"""Writes every process's log lines in one form: time, level and place, then words, then key=value pairs.

    2026-11-02 10:00:00,000 INFO hub/decode/d-1 decode engine: transfer received request_id=r1 bytes=9731072 ...

The pairs are logfmt, which log collectors split by themselves. A value that is not a plain word is a JSON string.
In JSON a line is one object with `time`, `level`, `place`, `logger` and `message`.
No line holds a secret: grants, tokens and keys are never values.
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
ROOMS: Final = ("gateway", "operator", "scheduler", "transfer", "vllm", "worker")
OURS: Final = ("prfaas", *(f"prfaas_{room}" for room in ROOMS))
"""Packages to which the level applies; lines of libraries stay at INFO."""
MAX_VALUE_CHARACTERS: Final = 500

# Printable ASCII without quotation mark, equals sign and backslash.
_PLAIN: Final = re.compile(r"[!#-<>-\[\]-~]+")

Value = str | int | float | None
KeysOf = Callable[[logging.LogRecord], Mapping[str, str]]


def no_keys(_record: logging.LogRecord) -> Mapping[str, str]:
    return {}


def configure_logs(place: str, log_format: LogFormat = "text", keys_of: KeysOf = no_keys) -> logging.Handler:
    """Log to standard error, from INFO up, or from the level in the environment variable PRFAAS_LOG_LEVEL.

    `place` is the process's name in every line; `keys_of` returns further keys of a record's line. Returns the one
    handler, for filters. Raises ConfigError for an unknown level.
    """
    wanted = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if wanted not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE} is {wanted!r}: set it to {', '.join(LEVELS)}, or not at all")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonFormatter if log_format == "json" else TextFormatter)(place, keys_of))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # No format prints these.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name in OURS:
        logging.getLogger(name).setLevel(LEVELS[wanted])
    return handler


class TextFormatter(logging.Formatter):
    def __init__(self, place: str, keys_of: KeysOf = no_keys):
        super().__init__(f"%(asctime)s %(levelname)s {place.replace('%', '%%')}: %(message)s")
        self._keys_of = keys_of

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        words, keys = super().formatMessage(record), self._keys_of(record)
        return line(words, **keys) if keys else words


class JsonFormatter(logging.Formatter):
    """Writes one JSON object a line, with a traceback in `exception` where there is one."""

    def __init__(self, place: str, keys_of: KeysOf = no_keys):
        super().__init__()
        self._place = place
        self._keys_of = keys_of

    def format(self, record: logging.LogRecord) -> str:
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
    """Log a request's line at INFO, without a search for the caller's file and line."""
    log.handle(log.makeRecord(log.name, logging.INFO, "", 0, text, (), None))


def line(words: str, /, **fields: Value) -> str:
    """Return a message: words, then the fields that are not empty, in order. Floats have four digits."""
    shown = {
        name: f"{value:.4f}" if isinstance(value, float) else str(value)[:MAX_VALUE_CHARACTERS]
        for name, value in fields.items()
        if value is not None and value != ""
    }
    # In most lines all are plain; a look at each value costs a third more.
    if not _PLAIN.fullmatch("".join(shown.values())):
        shown = {name: text if _PLAIN.fullmatch(text) else json.dumps(text) for name, text in shown.items()}
    return words + "".join([f" {name}={text}" for name, text in shown.items()])
