"""`prfaas profile measure` before servers of this process: what it asks, what it refuses, and what it leaves behind."""

import json
import signal
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from prfaas import identity
from prfaas.cli import measured_server
from prfaas.cli.measured_server import KEY_VARIABLE, HttpServer
from prfaas.cli.profile_measure import measure
from prfaas.credentials import utc_now
from prfaas.errors import ConfigError, IdentityError, PeerError, ProtocolError, UnreachableError
from prfaas.measure.beside import BEGUN_TOKENS
from prfaas.wire import headers

from ...waiting import eventually

pytestmark = pytest.mark.system

app = typer.Typer()
app.command()(measure)


class Fake(ThreadingHTTPServer):
    """Answers as vLLM does. `hold` is called before a completion's first byte."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, bytes]] = {
            "/v1/models": (200, b'{"data": [{"id": "kimi-k3", "max_model_len": 2000, "owned_by": "vllm"}]}'),
            "/version": (200, b'{"version": "0.32.0"}'),
            "/metrics": (200, b""),
        }
        self.bodies: list[dict[str, Any]] = []
        self.seen: list[dict[str, str]] = []
        self.headers: dict[str, str] = {}
        self.hold = lambda: None
        self.ended = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self.server.seen.append(dict(self.headers))
        status, body = self.server.answers.get(self.path, (404, b"no"))
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.hold()
        self.send_response(200)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for count in range(1, body["max_tokens"] + 1):
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
                self.wfile.write(b"data: %b\n\n" % json.dumps({"choices": [{}], "usage": usage}).encode())
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.ended.set()


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{fake.server_port}"
    finally:
        fake.shutdown()
        thread.join()
        fake.server_close()


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def url(fake: Fake) -> Iterator[str]:
    with serving(fake) as found:
        yield found


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def recorded(folder: Path, tokens: int) -> Path:
    path = folder / f"{tokens}.json"
    many = {"input_lens": [tokens] * 2, "output_lens": [2] * 2, "ttfts": [tokens / 1e4] * 2, "itls": [[0.1]] * 2}
    path.write_text(json.dumps({"model_id": "moonshotai/Kimi-K3", "max_concurrency": 1} | many))
    return path


def test_recorded_results_become_yaml_that_is_saved_too(tmp_path: Path):
    files = [argument for tokens in (500, 5000) for argument in ("--from-bench", recorded(tmp_path, tokens))]
    printed = run(*files, "--save", tmp_path / "p.yaml")
    sections, pool = yaml.safe_load_all((tmp_path / "p.yaml").read_text())
    assert (tmp_path / "p.yaml").read_text() in printed
    assert [point["tokens"] for point in sections["profiles"]["kimi-k3"]["points"]] == [500, 5000]
    assert pool["profile"]["tokenBytes"] == 27_648
    assert json.loads(run(*files, "-o", "json"))["profile"]["token_seconds"] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give either --url with a server, or --from-bench"),
        (("--url", "http://x", "--from-bench", "f"), "give either"),
        (("--url", "10.0.0.5:8000"), "give one such as http://"),
        (("--url", "http://x", "--save", "/nowhere/at/all"), "name a file in a folder that exists"),
        (("--from-bench", "/nowhere.json"), "--from-bench /nowhere.json cannot be read: No such file"),
        (("--url", "https://x", "--ca", "/nowhere.crt"), "--ca /nowhere.crt holds no certificate"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments: tuple[str, ...], said: str):
    with pytest.raises(ConfigError, match=said):
        run(*arguments)


def test_another_server_is_named(fake: Fake, url: str):
    fake.answers["/v1/models"] = 200, b"<html>"
    with pytest.raises(ProtocolError, match=r"/v1/models answers something else.*give the URL of a vLLM"):
        run("--url", url)
    fake.answers.clear()
    with pytest.raises(ProtocolError, match=r"/v1/models answers HTTP 404: no; give the URL of a vLLM"):
        run("--url", url)


def test_nobody_at_all_is_said():
    with pytest.raises(UnreachableError, match=r"does not answer: .*refused"):
        run("--url", "http://127.0.0.1:1")


def test_cache_sizes_are_asked_for_before_any_prompt_is_sent(fake: Fake, url: str):
    fake.answers["/v1/models"] = 200, b'{"data": [{"id": "llama", "max_model_len": 2000}]}'
    with pytest.raises(ConfigError, match=r"'llama' .* not known: give --model \(kimi-k3, .*--cache-metrics"):
        run("--url", url)
    with pytest.raises(ConfigError, match="shows no prfaas_profile_cache_bytes"):
        run("--url", url, "--cache-metrics", f"{url}/metrics")
    assert fake.bodies == []


def test_a_gateway_is_no_instance(fake: Fake, url: str):
    fake.headers[headers.DECISION] = "local"
    with pytest.raises(ConfigError, match="is a gateway, which chooses among instances"):
        run("--url", url)


def test_the_key_of_the_environment_is_sent_and_a_missing_one_is_named(
    fake: Fake, url: str, monkeypatch: pytest.MonkeyPatch
):
    fake.answers["/v1/models"] = 401, b"no"
    monkeypatch.setenv(KEY_VARIABLE, "k1")
    with pytest.raises(ConfigError, match="put it into the environment variable PRFAAS_API_KEY"):
        run("--url", url)
    assert fake.seen[-1]["authorization"] == "Bearer k1"


def test_a_server_that_falls_silent_is_given_up(fake: Fake, url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured_server, "ANSWER_SECONDS", 0.1)
    silent = threading.Event()
    fake.hold = silent.wait
    try:
        with pytest.raises(UnreachableError, match="sent nothing of an answer"):
            run("--url", url)
    finally:
        silent.set()


def test_an_interruption_leaves_no_request_and_no_thread(fake: Fake, url: str):
    before, freed, first = threading.active_count(), threading.Event(), threading.Lock()

    def interrupt() -> None:
        if first.acquire(blocking=False):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        freed.wait(30)

    with HttpServer(url) as server:
        server.card()
        fake.hold = interrupt
        with pytest.raises(KeyboardInterrupt):
            server.ask([[1, 2, 3]] * 4, 100_000)
    freed.set()
    assert fake.ended.wait(30)
    eventually(lambda: threading.active_count() <= before, "all threads have ended")


def test_a_request_that_still_connects_when_all_are_ended_is_not_sent(fake: Fake, url: str, monkeypatch):
    with HttpServer(url) as server:
        server.card()
        connect = server._connect

        def connect_late() -> Any:
            connection = connect()
            server.close()
            return connection

        monkeypatch.setattr(server, "_connect", connect_late)
        with pytest.raises(UnreachableError, match="given up before it was sent"):
            server.ask([[1, 2, 3]], 100_000)
        assert fake.bodies == []
        monkeypatch.undo()
        assert server.ask([[1, 2, 3]], 5), "another one is"


def test_what_a_server_streams_is_timed_and_its_version_read(fake: Fake, url: str):
    with HttpServer(f"{url}/v1/") as server:
        assert server.label(server.card()) == "vllm 0.32.0"
        (answer,) = server.ask([[1, 2, 3]], 5)
        assert server.others() is None
    assert [mark.tokens for mark in answer.marks] == [1, 2, 3, 4, 5]
    assert fake.bodies[0]["prompt"] == [1, 2, 3]
    assert (fake.bodies[0]["model"], fake.bodies[0]["min_tokens"]) == ("kimi-k3", 5)


def test_a_prompt_is_sent_beside_streams_that_have_begun(fake: Fake, url: str):
    with HttpServer(url) as server:
        server.card()
        streams, prompt = server.ask_beside([[1], [2], [3]], 2 * BEGUN_TOKENS, [4] * 9)
    assert [len(body["prompt"]) for body in fake.bodies] == [1, 1, 1, 9]
    assert [body["max_tokens"] for body in fake.bodies] == [2 * BEGUN_TOKENS] * 3 + [1]
    assert prompt.began_seconds > max(one.marks[0].seconds for one in streams)
    assert {one.marks[-1].tokens for one in streams} == {2 * BEGUN_TOKENS}


def test_a_stream_that_is_refused_holds_nobody_up(fake: Fake, url: str):
    fake.headers = {headers.DECISION: "local"}
    with HttpServer(url) as server:
        server.card()
        with pytest.raises(ConfigError, match="is a gateway"):
            server.ask_beside([[1], [2]], 100, [4] * 9)


def test_an_instance_is_known_by_its_authority_though_its_certificate_names_no_host(tmp_path: Path, fake: Fake):
    validity = identity.valid_for(utc_now(), 1)
    authorities = [identity.make_authority(name, validity) for name in ("ours", "theirs")]
    for name, authority in zip(("ours", "theirs"), authorities, strict=True):
        (tmp_path / f"{name}.crt").write_bytes(authority.certificate)
    pair = identity.issue(authorities[0], "eu", validity)
    (tmp_path / "pair").write_bytes(pair.certificate + pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair")
    fake.socket = context.wrap_socket(fake.socket, server_side=True)
    with serving(fake) as plain:
        url = plain.replace("http:", "https:")
        with HttpServer(url, tmp_path / "ours.crt") as server:
            assert server.card().id == "kimi-k3"
            assert len(server.ask([[1]], 2)[0].marks) == 2
        for ca in (tmp_path / "theirs.crt", None):
            with (
                HttpServer(url, ca) as server,
                pytest.raises(PeerError, match="give --ca with the file of its authority"),
            ):
                server.card()


def test_a_host_is_known_by_its_name_alone(tmp_path: Path, fake: Fake):
    validity = identity.valid_for(utc_now(), 1)
    authority = identity.make_authority("ours", validity)
    (tmp_path / "ca.crt").write_bytes(authority.certificate)
    pair = identity.issue_server(authority, "another", ["another.example"], validity)
    (tmp_path / "pair").write_bytes(pair.certificate + pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair")
    fake.socket = context.wrap_socket(fake.socket, server_side=True)
    with serving(fake) as url, HttpServer(url.replace("http:", "https:"), tmp_path / "ca.crt") as server:
        for _ in range(2):  # the first mismatch may not open the door for the second call
            with pytest.raises(IdentityError):
                server.card()


@pytest.mark.parametrize(
    "url",
    [
        "http://h:abc",
        "http://h:99999",
        "http://[::1",
        "http://u:secret@h:1",
        "http://h:1/?a=b",
        "ftp://h",
        "http://h\n:1",
    ],
)
def test_what_is_no_address_is_refused_without_its_password(url: str):
    for flag in ("--url", "--cache-metrics"):
        with pytest.raises(ConfigError, match=f"{flag} is ") as refused:
            HttpServer(url, flag=flag)
        assert "secret" not in str(refused.value)


def test_a_path_in_front_of_the_api_is_kept(fake: Fake, url: str):
    fake.answers["/instance-3/v1/models"] = fake.answers.pop("/v1/models")
    with HttpServer(f"{url}/instance-3") as server:
        assert server.card().id == "kimi-k3"
    with HttpServer(url) as server, pytest.raises(PeerError, match="/v1/models answers HTTP 404"):
        server.card()


def test_a_folder_is_no_file_to_save_to(tmp_path: Path):
    files = [argument for tokens in (500, 5000) for argument in ("--from-bench", recorded(tmp_path, tokens))]
    with pytest.raises(ConfigError, match="name a file in a folder that exists"):
        run(*files, "--save", tmp_path)


def test_sizes_of_two_sources_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="--cache-metrics gives the size"):
        run("--from-bench", recorded(tmp_path, 500), "--token-bytes", "10", "--cache-metrics", "http://h:8002")
