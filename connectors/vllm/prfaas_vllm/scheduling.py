"""The scheduler's side of the connector: which tokens of which requests cross, and when blocks may be freed.

Both sides compute the same `goal` from a prompt's length: the tokens whose cache crosses. The destination computes the
rest itself, at least the last token, because a recurrent state cannot take a token twice. The goal of a prompt of
several pages ends with a page, where the destination's own prefix cache can keep the state for the next turn. A shorter
prompt has less to win by that than the tail costs: all but its last token cross.

The source's prompt is cut to end with the goal. Where vLLM ends the steps within a prompt depends on its kernels, on
drafts and on what it has cached. The last step always ends with the prompt, and leaves the state that crosses. vLLM
computes at least the last token of any prompt, so no prefix cache takes that step away. And no step follows that would
write the state again while it crosses.

Of a prefix that the source should have cached, the gateway names the length. The goal is a page behind it: vLLM has no
state to give without a step, so the source computes that page, and whatever it lacks before.

Nothing here imports vLLM: requests are known by the few attributes of `VllmRequest`.
"""

import logging
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from prfaas.wire.prefill import LegParams, token_digest

log = logging.getLogger("vllm.prfaas")

BlockIds = tuple[list[int], ...]
WHOLE_PAGES_FROM: Final = 4
"""From so many pages on a prompt's whole pages cross; all but the last token of a shorter one."""
NAMED_TWICE: Final = "prfaas: the transfer of %s has begun before, for another request: it is served alone"


class VllmRequest(Protocol):
    """What is used of vLLM's Request."""

    request_id: str
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None


@dataclass(frozen=True)
class SourceStart:
    """A source's request came: a destination may ask for its cache from now on. `prompt` is its tokens' digest, and
    `prompt_tokens` counts what it had before it was cut to the goal."""

    request_id: str
    leg: LegParams
    goal: int
    prompt: str = ""
    prompt_tokens: int = 0


@dataclass(frozen=True)
class SourceStep:
    """This step brings a source's request from `before` to `computed` tokens in its blocks."""

    request_id: str
    before: int
    computed: int
    block_ids: BlockIds


@dataclass(frozen=True)
class Fetching:
    """A destination's request has blocks for the tokens from `start` to `goal`, which another instance computes."""

    request_id: str
    leg: LegParams
    start: int
    goal: int
    block_ids: BlockIds
    prompt: str = ""


@dataclass(frozen=True)
class DeclineFetch:
    """A destination's own prefix cache has all that its source would send, or its request is over before it asks."""

    request_id: str
    leg: LegParams


@dataclass
class StepPlan:
    """All that the worker's side must know of a step."""

    starts: list[SourceStart] = field(default_factory=list)
    steps: list[SourceStep] = field(default_factory=list)
    fetches: list[Fetching] = field(default_factory=list)
    declined: list[DeclineFetch] = field(default_factory=list)
    revoked: dict[str, str] = field(default_factory=dict)  # Requests whose cache is not given any more, and why.
    fetched: list[Fetching] = field(default_factory=list)  # All ranks' parts of these have come.
    unawaited: set[str] = field(default_factory=set)  # Sources of whose end vLLM must not hear.
    in_vain: set[str] = field(default_factory=set)  # Requests whose fetch has failed at a rank.


NOTHING: Final = StepPlan()
"""Of most steps there is nothing to say."""


def goal_of(prompt_tokens: int, page_tokens: int) -> int:
    """Return the tokens of a prompt that cross; 0 if there is nothing to save."""
    most = max(0, prompt_tokens - 1)
    pages = most // page_tokens
    return pages * page_tokens if pages >= WHOLE_PAGES_FROM else most


def prompt_digest(request: VllmRequest, goal: int) -> str:
    """Return a digest of the tokens before a goal; empty for a prompt without token ids."""
    return "" if request.prompt_token_ids is None else token_digest(request.prompt_token_ids[:goal])


class TransferPlanner:
    """Follows the requests of one scheduler. `page_tokens` is the unit of goals."""

    def __init__(self, page_tokens: int):
        self._page_tokens = page_tokens
        self._sources: dict[str, SourceStart] = {}
        self._known: set[str] = set()  # Sources of which the worker's side knows.
        self._tried: set[str] = set()  # Destinations that tried to fetch: after a failure vLLM asks again.
        self._owners: dict[str, str] = {}  # Requests by transfer: of these the worker's side may hold something.
        self._fetching: dict[str, Fetching] = {}
        self._next: StepPlan | None = None

    @property
    def _plan(self) -> StepPlan:
        """What is noted for the next step; made with the first note."""
        if self._next is None:
            self._next = StepPlan()
        return self._next

    def add(self, request: VllmRequest) -> int:
        """Note a new request; return the prompt tokens that a source must drop."""
        leg = leg_of(request)
        if leg is None or leg.role != "source":
            return 0
        goal = self._goal(request, leg)
        if not goal:
            log.info("prfaas: %s has %d tokens, too few to cross", request.request_id, request.num_prompt_tokens)
            return 0
        if self._is_of_another(request.request_id, leg):
            log.warning(NAMED_TWICE, request.request_id)
            return 0
        self._owners[leg.transfer_id] = request.request_id
        start = SourceStart(request.request_id, leg, goal, prompt_digest(request, goal), request.num_prompt_tokens)
        self._sources[request.request_id] = start
        self._plan.starts.append(start)
        return request.num_prompt_tokens - goal

    def matched(self, request: VllmRequest, computed: int) -> int:
        """Return the tokens beyond the `computed` ones that a fetch brings; without side effects."""
        leg = self._incoming(request)
        if leg is None or request.request_id in self._tried:
            return 0
        return 0 if self._is_of_another(request.request_id, leg) else max(0, self._goal(request, leg) - computed)

    def allocated(self, request: VllmRequest, block_ids: BlockIds, external: int) -> None:
        """Note the blocks for `external` tokens, and fetch them in this step; without any, tell its source."""
        leg = self._incoming(request)
        if leg is None or request.request_id in self._tried:
            return
        goal = self._goal(request, leg)
        self._tried.add(request.request_id)
        if not external:
            self._decline(request)
            return
        self._owners[leg.transfer_id] = request.request_id
        prompt = prompt_digest(request, goal)
        fetching = Fetching(request.request_id, leg, goal - external, goal, block_ids, prompt)
        self._fetching[request.request_id] = fetching
        self._plan.fetches.append(fetching)

    def scheduled(self, request: VllmRequest, tokens: int, block_ids: BlockIds) -> None:
        """Note a request's part of the next step: so many tokens that it has, without drafts."""
        request_id, before = request.request_id, request.num_computed_tokens
        source = self._sources.get(request_id)
        if source is None:
            return
        computed = before + tokens
        if computed > source.goal:  # no supported version does; it would write the state again, or leave none
            del self._sources[request_id]
            reason = f"vLLM leaves no state at token {source.goal}: a step goes from {before} to {computed}"
            self._withdraw(request_id, reason)
            return
        self._plan.steps.append(SourceStep(request_id, before, computed, block_ids))

    def is_source(self, request_id: str) -> bool:
        return request_id in self._sources

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Note requests whose blocks vLLM takes away before the next step."""
        for request_id in request_ids:
            if self._sources.pop(request_id, None) is not None:
                self._withdraw(request_id, "the source needed its memory for other requests")

    def end_offers(self, request_ids: Collection[str]) -> None:
        """Note requests that are over, and whose offers are, at all ranks."""
        self._forget(request_ids)

    def end_fetches(self, request_ids: Collection[str], failed: Container[str]) -> None:
        """Note requests whose fetch is over at all ranks."""
        for request_id in sorted(request_ids):
            fetching = self._fetching.pop(request_id, None)
            if fetching is None:  # it was aborted
                self._forget([request_id])
                continue
            self._owners.pop(fetching.leg.transfer_id, None)  # a source's own transfer goes on
            if request_id not in failed:
                self._plan.fetched.append(fetching)

    def fetches_failed(self, request_ids: set[str]) -> None:
        """Note requests whose fetch has failed at a rank: what the other ranks still fetch will not be used."""
        self._plan.in_vain |= request_ids

    def take(self) -> StepPlan:
        """Return what was noted since the last step."""
        if self._next is None:
            return NOTHING
        plan, self._next = self._next, None
        self._known.update(start.request_id for start in plan.starts)
        return plan

    def finish(self, request: VllmRequest, *, is_whole: bool) -> bool:
        """Note a request's end; return True if its blocks must stay until the worker's side reports it."""
        request_id = request.request_id
        if request_id not in self._tried:
            self._decline(request)
        self._tried.discard(request_id)
        is_fetching = self._fetching.pop(request_id, None) is not None
        if self._next is not None:
            self._next.fetched = [each for each in self._next.fetched if each.request_id != request_id]
        source = self._sources.pop(request_id, None)
        is_known = request_id in self._known
        if source is not None and not (is_known and is_whole):
            self._withdraw(request_id, "the prefill was aborted")
        self._known.discard(request_id)
        if is_known and is_fetching:
            # A source that is aborted while its prefix comes has given nothing. vLLM frees its blocks when the fetch
            # has ended, and would fail if it heard of both ends.
            self._plan.unawaited.add(request_id)
        return is_known and not is_fetching

    def _withdraw(self, request_id: str, reason: str) -> None:
        """Give nothing more of a source. If the worker's side does not know of it yet, it never will."""
        if request_id in self._known:
            self._plan.revoked[request_id] = reason
        else:
            self._plan.starts = [start for start in self._plan.starts if start.request_id != request_id]
            self._forget([request_id])

    def _goal(self, request: VllmRequest, leg: LegParams) -> int:
        if not leg.tokens:
            return goal_of(request.num_prompt_tokens, self._page_tokens)
        # Both sides count the whole prompt, also where one of them has cut it.
        source = self._sources.get(request.request_id)
        most = (request.num_prompt_tokens if source is None else source.prompt_tokens) - 1
        goal = min(leg.tokens + self._page_tokens, most) if leg.tokens < most else 0
        return goal if goal < request.num_prompt_tokens else 0

    def _incoming(self, request: VllmRequest) -> LegParams | None:
        """Return the leg of a destination, by which a cache may come; of a source that of its prefix."""
        leg = leg_of(request)
        if leg is not None and leg.role == "source":
            leg = leg.prefix
        # The source of a prefix may offer it to a prompt that has no use for it: it is told so.
        return leg if leg is not None and (leg.tokens or self._goal(request, leg)) else None

    def _decline(self, request: VllmRequest) -> None:
        """Tell the source of a destination, if it offers something, that it is not wanted."""
        leg = self._incoming(request)
        if leg is None:
            return
        if self._is_of_another(request.request_id, leg):
            log.warning(NAMED_TWICE, request.request_id)
            return
        self._plan.declined.append(DeclineFetch(request.request_id, leg))

    def _is_of_another(self, request_id: str, leg: LegParams) -> bool:
        """Return whether a caller has named this transfer for two requests: it is the first one's."""
        return self._owners.get(leg.transfer_id, request_id) != request_id

    def _forget(self, request_ids: Collection[str]) -> None:
        if request_ids:
            self._owners = {one: owner for one, owner in self._owners.items() if owner not in request_ids}


def leg_of(request: VllmRequest) -> LegParams | None:
    """Return what the gateway sends about a request's transfer, None if it is not one of ours."""
    transfer_params = request.kv_transfer_params  # a client may have made anything of it
    params = transfer_params.get("prfaas") if isinstance(transfer_params, dict) else None
    if params is None:
        return None
    if request.prompt_token_ids is None:
        log.warning(
            "prfaas: the prompt of %s is embeddings, of which no cache crosses: it is served alone", request.request_id
        )
        return None
    try:
        return msgspec.convert(params, LegParams)
    except msgspec.ValidationError as error:
        log.warning(
            "prfaas: kv_transfer_params of %s cannot be read, it is served alone: %s", request.request_id, error
        )
        return None
