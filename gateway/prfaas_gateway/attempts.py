"""Serves one request in one or more attempts: decides a route, follows it, retries after a failure, relays, resumes.

A request is retried until its first byte was sent to the client. After that the stream resumes at another worker if the
engine names token ids (engines/token_log.py). Else it ends with an error. A retry budget over all requests bounds both.
docs/operate/failover.md draws the states. A request and its progress are arguments: `Attempts` itself keeps neither.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from prfaas.errors import CapacityError
from prfaas.routing.decide import Overload, decide, decide_again, decide_at_last, find_overload
from prfaas.routing.facts import Decision, Refusal, Route, RoutingFacts
from prfaas.routing.quarantine import LOSSES, PROBATION_SECONDS
from prfaas.telemetry.logs import line
from prfaas.telemetry.tracing import OFF, Tracing
from prfaas.wire import headers
from prfaas.wire.trace import write_parts
from prfaas_gateway.api import most_bytes, not_served_by
from prfaas_gateway.auth import Auth
from prfaas_gateway.dashboard import RequestHistory
from prfaas_gateway.engines.shared import Attempt, EngineProtocol, LegFailedError, lost_prefill, prompts
from prfaas_gateway.kv.manager import KvManager
from prfaas_gateway.limits import Limits
from prfaas_gateway.metrics import GatewayMetrics, RequestOutcome
from prfaas_gateway.openai import (
    LateError,
    QuarantinedError,
    SaturatedError,
    error_event,
    model_not_found,
    read_error,
    read_usage,
    relayed_headers,
)
from prfaas_gateway.request import GatewayRequest, Progress
from prfaas_gateway.state import GatewayState
from prfaas_gateway.stream import AnswerStream, BrokenOffError, begin_answer, is_stream
from prfaas_gateway.upstream import Answer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GatewayParts:
    limits: Limits
    state: GatewayState
    metrics: GatewayMetrics
    engines: EngineProtocol
    kv: KvManager
    auth: Auth
    history: RequestHistory
    tracing: Tracing = OFF


class Attempts:
    def __init__(self, parts: GatewayParts):
        self._parts = parts
        self._state = parts.state
        self._limits = parts.limits

    async def serve(self, http: web.Request, request: GatewayRequest, progress: Progress) -> web.StreamResponse:
        """Decide once, count the request under that decision, and follow the route.

        Raises RequestError for an unknown model, CapacityError if no instance can serve the request in time.
        """
        facts = self._facts(request, progress)
        if request.model != facts.table.model:
            raise model_not_found(request.model)
        self._check_quarantine(request, progress)
        if missing := not_served_by(request.api, facts.table, isolates=self._parts.auth.isolates):
            # In `refused` as well: each wait for a returning instance sets `tried` back to it.
            progress.refused |= missing
            progress.tried |= missing
            facts = self._facts(request, progress)
        decision = decide(facts)
        if isinstance(decision, Refusal):
            until_seconds = self._state.clock() + self._limits.hold_seconds
            decision = await self._until_served(request, progress, decide, until_seconds)
            facts = self._facts(request, progress)
        if isinstance(decision, Refusal):
            raise _no_capacity(decision, facts)
        if request.api.prefills and (late := find_overload(facts, decision)) is not None:
            self._parts.metrics.slo_refusals.inc()
            raise _too_late(late)
        progress.first_route, progress.threshold_tokens = decision, facts.rule.threshold_tokens
        with self._state.counted(decision, prefills=request.api.prefills):
            return await self._try_routes(http, request, progress, decision)

    def _facts(self, request: GatewayRequest, progress: Progress) -> RoutingFacts:
        return self._state.facts(request, progress.prompt, progress.tried)

    async def _try_routes(
        self, http: web.Request, request: GatewayRequest, progress: Progress, decision: Decision
    ) -> web.StreamResponse:
        """Follow decisions until one is served or refused, or too many have failed."""
        # A last resort has waited for as long as a request may.
        left_seconds = 0.0 if progress.had_last_resort else self._limits.hold_seconds
        answer = None
        self._state.retry_budget.request_came(self._state.clock())
        for number in range(1, self._limits.attempts + 1):
            if isinstance(decision, Refusal):
                break
            try:
                return await self._follow(http, request, progress, decision)
            except LegFailedError as failure:
                if progress.stream is not None:
                    return await self._resume(request, progress, progress.stream, decision, failure)
                self._note_failure(request, progress, decision, failure)
                answer = failure.answer
                self._check_quarantine(request, progress)
                if not self._may_retry():
                    break
                if number == self._limits.attempts:
                    left_seconds = 0.0  # nobody follows the next route: only why there is none counts
                failed_at = self._state.clock()  # an answer may break long after it was asked for
                decision = await self._decide_again(request, progress, decision, failure, failed_at + left_seconds)
                left_seconds -= self._state.clock() - failed_at
        if answer is not None and answer.status == 503:
            words = read_error(answer.body or b"").get("message", "")
            raise SaturatedError(f"every instance that could serve is full; try again in a moment: {words}")
        if answer is not None and answer.body is not None:
            progress.outcome = "rejected"  # the last worker's own error is more precise
            return web.Response(status=answer.status, headers=relayed_headers(answer.headers, {}), body=answer.body)
        refusal = decision if isinstance(decision, Refusal) else Refusal(reason="NoDecodeInstance")
        raise _no_capacity(refusal, self._facts(request, progress))

    async def _follow(
        self, http: web.Request, request: GatewayRequest, progress: Progress, route: Route
    ) -> web.StreamResponse:
        """Serve the request along one route; raise LegFailedError if a leg fails, even in the middle of the answer."""
        progress.route = route
        broken = progress.stream.log if progress.stream is not None else None
        may_recompute = route.kind == "local" or not self._state.rejects_failed_offloads
        with self._state.occupied(route, progress.prompt.cached_on_ranks, request.request_id) as load:
            attempt = Attempt(route, load.ranks, broken, may_recompute, self._state.place_of)
            try:
                answer = await self._parts.engines.open(request, attempt)
            finally:
                progress.transfer_id = attempt.transfer_id or progress.transfer_id
            begun_seconds = self._state.clock()
            try:
                load.prefill_done(streams=is_stream(answer))
                progress.note_transfer(answer)
                is_noted = self._note_lost_prefill(request, progress, route, answer)
                if progress.stream is None:
                    self._learn(request, progress, attempt, answer)
                    progress.outcome = _outcome_of(answer.status, progress.fell_back)
                    added = _added_headers(progress, route, answer.status)
                    most = _most_bytes(request) if answer.body is None else 0
                    begun = await begin_answer(http, answer, added, attempt.log, most)
                    if isinstance(begun, web.Response):
                        return begun
                    progress.stream = begun
                else:
                    self._note_resumed(progress, progress.stream, route, answer)
                await progress.stream.relay(answer, self._limits)
                return progress.stream.response
            except BrokenOffError as error:
                is_early = self._state.clock() - begun_seconds < PROBATION_SECONDS
                if not is_early:
                    progress.lost.clear()  # what served it for long did not die of it
                # After a failed prefill leg the gateway itself may have cut the answer off.
                is_loss = error.is_closed and is_early and lost_prefill(answer) is None
                eject = not error.is_too_long
                raise LegFailedError(str(error), leg="decode", eject=eject, is_loss=is_loss) from error
            finally:
                if not is_noted:
                    self._note_lost_prefill(request, progress, route, answer)
                _settle(request, progress, answer)
                answer.close()

    async def _resume(
        self, request: GatewayRequest, progress: Progress, stream: AnswerStream, route: Route, failure: LegFailedError
    ) -> web.StreamResponse:
        """Resume a broken stream at another worker; if there is none, end the answer with an error."""
        log, pieces, until_seconds = stream.log, -1, 0.0
        while True:
            progress.forget_tried()
            self._note_failure(request, progress, route, failure)
            deadly_seconds = self._deadly_seconds(request, progress, failure)
            if log is None:
                break
            log.worker_died()
            if rest := log.ending():
                await stream.end(rest)
                return stream.response
            if log.pieces > pieces:  # the stream moved on, so another recovery gets the full time
                pieces, until_seconds = log.pieces, self._state.clock() + self._limits.recover_seconds
            if not log.can_go_on or log.is_refused or deadly_seconds or not self._may_retry():
                break
            decision = await self._decide_again(request, progress, route, failure, until_seconds)
            if isinstance(decision, Refusal):
                break
            route = decision
            try:
                response = await self._follow(stream.http, request, progress, route)
            except LegFailedError as again:
                failure = again
            # A late worker. The request's deadline is no TimeoutError in here, it cancels.
            except TimeoutError as error:
                failure = LegFailedError(str(error), leg="decode", eject=False)
            else:
                progress.outcome = "resumed"
                return response
        progress.outcome, progress.reason = "failed", str(failure)
        if deadly_seconds:
            refused = QuarantinedError(deadly_seconds, of_client=False)
            await stream.end_in_error(error_event(request.path, str(refused), refused.code))
        else:
            await stream.break_off(str(failure))
        return stream.response

    def _note_resumed(self, progress: Progress, stream: AnswerStream, route: Route, answer: Answer) -> None:
        """Record that a worker resumes the stream; raise LegFailedError if it does not."""
        metrics = self._parts.metrics
        if answer.status != 200 or answer.body is not None:
            text = f"{route.decode.name} does not resume the answer"
            raise LegFailedError(text, leg="decode", eject=False, answer=answer, refuses=answer.status < 500)
        self._note_alive(progress, route)
        progress.forget_tried()
        progress.resumes += 1
        metrics.resumes.inc()
        if stream.log is not None:
            metrics.resumed_tokens.inc(stream.log.sent_tokens)

    def _may_retry(self) -> bool:
        """Take a retry from the budget, and count the refusal if it is empty."""
        if self._state.retry_budget.take(self._state.clock()):
            return True
        self._parts.metrics.retries_refused.inc()
        return False

    def _check_quarantine(self, request: GatewayRequest, progress: Progress) -> None:
        quarantine, now_seconds = self._state.quarantine, self._state.clock()
        if not quarantine:
            return
        for refused in (request.digest, progress.client):
            if left_seconds := quarantine.left_seconds(refused, now_seconds):
                raise QuarantinedError(left_seconds, of_client=refused is not request.digest)

    def _deadly_seconds(self, request: GatewayRequest, progress: Progress, failure: LegFailedError) -> float:
        """Return for how long a request that lost its engine is refused, maybe by what another with the same digest
        lost; 0: it is not."""
        if not failure.lost_connection and len(progress.lost) < LOSSES:
            return 0.0
        return self._state.quarantine.left_seconds(request.digest, self._state.clock())

    def _note_loss(self, request: GatewayRequest, progress: Progress, instance: str) -> None:
        progress.lost.append(instance)
        if len(progress.lost) < LOSSES:
            return
        if self._state.quarantine.add(request.digest, progress.client, self._state.clock()):
            log.warning(line("a client is refused for a minute: its requests lost instances", client=progress.client))

    def _note_failure(self, request: GatewayRequest, progress: Progress, route: Route, failure: LegFailedError) -> None:
        at_fault = route.prefill if failure.leg == "prefill" and route.prefill else route.decode
        progress.note_transfer(failure.answer)
        words = read_error(failure.answer.body or b"").get("message") if failure.answer else None
        progress.log_failed_leg(failure.leg, at_fault.name, f"{failure}: {words}" if words else str(failure))
        if failure.lost_connection:
            self._note_loss(request, progress, at_fault.name)
        progress.tried.add(at_fault.name)
        if failure.refuses:
            progress.refused.add(at_fault.name)
        if failure.eject:
            self._state.ejections.failed(at_fault.name, self._state.clock())
        if route.kind == "offload" and failure.leg == "prefill":
            progress.fell_back = True
            self._state.offload_failed()

    def _note_lost_prefill(self, request: GatewayRequest, progress: Progress, route: Route, answer: Answer) -> bool:
        """Count a prefill leg that has failed while the decode instance continues without it; return whether it has."""
        failure = lost_prefill(answer)
        if failure is not None:
            self._note_failure(request, progress, route, failure)
        return failure is not None

    async def _decide_again(
        self, request: GatewayRequest, progress: Progress, route: Route, failure: LegFailedError, until_seconds: float
    ) -> Decision:
        if failure.leg == "decode" and not failure.eject:
            name = route.decode.name
            self._state.saturation.refused(name, self._state.load(name), self._state.clock())

        def again(facts: RoutingFacts) -> Decision:
            return decide_again(facts, route, failure.leg, facts.table.on_offload_failure)

        return await self._until_served(request, progress, again, until_seconds)

    async def _until_served(
        self,
        request: GatewayRequest,
        progress: Progress,
        choose: Callable[[RoutingFacts], Decision],
        until_seconds: float,
    ) -> Decision:
        """Return a route; if there is none, wait a while for an ejected instance, then try one once all the same."""
        failed = progress.tried  # this set stays; `forget_tried` makes another
        while True:
            try:
                decision = choose(self._facts(request, progress))
            except CapacityError:
                # Before the first byte a full fleet is a 429 now. A begun stream has no status left, so it waits.
                if progress.stream is None:
                    raise
                decision = Refusal(reason="NoDecodeInstance")
            if isinstance(decision, Route) or decision.reason == "OffloadRejected":
                return decision
            if self._state.clock() >= until_seconds or not self._state.decode_instances():
                # A begun stream has waited longer than an ejection lasts.
                if progress.stream is not None or progress.had_last_resort:
                    return decision
                progress.had_last_resort = True
                return decide_at_last(self._facts(request, progress), failed, choose)
            await asyncio.sleep(self._limits.poll_seconds)
            # What failed before may be the instance that comes back.
            progress.forget_tried()

    def _learn(self, request: GatewayRequest, progress: Progress, attempt: Attempt, answer: Answer) -> None:
        """Learn from an answer: the instances live, the first token came, and the prompt's exact length."""
        metrics = self._parts.metrics
        self._note_alive(progress, attempt.route)
        if answer.status >= 400 or not request.api.prefills:
            return
        seconds = progress.note_first_token(answer, attempt.began_seconds, attempt.prefilled_seconds)
        metrics.time_to_first_token.labels(progress.decision).observe(seconds)
        route = attempt.route
        if route.prefill is not None and route.prefill.name in progress.tried:  # its cache did not come
            route = msgspec.structs.replace(route, prefill=None)
        self._parts.kv.note_placed(progress.prompt, route, attempt.ranks)
        if prompt_tokens := progress.answer_start.prompt_tokens:
            metrics.prompt_tokens.observe(prompt_tokens)
            if progress.charge is not None:
                progress.charge.settle(prompt_tokens)

    def _note_alive(self, progress: Progress, route: Route) -> None:
        for one in filter(None, (route.decode, route.prefill)):
            if one.name not in progress.tried:  # else its cache did not come
                self._state.ejections.succeeded(one.name)


def _settle(request: GatewayRequest, progress: Progress, answer: Answer) -> None:
    """Charge what an answer says at its end: the exact length of the prompt, if it was not known, and its own."""
    charge = progress.charge
    if charge is None or (charge.exact_tokens and not charge.is_limited):
        return
    stream = progress.stream
    if (answer.status if stream is None else stream.response.status) >= 400:
        charge.settle_answers(0)
        return
    if stream is not None:
        usage = stream.usage
    elif answer.body is not None:
        usage = read_usage(request.path, answer.body)
    else:
        return
    charge.settle(usage.prompt_tokens or 0)
    if usage.answer_tokens is not None:
        charge.settle_answers(usage.answer_tokens)


def _most_bytes(request: GatewayRequest) -> int:
    return most_bytes(request.api, request.fields, prompts(request.fields) or 1, len(request.body))


def _outcome_of(status: int, fell_back: bool) -> RequestOutcome:
    if status >= 500:
        return "failed"
    if status >= 400:
        return "invalid"
    return "fallback" if fell_back else "ok"


def _added_headers(progress: Progress, route: Route, status: int) -> dict[str, str]:
    """Return the headers that give the gateway's decision to the client; see prfaas.wire.headers."""
    prefilled_by = route.prefill or route.decode
    if prefilled_by.name in progress.tried:  # its cache did not come
        prefilled_by = route.decode
    added = {
        headers.REQUEST_ID: progress.request_id,
        headers.DECISION: progress.decision,
        headers.PREFILL_CLUSTER: prefilled_by.cluster,
        headers.PREFILL_INSTANCE: prefilled_by.name,
        headers.DECODE_INSTANCE: route.decode.name,
        headers.THRESHOLD_TOKENS: str(progress.threshold_tokens),
    }
    if status < 400:
        added[headers.OUTCOME] = "fallback" if progress.fell_back else "ok"
    if parts := progress.answer_start.parts:
        added[headers.TTFT_SECONDS] = write_parts(parts)
    return added


def _too_late(late: Overload) -> LateError:
    return LateError(
        f"prefills of {late.wait_seconds:.1f} s wait before this one, and the policy's slo.ttftMillis is "
        f"{1000 * late.slo_seconds:.0f}; try again in {late.retry_after_seconds:.1f} s",
        late.retry_after_seconds,
    )


def _no_capacity(refusal: Refusal, facts: RoutingFacts) -> CapacityError:
    if refusal.reason == "OffloadRejected":
        return CapacityError("the offload pool failed, and the policy's onOffloadFailure is Reject; try again later")
    known = sum(one.role == "decode" for one in facts.table.instances)
    return CapacityError(
        f"none of the {known} decode instances of policy {facts.table.policy} can take the request now; try again later"
    )
