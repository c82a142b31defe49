"""What `prfaas verify` says of two stand-ins that hand requests over rightly, and of pairs that do not."""

import json
from pathlib import Path

import pytest

from prfaas.cli.contract import calls
from prfaas.errors import ConfigError, PeerError

from ..contract.stand_in import DATA_PORT, StandIn, stand_ins
from .command import Verified, verified

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "NOT_IDLE_SECONDS", 1.5)


def run(source: StandIn, destination: StandIn, *flags: str) -> Verified:
    return verified(source.url, destination.url, "--most-tokens", "512", *flags, data_port=DATA_PORT)


def test_a_right_pair_does_not_fail_and_its_record_names_no_address(tmp_path: Path):
    record, page = tmp_path / "record.json", tmp_path / "page.html"
    with stand_ins("", "") as servers:
        found = run(*servers, "--device", "two hands", "--record", str(record), "--html", str(page))
    assert found.outcomes("fails") == {}
    # Nothing serves a data port here, so no relay is reached, and no harm was done.
    assert (found.exit_code, found.record["verdict"]) == (1, "undecided")
    assert (found.record["way"], found.record["device"]) == ("prfaas", "two hands")
    assert json.loads(record.read_text()) == found.record
    little = found.outcomes("proves little")
    assert {seen.partition(",")[0] for seen in little.values()} == {"the destination does not reach an address"}
    assert {claim.split()[0] for claim in little} == {"refuses", "survives"}
    assert set(found.outcomes("left out").values()) == {"only NixlConnector gives one prompt the cache of another"}
    assert "127.0.0.1" not in record.read_text() + page.read_text()
    assert "two hands" in page.read_text()


@pytest.mark.parametrize(
    ("broken", "claim", "words"),
    [
        (("", "stale state"), "hands off 20 tokens", "3 nats off"),
        (("", "own usage"), "hands off 20 tokens", "prompt_tokens is 1"),
        (("", "any salt"), "decode counts cached tokens, by salt", "another cache_salt"),
    ],
)
def test_what_is_wrong_is_found_and_said(broken: tuple[str, str], claim: str, words: str):
    with stand_ins(*broken) as servers:
        found = run(*servers)
    assert (found.exit_code, found.record["verdict"]) == (1, "not proven")
    assert words in found.outcomes("fails")[claim]


def test_engines_whose_answers_depend_on_little_prove_little():
    with stand_ins("forgets", "forgets") as servers:
        found = run(*servers)
    assert found.exit_code == 1
    assert "a changed block shows in an answer" in found.outcomes("proves little")


def test_a_pair_between_which_nothing_crosses_is_refused_with_the_address_to_look_at():
    with stand_ins("gives nothing", "") as servers, pytest.raises(PeerError, match=r"127\.0\.0\.1:8001; name it by"):
        run(*servers)


def test_a_record_that_cannot_be_written_is_said_before_the_run(tmp_path: Path):
    with stand_ins("", "") as servers, pytest.raises(ConfigError, match=r"cannot be written: .*Is a directory"):
        run(*servers, "--record", str(tmp_path))
