"""Serves the relayed endpoints: admits a request, reads it, has it served, counts and logs its end."""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

from aiohttp import web

from prfaas.bounds.bodies import BodyPlace, HeldBytes
from prfaas.errors import CapacityError, PrfaasError, RequestError
from prfaas.http_server import client_of
from prfaas.routing.facts import check_places
from prfaas.routing.prompt_size import PromptSize, prompt_size, prompt_values
from prfaas.telemetry.logs import line
from prfaas.wire import headers
from prfaas.wire.preferences import Preferences
from prfaas.wire.trace import read_trace
from prfaas_gateway.api import API_ROUTES, ApiRoute, read_answers
from prfaas_gateway.attempts import Attempts, GatewayParts
from prfaas_gateway.auth import NO_ANSWERS, ApiClient, Charge, Meter, UnknownKeyError
from prfaas_gateway.engines.shared import prompts, without_hand_off
from prfaas_gateway.metrics import RequestOutcome
from prfaas_gateway.openai import CODE_DEADLINE, DeadlineError, LimitError, error_event, error_response
from prfaas_gateway.request import GatewayRequest, Progress, PromptFacts, ReadingWay, place_salt, read_aside, receive
from prfaas_gateway.stream import STARTED, ClientGoneError

log = logging.getLogger(__name__)


class Dispatcher:
    def __init__(self, parts: GatewayParts):
        self._parts = parts
        self._attempts = Attempts(parts)
        self.held = HeldBytes(parts.limits.all_requests_bytes, parts.limits.arriving_bytes)
        self.open_requests = 0
        """Includes requests whose bodies are still arriving."""

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """Serve one request; every error becomes an OpenAI-style answer and one outcome."""
        span = self._parts.tracing.start("request", read_trace(http.headers), "server")
        progress = Progress(span, peer=http.remote or "")
        self.open_requests += 1
        try:
            response = await self._admit(http, progress)
        except (asyncio.CancelledError, ClientGoneError) as error:
            if progress.stream is None or not progress.stream.has_ended:
                progress.outcome = "aborted"
            # Nobody is left to get a response, and aiohttp takes a cancelled handler for one without.
            raise asyncio.CancelledError from error
        except Exception as error:
            progress.outcome = _outcome_of(error)
            progress.reason = str(error) or repr(error)
            progress.key_digest = error.key_digest if isinstance(error, UnknownKeyError) else ""
            if not isinstance(error, (PrfaasError, TimeoutError)):
                log.exception(line("internal error while serving a request", request_id=progress.request_id))
            response = error_response(error, http.path)
            progress.status = response.status
        else:
            progress.status = response.status
        finally:
            self.open_requests -= 1
            self._parts.metrics.requests.labels(progress.decision, progress.outcome).inc()
            progress.close()
            self._parts.history.add(progress)
        return response

    async def _admit(self, http: web.Request, progress: Progress) -> web.StreamResponse:
        address = client_of(http.transport) if http.transport is not None else ""
        with self._parts.auth.admitted(http) as meter, self.held.place(meter.client.name, address) as place:
            progress.client = meter.client.name
            request = await self._receive(http, progress, meter, place)
            charge = progress.charge
            try:
                return await self._serve_in_time(http, request, progress)
            except ClientGoneError:
                raise  # it pays for what it did not wait for
            except Exception:
                if charge is not None and progress.stream is None:
                    charge.settle_answers(0)  # it got nothing of an answer
                raise
            finally:
                if charge is not None and progress.first_route is None:
                    charge.give_back()  # no instance got the prompt

    async def _receive(self, http: web.Request, progress: Progress, meter: Meter, place: BodyPlace) -> GatewayRequest:
        """Receive a request; estimate its prompt, find where it is cached, and charge it."""
        parts = self._parts
        auth = parts.auth
        find_way = partial(self._find_way, API_ROUTES[http.path], meter.client)
        request, fields = await receive(http, progress, parts.limits, place, find_way)
        no_hand_off = without_hand_off(request)
        if not request.api.prefills:
            progress.prompt = PromptFacts(no_hand_off=no_hand_off)
            return request
        values, size = await read_aside(request, partial(_measured, fields, request.api.fields))
        progress.prompt = PromptFacts(meter.estimator.tokens(size), no_hand_off)
        prompt = progress.prompt = await parts.kv.find(request, values, progress.prompt)
        answers = read_answers(request.api, request.fields, prompts(request.fields) or 1) if auth.asks else NO_ANSWERS
        progress.charge = Charge(meter, size, prompt.total_tokens, answers)
        if prompt.is_exact:
            progress.charge.settle(prompt.total_tokens)
        return request

    def _find_way(self, api: ApiRoute, client: ApiClient, preferences: Preferences) -> ReadingWay:
        """Return how to read a request's body. The index looks for its prompt under the same salt.

        Raises RequestError if it forbids a place that is not known.
        """
        auth, state = self._parts.auth, self._parts.state
        if state.table is not None:
            check_places(preferences, state.table)
        places = state.places(preferences)
        salt_of = client.cache_salt if auth.isolates else None
        # Without such a salt only what the hub itself computed is cached.
        if state.needs_place_salt and set(places) - {headers.UNKNOWN_PLACE}:
            salt_of = _of_places(places, salt_of)
        return ReadingWay(
            every_field=auth.asks or state.reads_whole_bodies,
            salt_of=salt_of if api.prefills and api.path not in state.unsalted_apis else None,
            salt_objects=state.salt_objects,
            places=places,
            has_place_salt=state.needs_place_salt,
        )

    async def _serve_in_time(
        self, http: web.Request, request: GatewayRequest, progress: Progress
    ) -> web.StreamResponse:
        """Serve a request; at its deadline cancel its work and answer with an error."""
        try:
            async with asyncio.timeout_at(request.deadline_seconds) as timer:
                return await self._attempts.serve(http, request, progress)
        except TimeoutError as error:
            # A worker's own time-out: it has another status, and its own outcome.
            if not timer.expired():
                raise
            progress.outcome, progress.reason = "failed", "the request's deadline has passed"
            stream = http.get(STARTED)
            if stream is None:
                raise DeadlineError(progress.reason) from error
            await stream.end_in_error(error_event(http.path, progress.reason, CODE_DEADLINE))
            return stream.response


def _of_places(places: tuple[str, ...], salt_of: Callable[[str], str] | None) -> Callable[[str], str]:
    """Return what makes the salt of a prompt that these places may have given bytes of; `salt_of` makes the client's of
    the one that it sent."""
    return lambda sent: place_salt(places, salt_of(sent) if salt_of else sent)


def _measured(fields: Mapping[str, Any], names: Set[str]) -> tuple[dict[str, Any], PromptSize]:
    values = prompt_values(fields, names)
    return values, prompt_size(values, random.random())  # noqa: S311  # no secret


def _outcome_of(error: Exception) -> RequestOutcome:
    if isinstance(error, RequestError) and not isinstance(error, LimitError):
        return "invalid"
    return "rejected" if isinstance(error, (CapacityError, LimitError)) else "failed"
