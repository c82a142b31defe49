"""One request from its first byte to its last: decide, try a leg, decide again after a failure, relay, count.

Until the first byte has gone to the client a request may be sent again, and is. After that its stream goes on at
another worker, where workers say which tokens they send (prfaas.wire.resume); else it ends with its worker, honestly.
A budget over all requests bounds how often either may be done. docs/failover.md draws the states.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from aiohttp import web

from prfaas.errors import CapacityError, PrfaasError, RequestError
from prfaas.routing.admission import overload
from prfaas.routing.decide import decide, decide_again
from prfaas.routing.facts import Decision, Facts, Refusal, Route
from prfaas.routing.preferences import narrowed
from prfaas.telemetry.logs import line
from prfaas.telemetry.tracing import OFF, Tracing
from prfaas.wire import headers
from prfaas.wire.resume import Fixed
from prfaas.wire.trace import read_trace
from prfaas_gateway.account import Account
from prfaas_gateway.budget import RetryBudget
from prfaas_gateway.door import Door
from prfaas_gateway.engines import Engine, LegFailedError
from prfaas_gateway.estimate import TokenEstimator
from prfaas_gateway.exchange import (
    Exchange,
    added_headers,
    no_capacity,
    outcome_of_error,
    outcome_of_status,
    said,
    too_late,
)
from prfaas_gateway.kv.manager import NOTHING, KvManager
from prfaas_gateway.limits import Limits
from prfaas_gateway.metrics import Metrics, Outcome
from prfaas_gateway.openai import (
    CODE_DEADLINE,
    DeadlineError,
    Intake,
    SaturatedError,
    error_message,
    error_response,
    read_intake,
    relayed_headers,
)
from prfaas_gateway.relay import STARTED, BrokenOffError, ClientGoneError, begin, end_in_error
from prfaas_gateway.saturation import Saturation, avoiding
from prfaas_gateway.state import GatewayState
from prfaas_gateway.upstream import Answer

log = logging.getLogger(__name__)


class Dispatcher:
    """Serves the relayed endpoints."""

    def __init__(
        self,
        state: GatewayState,
        engine: Engine,
        metrics: Metrics,
        limits: Limits,
        tracing: Tracing = OFF,
        door: Door | None = None,
    ):
        self._state = state
        self._engine = engine
        self._metrics = metrics
        self._limits = limits
        self._tracing = tracing
        self._door = door or Door()
        self._estimator = TokenEstimator()
        self._saturation = Saturation()
        self._budget = RetryBudget(state.clock())
        self.open_requests = 0
        """Requests from their heads to the ends of their answers, so those too whose bodies still come."""
        self.kv: KvManager | None = None
        """Knows what is cached where; without it, load alone decides."""
        self.on_end: Callable[[Account, str, Outcome], None] = lambda _account, _decision, _outcome: None
        """Called with each request that is over."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request; whatever goes wrong becomes an OpenAI-style answer and one outcome."""
        account = Account(self._tracing.start("request", read_trace(request.headers), "server"))
        exchange: Exchange | None = None
        outcome: Outcome = "failed"
        self.open_requests += 1
        try:
            with self._door.entered(request) as meter:
                account.client = meter.client.name
                intake = await read_intake(request, self._limits)
                # A span of ours, or where nothing is traced, the context that came.
                intake.headers.update(account.span.context.headers())
                # What no second worker could know, should the first one die.
                intake.headers[headers.RESUMABLE] = Fixed(secrets.randbits(63), int(time.time())).header()
                exchange = self._exchange(intake, account)
                meter.charge(exchange.total_tokens)
                response = await self._in_time(request, exchange)
            outcome = exchange.outcome
            account.status = response.status
        except (asyncio.CancelledError, ClientGoneError) as error:
            outcome = "aborted"
            raise asyncio.CancelledError from error
        except Exception as error:
            outcome = outcome_of_error(error)
            account.reason = str(error) or repr(error)
            if not isinstance(error, (PrfaasError, TimeoutError)):
                log.exception(line("request met a bug", request_id=account.request_id))
            response = error_response(error)
            account.status = response.status
        finally:
            self.open_requests -= 1
            decision = exchange.began.kind if exchange and exchange.began else "none"
            self._metrics.requests.labels(decision, outcome).inc()
            account.close(decision, outcome)
            self.on_end(account, decision, outcome)
        return response

    def _exchange(self, intake: Intake, account: Account) -> Exchange:
        tokens = self._estimator.tokens(len(intake.body))
        account.request_id, account.estimated_tokens = intake.request_id, tokens
        found = self.kv.find(intake, tokens) if self.kv else NOTHING
        return Exchange(intake, account, tokens, found)

    async def _in_time(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        """Serve a request; when its own deadline comes first, abort what runs for it and say so."""
        deadline_seconds = exchange.intake.deadline_seconds
        try:
            async with asyncio.timeout_at(deadline_seconds) as timer:
                return await self._serve(request, exchange)
        except TimeoutError as error:
            if not timer.expired():
                raise
            exchange.outcome, exchange.account.reason = "failed", "the request's deadline has passed"
            response = request.get(STARTED)
            if response is None:
                raise DeadlineError(exchange.account.reason) from error
            await end_in_error(request, response, exchange.account.reason, CODE_DEADLINE)
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
            decision = await self._until_served(exchange, decide, self._state.clock() + self._limits.hold_seconds)
            facts = self._facts(exchange)
        if isinstance(decision, Refusal):
            raise no_capacity(decision, facts)
        if (late := overload(facts, decision)) is not None:
            self._metrics.slo_refusals.inc()
            raise too_late(late)
        exchange.began = decision
        exchange.threshold_tokens = exchange.account.threshold_tokens = facts.rule.threshold_tokens
        with self._state.counted(decision):
            return await self._try_routes(request, exchange, decision)

    async def _try_routes(self, request: web.Request, exchange: Exchange, decision: Decision) -> web.StreamResponse:
        """Follow decisions until one is served, refused, or enough have failed."""
        self._budget.request_came()
        until_seconds = self._state.clock() + self._limits.hold_seconds
        for _ in range(self._limits.attempts):
            if isinstance(decision, Refusal):
                break
            try:
                return await self._follow(request, exchange, decision)
            except LegFailedError as failure:
                if exchange.stream is not None:
                    return await self._resume(request, exchange, decision, failure)
                self._note(failure, decision, exchange)
                if not self._may_retry():
                    break
                decision = await self._after(failure, decision, exchange, until_seconds)
        if exchange.last_answer is not None and exchange.last_answer.status == 503:
            words = error_message(exchange.last_answer.body or b"")
            raise SaturatedError(f"every instance that could serve is full; try again in a moment: {words}")
        if exchange.last_answer is not None and exchange.last_answer.body is not None:
            exchange.outcome = "rejected"  # the last worker's own words say more than ours
            answer = exchange.last_answer
            return web.Response(status=answer.status, headers=relayed_headers(answer.headers, {}), body=answer.body)
        refusal = decision if isinstance(decision, Refusal) else Refusal(reason="NoDecodeInstance")
        raise no_capacity(refusal, self._facts(exchange))

    async def _follow(self, request: web.Request, exchange: Exchange, route: Route) -> web.StreamResponse:
        """Serve the request along one route."""
        exchange.account.route = route
        with self._state.occupied(route) as load:
            answer = await self._engine.open(route, exchange.leg())
            try:
                load.prefill_done()
                exchange.account.heard(answer)
                if exchange.stream is None:
                    self._learn(exchange, route, answer)
                    exchange.outcome = outcome_of_status(answer.status, exchange.fell_back)
                    begun = await begin(request, answer, added_headers(exchange, route, answer.status))
                    if isinstance(begun, web.Response):
                        return begun
                    exchange.stream = begun
                else:
                    self._went_on(exchange, route, answer)
                await exchange.stream.take(answer, self._limits)
                return exchange.stream.response
            except BrokenOffError as error:
                raise LegFailedError(str(error), leg="decode", eject=True) from error
            finally:
                answer.close()

    async def _resume(
        self, request: web.Request, exchange: Exchange, route: Route, failure: LegFailedError
    ) -> web.StreamResponse:
        """Go on with a stream that broke, elsewhere; if nobody can, tell the client that it is not whole."""
        stream = exchange.stream
        assert stream is not None  # noqa: S101 - the caller has looked
        journal = stream.journal
        event, for_all = journal.dying_words() if journal else (b"", False)
        broke_seconds, pieces = self._state.clock(), journal.pieces if journal else 0
        while True:
            exchange.tried = set(exchange.refused)
            self._note(failure, route, exchange)
            if journal is None or not journal.can_go_on or for_all or not self._may_retry():
                break
            until_seconds = broke_seconds + self._limits.recover_seconds
            decision = await self._after(failure, route, exchange, until_seconds)
            if isinstance(decision, Refusal):
                break
            try:
                response = await self._follow(request, exchange, decision)
                exchange.outcome = "resumed"
                return response
            except LegFailedError as again:
                route, failure = decision, again
            except TimeoutError as error:
                route, failure = decision, LegFailedError(str(error), leg="decode", eject=False)
            words, for_all = journal.dying_words()
            event = words or event
            if journal.pieces > pieces:
                broke_seconds, pieces = self._state.clock(), journal.pieces
        exchange.outcome, exchange.account.reason = "failed", str(failure)
        await stream.break_off(str(failure), event)
        return stream.response

    async def _until_served(
        self, exchange: Exchange, choose: Callable[[Facts], Decision], until_seconds: float
    ) -> Decision:
        """Return where a request can go; waits a while for an instance that failed just now and may be back."""
        while True:
            try:
                decision = choose(self._facts(exchange))
            except CapacityError:
                if exchange.stream is None:
                    raise
                decision = Refusal(reason="NoDecodeInstance")
            is_final = isinstance(decision, Route) or decision.reason == "OffloadRejected"
            if is_final or self._state.clock() >= until_seconds or not self._state.has_decode:
                return decision
            await asyncio.sleep(self._limits.look_again_seconds)
            exchange.tried = set(exchange.refused)

    def _went_on(self, exchange: Exchange, route: Route, answer: Answer) -> None:
        """Take in that a worker goes on with a stream.

        Raises:
            LegFailedError: it does not.

        """
        if answer.status != 200 or answer.body is not None:
            if answer.status < 500:
                exchange.refused.add(route.decode.name)
            text = f"{route.decode.name} does not go on with the answer"
            raise LegFailedError(text, leg="decode", eject=False, answer=answer)
        for one in filter(None, (route.decode, route.prefill)):
            self._state.ejections.succeeded(one.name)
        exchange.tried = set(exchange.refused)
        exchange.account.resumes += 1
        stream = exchange.stream
        self._metrics.resumes.inc()
        if stream is not None and stream.journal is not None:
            self._metrics.resumed_tokens.inc(stream.journal.resume().sent_tokens)

    def _may_retry(self) -> bool:
        """Take one retry from the budget; counts those that it refuses."""
        if self._budget.take(self._state.clock()):
            return True
        self._metrics.retries_refused.inc()
        return False

    def _note(self, failure: LegFailedError, route: Route, exchange: Exchange) -> None:
        """Note one failed leg, and who is at fault."""
        at_fault = route.prefill if failure.leg == "prefill" and route.prefill else route.decode
        exchange.account.heard(failure.answer)
        exchange.account.leg_failed(failure.leg, at_fault.name, said(failure))
        exchange.tried.add(at_fault.name)
        exchange.last_answer = failure.answer
        if failure.eject:
            self._state.ejections.failed(at_fault.name, self._state.clock())
        if route.kind == "offload" and failure.leg == "prefill":
            exchange.fell_back = True
            self._state.offload_failed()

    async def _after(self, failure: LegFailedError, route: Route, exchange: Exchange, until_seconds: float) -> Decision:
        """Return what to do after a failed leg that was noted."""
        if failure.leg == "decode" and not failure.eject:
            self._saturation.refused(route.decode.name, self._state.load(route.decode.name), self._state.clock())

        def again(facts: Facts) -> Decision:
            return decide_again(facts, route, failure.leg, facts.table.on_offload_failure)

        return await self._until_served(exchange, again, until_seconds)

    def _learn(self, exchange: Exchange, route: Route, answer: Answer) -> None:
        """Take in what an answer tells: the instances live, the first token came, the prompt had so many tokens."""
        for one in filter(None, (route.decode, route.prefill)):
            self._state.ejections.succeeded(one.name)
        if answer.status >= 400 or exchange.began is None:
            return
        account = exchange.account
        self._metrics.time_to_first_token.labels(exchange.began.kind).observe(account.answered(answer))
        if self.kv is not None:
            self.kv.placed(exchange.found, route)
        if account.prompt_tokens:
            self._metrics.prompt_tokens.observe(account.prompt_tokens)
            self._estimator.observe(len(exchange.intake.body), account.prompt_tokens)

    def _facts(self, exchange: Exchange) -> Facts:
        """Return the facts of this moment, as the request's preferences and full instances leave them.

        Raises:
            CapacityError: there is no routing table yet, or every decode instance that lives is full.

        """
        facts = self._state.facts(exchange.intake.request_id, exchange.total_tokens, exchange.tried)
        if facts is None:
            raise CapacityError("the gateway has no routing table yet; is the operator running?")
        facts = narrowed(exchange.found.added_to(facts), exchange.intake.preferences)
        full = self._saturation.full(facts.in_flight, facts.now_seconds)
        return avoiding(facts, full) if full else facts
