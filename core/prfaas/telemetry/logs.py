"""One form of log lines for gateway and workers: time, level and place, then words, then key=value pairs.

    2026-11-02 10:00:00,000 INFO hub/decode/d-1 decode engine: transfer received request_id=r1 bytes=9731072 ...

The pairs are logfmt, which log collectors split without a rule of ours: a value that is no plain word is a JSON string.
No secret has a place in a line: grants, tokens and keys are never values.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Final

from prfaas.errors import ConfigError

LEVEL_VARIABLE: Final = "PRFAAS_LOG_LEVEL"
LEVELS: Final[Mapping[str, int]] = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING}
OURS: Final = ("prfaas", "prfaas_gateway", "prfaas_worker")
"""Packages whose lines the level is about: nobody wants to see what libraries say while they search for an error."""
MAX_VALUE_CHARACTERS: Final = 500

# Printable ASCII without quotation mark, equals sign and backslash.
_PLAIN: Final = re.compile(r"[!#-<>-\[\]-~]+")

Value = str | int | float | None


def configure_logs(place: str) -> None:
    """Log to standard error, from INFO up, or from what the environment variable PRFAAS_LOG_LEVEL says.

    Raises:
        ConfigError: it says something else than a level.

    """
    wanted = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if wanted not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE} is {wanted!r}: set it to {', '.join(LEVELS)}, or not at all")
    place = place.replace("%", "%%")
    form = f"%(asctime)s %(levelname)s {place}: %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=form)
    # Nobody prints these either.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name in OURS:
        logging.getLogger(name).setLevel(LEVELS[wanted])


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
