"""`prfaas serve` decides where a prompt goes by what both sides tell, leaves a service out that cannot serve and takes
it again when it can, and refuses a wrong flag by its name.
"""

import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from tests.waiting import eventually
from typer.testing import CliRunner

from prfaas.cli.serve.command import serve
from prfaas.cli.serve.plan import (
    Ports,
    Settings,
    gateway_url,
    name_of,
    refusal,
    routing_table,
    update_of,
    worker_command,
)
from prfaas.cli.serve.run import ANSWER_BYTES, Caller, Watch
from prfaas.errors import PeerError, ProtocolError
from prfaas.processes import ChildProcess
from prfaas.routing.decide import decide
from prfaas.routing.facts import Route, RoutingFacts, rule_in_force
from prfaas.routing.prices import Backlog, Work
from prfaas.wire.control import ThresholdUpdate
from prfaas.wire.profile import ProfileAnswer, read_profile
from prfaas.wire.routes import decode

PORTS = Ports(gateway=8080, api=8000, data=8001)
SETTINGS = Settings(
    model_source="builtin:kimi-linear-tiny",
    model_name="kimi",
    service_url="http://192.0.2.1:8000",
    service_cluster="service",
    link_mbps=800,
    threshold_tokens=None,
    tls_dir=None,
    host="127.0.0.1",
)
FIXED = msgspec.structs.replace(SETTINGS, threshold_tokens=500)


def told(token_seconds: float, **given: Any) -> ProfileAnswer:
    prefill = {"fixed_seconds": 0.0, "token_seconds": token_seconds, "squared_seconds": 0.0, "samples": 5}
    prefill |= {name: given.pop(name) for name in list(given) if name in prefill}
    of = {"model": "kimi", "fingerprint": "f", "state_bytes": 0, "token_bytes": 1000, "prefill": prefill}
    return msgspec.convert(of | given, ProfileAnswer)


HOME = told(1e-4)
AWAY = told(2e-5, fixed_seconds=0.2)
"""An idle service is quicker from 2,500 tokens on: 0.2 s + 20 us a token, and 10 us of the link, against 100 us."""


def route(settings: Settings, tokens: int, update: ThresholdUpdate | None, **more: Any) -> Route:
    table = routing_table(settings, PORTS)
    facts = RoutingFacts(
        **({"now_seconds": 0.0} | more),
        request_id="r",
        total_tokens=tokens,
        rule=rule_in_force(table, update),
        table=table,
    )
    decision = decide(facts)
    assert isinstance(decision, Route)
    return decision


def test_by_prices_a_prompt_goes_where_it_is_prefilled_sooner():
    update = update_of(SETTINGS, HOME, AWAY, "")
    assert [route(SETTINGS, tokens, update).kind for tokens in (100, 2400, 2600)] == ["local", "local", "offload"]
    slow = msgspec.structs.replace(SETTINGS, link_mbps=1)
    assert route(slow, 2600, update_of(slow, HOME, AWAY, "")).kind == "local", "its cache takes 20 s"


def test_what_waits_at_home_sends_even_a_short_prompt_away():
    busy = Backlog()
    busy.add("another", "local", Work(seconds=1.0), 0.0)
    assert route(SETTINGS, 100, update_of(SETTINGS, HOME, AWAY, ""), backlog=busy).kind == "offload"


def test_by_a_threshold_the_length_alone_decides():
    update = update_of(FIXED, HOME, AWAY, "")
    assert [route(FIXED, tokens, update).kind for tokens in (500, 501)] == ["local", "offload"]


@pytest.mark.parametrize("settings", [SETTINGS, FIXED])
@pytest.mark.parametrize(("home", "away", "problem"), [(HOME, None, "gone"), (HOME, AWAY, "strange"), (None, AWAY, "")])
def test_a_service_that_cannot_serve_gets_nothing(settings, home, away, problem):
    update = update_of(settings, home, away, problem)
    assert route(settings, 100_000, update).kind == "local"
    assert problem in update.reason


def test_before_anything_is_known_no_price_is_guessed():
    assert route(SETTINGS, 100_000, None).kind == "local"


@pytest.mark.parametrize(
    ("settings", "home", "away", "words"),
    [
        (SETTINGS, HOME, AWAY, ""),
        (SETTINGS, HOME, told(1e-5, model="other"), "'other', not 'kimi'"),
        (SETTINGS, HOME, told(1e-5, fingerprint="g"), "other weights"),
        (SETTINGS, None, AWAY, "the local worker did not report its weights"),
        (SETTINGS, HOME, told(0, samples=0), "it has measured no prefill"),
        (SETTINGS, told(0, samples=0), AWAY, "the local worker has measured no prefill"),
        (FIXED, told(0, samples=0), told(0, samples=0), ""),
    ],
)
def test_what_is_wrong_with_a_service_is_said(settings, home, away, words):
    found = refusal(settings, home, away)
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize("document", [b"", b"[]", b'{"model": "m"}', b"\xff", b'{"model": 5}', b'{"x":' + b"[" * 9999])
def test_what_is_no_profile_is_a_protocol_error(document):
    with pytest.raises(ProtocolError, match="is that a prfaas worker"):
        read_profile(document, "http://192.0.2.1:1")


def test_the_table_is_one_that_a_gateway_reads():
    table = routing_table(SETTINGS, PORTS)
    assert decode(msgspec.json.encode(table)) == table
    assert table.on_offload_failure == "PrefillLocally"


def test_the_worker_gets_our_flags_and_then_the_users():
    command = worker_command(
        msgspec.structs.replace(SETTINGS, tls_dir=Path("hub"), worker_flags=("--threads", "8")), PORTS
    )
    assert command[-4:] == ["--tls-dir", "hub", "--threads", "8"]


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8080"), ("0.0.0.0", "http://127.0.0.1:8080"), ("::", "http://[::1]:8080")],
)
def test_the_address_that_is_shown_can_be_used_on_this_machine(host, url):
    assert gateway_url(msgspec.structs.replace(SETTINGS, host=host), PORTS) == url


def test_a_model_is_called_by_its_source():
    assert [name_of(source) for source in ("builtin:kimi", "/models/kimi/", "models/kimi")] == ["kimi"] * 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill-service", "ftp://a:1"], "--prefill-service 'ftp://a:1' is not of the form https://HOST:PORT"),
        (["--prefill-service", "http://a"], "--prefill-service 'http://a' is not of the form"),
        (["--prefill-service", "http://a:1/v1"], "--prefill-service 'http://a:1/v1' is not of the form"),
        (["--prefill-service", "http://a:99999"], "--prefill-service 'http://a:99999' is not an address"),
        (["--prefill-service", "https://a:1"], "give --tls-dir a directory"),
        (["--tls-dir", "nowhere"], "give https://, or leave --tls-dir out"),
        (["--tls-dir", "nowhere", "--prefill-service", "https://a:1"], "--tls-dir nowhere"),
        (["--host", "here"], "--host 'here' is not an IP address; give 127.0.0.1"),
        (["--host", "192.0.2.1", "--port", "0"], "--host '192.0.2.1' cannot be listened on"),
        (["--service-cluster", "hub"], "--service-cluster 'hub' cannot be the service's"),
        (["--model", "/"], "--model '/' has no name of its own; give --model-name"),
        (["--link-mbps", "0"], "--link-mbps 0 is not between 1 and"),
        (["--threshold-tokens", "-1"], "--threshold-tokens -1 is not between 0 and"),
        (["--threshold-tokens", "long"], "'--threshold-tokens'"),
        (["--port", "70000"], "--port 70000 is not between 0 and 65535"),
    ],
)
def test_a_wrong_flag_is_refused_by_name_value_and_fix(flags, words):
    app = typer.Typer(rich_markup_mode=None)
    app.command()(serve)
    given = ["--model", "builtin:kimi-linear-tiny", "--prefill-service", "http://192.0.2.1:8000", *flags]
    ended = CliRunner().invoke(app, given)
    assert ended.exit_code != 0
    assert words in f"{ended.output} {ended.exception}"


@pytest.mark.system
def test_a_process_that_dies_is_named_with_its_last_words(tmp_path):
    program = "import sys; print('step 1'); sys.exit('the model is damaged')"
    child = ChildProcess("the worker", [sys.executable, "-c", program], tmp_path / "worker.log")
    with pytest.raises(PeerError, match=r"the worker ended with status 1; (.|\n)*the model is damaged"):
        eventually(child.check_running, "the process ends")
    child.stop(60)


@pytest.mark.system
def test_a_process_that_does_not_end_is_killed(tmp_path):
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    log = tmp_path / "worker.log"
    child = ChildProcess("the worker", [sys.executable, "-c", program], log)
    eventually(lambda: "deaf" in log.read_text(), "the process ignores SIGTERM")
    child.stop(0.1)
    with pytest.raises(PeerError, match="killed by signal 9"):
        child.check_running()


class Answers(BaseHTTPRequestHandler):
    """Answers every GET with its server's body, 503 where that is empty, and keeps what is PUT."""

    def do_GET(self) -> None:
        body = self.server.body  # type: ignore[attr-defined]
        self.send_response(200 if body else 503)
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.taken.append(msgspec.json.decode(body, type=ThresholdUpdate))  # type: ignore[attr-defined]
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Gateway(socketserver.ThreadingUnixStreamServer):
    """The gateway's control socket."""

    def get_request(self) -> Any:
        return super().get_request()[0], ("local", 0)


class Worker(ThreadingHTTPServer):
    """Has a port from its beginning, and refuses connections until it is activated."""

    def __init__(self, told: ProfileAnswer):
        super().__init__(("127.0.0.1", 0), Answers, bind_and_activate=False)
        self.server_bind()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.body = msgspec.json.encode(told)


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture
def home() -> Iterator[Worker]:
    """The local worker."""
    with Worker(HOME) as worker:
        worker.server_activate()
        with serving(worker):
            yield worker


def test_a_service_is_left_out_while_it_cannot_serve_and_used_again_when_it_can(tmp_path, home):
    said, control = [], tmp_path / "control.sock"
    with Gateway(str(control), Answers) as gateway, serving(gateway), Worker(AWAY) as service:
        gateway.taken = []  # type: ignore[attr-defined]
        settings = msgspec.structs.replace(SETTINGS, service_url=service.url)
        watch = Watch(settings, home.url, Caller(None), control, said.append)
        watch.round()
        service.server_activate()
        good, strange = service.body, msgspec.json.encode(told(1e-5, fingerprint="g"))
        with serving(service):
            for body in (good, good, b"", good, strange, b"x" * (ANSWER_BYTES + 1), good):
                service.body = body
                watch.round()
    updates = gateway.taken  # type: ignore[attr-defined]
    assert [len(one.offload_clusters) for one in updates] == [0, 1, 1, 0, 1, 0, 0, 1]
    assert [len(one.prices) for one in updates] == [0, 2, 2, 0, 2, 0, 0, 2]
    used = "is used for long prompts"
    wanted = ["does not answer", used, "answers HTTP 503", used, "other weights", "answers more than", used]
    assert [words for words, line in zip(wanted, said, strict=True) if words not in line] == []


def test_a_gateway_that_does_not_listen_is_said_and_the_watch_goes_on(tmp_path, home):
    said = []
    settings = msgspec.structs.replace(SETTINGS, service_url=home.url)
    Watch(settings, home.url, Caller(None), tmp_path / "nothing.sock", said.append).round()
    assert len(said) == 1
    assert "the gateway was not told" in said[0]
