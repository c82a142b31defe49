"""Proves that one transfer can be followed through a real gateway and two real workers: by its id in the response, in
one log line a side, and as spans of one trace in a collector; that a failed one says why, and a broken connection
shows.
"""

import asyncio
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import pytest

from prfaas.names import HUB
from prfaas.wire.frames import Address
from prfaas.wire.prefill import new_transfer
from prfaas.wire.routes import Cluster, Instance, LinkWatermarks, RoutingTable, Threshold, encode
from prfaas.wire.trace import PARTS, named_seconds, read_parts
from prfaas_transfer.pull import Connections, SourceAddress, decline
from prfaas_transfer.tls import PeerAuth

from ...waiting import eventually, eventually_async
from .collector import Collector, Span
from .conftest import Worker, _all_ready, launched
from .transfer_proxy import Proxy, at_frame, cut

pytestmark = pytest.mark.system

THRESHOLD_TOKENS = 200
PROMPT = "def main(arguments):\n    return 0\n" * 60  # a byte is a token
REMOTE = ["prefill.remote", "transfer", "prefill"]
LONG = PROMPT * 4
"""Takes so long that a client's way to the gateway and back is far less than a twentieth."""
REPEATS = 9
"""Of which the median counts: a busy machine may delay a client between the gateway's first token and its own."""
Leg = dict[str, Any]


class System(NamedTuple):
    prefill: Worker
    decode: Worker
    gateway_url: str
    gateway_log: Path
    collector: Collector

    @property
    def logs(self) -> dict[str, Path]:
        return {"gateway": self.gateway_log, "D": self.decode.log, "P": self.prefill.log}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """All of it, traced and talkative."""
    directory = tmp_path_factory.mktemp("following")
    wanted = {"OTEL_BSP_SCHEDULE_DELAY": "50", "PRFAAS_LOG_LEVEL": "DEBUG"}
    with Collector() as collector, pytest.MonkeyPatch.context() as patch, launched(directory) as launch:
        for name, value in (wanted | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}).items():
            patch.setenv(name, value)
        prefill, decode = launch("p0", "--role", "prefill"), launch("d0", "--role", "decode")
        asyncio.run(_all_ready(prefill, decode))
        routes, log = directory / "routes.json.gz", directory / "gateway.log"
        routes.write_bytes(encode(_table(prefill.url, decode.url)))
        command = [
            sys.executable,
            "-m",
            "prfaas_gateway",
            "--port",
            "0",
            "--admin-port",
            "0",
            "--routes-file",
            str(routes),
        ]
        with log.open("wb") as output, subprocess.Popen([*command, "--drain-seconds", "0"], stderr=output) as gateway:
            try:
                yield System(prefill, decode, f"http://127.0.0.1:{_port(log)}", log, collector)
            finally:
                gateway.kill()


def _table(prefill_url: str, decode_url: str) -> RoutingTable:
    return RoutingTable(
        policy="p",
        namespace="n",
        generation=1,
        model="tiny",
        on_offload_failure="PrefillLocally",
        threshold=Threshold(mode="Fixed", tokens=THRESHOLD_TOKENS, min_tokens=1, max_tokens=THRESHOLD_TOKENS),
        watermarks=LinkWatermarks(high_percent=80, low_percent=50),
        short_interval_seconds=1,
        clusters=(Cluster(name="eu", capacity_mbps=100, utilisation_query="vector(0)"),),
        instances=(
            Instance(name="d0", pool="near", cluster=HUB, role="decode", url=decode_url),
            Instance(name="p0", pool="far", cluster="eu", role="prefill", url=prefill_url),
        ),
    )


def _port(log: Path) -> int:
    found = eventually(lambda: re.search(r"listening on \S+:(\d+)", log.read_text()), log.read_text)
    assert found is not None
    return int(found[1])


async def ask(url: str, prompt: str = PROMPT, leg: Leg | None = None, /, **headers: str) -> tuple[int, dict[str, str]]:
    """Complete a prompt that is not cached, in a trace of the client's; returns status and headers."""
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "cache_salt": secrets.token_hex(8)}
    if leg is not None:
        body |= {"cache_salt": leg["transfer_id"], "kv_transfer_params": {"prfaas": leg}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body, headers=headers) as answer,
    ):
        text = await answer.text()
        return answer.status, {"body": text} | {name.lower(): value for name, value in answer.headers.items()}


async def stream(url: str, prompt: str, **sent: str) -> tuple[dict[str, str], float]:
    """Stream the answer to a prompt that is not cached; returns its headers and the seconds to its first bytes."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "stream": True, "cache_salt": secrets.token_hex(8)}
    began = time.monotonic()
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body, headers=sent) as answer,
    ):
        await answer.content.readany()
        waited_seconds = time.monotonic() - began
        await answer.read()
        return {name.lower(): value for name, value in answer.headers.items()}, waited_seconds


def legs_to(host: str, port: int = 8001) -> tuple[Leg, Leg]:
    """Name a transfer; return the legs of its source, at this place, and of its destination."""
    transfer = new_transfer()
    return {"role": "source", **transfer}, {"role": "destination", **transfer, "host": host, "port": port}


def trace_context() -> tuple[str, str, dict[str, str]]:
    """Return a client's trace id, its span's id, and its header."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-01"}


def lines(log: Path, **wanted: str) -> list[dict[str, str]]:
    """Return the fields of the log lines that have these; `level` and `words` are what stands before them."""
    found = []
    for text in log.read_text().splitlines():
        head, *pairs = re.split(r" (?=[a-z_]+=)", text)
        fields = dict(shlex.split(pair)[0].split("=", 1) for pair in pairs)
        if wanted.items() <= fields.items() and (parts := re.match(r"\S+ \S+ ([A-Z]+) [^:]*: (.*)", head)):
            found.append(fields | {"level": parts[1], "words": parts[2]})
    return found


async def wait_for_lines(log: Path, count: int, **wanted: str) -> list[dict[str, str]]:
    """Wait until there are so many such lines at INFO or above, and return them."""

    def found() -> list[dict[str, str]]:
        return [line for line in lines(log, **wanted) if line["level"] != "DEBUG"]

    await eventually_async(lambda: len(found()) >= count, lambda: f"{count} lines of {wanted} in {log.read_text()}")
    return found()


def tree(spans: list[Span], root: str = "") -> set[tuple[str, str, str]]:
    """Return (name, service, name of the parent); `root` is the id of the client's own span."""
    names = {span.span_id: span.name for span in spans} | {root: "client"}
    return {(span.name, span.service, names.get(span.parent_id, "none")) for span in spans}


async def test_one_transfer_id_leads_through_the_response_and_the_logs_of_all_three(system):
    status, headers = await ask(system.gateway_url, **{"x-request-id": "follow-me/1"})
    transfer_id = headers["x-prfaas-transfer-id"]
    assert (status, headers["x-request-id"], headers["x-prfaas-decision"]) == (200, "follow-me/1", "offload")
    assert re.fullmatch("[0-9a-f]{32}", transfer_id)
    ends = {side: await wait_for_lines(log, 1, transfer_id=transfer_id) for side, log in system.logs.items()}
    assert {side: [line["words"] for line in found] for side, found in ends.items()} == {
        "gateway": ["request"],
        "D": ["transfer received"],
        "P": ["transfer sent"],
    }, "one line a side tells the story"
    (gateway,), (destination,), (source,) = ends.values()
    assert {line["request_id"] for line in (gateway, destination, source)} == {"follow-me/1"}
    assert (gateway["decision"], gateway["outcome"], gateway["cluster"], gateway["pool"]) == (
        "offload",
        "ok",
        "eu",
        "far",
    )
    assert (destination["outcome"], source["outcome"], destination["breaks"], source["breaks"]) == (
        "delivered",
        "delivered",
        "0",
        "0",
    )
    assert destination["bytes"] == source["bytes"] == headers["x-prfaas-kv-bytes"]
    assert float(destination["mbps"]) > 0
    assert 0 < float(destination["flow_seconds"]) <= float(destination["seconds"])
    assert destination["trace_id"] == source["trace_id"] == gateway["trace_id"]


@pytest.mark.parametrize(("offload", "decision"), [("auto", "offload"), ("never", "local")])
async def test_the_parts_of_a_first_token_add_up_to_what_the_client_waited(system, offload, decision):
    left: list[float] = []
    for _ in range(REPEATS):
        answered, waited_seconds = await stream(system.gateway_url, LONG, **{"x-prfaas-offload": offload})
        parts = read_parts(answered["x-prfaas-ttft-seconds"])
        assert answered["x-prfaas-decision"] == decision
        assert parts.keys() == set(PARTS), "our workers report all of them"
        left.append(1 - sum(parts.values()) / waited_seconds)
    assert min(left) >= 0, "the gateway waits while the client does"
    assert median(left) <= 0.05, f"shares that are in no part: {left}"


@pytest.mark.parametrize("prompt", [PROMPT, "short"])
async def test_header_log_spans_and_explain_have_the_same_parts(system, prompt):
    trace_id, _, context = trace_context()
    request_id = f"parts-{trace_id}"
    answered, _ = await stream(system.gateway_url, prompt, **context, **{"x-request-id": request_id})
    parts = read_parts(answered["x-prfaas-ttft-seconds"])
    named = named_seconds(parts)
    assert parts["prefill"] <= float(answered["x-prfaas-prefill-seconds"]) + 1e-5
    (logged,) = await wait_for_lines(system.gateway_log, 1, request_id=request_id)
    assert {name: float(logged[name]) for name in named} == pytest.approx(named, abs=1e-4)
    is_remote = prompt is PROMPT
    spans = await asyncio.to_thread(
        system.collector.trace,
        trace_id,
        "request",
        "decode",
        *(("source", *REMOTE) if is_remote else ("prefill.local",)),
    )
    traced = {span.name: span.attributes for span in spans}
    assert {name: traced["request"][name] for name in named} == pytest.approx(named, abs=1e-6)
    assert traced["decode"]["decode_queue_seconds"] == pytest.approx(parts["decode_queue"], abs=1e-6)
    if is_remote:
        for side in ("D", "P"):
            await wait_for_lines(system.logs[side], 1, request_id=request_id)
    found = await explain(system, request_id)
    assert {one["part"]: one["seconds"] for one in found["parts"]} == pytest.approx(parts, abs=1e-4)
    assert found["first_token_seconds"] == pytest.approx(sum(parts.values()), abs=1e-3)
    where = {one["part"]: one["where"] for one in found["parts"]}
    if is_remote:
        assert (where["prefill"], where["transfer"]) == ("eu, p0", "eu to hub")
        assert {one["what"] for one in found["transfers"]} == {"transfer sent", "transfer received"}
    else:
        assert (where["prefill"], parts["link_wait"], parts["transfer"]) == ("hub, d0", 0.0, 0.0)


async def explain(system: System, request_id: str) -> dict[str, Any]:
    logs = [word for log in system.logs.values() for word in ("--log", str(log))]
    command = [sys.executable, "-m", "prfaas.cli.main", "explain", request_id, *logs, "-o", "json"]
    explained = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    return json.loads(explained.stdout)


async def test_the_debug_log_has_the_steps_of_a_transfer(system):
    _, headers = await ask(system.gateway_url)
    transfer_id = headers["x-prfaas-transfer-id"]
    await wait_for_lines(system.prefill.log, 1, transfer_id=transfer_id)
    steps = {line["words"] for line in lines(system.prefill.log, transfer_id=transfer_id) if line["level"] == "DEBUG"}
    assert steps == {"transfer announced", "transfer connected", "transfer computed"}


async def test_no_log_holds_the_token_that_opens_a_transfer(system):
    leg, _ = legs_to(system.prefill.host)
    async with aiohttp.ClientSession() as session:
        body = {"request_id": "secretive", "model": "tiny", "token_ids": [1, 2, 3], "leg": leg}
        async with session.post(f"{system.prefill.url}/v1/prefills", json=body) as answer:
            assert (answer.status, await answer.json()) == (201, {"data_port": 8001, "end_token": 2})
    source, address = SourceAddress(system.prefill.host, 8001), Address(leg["transfer_id"], leg["epoch"])
    await asyncio.to_thread(decline, Connections(PeerAuth()), source, leg["token"], address)
    (end,) = await wait_for_lines(system.prefill.log, 1, request_id="secretive")
    assert (end["words"], end["outcome"], end["transfer_id"]) == ("transfer sent", "cancelled", leg["transfer_id"])
    assert not any(leg["token"] in log.read_text() for log in system.logs.values())


async def test_a_clients_trace_has_the_spans_of_gateway_decode_and_prefill_below_it(system):
    trace_id, root, context = trace_context()
    _, headers = await ask(system.gateway_url, **context)
    spans = await asyncio.to_thread(system.collector.trace, trace_id, "request", "decode", "source", *REMOTE)
    assert tree(spans, root) == {
        ("request", "prfaas-gateway", "client"),
        ("decode", "prfaas-worker", "request"),
        ("prefill.remote", "prfaas-worker", "decode"),
        ("transfer", "prfaas-worker", "prefill.remote"),
        ("source", "prfaas-worker", "request"),
        ("prefill", "prfaas-worker", "source"),
    }
    by_name = {span.name: span for span in spans}
    named = {span.attributes.get("transfer_id") for span in spans if span.name not in ("decode", "source")}
    assert named == {headers["x-prfaas-transfer-id"]}
    assert {name: span.instance for name, span in by_name.items() if span.instance} == {
        "decode": "d0",
        "prefill.remote": "d0",
        "transfer": "d0",
        "source": "p0",
        "prefill": "p0",
    }
    # Also if the answer has ended before the source's leg was answered, which the gateway leaves then.
    assert [span.error for span in spans] == [None] * 6
    request, transfer, prefill = (by_name[name] for name in ("request", "transfer", "prefill"))
    assert request.attributes["threshold_tokens"] == THRESHOLD_TOKENS
    assert {request.attributes[name] for name in ("pool", "cluster", "outcome")} == {"far", "eu", "ok"}
    assert transfer.attributes["bytes"] == int(headers["x-prfaas-kv-bytes"]) > 0
    assert transfer.attributes["codecs"]
    assert transfer.attributes["mbps"] > 0
    assert sorted(prefill.events) == ["announced", "computed", "connected", "delivered", "first_byte"]
    for span in spans:  # one machine, one clock
        assert request.began <= span.began <= span.ended, span
    assert transfer.ended <= by_name["prefill.remote"].ended <= by_name["decode"].ended <= request.ended


async def test_a_prompt_below_the_threshold_is_prefilled_in_one_span_and_moves_nothing(system):
    trace_id, root, context = trace_context()
    body = {"model": "tiny", "prompt": "short", "max_tokens": 2, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(system.gateway_url + "/v1/completions", json=body, headers=context) as answer,
    ):
        await answer.read()
        assert "x-prfaas-transfer-id" not in answer.headers
    spans = await asyncio.to_thread(system.collector.trace, trace_id, "request", "decode", "prefill.local")
    assert tree(spans, root) == {
        ("request", "prfaas-gateway", "client"),
        ("decode", "prfaas-worker", "request"),
        ("prefill.local", "prfaas-worker", "decode"),
    }


async def test_a_connection_that_breaks_shows_on_both_sides_and_in_the_metrics(system, client):
    trace_id, _, context = trace_context()
    before = [await client.metrics(worker) for worker in (system.prefill, system.decode)]
    with Proxy((system.prefill.host, 8001), at_frame(3, cut)) as proxy:
        source, destination = legs_to(*proxy.address)
        _, (status, headers) = await asyncio.gather(
            ask(system.prefill.url, PROMPT, source, **context), ask(system.decode.url, PROMPT, destination, **context)
        )
    assert status == 200, headers
    ends: list[int] = []
    for log in (system.prefill.log, system.decode.log):
        *resumes, end = await wait_for_lines(log, 2, transfer_id=headers["x-prfaas-transfer-id"])
        assert [line["words"] for line in resumes] == ["transfer resumes"] * int(end["breaks"])
        assert end["outcome"] == "delivered"
        ends.append(int(end["breaks"]))
    sent, received = ends  # one, and on a machine that stood still another
    assert sent >= 1
    assert received >= 1
    spans = await asyncio.to_thread(system.collector.trace, trace_id, "decode", "source", *REMOTE)
    assert {span.name: span.attributes["breaks"] for span in spans if "breaks" in span.attributes} == {
        "transfer": received,
        "prefill": sent,
    }
    sides = zip((system.prefill, system.decode), before, ("send", "receive"), ends, strict=True)
    for worker, old, direction, breaks in sides:
        new, label = await client.metrics(worker), f'{{direction="{direction}"}}'
        for name, more in (("breaks_total", breaks), ("seconds_count", 1), ("bytes_count", 1)):
            assert new[f"prfaas_transfer_{name}{label}"] - old[f"prfaas_transfer_{name}{label}"] == more
        moved = new[f"prfaas_transfer_bytes_sum{label}"] - old[f"prfaas_transfer_bytes_sum{label}"]
        assert moved == int(headers["x-prfaas-kv-bytes"])


async def test_a_transfer_that_fails_costs_time_only_and_says_why_everywhere(system):
    trace_id, _, context = trace_context()
    _, leg = legs_to(system.prefill.host)  # its source never hears of it
    status, headers = await ask(system.decode.url, PROMPT, leg, **context)
    assert (status, headers["x-prfaas-lost-transfer"]) == (200, leg["transfer_id"])
    spans = await asyncio.to_thread(system.collector.trace, trace_id, "decode", "prefill.remote", "transfer")
    reasons = {span.name: span.error for span in spans}
    reason = f"no prefill {leg['transfer_id']} with this token and epoch: ended, expired or foreign"
    assert reasons == {"decode": None, "prefill.remote": None, "transfer": reason}
    (end,) = await wait_for_lines(system.decode.log, 1, trace_id=trace_id)
    assert (end["level"], end["outcome"], end["reason"]) == ("WARNING", "failed", reason)


async def test_a_source_whose_caller_leaves_is_named_on_both_sides(system):
    trace_id, _, context = trace_context()
    source, destination = legs_to(system.prefill.host)
    filling = asyncio.ensure_future(ask(system.prefill.url, PROMPT * 12, source, **context))
    answering = asyncio.ensure_future(ask(system.decode.url, PROMPT * 12, destination, **context))
    await eventually_async(
        lambda: [line for line in lines(system.prefill.log, trace_id=trace_id) if "connection" in line],
        "the destination is connected",
        poll=0.005,
    )
    filling.cancel()
    status, headers = await answering
    assert (status, headers["x-prfaas-lost-transfer"]) == (200, destination["transfer_id"])
    spans = await asyncio.to_thread(system.collector.trace, trace_id, "decode", "source", *REMOTE)
    reasons = {span.name: span.error for span in spans}
    reason = "its caller left before the prompt was computed"
    assert reasons["prefill"] == reason
    (left,) = (span for span in spans if span.name == "source")
    assert (left.events, left.error) == (["left"], None), "the leg has no error of its own"
    assert reason in (reasons["transfer"] or ""), reasons


async def test_a_request_that_falls_back_is_served_and_names_what_failed(system):
    trace_id, headers = "", dict[str, str]()
    with routed(system, "http://127.0.0.1:9"):

        async def falls_back() -> bool:
            nonlocal trace_id, headers
            trace_id, _, context = trace_context()
            _, headers = await ask(system.gateway_url, **context)
            return headers.get("x-prfaas-outcome") == "fallback"

        await eventually_async(falls_back, "the gateway follows its file", poll=0.1)
    spans = await asyncio.to_thread(system.collector.trace, trace_id, "request", "decode", "prefill.remote", "transfer")
    (request,) = (span for span in spans if span.name == "request")
    assert (request.attributes["outcome"], request.events, request.error) == ("fallback", ["leg failed"], None)
    (leg, end) = await wait_for_lines(system.gateway_log, 2, request_id=headers["x-request-id"])
    assert (leg["level"], leg["words"], leg["leg"], leg["instance"]) == ("WARNING", "leg failed", "prefill", "p0")
    assert "127.0.0.1:9" in leg["reason"]
    assert (end["words"], end["outcome"]) == ("request", "fallback")
    await offloads(system)


async def offloads(system: System) -> None:
    """Wait until the gateway sends requests to the prefill worker again: it avoids for a moment what failed."""

    async def offloads_one() -> bool:
        return (await ask(system.gateway_url))[1].get("x-prfaas-decision") == "offload"

    await eventually_async(offloads_one, system.gateway_log.read_text, poll=0.1)


@contextmanager
def routed(system: System, prefill_url: str) -> Iterator[None]:
    """Have the gateway reach P by another address while the block runs."""
    file = system.gateway_log.with_name("routes.json.gz")
    before = file.read_bytes()
    file.write_bytes(encode(_table(prefill_url, system.decode.url)))
    try:
        yield
    finally:
        file.write_bytes(before)


def test_the_engines_of_a_traced_system_have_loaded_nothing_of_it(system):
    assert "_upb" in Path(f"/proc/{system.prefill.process.pid}/maps").read_text(), "the front has: protobuf's library"
    for worker in (system.prefill, system.decode):
        assert "_upb" not in Path(f"/proc/{worker.engine_pid}/maps").read_text()
    assert os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") == system.collector.url, "though its environment names it"
