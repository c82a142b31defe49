"""`prfaas serve` decides where a prompt goes by what both sides tell, leaves a service out that cannot serve and takes
it again when it can, and refuses a wrong flag by its name.
"""

import shlex
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from prfaas import identity
from prfaas.cli.serve.command import serve
from prfaas.cli.serve.plan import NEVER_TOKENS, Settings, commands, prices_of, routing_table, update_of
from prfaas.cli.serve.run import ANSWER_BYTES, Caller, follow_service
from prfaas.credentials import tls13, utc_now
from prfaas.errors import MismatchError, PeerError, UnreachableError
from prfaas.names import TLS_CERT, TLS_KEY
from prfaas.routing.decide import decide
from prfaas.routing.facts import Route, RoutingFacts, rule_in_force
from prfaas.wire.control import ThresholdUpdate
from prfaas.wire.profile import ProfileAnswer
from prfaas.wire.routes import decode

from ..tls.mounts import Mount

SETTINGS = Settings(
    model_source="builtin:kimi-linear-tiny",
    model_name="kimi",
    service_url="http://192.0.2.1:8000",
    service_cluster="service",
    link_mbps=800,
    threshold_tokens=NEVER_TOKENS,
    tls_dir=None,
    port=8080,
    api_port=8000,
    data_port=8001,
)
FIXED = msgspec.structs.replace(SETTINGS, threshold_tokens=500)
PAGE = Path(__file__).parents[3] / "docs" / "use" / "worker.md"


def make_profile(token_seconds: float, **changes: Any) -> ProfileAnswer:
    prefill = {"fixed_seconds": 0.0, "token_seconds": token_seconds, "squared_seconds": 0.0, "samples": 5}
    prefill |= {name: changes.pop(name) for name in list(changes) if name in prefill}
    of = {"model": "kimi", "fingerprint": "f", "state_bytes": 0, "token_bytes": 1000, "prefill": prefill}
    return msgspec.convert(of | changes, ProfileAnswer)


HOME = make_profile(1e-4)
AWAY = make_profile(2e-5, fixed_seconds=0.2)
"""An idle service is quicker from 2,500 tokens on: 0.2 s + 20 us a token, and 10 us of the link, against 100 us."""
STRANGE = make_profile(1e-5, fingerprint="g")
GOOD = b"HTTP/1.1 200 OK\r\n\r\n"


def placed(settings: Settings, tokens: int, update: ThresholdUpdate | None) -> str:
    table = routing_table(settings)
    rule = rule_in_force(table, update)
    decision = decide(RoutingFacts(now_seconds=0.0, request_id="r", total_tokens=tokens, rule=rule, table=table))
    assert isinstance(decision, Route)
    return decision.kind


def used(settings: Settings) -> ThresholdUpdate:
    return update_of(settings, "", prices=prices_of(settings, HOME, AWAY))


def test_by_prices_a_prompt_goes_where_it_is_prefilled_sooner():
    assert [placed(SETTINGS, tokens, used(SETTINGS)) for tokens in (100, 2400, 2600)] == ["local", "local", "offload"]
    slow = msgspec.structs.replace(SETTINGS, link_mbps=1)
    assert placed(slow, 2600, used(slow)) == "local", "its cache takes 20 s"


def test_by_a_threshold_only_the_length_decides_and_no_measured_prefill_is_needed():
    assert [placed(FIXED, tokens, used(FIXED)) for tokens in (500, 501)] == ["local", "offload"]
    assert prices_of(FIXED, make_profile(0, samples=0), make_profile(0, samples=0))


@pytest.mark.parametrize("settings", [SETTINGS, FIXED])
def test_a_service_that_cannot_serve_gets_nothing(settings):
    assert placed(settings, 100_000, update_of(settings, "no answer", is_used=False)) == "local"


def test_before_anything_is_known_no_price_is_guessed():
    assert placed(SETTINGS, 100_000, None) == "local"


@pytest.mark.parametrize(
    ("home", "away", "words"),
    [
        (HOME, make_profile(1e-5, model="other"), "'other', not 'kimi'"),
        (HOME, STRANGE, "other weights"),
        (HOME, make_profile(0, samples=0), "it has measured no prefill"),
        (make_profile(0, samples=0), AWAY, "the local worker has measured no prefill"),
    ],
)
def test_reports_what_is_wrong_with_a_service(home, away, words):
    with pytest.raises(MismatchError, match=words):
        prices_of(SETTINGS, home, away)


def test_the_table_is_one_that_a_gateway_reads():
    table = routing_table(SETTINGS)
    assert decode(msgspec.json.encode(table)) == table
    assert table.on_offload_failure == "PrefillLocally"


VLLM = msgspec.structs.replace(FIXED, model_source="", decode_url="http://127.0.0.1:9000", service_data_port=7001)


def test_beside_a_vllm_only_a_gateway_runs_and_both_sides_are_reached_as_vllm():
    assert list(commands(VLLM, Path("r"), Path("c"))) == ["gateway"]
    local, service = routing_table(VLLM).instances
    assert (local.engine, local.url, service.engine, service.data_port) == (
        "vllm-prfaas",
        "http://127.0.0.1:9000",
        "vllm-prfaas",
        7001,
    )
    assert [one.engine for one in routing_table(SETTINGS).instances] == ["prfaas", "prfaas"]
    assert placed(VLLM, 501, update_of(VLLM, "it serves the model")) == "offload", "no price is needed"


def test_the_worker_gets_our_flags_and_then_the_users():
    settings = msgspec.structs.replace(SETTINGS, tls_dir=Path("hub"), worker_flags=("--threads", "8"))
    worker = commands(settings, Path("r"), Path("c"), "buyer/acme")["worker"]
    assert worker[-3:] == ["--tls-dir=hub", "--threads", "8"]
    assert "--cluster=buyer/acme" in worker


def invoke(*flags: str) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(serve)
    return CliRunner().invoke(app, flags)


def test_the_command_of_the_page_says_all_that_is_needed(monkeypatch):
    begun: list[Settings] = []
    monkeypatch.setattr("prfaas.cli.serve.run.Caller", lambda _tls_dir: None)
    monkeypatch.setattr("prfaas.cli.serve.run.run", lambda settings, _caller: begun.append(settings))
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith("    prfaas serve "))
    assert invoke(*shlex.split(line)[2:]).exit_code == 0
    only = begun[0]
    assert (only.model_name, only.service_url) == ("kimi-linear", "https://prefill.example:8000")
    assert (only.service_cluster, only.tls_dir, only.port) == ("prefill-eu", Path("acme"), 8080)
    assert only.threshold_tokens == NEVER_TOKENS


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill-service", "ftp://a:1"], "--prefill-service 'ftp://a:1' is not of the form https://HOST:PORT"),
        (["--prefill-service", "http://a"], "--prefill-service 'http://a' is not of the form"),
        (["--prefill-service", "http://a:1/v1"], "--prefill-service 'http://a:1/v1' is not of the form"),
        (["--prefill-service", "http://a:99999"], "--prefill-service 'http://a:99999' is not of the form"),
        (["--prefill-service", "https://a:1"], "https:// needs --tls-dir"),
        (["--tls-dir", "nowhere"], "http:// takes none"),
        (["--tls-dir", "nowhere", "--prefill-service", "https://a:1"], "--tls-dir nowhere"),
        (["--service-cluster", "hub"], "--service-cluster 'hub' is ours"),
        (["--model", "/"], "--model '/' has no name of its own; give --model-name"),
        (["--link-mbps", "0"], "'--link-mbps'"),
        (["--decode-url", "http://127.0.0.1:9000"], "give either --model, for a worker that this command runs, or"),
        (["--model", ""], "give either --model"),
        (["--model", "", "--decode-url", "http://a:1", "--", "--role", "mixed"], "to take --role mixed; give"),
        (["--model", "", "--decode-url", "http://a:1"], "give --threshold-tokens"),
        (["--model", "", "--decode-url", "http://a:1", "--threshold-tokens", "9"], "has no name of its own"),
        (
            ["--model", "", "--decode-url", "http://a", "--threshold-tokens", "9", "--model-name", "m"],
            "--decode-url 'http://a' is not of the form",
        ),
    ],
)
def test_a_wrong_flag_is_refused_by_name_and_fix(flags, words):
    ended = invoke("--model", "builtin:kimi-linear-tiny", "--prefill-service", "http://192.0.2.1:8000", *flags)
    assert ended.exit_code != 0
    assert words in f"{ended.output} {ended.exception}"


@contextmanager
def answering(directory: Path, *documents: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Answer one call with each document, inside TLS; yield the address, and the requests that came."""
    context = tls13(ssl.SSLContext, ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # an unread ticket would turn the close into a reset
    context.load_cert_chain(directory / TLS_CERT, directory / TLS_KEY)
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for document in documents:
                with context.wrap_socket(listener.accept()[0], server_side=True) as peer:
                    requests.append(peer.recv(4096))
                    if requests[-1]:
                        peer.sendall(document)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}", requests
        thread.join()


@pytest.mark.parametrize(
    ("cluster", "document", "words"),
    [
        ("eu", b"", "does not answer"),
        ("eu", b"SSH-2.0\r\n\r\n", "does not answer"),
        ("eu", b"HTTP/1.1 503 Busy\r\n\r\nloading", "answers HTTP 503: loading"),
        ("eu", GOOD + b"x" * (ANSWER_BYTES + 1), "answers more than"),
        ("us", GOOD, "shows a certificate of cluster 'eu', not of 'us'"),
    ],
)
def test_only_a_good_answer_counts_and_another_cluster_gets_no_request(tmp_path, cluster, document, words):
    now = utc_now()
    authority, until = identity.make_authority("test", identity.valid_for(now, 30)), identity.valid_for(now, 2)
    hub, eu = (
        Mount(tmp_path / one).put(identity.issue(authority, one, until), authority).path for one in ("hub", "eu")
    )
    with answering(eu, GOOD + b"yes", document) as (url, requests):
        assert Caller(hub).call("GET", url, "/readyz", "eu") == b"yes"
        with pytest.raises(PeerError, match=words):
            Caller(hub).call("GET", url, "/readyz", cluster)
    assert bool(requests[1]) == (cluster == "eu")


UNREACHABLE = UnreachableError("no answer")


class Peers(Caller):
    """Answers in place of the worker, the service and the gateway."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {SETTINGS.worker_url: HOME}
        self.called: set[tuple[str, str, str]] = set()
        self.taken: list[ThresholdUpdate] = []

    def call(self, method: str, url: str, path: str, cluster: str = "", body: bytes | None = None) -> bytes:
        self.called.add((method, url + path, cluster))
        answer = self.answers.get(url)
        if isinstance(answer, PeerError):
            raise answer
        if body is not None:
            self.taken.append(msgspec.json.decode(body, type=ThresholdUpdate))
        return msgspec.json.encode(answer)


def follow(peers: Peers, *services: ProfileAnswer | PeerError) -> None:
    """Run one round for each state of the service; the worker does not answer after the first one."""
    rounds = follow_service(SETTINGS, peers, Path("control.sock"))
    for service in services:
        peers.answers[SETTINGS.service_url] = service
        next(rounds)
        peers.answers[SETTINGS.worker_url] = UNREACHABLE


def test_a_service_is_left_out_while_it_cannot_serve_and_used_again_when_it_can(capsys):
    peers = Peers()
    follow(peers, UNREACHABLE, AWAY, AWAY, UNREACHABLE, AWAY, STRANGE, AWAY)
    assert [len(one.offload_clusters) for one in peers.taken] == [0, 1, 1, 0, 1, 0, 1]
    assert [len(one.prices) for one in peers.taken] == [0, 2, 2, 0, 2, 0, 2]
    lives, unused = "is used for long prompts", "is not used: no answer"
    lines, wanted = capsys.readouterr().err.splitlines(), [unused, lives, unused, lives, "other weights", lives]
    assert [words for words, line in zip(wanted, lines, strict=True) if words not in line] == []


def test_reports_a_silent_gateway_once_and_each_peer_must_show_its_own_cluster(capsys):
    peers = Peers()
    peers.answers["unix:control.sock"] = UNREACHABLE
    follow(peers, AWAY, AWAY)
    assert capsys.readouterr().err.splitlines() == ["the gateway does not know whether to use the service: no answer"]
    assert peers.called == {
        ("GET", f"{SETTINGS.worker_url}/v1/profile", "hub"),
        ("GET", f"{SETTINGS.service_url}/v1/profile", "service"),
        ("PUT", "unix:control.sock/threshold", ""),
    }


def test_a_vllm_is_asked_for_its_model_and_left_out_while_it_serves_another(capsys):
    peers = Peers()
    rounds = follow_service(VLLM, peers, Path("control.sock"))
    for names in (["kimi"], ["other"], [], ["kimi"]):
        peers.answers[VLLM.service_url] = {"object": "list", "data": [{"id": name} for name in names]}
        next(rounds)
    assert [len(one.offload_clusters) for one in peers.taken] == [1, 0, 0, 1]
    assert "it serves the model 'other', not 'kimi'" in capsys.readouterr().err
    assert ("GET", f"{VLLM.service_url}/v1/models", "service") in peers.called
    assert not any(VLLM.decode_url in url for _, url, _ in peers.called), "it has no profile"
