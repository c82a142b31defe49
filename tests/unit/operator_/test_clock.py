"""Proves that a server's clock is read from its answers, and that ours counts only until the first one."""

from datetime import UTC, datetime, timedelta

import pytest
from multidict import CIMultiDict

from prfaas_operator.clusters.client import ServerClock

NOON = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
AT_NOON = {"date": "Fri, 01 May 2026 12:00:00 GMT", "Content-Type": "application/json"}


class Seconds:
    """Monotonic seconds that a test sets."""

    now = 5000.0

    def __call__(self) -> float:
        return self.now


def test_the_servers_clock_runs_between_answers_independently_of_ours():
    seconds = Seconds()
    clock = ServerClock(seconds)
    assert abs(clock.now() - datetime.now(UTC)) < timedelta(minutes=1), "before an answer there is no other"
    clock.set_from(CIMultiDict(AT_NOON))
    assert clock.now() == NOON
    seconds.now += 90
    assert clock.now() == NOON + timedelta(seconds=90)
    clock.set_from({"Date": "Fri, 01 May 2026 11:00:00 GMT"})
    assert clock.now() == NOON - timedelta(hours=1), "a server may put its clock back"


@pytest.mark.parametrize("headers", [{}, {"Date": ""}, {"Date": "soon"}, {"Date": "Fri, 01 May 99999 12:00:00"}])
def test_an_answer_without_a_date_tells_nothing(headers):
    clock = ServerClock(Seconds())
    clock.set_from(CIMultiDict(AT_NOON))
    clock.set_from(headers)
    assert clock.now() == NOON
