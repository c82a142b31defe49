"""A measurement of a server on virtual time: it finds the true curve, and says so where it cannot."""

import random

import pytest

from prfaas.capacity.profile import prefill_seconds
from prfaas.errors import CapacityError, ConfigError, PeerError, RequestError
from prfaas.measure.answers import CacheBytes, ServedCard, StreamedAnswer, TokenMark
from prfaas.measure.beside import BEGUN_TOKENS, added_seconds
from prfaas.measure.fit import LengthTimes, check_sound
from prfaas.measure.session import MAX_BATCH, Reach, Session, lengths_up_to, reach_of
from prfaas.wire.profile import Profile

TRUE = Profile(state_bytes=1000, token_bytes=10, fixed_seconds=0.01, token_seconds=2e-5, squared_seconds=1e-10)
CACHE = CacheBytes(1000, 10, "a test")
BESIDE = 1.5


class Server:
    """Serves on its own clock what TRUE says. It runs at most `slots` streams at once, and refuses larger token ids."""

    def __init__(self, *, slots=1000, vocabulary=32_000, slow=lambda: 1.0, others=lambda: 0, cached=0):
        self.now = 0.0
        self.slots, self.vocabulary, self.slow, self.others, self.cached = slots, vocabulary, slow, others, cached
        self.prompts = []
        self.answered = 0
        self.lengths = []

    def step(self, batch):
        return 0.005 + 0.0001 * batch

    def ask_beside(self, streams, answer_tokens, prompt):
        """The prompt comes in a step under way. Its chunks of 512 tokens take half as long again as alone."""
        self.prompts += [*streams, prompt]
        pace, times, left, first = self.step(len(streams)), [self.now], len(prompt), None
        while len(times) < answer_tokens:
            chunk = min(512, left) if len(times) > BEGUN_TOKENS else 0
            left -= chunk
            times.append(times[-1] + pace + BESIDE * prefill_seconds(TRUE, len(prompt)) * chunk / len(prompt))
            if not left and first is None:
                first = times[-1]
        sent = times[BEGUN_TOKENS - 1] + 0.4 * pace
        stream = StreamedAnswer(self.now, tuple(TokenMark(at, n + 1) for n, at in enumerate(times)), len(streams[0]), 0)
        self.now = times[-1]
        return [stream] * len(streams), StreamedAnswer(sent, (TokenMark(first or self.now, 1),), len(prompt), 0)

    def ask(self, prompts, answer_tokens):
        if any(max(prompt) >= self.vocabulary for prompt in prompts):
            raise RequestError("a token is out of the vocabulary")
        self.prompts += prompts
        self.answered = answer_tokens
        self.lengths += [len(prompt) for prompt in prompts]
        answers = []
        for place, prompt in enumerate(prompts):
            turn = place // self.slots
            first = self.now + turn * 1000 + (place % self.slots + 1) * prefill_seconds(TRUE, len(prompt)) * self.slow()
            pace = self.step(min(len(prompts), self.slots)) * self.slow()
            marks = tuple(TokenMark(first + pace * n, n + 1) for n in range(answer_tokens))
            answers.append(StreamedAnswer(self.now, marks, len(prompt), self.cached))
        self.now = max(answer.marks[-1].seconds for answer in answers)
        return answers


def measured(server, max_tokens=16_384, context_tokens=100_000):
    said = []
    session = Session(server, Reach(context_tokens, max_tokens), random.Random(1), said.append)
    return session.measure(ServedCard(id="m"), "here", CACHE)


def worst(profile, lengths=(300, 700, 3000, 10_000, 20_000)):
    return max(abs(prefill_seconds(profile, n) / prefill_seconds(TRUE, n) - 1) for n in lengths)


def test_it_finds_the_curve_the_sizes_and_the_steps():
    found = measured(Server())
    assert worst(found.profile) < 1e-3
    assert (found.profile.state_bytes, found.profile.token_bytes) == (1000, 10)
    assert [step.batch for step in found.decode_steps] == [1, 2, 4, 8, 16, 32, 64, MAX_BATCH]
    assert all(step.seconds == pytest.approx(0.005 + 0.0001 * step.batch) for step in found.decode_steps)
    assert found.notes == ()


def test_it_finds_what_prompts_add_to_the_steps_of_streams():
    found = measured(Server())
    assert [one.tokens for one in found.beside_decodes] == [one.tokens for one in found.lengths]
    for one in found.beside_decodes:
        assert one.seconds == pytest.approx(BESIDE * prefill_seconds(TRUE, one.tokens))
    times = found.times
    assert times.beside_decodes is not None
    assert times.beside_decodes.prompt_seconds(1024) == pytest.approx(BESIDE * times.prefill.prompt_seconds(1024))


def test_streams_that_end_before_the_prompt_does_show_nothing():
    streams, prompt = Server().ask_beside([[1]] * 2, 100, [1] * 512)
    assert added_seconds(streams, prompt) == pytest.approx(BESIDE * prefill_seconds(TRUE, 512))
    for tokens in (BEGUN_TOKENS, BEGUN_TOKENS + 2):
        streams, _ = Server().ask_beside([[1]] * 2, tokens, [1] * 512)
        assert added_seconds(streams, prompt) is None
    late = Server()
    late.now = 1.0
    apart, _ = late.ask_beside([[1]], 100, [1] * 512)
    assert added_seconds([*streams, *apart], prompt) is None, "they never ran together"


def test_a_server_that_runs_few_streams_at_once_is_measured_without():
    assert measured(Server(slots=1)).beside_decodes == ()


@pytest.mark.parametrize(("owner", "in_order"), [("vllm", True), ("prfaas", False)])
def test_engines_that_are_none_of_ours_compute_in_order_of_arrival(owner, in_order):
    session = Session(Server(), Reach(100_000, 4096), random.Random(1), lambda _: None)
    assert session.measure(ServedCard(id="m", owned_by=owner), "here", CACHE).in_order == in_order


def test_pauses_that_slow_one_prompt_in_four_change_nothing():
    rng = random.Random(2)
    found = measured(Server(slow=lambda: 3.0 if rng.random() < 0.25 else 1.0 + 0.02 * rng.random()))
    assert worst(found.profile) < 0.05
    assert any("differ by more than 30%" in note for note in found.notes)


def test_the_first_prompt_of_a_length_may_compile():
    server = Server()
    server.slow = lambda: 1.0 if server.lengths.count(server.lengths[-1]) > 1 else 50.0
    assert worst(measured(server).profile) < 1e-3


def test_times_that_never_agree_give_no_profile():
    rng = random.Random(3)
    with pytest.raises(CapacityError, match=r"of \d+ are near the median of .*: other work disturbs"):
        measured(Server(slow=lambda: 2 ** (10 * rng.random())))


def test_a_busy_server_is_named_before_the_rounds():
    server = Server(others=lambda: 3)
    with pytest.raises(CapacityError, match=r"busy: at 14 of 14 looks it had up to 3 requests of others"):
        measured(server)
    assert len(server.prompts) == 1 + 14


def test_a_few_requests_of_others_are_a_note():
    looks = iter([1] + [0] * 10_000)
    assert any("1 of" in note for note in measured(Server(others=lambda: next(looks))).notes)


def test_a_server_that_does_not_count_its_requests_is_measured():
    assert worst(measured(Server(others=lambda: None)).profile) < 1e-3


def test_no_prompt_begins_as_another():
    server = Server()
    measured(server, 4096)
    beginnings = [tuple(prompt[:16]) for prompt in server.prompts[1:]]
    assert len(set(beginnings)) == len(beginnings)


def test_a_small_vocabulary_is_found():
    server = Server(vocabulary=300)
    assert worst(measured(server).profile) < 1e-3
    assert max(map(max, server.prompts)) == 255
    with pytest.raises(RequestError, match="out of the vocabulary"):
        measured(Server(vocabulary=10))


def test_tokens_from_a_cache_are_refused():
    with pytest.raises(PeerError, match="had 3 of 256 tokens in its cache"):
        measured(Server(cached=3))


def test_decode_steps_end_where_streams_no_longer_run_together():
    found = measured(Server(slots=8))
    assert found.decode_steps[-1].batch == 8
    assert "16 streams did not run at once: decode steps end before" in found.notes


def test_decode_steps_that_never_agree_are_left_out_and_named():
    server = Server()
    server.step = lambda batch: 0.005 * (1.3 ** (len(server.prompts) % 1000 // batch) if batch == 4 else 1.0)
    found = measured(server, 4096)
    assert 4 not in [step.batch for step in found.decode_steps]
    assert "decode steps of 4 streams were left out: no two of 7 agree" in found.notes


def test_batches_that_would_take_minutes_are_left_out():
    server = Server()
    server.step = lambda batch: 0.1 * batch
    found = measured(server, 4096)
    assert found.decode_steps[-1].batch == 8
    assert "decode steps of 16 streams were left out: their answers take too long" in found.notes


def test_lengths_that_would_take_minutes_are_left_out():
    server = Server()
    server.slow = lambda: 400.0
    found = measured(server, 65_536)
    assert max(server.lengths) == 4096
    assert any("prompts of 16,384 tokens were left out: each would take about 14" in note for note in found.notes)


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [
        (262_144, (256, 1024, 4096, 16_384, 65_536, 262_144)),
        (131_071, (256, 1024, 4096, 16_384, 65_536, 131_071)),
        (65_536, (256, 1024, 4096, 16_384, 65_536)),
        (4095, (256, 512, 1024, 2048, 4095)),
        (600, (256, 512)),
    ],
)
def test_lengths_are_about_six_up_to_the_longest(longest, lengths):
    assert lengths_up_to(longest) == lengths


def test_prompts_leave_room_for_an_answer_and_keep_to_what_is_allowed():
    card = ServedCard(id="m", max_model_len=4096)
    assert reach_of(card, None) == (4096, 4095)
    assert reach_of(card, 2000) == (4096, 2000)
    assert reach_of(ServedCard(id="m"), 2000).max_tokens == 2000


@pytest.mark.parametrize(
    ("context", "given", "said"),
    [
        (None, None, "give --max-tokens"),
        (4096, 300, "prompts of at most 300 tokens make no curve"),
        (400, None, "at most 399"),
    ],
)
def test_too_short_prompts_are_refused(context, given, said):
    with pytest.raises(ConfigError, match=said):
        reach_of(ServedCard(id="m", max_model_len=context), given)


def test_a_batch_that_is_refused_ends_the_steps_and_costs_no_prefill():
    server = Server()
    ask = server.ask

    def refusing(prompts, answer_tokens):
        if len(prompts) == 8:
            raise RequestError("HTTP 503")
        return ask(prompts, answer_tokens)

    server.ask = refusing
    found = measured(server)
    assert [one.batch for one in found.decode_steps] == [1, 2, 4]
    assert any("8 streams at once failed" in note and "HTTP 503" in note for note in found.notes)


def test_a_server_that_got_busy_after_the_prefills_has_no_steps():
    server = Server()
    server.others = lambda: 5 if server.answered > 1 else 0
    found = measured(server)
    assert found.decode_steps == ()
    assert any("decode steps were left out: the server is busy" in note for note in found.notes)


def test_the_step_of_one_stream_is_measured_however_slow_prefills_are():
    found = measured(Server(slow=lambda: 40.0))
    assert found.decode_steps[0].batch == 1


def test_a_curve_that_misses_its_own_points_is_no_profile():
    lengths = tuple(
        LengthTimes(tokens=n, repeats=3, seconds=s, quickest_seconds=s, near=3, slowest_seconds=s, fitted_seconds=1.0)
        for n, s in ((256, 1.0), (1024, 5.0))
    )
    with pytest.raises(CapacityError, match="describes no such server"):
        check_sound(lengths, ())
