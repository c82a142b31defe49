"""One request from its first byte to its last: decide, try a leg, decide again after a failure, relay, count.

Until the first byte has gone to the client a request may be sent again, and is. After that it ends with its worker,
honestly.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field

from aiohttp import web

from prfaas.errors import CapacityError, PrfaasError, RequestError
from prfaas.routing.decide import decide, decide_again
from prfaas.routing.facts import Decision, Facts, Refusal, Route
from prfaas.wire import headers
from prfaas_gateway.engines import Engine, LegFailedError
from prfaas_gateway.estimate import TokenEstimator
from prfaas_gateway.limits import Limits
from prfaas_gateway.metrics import Metrics, Outcome
from prfaas_gateway.openai import Intake, error_response, read_intake
from prfaas_gateway.relay import BrokenOffError, ClientGoneError, relay
from prfaas_gateway.state import GatewayState
from prfaas_gateway.upstream import Answer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Exchange:
    """One request while it is served. `began` is the route it was first given; what it counts as never changes."""

    intake: Intake
    total_tokens: int
    started_seconds: float
    threshold_tokens: int = 0
    began: Route | None = None
    tried: set[str] = field(default_factory=set[str])
    last_answer: Answer | None = None
    fell_back: bool = False
    outcome: Outcome = "failed"


class Dispatcher:
    """Serves the relayed endpoints."""

    def __init__(self, state: GatewayState, engine: Engine, metrics: Metrics, limits: Limits):
        self._state = state
        self._engine = engine
        self._metrics = metrics
        self._limits = limits
        self._estimator = TokenEstimator()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request; whatever goes wrong becomes an OpenAI-style answer and one outcome."""
        exchange: Exchange | None = None
        outcome: Outcome = "failed"
        try:
            intake = await read_intake(request, self._limits)
            exchange = Exchange(intake, self._estimator.tokens(len(intake.body)), self._state.clock())
            response = await self._serve(request, exchange)
            outcome = exchange.outcome
        except (asyncio.CancelledError, ClientGoneError) as error:
            outcome = "aborted"
            raise asyncio.CancelledError from error
        except RequestError as error:
            outcome = "invalid"
            response = error_response(error)
        except CapacityError as error:
            outcome = "rejected"
            response = error_response(error)
        except (PrfaasError, TimeoutError) as error:
            log.warning("request %s: %s", exchange.intake.request_id if exchange else "-", error)
            response = error_response(error)
        except Exception as error:
            log.exception("request %s met a bug", exchange.intake.request_id if exchange else "-")
            response = error_response(error)
        finally:
            decision = exchange.began.kind if exchange and exchange.began else "none"
            self._metrics.requests.labels(decision, outcome).inc()
        return response

    async def _serve(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        """Take the first decision and count the request under it."""
        facts = self._facts(exchange)
        if exchange.intake.model != facts.table.model:
            raise RequestError(
                f"the model {exchange.intake.model!r} is not served here; GET /v1/models lists what is",
                status=404,
                code="model_not_found",
                param="model",
            )
        decision = decide(facts)
        if isinstance(decision, Refusal):
            raise _no_capacity(decision, facts)
        exchange.began = decision
        exchange.threshold_tokens = facts.rule.threshold_tokens
        with self._state.counted(decision.kind):
            return await self._try_routes(request, exchange, decision)

    async def _try_routes(self, request: web.Request, exchange: Exchange, decision: Decision) -> web.StreamResponse:
        """Follow decisions until one is served, refused, or enough have failed."""
        for _ in range(self._limits.attempts):
            if isinstance(decision, Refusal):
                break
            try:
                return await self._follow(request, exchange, decision)
            except LegFailedError as failure:
                decision = self._after(failure, decision, exchange)
        if exchange.last_answer is not None:  # the last worker's own words say more than ours
            exchange.outcome = "rejected"
            return await relay(request, exchange.last_answer, {}, self._limits.idle_seconds)
        refusal = decision if isinstance(decision, Refusal) else Refusal(reason="NoDecodeInstance")
        raise _no_capacity(refusal, self._facts(exchange))

    async def _follow(self, request: web.Request, exchange: Exchange, route: Route) -> web.StreamResponse:
        """Serve the request along one route."""
        with self._state.occupied(route) as load:
            answer = await self._engine.open(route, exchange.intake)
            try:
                load.prefill_done()
                self._learn(exchange, route, answer)
                exchange.outcome = _outcome(answer.status, exchange.fell_back)
                added = _added_headers(exchange, route, answer.status)
                return await relay(request, answer, added, self._limits.idle_seconds)
            except BrokenOffError as error:
                log.warning("request %s on %s: %s", exchange.intake.request_id, route.decode.name, error)
                exchange.outcome = "failed"
                self._state.ejections.failed(route.decode.name, self._state.clock())
                return error.response
            finally:
                answer.close()

    def _after(self, failure: LegFailedError, route: Route, exchange: Exchange) -> Decision:
        """Note one failed leg and return what to do next."""
        at_fault = route.prefill if failure.leg == "prefill" and route.prefill else route.decode
        log.warning("request %s, %s leg: %s", exchange.intake.request_id, failure.leg, failure)
        exchange.tried.add(at_fault.name)
        exchange.last_answer = failure.answer
        if failure.eject:
            self._state.ejections.failed(at_fault.name, self._state.clock())
        if route.kind == "offload" and failure.leg == "prefill":
            exchange.fell_back = True
            self._state.offload_failed()
        facts = self._facts(exchange)
        return decide_again(facts, route, failure.leg, facts.table.on_offload_failure)

    def _learn(self, exchange: Exchange, route: Route, answer: Answer) -> None:
        """Take in what an answer tells: the instances live, the first token came, the prompt had so many tokens."""
        for one in filter(None, (route.decode, route.prefill)):
            self._state.ejections.succeeded(one.name)
        if answer.status >= 400 or exchange.began is None:
            return
        waited_seconds = self._state.clock() - exchange.started_seconds
        self._metrics.time_to_first_token.labels(exchange.began.kind).observe(waited_seconds)
        with suppress(ValueError):  # an engine that reports no count teaches nothing
            prompt_tokens = int(answer.headers.get(headers.PROMPT_TOKENS, ""))
            self._metrics.prompt_tokens.observe(prompt_tokens)
            self._estimator.observe(len(exchange.intake.body), prompt_tokens)

    def _facts(self, exchange: Exchange) -> Facts:
        """Return the facts of this moment; raises CapacityError before the first routing table."""
        facts = self._state.facts(exchange.intake.request_id, exchange.total_tokens, exchange.tried)
        if facts is None:
            raise CapacityError("the gateway has no routing table yet; is the operator running?")
        return facts


def _outcome(status: int, fell_back: bool) -> Outcome:
    if status >= 500:
        return "failed"
    if status >= 400:
        return "invalid"
    return "fallback" if fell_back else "ok"


def _added_headers(exchange: Exchange, route: Route, status: int) -> dict[str, str]:
    """Return what the gateway tells the client about its own decision; see prfaas.wire.headers."""
    prefilled_by = route.prefill or route.decode
    added = {
        headers.REQUEST_ID: exchange.intake.request_id,
        headers.DECISION: exchange.began.kind if exchange.began else route.kind,
        headers.PREFILL_CLUSTER: prefilled_by.cluster,
        headers.PREFILL_INSTANCE: prefilled_by.name,
        headers.DECODE_INSTANCE: route.decode.name,
        headers.THRESHOLD_TOKENS: str(exchange.threshold_tokens),
    }
    if status < 400:
        added[headers.OUTCOME] = "fallback" if exchange.fell_back else "ok"
    return added


def _no_capacity(refusal: Refusal, facts: Facts) -> CapacityError:
    """Return the error for a refusal, in a sentence that tells the causes apart."""
    if refusal.reason == "OffloadRejected":
        return CapacityError("the offload pool failed, and the policy's onOffloadFailure is Reject; try again later")
    known = sum(one.role == "decode" for one in facts.table.instances)
    return CapacityError(
        f"none of the {known} decode instances of policy {facts.table.policy} can take the request now; try again later"
    )
