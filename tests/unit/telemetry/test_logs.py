"""Proves that a log line's fields come apart again as they went in, whatever a peer puts into them."""

import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.telemetry.logs import MAX_VALUE_CHARACTERS, OURS, configure_logs, line


def parsed(text: str) -> tuple[str, dict[str, str]]:
    """Read a line as a collector of logfmt does."""
    fields = {}
    for name, value in re.findall(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|\S*)', text):
        fields[name] = json.loads(value) if value.startswith('"') else value
    return re.split(r" [a-z_]+=", text)[0], fields


@given(st.text(min_size=1, max_size=MAX_VALUE_CHARACTERS), st.text(min_size=1, max_size=MAX_VALUE_CHARACTERS))
def test_any_text_comes_apart_again_on_one_line(some: str, more: str):
    text = line("transfer failed", reason=some, request_id=more)
    assert text.isprintable()
    assert "\n" not in text
    assert parsed(text) == ("transfer failed", {"reason": some, "request_id": more})


def test_a_peer_cannot_forge_a_field_or_a_line():
    text = line("transfer failed", reason='x" outcome=delivered\n2026 INFO transfer received')
    assert parsed(text)[1].keys() == {"reason"}
    assert len(text.splitlines()) == 1


def test_numbers_are_plain_and_what_says_nothing_is_left_out():
    text = line("transfer sent", bytes=12, seconds=0.12345678, breaks=0, transfer_id="", mbps=None)
    assert text == "transfer sent bytes=12 seconds=0.1235 breaks=0"


def test_a_value_is_cut_where_it_would_fill_the_log():
    assert len(line("x", reason="y" * 100_000)) < MAX_VALUE_CHARACTERS + 20


@pytest.mark.parametrize(
    ("wanted", "level"), [("debug", logging.DEBUG), ("WARNING", logging.WARNING), (None, logging.INFO)]
)
def test_the_level_is_that_of_the_environment_for_our_own_lines(monkeypatch, wanted, level):
    monkeypatch.delenv("PRFAAS_LOG_LEVEL", raising=False)
    if wanted:
        monkeypatch.setenv("PRFAAS_LOG_LEVEL", wanted)
    ours = logging.getLogger("prfaas_worker")
    before = ours.level
    try:
        configure_logs("100%s here")
        assert ours.level == level
    finally:
        for name in OURS:
            logging.getLogger(name).setLevel(before)


def test_an_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv("PRFAAS_LOG_LEVEL", "LOUD")
    with pytest.raises(ConfigError, match=r"'LOUD'.*DEBUG, INFO, WARNING"):
        configure_logs("here")
