"""What `prfaas verify` decides without any engine: lengths, limits, prompts, verdicts, and what its record may say."""

import math
from typing import Any, Final, cast

import pytest

from prfaas.cli.contract.calls import CheckedAnswer
from prfaas.cli.verify.command import _without_addresses, verify
from prfaas.cli.verify.kit import Kit, VerifyFigures
from prfaas.cli.verify.prompts import Prompts
from prfaas.cli.verify.record import EngineSaid, Record, VerifiedStep, page_of, verdict_of
from prfaas.cli.verify.relay import RelayedFrame, killed, stale, zeroed
from prfaas.cli.verify.run import Pace, run_steps
from prfaas.cli.verify.steps import PlannedStep, _answers_alike, _hands_off_many, lengths
from prfaas.cli.verify.ways import DoubtError, GatewayWay, LeftOutError, SglangWay
from prfaas.errors import ConfigError, PeerError, UnreachableError
from prfaas.measure.scores import LEAST_NATS, NOISE_NATS, limit_of
from prfaas.wire.frames import Address, FrameHeader, Kind

KIT: Final = cast("Kit", None)
PAGE: Final = RelayedFrame(FrameHeader(Kind.BLOCK, Address("0" * 32, 7), 4, codec=1), b"abcd")
STATE: Final = RelayedFrame(PAGE.header._replace(kind=Kind.STATE), b"abcd")


class Engine:
    """Makes a token of each byte; or says no ids, as some engines do."""

    url, context_tokens = "http://10.0.0.5:8000", 4096

    def __init__(self, gives_ids: bool):
        self.gives_ids = gives_ids

    def ask(self, prompt: str, **_: Any) -> CheckedAnswer:
        ids = list(prompt.encode()) if self.gives_ids else []
        usage = {"prompt_tokens": len(prompt) // 5}
        return CheckedAnswer(200, {}, {"choices": [{"prompt_token_ids": ids}], "usage": usage})


@pytest.mark.parametrize("tokens", [1, 8, 64, 1000])
def test_prompts_are_of_the_engines_tokens_and_exactly_as_long_as_asked_for(tokens: int):
    prompts = Prompts(Engine(gives_ids=True))  # type: ignore[arg-type]
    first, second = prompts.draw(tokens), prompts.draw(tokens)
    assert len(first) == len(second) == tokens
    assert tokens < 8 or first != second


@pytest.mark.parametrize("gives_ids", [True, False])
@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
def test_a_changed_block_leaves_length_and_all_else_as_it_was(gives_ids: bool, place: float):
    prompts = Prompts(Engine(gives_ids))  # type: ignore[arg-type]
    prompt = prompts.draw(640)
    changed = prompts.change(prompt, place, 64)
    assert len(changed) == len(prompt)
    first, most = int(len(prompt) * place), 64 * (1 if gives_ids else 5)
    assert changed != prompt
    assert changed[:first] == prompt[:first]
    assert changed[first + most :] == prompt[first + most :]


@pytest.mark.parametrize(("block", "most"), [(16, 512), (64, 16_384), (784, 2048), (4096, 32_768)])
def test_lengths_lie_around_the_edges_of_blocks_and_end_with_the_longest(block: int, most: int):
    found = lengths(block, most)
    assert found == sorted(set(found))
    assert {edge for edge in (block - 1, block, block + 1) if edge <= most} <= set(found)
    assert found[-1] == most


def test_what_counts_as_equal_follows_the_noise_within_bounds():
    assert limit_of([]) == limit_of([0.0, 1e-6]) == LEAST_NATS
    assert limit_of([0.1, 0.02]) == pytest.approx(0.8)
    assert limit_of([9.0]) == NOISE_NATS


class RoundingKit:
    """Answers alike whenever it is asked the same; a token that ends a prompt is scored a little off."""

    most_tokens, block_tokens, prefill_answers = 1024, 64, False

    def __init__(self, off_nats: float):
        self.prompts, self.figures, self._off_nats = Prompts(Engine(gives_ids=True)), VerifyFigures(), off_nats  # type: ignore[arg-type]

    def alone(self, prompt: list[int], max_tokens: int = 4, **_: Any) -> CheckedAnswer:
        value = -1.0 - (self._off_nats if prompt[-1] == 1 else 0.0)
        scores = {name: [each] * max_tokens for name, each in (("tokens", "a"), ("token_logprobs", value))}
        scores["top_logprobs"] = [{"a": value}] * max_tokens
        return CheckedAnswer(200, {}, {"choices": [{"token_ids": [1] * max_tokens, "logprobs": scores}]})


@pytest.mark.parametrize(("off_nats", "limit"), [(0.0, LEAST_NATS), (0.1, 0.8)])
def test_rounding_is_what_an_answer_moves_when_its_first_token_ends_the_prompt(off_nats: float, limit: float):
    kit = cast("Kit", RoundingKit(off_nats))
    _answers_alike(kit)
    assert kit.limit_nats == kit.figures.limit_nats == pytest.approx(limit)


def test_engines_whose_own_answers_are_far_apart_prove_little():
    with pytest.raises(DoubtError, match=r"answers of one engine are 0\.5 nats apart"):
        _answers_alike(cast("Kit", RoundingKit(0.5)))


class WayOfOne:
    """A way of which one of eight prompts crosses, and a kit with it."""

    block_tokens, most_tokens = 16, 512

    def __init__(self):
        self.way, self.prompts, self._crossed = self, Prompts(Engine(gives_ids=True)), 0  # type: ignore[arg-type]

    def fetched_tokens(self) -> float:
        return self._crossed

    def hand_off(self, prompt: list[int]) -> None:
        self._crossed = len(prompt) - 1


def test_one_cache_that_crosses_does_not_count_for_eight():
    with pytest.raises(PeerError, match="only 262 tokens crossed, of 8 prompts of 263"):
        _hands_off_many(cast("Kit", WayOfOne()))


class Sglang(Engine):
    def __init__(self, mode: str):
        self.get = lambda _path: f'{{"disaggregation_mode": "{mode}"}}'.encode()


def test_engines_of_sglang_must_be_a_pair():
    SglangWay(Sglang("prefill"), Sglang("decode"))  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="must have --disaggregation-mode decode; its mode is null"):
        SglangWay(Sglang("prefill"), Sglang("null"))  # type: ignore[arg-type]


def answered(**headers: str) -> CheckedAnswer:
    return CheckedAnswer(200, {f"x-prfaas-{name.replace('_', '-')}": value for name, value in headers.items()}, {})


def test_behind_a_gateway_bytes_say_whether_a_cache_crossed_and_a_threshold_why_not():
    way = GatewayWay(Engine(True), Engine(True), Engine(True))  # type: ignore[arg-type]
    assert way._has_crossed(answered(kv_bytes="9", decision="local"), None)
    with pytest.raises(PeerError, match="threshold is 2048 tokens"):
        way._has_crossed(answered(kv_bytes="0", threshold_tokens="2048"), None)
    with pytest.raises(DoubtError, match="nothing says whether a cache crossed"):
        way._has_crossed(answered(), None)


def test_harm_is_done_once_to_what_it_is_meant_for_and_keeps_lengths():
    harm = zeroed(Kind.STATE)
    assert harm(PAGE) is PAGE
    assert harm(STATE) == RelayedFrame(STATE.header._replace(codec=0), bytes(4))
    assert harm(STATE) is STATE
    assert stale(PAGE).header.address.epoch == 6
    assert killed(STATE) is None
    end = RelayedFrame(PAGE.header._replace(kind=Kind.DONE), b"")
    assert (stale(end), killed(end)) == (end, end)


def result(outcome: Any, is_due: bool = False, seen: str = "") -> VerifiedStep:
    return VerifiedStep("it holds", outcome, seen, 0.1, is_due)


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        ([result("holds")], "proven"),
        ([result("holds"), result("left out")], "proven"),
        ([result("holds"), result("left out", is_due=True)], "undecided"),
        ([result("holds"), result("proves little")], "undecided"),
        ([result("proves little"), result("fails")], "not proven"),
        ([], "undecided"),
    ],
)
def test_all_that_applies_must_hold(steps: list[VerifiedStep], verdict: str):
    assert verdict_of(steps) == verdict


def test_a_record_says_no_address_and_its_page_escapes_what_engines_say():
    seen = "http://10.0.0.5:8000 and http://[::1]:9/x broke, 10.1.2.3:55 too"
    words = _without_addresses(seen, {"prefill": Engine(True)}, "s3cret")  # type: ignore[dict-item]
    assert words == "prefill and an address broke, an address too"
    page = page_of(
        Record(
            prfaas="0.1.0",
            day="2026-11-29",
            way="prfaas",
            engines=[EngineSaid("decode", "<script>", "m")],
            device="",
            link="",
            verdict="proven",
            seconds=1.0,
            figures=VerifyFigures(noise_nats=0.1),
            steps=[result("holds", seen="<b>")],
        )
    )
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "<b>" not in page


@pytest.mark.parametrize(
    ("urls", "words", "kind"),
    [
        (("http://a:1", "http://a:1/"), "--prefill and --decode different URLs", ConfigError),
        (("b:1", "http://a:1"), "--prefill is 'b:1'", ConfigError),
        (("http://127.0.0.1:9", "http://127.0.0.1:7"), "http://127.0.0.1:9 does not answer", UnreachableError),
    ],
)
def test_what_is_no_pair_is_refused(urls: tuple[str, str], words: str, kind: type[Exception]):
    with pytest.raises(kind, match=words):
        verify(*urls)


def planned(outcome: type[Exception] | None, tokens: int = 1000) -> PlannedStep:
    def step(_kit: Kit) -> str:
        if outcome is not None:
            raise outcome("why")
        return "seen"

    return PlannedStep("it holds", step, tokens, 10)


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        (None, "holds"),
        (PeerError, "fails"),
        (UnreachableError, "fails"),
        (KeyError, "fails"),
        (DoubtError, "proves little"),
        (LeftOutError, "left out"),
    ],
)
def test_a_step_ends_in_an_outcome_whatever_an_answer_holds(raised: type[Exception] | None, outcome: str):
    results: list[VerifiedStep] = []
    said: list[float] = []
    steps = [planned(raised), planned(None)]
    run_steps(KIT, steps, Pace(0.01, 0.1), math.inf, lambda _, left: said.append(left), results)
    assert [one.outcome for one in results] == [outcome, "holds"]
    assert not any(one.is_due for one in results)
    assert said == [pytest.approx(11.0), 0.0]


def test_what_time_does_not_suffice_for_is_left_out_and_due():
    results: list[VerifiedStep] = []
    run_steps(KIT, [planned(None)], Pace(0.01, 0.1), -math.inf, lambda *_: None, results)
    assert [(one.outcome, one.is_due) for one in results] == [("left out", True)]
    assert verdict_of(results) == "undecided"


def test_a_missing_key_ends_the_run():
    results: list[VerifiedStep] = []
    with pytest.raises(ConfigError, match="why"):
        run_steps(KIT, [planned(ConfigError)], Pace(0, 0), math.inf, lambda *_: None, results)
