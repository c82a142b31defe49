"""Proves that `prfaas explain` finds a request in the logs of both clusters, in either format, and makes no number of
what is damaged.
"""

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prfaas.cli import main
from prfaas.telemetry.logs import JsonFormatter, TextFormatter, line

from .test_main import prfaas

OURS = {"request_id": "slow-1", "transfer_id": "a" * 32}
PARTS = {
    "gateway_queue_seconds": 0.1,
    "prefill_queue_seconds": 0.2,
    "prefill_seconds": 1.0,
    "link_wait_seconds": 0.0,
    "transfer_seconds": 0.5,
    "decode_queue_seconds": 0.0,
    "first_step_seconds": 0.2,
}
ROUTE = {"cluster": "eu", "prefill_instance": "p0", "decode_instance": "d0"}
NO_PARTS = {**OURS, "decision": "offload", "outcome": "ok", **ROUTE, "first_token_seconds": 2.0}
REQUEST = NO_PARTS | PARTS


def logged(place: str, words: str, *, as_json: bool = False, **fields: str | float) -> str:
    """A line as a program of ours writes it."""
    form = (JsonFormatter if as_json else TextFormatter)(place)
    return form.format(logging.LogRecord("x", logging.INFO, "", 0, line(words, **fields), (), None)) + "\n"


def write(path: Path, *lines: str) -> str:
    path.write_text("a line of someone else about slow-1\n" + "".join(lines))
    return str(path)


@pytest.mark.parametrize("as_json", [False, True])
def test_says_where_the_time_went_from_the_logs_of_both_clusters(tmp_path: Path, as_json: bool):
    other = {**REQUEST, "request_id": "slow-12"}
    gateway = [logged("gateway", "request", as_json=as_json, **one) for one in (other, REQUEST)]
    sent = {**OURS, "outcome": "delivered", "bytes": 512, "seconds": 1.5}
    hub = write(tmp_path / "hub.log", *(f"[pod/gateway-0/gateway] {one}" for one in gateway))
    member = write(tmp_path / "member.log", logged("eu/p0 prefill engine", "transfer sent", as_json=as_json, **sent))
    ended = prfaas("explain", "slow-1", "--log", hub, "--log", member, "--log", hub)
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = [row.split() for row in ended.stdout.splitlines()]
    assert rows[0][:3] == ["slow-1:", "2.000", "s"]
    assert ["prefill", "1.000", "50%", "eu,", "p0"] in rows
    assert ["transfer", "0.500", "25%", "eu", "to", "hub"] in rows
    assert ["first", "step", "0.200", "10%", "hub,", "d0"] in rows
    assert "eu/p0 prefill engine: transfer sent, outcome delivered, bytes 512, seconds 1.5000" in ended.stdout


def test_reads_one_stream_and_prints_json():
    text = logged("gateway", "request", **NO_PARTS, gateway_queue_seconds=0.5, unknown_seconds=1.5)
    ended = CliRunner().invoke(main.app, ["explain", "slow-1", "-o", "json"], input=text.encode() + b"\xff\n")
    found = json.loads(ended.stdout)
    assert (found["first_token_seconds"], found["transfers"]) == (2.0, [])
    assert found["parts"][0] == {"part": "gateway_queue", "seconds": 0.5, "share": 0.25, "where": "hub, gateway"}
    assert found["parts"][-1] == {"part": "unknown", "seconds": 1.5, "share": 0.75, "where": ""}
    assert {one["seconds"] for one in found["parts"][1:-1]} == {None}, "what is unknown is no 0"


@pytest.mark.parametrize("request_id", ["slow-1", "cmpl-slow-1-0-89f5e833"])
def test_a_transfers_line_has_what_the_gateway_cannot_see_of_another_engine(tmp_path: Path, request_id: str):
    seen = {"gateway_queue_seconds": 0.25, "prefill_seconds": 1.0, "unknown_seconds": 0.75}
    received = {"outcome": "delivered", "flow_seconds": 0.75, "first_byte_seconds": 0.5, "computed_seconds": 0.75}
    ours = {**OURS, "request_id": request_id, **received}
    others = {"request_id": "cmpl-slow-1-0-0-12345678", "transfer_id": "b" * 32, **received, "flow_seconds": 9.0}
    log = write(
        tmp_path / "log",
        *(logged("mover", "transfer received", **one) for one in (ours, others)),
        logged("gateway", "request", **NO_PARTS, **seen),
    )
    found = json.loads(prfaas("explain", "slow-1", "--log", log, "-o", "json").stdout)
    assert [one["request_id"] for one in found["transfers"]] == [request_id]
    parts = {one["part"]: one["seconds"] for one in found["parts"]}
    assert (parts["link_wait"], parts["transfer"], parts["decode_queue"]) == (0.0, 0.5, None)
    assert parts["unknown"] == 0.25


def test_a_fallback_was_prefilled_where_it_is_decoded(tmp_path: Path):
    log = write(tmp_path / "log", logged("gateway", "request", **REQUEST | {"outcome": "fallback"}))
    assert ["prefill", "1.000", "50%", "hub,", "d0"] in [
        row.split() for row in prfaas("explain", "slow-1", "--log", log).stdout.splitlines()
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prefill_seconds": "soon"}, "log, line 2: prefill_seconds is 'soon', which is no number of seconds"),
        ({"prefill_seconds": -1.0}, "prefill_seconds is '-1.0000', which is no number"),
        ({"prefill_seconds": "nan"}, "prefill_seconds is 'nan', which is no number"),
        ({"prefill_seconds": 9.0}, "the parts add up to 10.0000 s and the first token took 2.0000 s"),
        ({"first_token_seconds": None, "reason": "it died", "outcome": "failed"}, "(outcome failed) has no time"),
        ({"request_id": "slow-2"}, "none of the 2 lines of"),
    ],
)
def test_a_line_that_cannot_be_right_gets_a_sentence_and_no_number(tmp_path: Path, change: dict, sentence: str):
    log = write(tmp_path / "log", logged("gateway", "request", **REQUEST | change))
    ended = prfaas("explain", "slow-1", "--log", log)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert sentence in ended.stderr


def test_says_what_it_looked_at_and_what_is_missing(tmp_path: Path):
    log = write(tmp_path / "member.log", logged("eu/p0 prefill engine", "transfer sent", **OURS))
    missing = prfaas("explain", "slow-1", "--log", log)
    assert "member.log has lines about the request 'slow-1' of eu/p0 prefill engine, but none" in missing.stderr
    absent = prfaas("explain", "slow-1", "--log", str(tmp_path / "nothing.log"))
    assert (absent.returncode, "nothing.log cannot be read: No such file" in absent.stderr) == (1, True)
    twice = logged("gateway", "request", **REQUEST) + logged("gateway", "request", **REQUEST | {"status": 429})
    both = prfaas("explain", "slow-1", "--log", write(tmp_path / "log", twice))
    assert (both.returncode, "2 requests with the id 'slow-1'" in both.stderr) == (1, True)
