"""The steps of a verification: a claim each, and what tests it. A step returns what it saw, or raises PeerError.

Every answer of a hand-off is compared with that of one engine, by its tokens and their log probabilities. First the
engines are compared alone, which says how much rounding is, and prompts with one changed block, which says whether a
lost cache would show at all.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

from prfaas.cli.contract.calls import require
from prfaas.cli.contract.checks import ALONE, PAIR, SCORED, EnginePair
from prfaas.cli.verify.kit import LONG_TOKENS, Kit, RunStep, nats_between
from prfaas.cli.verify.prompts import DrawnPrompt
from prfaas.cli.verify.relay import Harm, killed, no_harm, stale, zeroed
from prfaas.cli.verify.ways import DoubtError, LeftOutError, NixlWay
from prfaas.measure.scores import NOISE_NATS, difference, limit_of
from prfaas.wire.frames import Kind

AT_ONCE: Final = 8
_PLACES: Final = (0.05, 0.5, 0.9)
_MOST_STALL_TOKENS: Final = 200
_FEW_TOKENS: Final = 20
_DRAFTS: Final = "vllm:spec_decode_num_drafts_total"


class PlannedStep(NamedTuple):
    """A step, and what it costs: the tokens of all its prompts, and its answers."""

    claim: str
    run: RunStep
    prompt_tokens: int
    answers: int


def steps_of(kit: Kit) -> list[PlannedStep]:
    """Return all steps for these engines, in order."""
    middle, block = _middle(kit), kit.block_tokens
    steps = [
        PlannedStep("alone, both engines answer alike", _answers_alike, 24 * middle, 32),
        PlannedStep("a changed block shows in an answer", _shows_changes, 6 * middle, 6),
    ]
    for tokens in lengths(block, kit.most_tokens):
        steps.append(PlannedStep(f"hands off {tokens:,} tokens", partial(_hands_off, tokens), 2 * tokens, 2))
    steps += [
        PlannedStep("hands off what a long answer needs", _answers_long, 2 * middle, 10),
        PlannedStep("hands off what the destination has begun", _hits_at_destination, 7 * middle, 6),
        PlannedStep("hands off what the source has begun", _hits_at_source, 5 * middle, 3),
        PlannedStep("keeps prompts of one length apart", _keeps_apart, 8 * middle, 8),
        PlannedStep(f"hands off {AT_ONCE} at once", _hands_off_many, 2 * AT_ONCE * middle, 2 * AT_ONCE),
        PlannedStep("a cache of another prompt shows", _shows_another_cache, 2 * middle, 2),
    ]
    harms: tuple[tuple[str, Harm, Kind], ...] = (
        ("refuses a page of zeros", zeroed(Kind.BLOCK), Kind.BLOCK),
        ("refuses a state of zeros", zeroed(Kind.STATE), Kind.STATE),
        ("refuses the frames of another epoch", stale, Kind.BLOCK),
        ("survives a transfer that is killed", killed, Kind.BLOCK),
    )
    if kit.direct is not None:
        steps += [PlannedStep(claim, partial(_withstands, harm, kind), 2 * middle, 3) for claim, harm, kind in harms]
    else:
        steps.append(PlannedStep("survives a request that is left", _survives_leaving, 3 * middle, 3))
    steps.append(PlannedStep("measures the link and the stall", _measure, 6 * kit.most_tokens, 30))
    if kit.direct is not None:
        steps += list(_contract(kit.direct.pair))
    steps.append(PlannedStep("the engines are those of the beginning", _is_unchanged, 0, 1))
    return steps


def lengths(block_tokens: int, most_tokens: int) -> list[int]:
    """Return lengths of prompts: around the edges of blocks, and then four times as many tokens each time."""
    near = {edge + more for edge in (block_tokens, 4 * block_tokens) for more in (-1, 0, 1)}
    wide = {_FEW_TOKENS, block_tokens // 2, most_tokens} | {1024 << 2 * power for power in range(6)}
    return sorted(tokens for tokens in near | wide if 1 < tokens <= most_tokens)


def _middle(kit: Kit) -> int:
    """Return the length of a prompt of some blocks that do not end it."""
    return min(kit.most_tokens * 2 // 3, max(256, 4 * kit.block_tokens) + 7)


def _answers_alike(kit: Kit) -> str:
    noise: list[float] = []
    for tokens in (_FEW_TOKENS, _FEW_TOKENS, _middle(kit) // 2, _middle(kit)):
        prompt = kit.prompts.draw(tokens)
        wanted = kit.alone(prompt)
        noise += nats_between(kit.alone(prompt), wanted), _rounding(kit, prompt)
        if kit.prefill_answers:
            noise.append(nats_between(kit.alone(prompt, kit.way.prefill), wanted))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        noise += pool.map(partial(_rounding, kit), [kit.prompts.draw(_middle(kit)) for _ in range(AT_ONCE)])
    kit.limit_nats = kit.figures.limit_nats = limit_of(noise)
    kit.figures.noise_nats = max(noise)
    worst = max(noise)
    words = "have they the same weights, precision and flags?"
    require(worst <= kit.limit_nats, f"their answers to one prompt are {worst:.3g} nats apart: {words}")
    if kit.limit_nats == NOISE_NATS:
        raise DoubtError(f"answers of one engine are {worst:.2g} nats apart: what is lost may hide behind that")
    return f"{worst:.2g} nats apart at most; {kit.limit_nats:.2g} count as equal"


def _rounding(kit: Kit, prompt: DrawnPrompt) -> float:
    """Return by how many nats an answer moves if its first token ends the prompt instead, so that another kernel
    computes it. A hand-off does so with a prompt's last token."""
    whole = kit.alone(prompt, return_token_ids=True)
    if isinstance(prompt, str):
        return nats_between(kit.alone(prompt), whole)
    rest = kit.alone([*prompt, *whole.ids[1][:1]], max_tokens=len(whole.scores["tokens"]) - 1)
    return difference(rest.scores, {name: values[1:] for name, values in whole.scores.items() if values})


def _shows_changes(kit: Kit) -> str:
    """Only where a lost part of the context shows in an answer do equal answers prove that none was lost."""
    seen: list[float] = []
    for place in _PLACES:
        prompt = kit.prompts.draw(_middle(kit))
        changed = kit.prompts.change(prompt, place, kit.block_tokens)
        seen.append(nats_between(kit.alone(changed), kit.alone(prompt)))
    words = f"{', '.join(map(_moved, seen))}, at the beginning, in the middle, near the end"
    if sum(nats > kit.limit_nats for nats in seen) < 2:
        raise DoubtError(f"one changed block moves answers by {words}: equal answers prove little")
    return f"by {words}"


def _hands_off(tokens: int, kit: Kit) -> str:
    return _off(kit.check(kit.prompts.draw(tokens)))


def _answers_long(kit: Kit) -> str:
    before = kit.way.decode.metrics().get(_DRAFTS)
    nats = kit.check(kit.prompts.draw(_middle(kit)), max_tokens=LONG_TOKENS)
    drafts = kit.way.decode.metrics().get(_DRAFTS, 0.0) - (before or 0.0)
    return f"{LONG_TOKENS} tokens, {_off(nats)}" + (f", with {drafts:.0f} drafts" if before is not None else "")


def _hits_at_destination(kit: Kit) -> str:
    """What it has whole need not cross again: all but the last token, where that begins a block."""
    if not (blocks := _middle(kit) // kit.block_tokens):
        raise LeftOutError("a block of the cache is longer than the prompts that the time suffices for")
    begun = kit.prompts.draw(blocks * kit.block_tokens + 1)
    kit.check(begun)
    again = kit.way.begin(begun, **SCORED).answered.answer()
    return _off(max(kit.compare(again, begun), kit.check(_longer(kit, begun))))


def _hits_at_source(kit: Kit) -> str:
    begun = kit.prompts.draw(_middle(kit))
    if kit.prefill_answers:
        require(kit.way.prefill.ask(prompt=begun, max_tokens=1).choice, "the source has no choice")
    return _off(kit.check(_longer(kit, begun)))


def _keeps_apart(kit: Kit) -> str:
    prompts = [kit.prompts.draw(_middle(kit)) for _ in range(3)]
    prompts.append(kit.prompts.change(prompts[-1], 0.5, kit.block_tokens))
    return _off(max(kit.check(prompt) for prompt in prompts))


def _hands_off_many(kit: Kit) -> str:
    prompts = [kit.prompts.draw(_middle(kit)) for _ in range(AT_ONCE)]
    before = kit.way.fetched_tokens()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(kit.way.hand_off, prompts))
    if before is not None:  # one counter for all: a single cache would count for each
        fetched, least = (kit.way.fetched_tokens() or 0.0) - before, AT_ONCE * (_middle(kit) - kit.block_tokens)
        require(fetched >= least, f"only {fetched:.0f} tokens crossed, of {AT_ONCE} prompts of {_middle(kit)}")
    return _off(max(kit.compare(answer, prompt) for answer, prompt in zip(answers, prompts, strict=True)))


def _shows_another_cache(kit: Kit) -> str:
    """A control on the very path: what is answered from the cache of another prompt must differ."""
    if not isinstance(kit.way, NixlWay):
        raise LeftOutError("only NixlConnector gives one prompt the cache of another")
    prompt = kit.prompts.draw(_middle(kit))
    changed = kit.prompts.change(prompt, 0.5, kit.block_tokens)
    answer = kit.way.begin_pull(changed, prompt, **SCORED).answer()
    nats = nats_between(answer, kit.alone(prompt))
    if nats <= kit.limit_nats:
        raise DoubtError(f"the cache of another prompt moves an answer by {_moved(nats)} only")
    return f"by {_moved(nats)}"


def _withstands(harm: Harm, kind: Kind, kit: Kit) -> str:
    """The answer is right, from no cache, or from one that was sent again."""
    prompt = kit.prompts.draw(_middle(kit))
    answer, relay = kit.harm(harm, prompt)
    if kind not in relay.seen:
        raise LeftOutError(f"the cache has no {'state' if kind is Kind.STATE else 'page'}")
    nats = kit.compare(answer, prompt)
    require(not answer.has_fetched, "a cache that is not the right one was used")
    return f"the prompt was computed, {_off(nats)}"


def _survives_leaving(kit: Kit) -> str:
    handed = kit.way.begin(kit.prompts.draw(_middle(kit)), max_tokens=LONG_TOKENS)
    for leg in (handed.given, handed.answered):
        if leg is not None:
            leg.leave()
    return f"the next one is {_off(kit.check(kit.prompts.draw(_middle(kit))))}"


def _measure(kit: Kit) -> str:
    figures, prompt = kit.figures, kit.prompts.draw(kit.most_tokens)
    figures.prompt_tokens = kit.most_tokens
    figures.handed_seconds = _seconds(lambda: kit.way.hand_off(prompt, max_tokens=1))
    figures.alone_seconds = _seconds(lambda: kit.alone(prompt, max_tokens=1))
    words = f"first token after {figures.handed_seconds:.2f} s, alone {figures.alone_seconds:.2f} s"
    with suppress(DoubtError, LeftOutError):
        began = time.perf_counter()
        _, relay = kit.harm(no_harm, kit.prompts.draw(kit.most_tokens))
        if relay.data_bytes:
            figures.first_byte_seconds = relay.first_seconds - began
            figures.cache_mbps = relay.data_bytes * 8e-6 / max(1e-6, relay.last_seconds - relay.first_seconds)
            words += f"; the cache came at {figures.cache_mbps:,.0f} Mbit/s"
            words += f", its first byte after {figures.first_byte_seconds:.3f} s"
    if kit.prompts.are_exact and kit.prefill_answers:
        figures.stall_alone_seconds = _stall(kit, [])
        figures.stall_beside_seconds = _stall(kit, [kit.prompts.draw(kit.most_tokens)])
        words += f"; longest gap between tokens {figures.stall_alone_seconds * 1e3:.1f} ms"
        words += f", beside a hand-off {figures.stall_beside_seconds * 1e3:.1f} ms"
    return words


def _stall(kit: Kit, beside: Sequence[DrawnPrompt]) -> float:
    """Return the longest time between two tokens of an answer, seconds, while prompts are handed over."""
    tokens = min(_MOST_STALL_TOKENS, kit.reference.context_tokens // 2)
    with ThreadPoolExecutor(2) as pool:
        streaming = pool.submit(kit.way.decode.stream, kit.prompts.ids(_FEW_TOKENS), tokens)
        for one in beside:
            kit.way.hand_off(one, max_tokens=1)
        marks = streaming.result().marks
    return max((after.seconds - before.seconds for before, after in pairwise(marks)), default=0.0)


def _is_unchanged(kit: Kit) -> str:
    labels = {one.url: one.label() for one in kit.engines()}
    for url, label in labels.items():
        require(label == kit.labels[url], f"{url} said that it is {kit.labels[url]!r}, and now {label!r}")
    return ", ".join(sorted(set(labels.values())))


def _contract(pair: EnginePair) -> Iterator[PlannedStep]:
    """The checks of `prfaas contract`."""

    def planned(who: str, claim: str, run: Callable[[], str]) -> PlannedStep:
        def step(_kit: Kit) -> str:
            return run()

        return PlannedStep(f"{who} {claim}", step, 4000, 4)

    for who, engine in (("prefill", pair.source), ("decode", pair.destination)):
        for claim, check in ALONE.items():
            yield planned(who, claim, partial(check, engine))
    for claim, run in PAIR.items():
        yield planned("the pair", claim, partial(run, pair))


def _longer(kit: Kit, begun: DrawnPrompt) -> DrawnPrompt:
    more = kit.prompts.draw(2 * kit.block_tokens + 5)
    if isinstance(begun, str) or isinstance(more, str):
        return f"{begun} {more}"
    return begun + more


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _off(nats: float) -> str:
    return f"{nats:.2g} nats off"


def _moved(nats: float) -> str:
    return "more than the likeliest tokens" if nats == math.inf else f"{nats:.2g} nats"
