"""What the simulated scheduler sees: the values of the latest scrape with their age, rates between scrapes, and nothing
of a link that cannot be scraped."""

import re
from pathlib import Path

import pytest

from prfaas.api.membercluster import DEFAULT_UTILISATION_QUERY
from prfaas.routing.links import LinkSample
from prfaas.simulate.outcome import Tally
from prfaas.simulate.request import Arrival, Request
from prfaas.simulate.request_process import RequestProcess
from prfaas.simulate.scrapes import SCRAPE_SECONDS, TRAFFIC_SECONDS, Scrapes

from .worlds import world

CHARTS = Path(__file__).parents[3] / "charts"
MBPS = 800.0
BYTES_PER_SECOND = MBPS * 1e6 / 8


class Seen:
    """A link with transfers that need no request's life, and its scrapes."""

    def __init__(self, window_seconds: int = 5):
        self.process = RequestProcess(world(link_mbps=MBPS).validated(), Tally())
        self.scrapes = Scrapes(self.process, window_seconds)
        self.link = self.process.links["member"]

    def send(self, at: float, nbytes: float) -> None:
        request = Request(0, Arrival(at, 1, 1))
        self.process.events.at(at, lambda _: self.link.to_hub.add(request, nbytes))

    def at(self, seconds: float) -> LinkSample | None:
        """Return the sample of that moment."""
        found: list[LinkSample | None] = []
        self.process.events.at(seconds, lambda _: found.append(self.scrapes.sample("member")))
        while not found:
            self.process.events.step()
        return found[0]

    def known(self, seconds: float) -> LinkSample:
        found = self.at(seconds)
        assert found is not None
        return found


def test_it_scrapes_as_often_as_the_charts_do_and_the_default_query_has_its_window():
    for chart in ("prfaas", "prfaas-member"):
        interval = re.search(r"^ +interval: (\d+)s$", (CHARTS / chart / "values.yaml").read_text(), re.MULTILINE)
        assert interval is not None
        assert float(interval[1]) == SCRAPE_SECONDS
    assert f"[{TRAFFIC_SECONDS}s]" in DEFAULT_UTILISATION_QUERY


def test_values_are_those_of_the_latest_scrape_with_its_age():
    seen = Seen()
    seen.send(2.6, 2 * BYTES_PER_SECOND)  # between the scrapes at 2.5 and 3.5 s
    before, after = seen.known(3.0), seen.known(4.0)
    assert (before.sampled_at_seconds, before.age_seconds, before.unsent_bytes) == (2.5, 0.5, 0.0)
    assert (after.sampled_at_seconds, after.age_seconds) == (3.5, 0.5)
    assert after.unsent_bytes == pytest.approx(1.1 * BYTES_PER_SECOND)
    assert seen.link.to_hub.unserved == pytest.approx(0.6 * BYTES_PER_SECOND), "the link itself is further"


def test_rates_are_slopes_between_the_scrapes_in_their_window():
    seen = Seen()
    seen.send(2.0, 1.5 * BYTES_PER_SECOND)
    # Between 1.5 and 5.5 s, of which the link was busy for 1.5 s; then between 3.5 and 7.5 s, in which it is idle.
    sample = seen.known(6.0)
    assert sample.traffic_mbps == pytest.approx(MBPS * 1.5 / 4)
    assert sample.delivery_mbps == pytest.approx(MBPS)
    assert sample.backlogged_fraction == pytest.approx(1.5 / 4)
    assert sample.latest_delivery_mbps is None
    sample = seen.known(8.0)
    assert (sample.traffic_mbps, sample.delivery_mbps, sample.backlogged_fraction) == (0.0, None, 0.0)


def test_a_single_scrape_tells_no_rate_and_none_tells_nothing():
    seen = Seen()
    assert seen.at(0.4) is None
    seen.send(0.4, BYTES_PER_SECOND)
    sample = seen.known(1.0)
    assert (sample.traffic_mbps, sample.delivery_mbps) == (None, None)
    assert sample.unsent_bytes > 0
    assert seen.known(2.0).traffic_mbps is not None


def test_a_link_that_is_down_cannot_be_scraped_which_a_timeout_tells():
    seen = Seen()
    seen.process.events.at(3.6, lambda _: seen.link.set_cut(True))
    seen.process.events.at(7.0, lambda _: seen.link.set_cut(False))
    assert seen.known(5.0).age_seconds == pytest.approx(1.5), "the scrape at 4.5 s has not timed out"
    assert seen.at(6.0) is None
    assert seen.at(7.2) is None
    assert seen.known(8.0).sampled_at_seconds == pytest.approx(7.5)


def test_waiting_prefills_are_those_not_begun_at_the_latest_scrape_with_a_slot_or_without():
    seen = Seen()
    name = next(one.name for one in seen.process.table.instances if one.cluster == "member")
    for index in range(40):
        request = Request(index, Arrival(0.6, 100_000, 1))
        seen.process.events.at(
            0.6, lambda _, request=request: seen.process.instances[name].serve(request, 0, 100_000, 0)
        )
    assert seen.known(1.4).waiting_prefills == 0
    assert seen.known(1.6).waiting_prefills == 40 - 1, "the first has the whole step; 31 others have a slot, too"
