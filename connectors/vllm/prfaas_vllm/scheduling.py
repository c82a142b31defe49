"""The scheduler's side of the connector: which tokens of which requests cross, and when blocks may be freed.

Both sides compute the same `goal` from a prompt's length: the tokens whose cache crosses. The destination computes the
rest itself, at least the last token, because a recurrent state cannot take a token twice. The goal of a prompt of
several pages ends with a page, where the destination's own prefix cache can keep the state for the next turn. A shorter
prompt has less to win by that than the tail costs: all but its last token cross.

The source's prompt is cut to end with the goal. Where vLLM ends the steps within a prompt depends on its kernels, on
drafts and on what it has cached. The last step always ends with the prompt, and leaves the state that crosses. vLLM
computes at least the last token of any prompt, so no prefix cache takes that step away. And no step follows that would
write the state again while it crosses.

Nothing here imports vLLM: requests are known by the few attributes of `VllmRequest`.
"""

import hashlib
import logging
from array import array
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

log = logging.getLogger("vllm.prfaas")

BlockIds = tuple[list[int], ...]
WHOLE_PAGES_FROM: Final = 4
"""From so many pages on a prompt's whole pages cross; all but the last token of a shorter one."""
DIGEST_CHARS: Final = 32
NAMED_TWICE: Final = "prfaas: the transfer of %s has begun before, for another request: it is served alone"
MAX_RANKS: Final = 64
# 253: the longest name in DNS (RFC 1035 allows 255 bytes with its lengths).
_Word: TypeAlias = Annotated[str, Meta(pattern=r"^[!-~]{0,253}\Z")]


class VllmRequest(Protocol):
    """What is used of vLLM's Request."""

    request_id: str
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None


class LegParams(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params["prfaas"]`: the gateway's word to one leg. The token is a secret, never logged. `ranks` are
    the other instance's tensor-parallel ranks; 0: as many as here.

    Whoever reaches vLLM's port may say it. So all of it fits into one message to the mover, and into a frame's header.
    """

    role: Literal["source", "destination"]
    transfer_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    epoch: Annotated[int, Meta(ge=0, lt=1 << 62)]
    token: _Word
    host: _Word = ""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    cluster: _Word = ""
    ranks: Annotated[int, Meta(ge=0, le=MAX_RANKS)] = 0


@dataclass(frozen=True)
class SourceStart:
    """A source's request came: a destination may ask for its cache from now on. `prompt` is its tokens' digest."""

    request_id: str
    leg: LegParams
    goal: int
    prompt: str = ""


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
    """All that the worker's side must know of a step. `is_idle` if the model does not run."""

    starts: list[SourceStart] = field(default_factory=list)
    steps: list[SourceStep] = field(default_factory=list)
    fetches: list[Fetching] = field(default_factory=list)
    declined: list[DeclineFetch] = field(default_factory=list)
    revoked: dict[str, str] = field(default_factory=dict)  # Requests whose cache is not given any more, and why.
    fetched: list[Fetching] = field(default_factory=list)  # All ranks' parts of these have come.
    in_vain: set[str] = field(default_factory=set)  # Requests whose fetch has failed at a rank.
    is_idle: bool = False


def goal_of(prompt_tokens: int, page_tokens: int) -> int:
    """Return the tokens of a prompt that cross; 0 if there is nothing to save."""
    most = max(0, prompt_tokens - 1)
    pages = most // page_tokens
    return pages * page_tokens if pages >= WHOLE_PAGES_FROM else most


def prompt_digest(request: VllmRequest, goal: int) -> str:
    """Return a digest of the tokens before a goal; empty for a prompt without token ids.

    Each side makes token ids of a prompt by its own tokenizer and chat template, which may add the day's date. A cache
    of other tokens has the same shape if they are as many.
    """
    return "" if request.prompt_token_ids is None else token_digest(request.prompt_token_ids[:goal])


def token_digest(ids: list[int]) -> str:
    return hashlib.sha256(array("I", ids)).hexdigest()[:DIGEST_CHARS]


class TransferPlanner:
    """Follows the requests of one scheduler. `page_tokens` is the unit of goals."""

    def __init__(self, page_tokens: int):
        self._page_tokens = page_tokens
        self._sources: dict[str, SourceStart] = {}
        self._known: set[str] = set()  # Sources of which the worker's side knows.
        self._tried: set[str] = set()  # Destinations that tried to fetch: after a failure vLLM asks again.
        self._owners: dict[str, str] = {}  # Requests by transfer: of these the worker's side may hold something.
        self._fetching: dict[str, Fetching] = {}
        self._plan = StepPlan()

    def add(self, request: VllmRequest) -> int:
        """Note a new request; return the prompt tokens that a source must drop."""
        leg = leg_of(request)
        if leg is None or leg.role != "source":
            return 0
        goal = self._goal(request)
        if not goal:
            log.info("prfaas: %s has %d tokens, too few to cross", request.request_id, request.num_prompt_tokens)
            return 0
        if self._is_of_another(request.request_id, leg):
            log.warning(NAMED_TWICE, request.request_id)
            return 0
        self._owners[leg.transfer_id] = request.request_id
        start = SourceStart(request.request_id, leg, goal, prompt_digest(request, goal))
        self._sources[request.request_id] = start
        self._plan.starts.append(start)
        return request.num_prompt_tokens - goal

    def matched(self, request: VllmRequest, computed: int) -> int:
        """Return the tokens beyond the `computed` ones that a fetch brings; without side effects."""
        leg = leg_of(request)
        if leg is None or leg.role != "destination" or request.request_id in self._tried:
            return 0
        return 0 if self._is_of_another(request.request_id, leg) else max(0, self._goal(request) - computed)

    def allocated(self, request: VllmRequest, block_ids: BlockIds, external: int) -> None:
        """Note the blocks for `external` tokens, and fetch them in this step; without any, tell its source."""
        leg = leg_of(request)
        goal = self._goal(request)
        if leg is None or leg.role != "destination" or not goal or request.request_id in self._tried:
            return
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
        self._forget(request_ids)
        for request_id in sorted(request_ids):
            fetching = self._fetching.pop(request_id, None)
            if fetching is not None and request_id not in failed:
                self._plan.fetched.append(fetching)

    def fetches_failed(self, request_ids: set[str]) -> None:
        """Note requests whose fetch has failed at a rank: what the other ranks still fetch will not be used."""
        self._plan.in_vain |= request_ids

    def take(self, *, is_idle: bool) -> StepPlan:
        """Return what was noted since the last step."""
        plan, self._plan = self._plan, StepPlan()
        self._known.update(start.request_id for start in plan.starts)
        plan.is_idle = is_idle
        return plan

    def finish(self, request: VllmRequest, *, is_whole: bool) -> bool:
        """Note a request's end; return True if its blocks must stay until the worker's side reports it."""
        request_id = request.request_id
        if request_id not in self._tried:
            self._decline(request)
        self._tried.discard(request_id)
        self._fetching.pop(request_id, None)
        self._plan.fetched = [each for each in self._plan.fetched if each.request_id != request_id]
        source = self._sources.pop(request_id, None)
        is_known = request_id in self._known
        if source is not None and not (is_known and is_whole):
            self._withdraw(request_id, "the prefill was aborted")
        self._known.discard(request_id)
        return is_known

    def _withdraw(self, request_id: str, reason: str) -> None:
        """Give nothing more of a source. If the worker's side does not know of it yet, it never will."""
        if request_id in self._known:
            self._plan.revoked[request_id] = reason
        else:
            self._plan.starts = [start for start in self._plan.starts if start.request_id != request_id]
            self._forget([request_id])

    def _goal(self, request: VllmRequest) -> int:
        return goal_of(request.num_prompt_tokens, self._page_tokens)

    def _decline(self, request: VllmRequest) -> None:
        """Tell the source of a destination, if it offers something, that it is not wanted."""
        leg = leg_of(request)
        if leg is None or leg.role != "destination" or not self._goal(request):
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
    """Return the gateway's word to a request, None if it is not one of ours."""
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
