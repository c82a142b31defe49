"""How the parts of a time to the first token are compared with what a client waited."""

import pytest
from benchmarks.first_token import compared, off_share

from prfaas.errors import PeerError
from prfaas.evaluate.record import AnsweredRequest
from prfaas.wire.trace import PARTS, UNKNOWN

NONE = dict.fromkeys(PARTS, 0.0)


def answer(waited: float, *, offloaded: bool = False, late: float = 0.0, **parts: float) -> AnsweredRequest:
    return AnsweredRequest(
        at_seconds=0.0,
        prompt_tokens=4000,
        sent_late_seconds=late,
        ttft_seconds=waited,
        seconds=waited,
        offloaded=offloaded,
        parts=NONE | parts,
    )


@pytest.mark.parametrize(
    ("one", "share"),
    [
        (answer(1.0, prefill=0.75, first_step=0.25), 0.0),
        (answer(1.0, prefill=0.75, first_step=0.125), 0.125),  # a part is missing
        (answer(1.0, prefill=0.75, first_step=0.25, transfer=0.25), 0.25),  # a time is in two parts
        (answer(1.5, prefill=0.75, first_step=0.25, late=0.5), 0.0),  # the gateway did not see it before
    ],
)
def test_parts_are_off_by_what_is_in_none_or_in_two(one: AnsweredRequest, share: float):
    assert off_share(one) == pytest.approx(share)


def test_each_place_has_its_figures_and_a_lost_or_partly_known_request_is_counted_and_no_more():
    lost = AnsweredRequest(at_seconds=0.0, prompt_tokens=4000, lost="failure", error="it died")
    unknown = AnsweredRequest(at_seconds=0.0, prompt_tokens=4000, ttft_seconds=1.0, parts={UNKNOWN: 1.0})
    near = [answer(1.0, prefill=1.0 - off) for off in (0.01, 0.02, 0.03)]
    away = [answer(1.0, offloaded=True, transfer=1.0 - off) for off in (0.25, 0.5, 0.75)]
    found = {one.name: one.value for one in compared("w", [lost, unknown, *near, *away])}
    label = "w, prefilled {}: off by, {}".format
    assert found == {
        "w: requests without an answer, or without a part": 2,
        label("where it is decoded", "median"): pytest.approx(2.0),
        label("where it is decoded", "of 90 %, at most"): pytest.approx(3.0),
        label("elsewhere", "median"): pytest.approx(50.0),
        label("elsewhere", "of 90 %, at most"): pytest.approx(75.0),
    }
    with pytest.raises(PeerError, match="no prompt was prefilled where it is decoded; the last error: it died"):
        list(compared("w", [*away, lost]))
