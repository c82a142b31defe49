"""Sends instant queries to Prometheus's HTTP API and reads its answers into labelled figures.

An answer is bounded in time, bytes and values, and never a redirect. The error's class says who can act.
UnreachableError: Prometheus is down, slow or overloaded. ConfigError: it rejects the query, or the query answers more
than was asked for. ProtocolError: bytes that no Prometheus sends. No error has the address's name and password.
"""

import re
from typing import NamedTuple

import aiohttp
import msgspec

from prfaas.bounds.answers import ACCEPTED, read_at_most, unpacked
from prfaas.errors import ConfigError, ProtocolError, UnreachableError
from prfaas.util import check_values, decode_json

FIGURE_LABEL = "figure"
"""Label that tells figures apart where one query asks for several."""
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_ANSWER_VALUES = 500_000
"""Labels and figures."""
SHOWN_QUERY_CHARS = 200
_CREDENTIALS = re.compile(r"(^|//)[^/]*@")
# Statuses with which Prometheus, or a proxy before it, speaks of itself and not of the query.
BUSY_STATUSES = frozenset({408, 429, 499})


class Figure(NamedTuple):
    """One element of an instant vector. `at_seconds` is the evaluation's time by Prometheus's clock."""

    labels: dict[str, str]
    value: float
    at_seconds: float


class _Element(msgspec.Struct):
    value: tuple[float, str]
    metric: dict[str, str] = {}


class _Data(msgspec.Struct, rename="camel"):
    result_type: str
    result: msgspec.Raw


class _Answer(msgspec.Struct, rename="camel"):
    status: str
    data: _Data | None = None
    error: str = ""


class Prometheus:
    """One Prometheus. The base `url` may have a path prefix; `timeout_seconds` is for every query with its answer, of
    whose bounds `bounds_part` holds."""

    def __init__(self, http: aiohttp.ClientSession, url: str, timeout_seconds: float, bounds_part: float = 1.0):
        self._http = http
        self._endpoint = f"{url.rstrip('/')}/api/v1/query"
        self._shown = _CREDENTIALS.sub(r"\1***@", self._endpoint)
        self._timeout_seconds = timeout_seconds
        self._bounds_part = bounds_part

    async def vector(self, query: str) -> list[Figure]:
        """Return the elements of an instant vector, or the one of a scalar; empty when nothing matches.

        Raises UnreachableError, ConfigError and ProtocolError, as the module says.
        """
        # Prometheus gives up at its own timeout, so that a slow query does not run longer than we wait for it.
        form = {"query": query, "timeout": f"{self._timeout_seconds:g}s"}
        timeout = aiohttp.ClientTimeout(total=self._timeout_seconds)
        try:
            # POST: the joined query of a large policy is longer than what servers take as a URL.
            async with self._http.post(
                self._endpoint,
                data=form,
                headers=ACCEPTED,
                timeout=timeout,
                allow_redirects=False,
                auto_decompress=False,
            ) as response:
                return parse(response.status, await _read(response, self._bounds_part), query)
        except TimeoutError as error:
            raise UnreachableError(f"{self._shown} did not answer within {self._timeout_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            why = str(error).replace(self._endpoint, self._shown)
            raise UnreachableError(f"{self._shown} cannot be reached: {type(error).__name__}: {why}") from error
        except ValueError as error:  # what aiohttp and yarl raise for an address that is none
            raise ConfigError(f"{self._shown} is not an HTTP address; set metrics.prometheusUrl") from error

    async def figure(self, query: str) -> Figure | None:
        """Return the one element of a query; None when nothing matches. Raises as `vector`, also for several ones."""
        figures = await self.vector(query)
        if len(figures) > 1:
            raise ConfigError(f"{_shown(query)} answers {len(figures)} values where one is needed: wrap it in sum(...)")
        return figures[0] if figures else None

    async def value(self, query: str) -> float | None:
        """Return the value of that one element."""
        figure = await self.figure(query)
        return figure.value if figure else None


def parse(status: int, body: bytes | bytearray, query: str) -> list[Figure]:
    """Read one answer of /api/v1/query; `query` is named in errors, which are those of `Prometheus.vector`."""
    if 300 <= status < 400:
        raise ConfigError(f"Prometheus answers with a redirect, HTTP {status}: set metrics.prometheusUrl to its end")
    if status >= 500 or status in BUSY_STATUSES:
        raise UnreachableError(f"Prometheus answers HTTP {status}: {body[:200].decode('utf-8', 'replace')}")
    answer = decode_json(body, _Answer, f"Prometheus answers HTTP {status} with no JSON of its own")
    if answer.status != "success" or answer.data is None:
        raise ConfigError(f"Prometheus rejects {_shown(query)}: {answer.error or f'HTTP {status}'}")
    data, damaged = answer.data, f"Prometheus's answer to {_shown(query)} is damaged"
    if data.result_type == "scalar":
        at_seconds, text = decode_json(data.result, tuple[float, str], damaged)
        return [Figure({}, _float(text, query), at_seconds)]
    if data.result_type == "vector":
        elements = decode_json(data.result, list[_Element], damaged)
        return [Figure(one.metric, _float(one.value[1], query), one.value[0]) for one in elements]
    raise ConfigError(f"{_shown(query)} answers a {data.result_type} where one value is needed")


def _float(text: str, query: str) -> float:
    """Read a sample value: Prometheus writes NaN, +Inf and -Inf as Python reads them."""
    try:
        return float(text)
    except ValueError as error:
        raise ProtocolError(f"{_shown(query)} answers {text[:40]!r}, which is not a number") from error


async def _read(response: aiohttp.ClientResponse, part: float) -> bytearray:
    most_bytes = int(MAX_ANSWER_BYTES * part)
    body = await read_at_most(unpacked(response), most_bytes)
    if len(body) > most_bytes:
        raise ProtocolError(f"Prometheus answers more than {most_bytes} bytes")
    check_values(body, int(MAX_ANSWER_VALUES * part), "Prometheus answers JSON")
    return body


def _shown(query: str) -> str:
    return f"the query {query if len(query) <= SHOWN_QUERY_CHARS else query[:SHOWN_QUERY_CHARS] + '...'}"
