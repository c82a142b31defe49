"""Proves that inside TLS only instances that show their cluster get a data connection; that
each refusal says on both sides what is wrong; and that strangers who say nothing, little or nonsense cost a deadline.
"""

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from prfaas import credentials as module
from prfaas import identity
from prfaas.errors import IdentityError, ProtocolError, UnreachableError
from prfaas.identity import Validity
from prfaas_transfer.credentials import MIXED, PeerCredentials, is_tls
from prfaas_transfer.net import DataStream, TlsStream
from prfaas_transfer.tls import TlsAuth, accept_tls, connect_tls

pytestmark = pytest.mark.system

NOW = datetime.datetime.now(datetime.UTC)
SECONDS = 5.0
Serve = Callable[..., tuple[socket.socket, Future[TlsStream]]]
Connect = Callable[..., TlsStream]


@pytest.fixture
def served(sockets) -> Iterator[Serve]:
    """Begin to accept one connection in a thread; returns the client's socket and what becomes of the server's side."""
    futures: list[Future[TlsStream]] = []
    with ThreadPoolExecutor(2) as pool:

        def serve(credentials: PeerCredentials, seconds: float = SECONDS) -> tuple[socket.socket, Future[TlsStream]]:
            client, server = sockets()
            futures.append(pool.submit(accept_tls, server, credentials, seconds))
            return client, futures[-1]

        yield serve
    for future in futures:
        if future.exception() is None:
            future.result().close()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect as `connect_tls` does, and close at the end."""
    streams: list[TlsStream] = []

    def connect(sock: socket.socket, credentials: PeerCredentials, expected_cluster: str = "") -> TlsStream:
        streams.append(connect_tls(sock, credentials, SECONDS, expected_cluster))
        return streams[-1]

    yield connect
    for stream in streams:
        stream.close()


def client_hears(connect: Connect, sock: socket.socket, credentials: PeerCredentials, match: str) -> None:
    """Require that a client learns why it was refused: with its handshake or with its first read."""
    with pytest.raises(IdentityError, match=match):
        connect(sock, credentials).receive_into(bytearray(1))


def test_no_connection_is_made_to_whoever_answers(sockets, hub):
    """vLLM's API takes a leg of anybody: without a cluster in it, any holder of a certificate could give the cache."""
    with pytest.raises(IdentityError, match="names no cluster"):
        TlsAuth(hub).connect(sockets()[0], "")


def test_both_sides_know_the_others_cluster(served, connect, hub, eu):
    sock, accepted = served(eu)
    client = connect(sock, hub, "eu")
    server = accepted.result()
    assert (client.peer.cluster, server.peer.cluster) == ("eu", "hub")
    server.send([b"hello ", b"there"], lambda _sent: None)
    heard = bytearray(11)
    client.receive_into(heard)
    assert heard == b"hello there"


def test_it_is_tls_1_3_without_session_tickets(served, connect, hub, eu):
    sock, accepted = served(eu)
    client, heard = connect(sock, hub), bytearray(1)
    server = accepted.result()
    server.send([b"x"], lambda _sent: None)
    client.receive_into(heard)
    tls = client.channel.tls
    assert heard == b"x"
    assert (tls.version(), tls.compression(), tls.session.has_ticket) == ("TLSv1.3", None, False)


def test_older_tls_is_refused(served, eu):
    sock, accepted = served(eu)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="protocol version"):
        old.wrap_socket(sock)
    with pytest.raises(ProtocolError, match="unsupported protocol"):
        accepted.result()


def test_an_instance_of_another_cluster_than_expected_is_refused(served, connect, hub, eu):
    sock, _ = served(eu)
    with pytest.raises(IdentityError, match="of cluster 'eu' and 'asia' was expected"):
        connect(sock, hub, "asia")


def test_a_peer_of_an_unknown_authority_is_refused_and_both_say_so(served, connect, mount, eu, authority, other):
    stranger = PeerCredentials(mount("hub", signer=other, trusts=(other, authority)).path)
    refused = r"the peer refuses our certificate: its ca\.crt does not hold the authority of ours"
    refuses = r"comes from an authority that our ca\.crt does not hold"
    for client, server, at_client, at_server in ((stranger, eu, refused, refuses), (eu, stranger, refuses, refused)):
        sock, accepted = served(server)
        client_hears(connect, sock, client, at_client)
        with pytest.raises(IdentityError, match=at_server):
            accepted.result()


def test_refuses_a_client_without_a_certificate_and_says_why(served, eu):
    sock, accepted = served(eu)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with bare.wrap_socket(sock) as tls, pytest.raises(ssl.SSLError, match="certificate required"):
        tls.recv(1)
    with pytest.raises(IdentityError, match="showed no certificate; give it --tls-dir"):
        accepted.result()


@pytest.fixture
def expired(mount, authority, monkeypatch) -> PeerCredentials:
    """PeerCredentials that have ended a minute ago: they were good when they were read."""
    validity = Validity(NOW - datetime.timedelta(hours=1), NOW - datetime.timedelta(minutes=1))
    old = mount("old").put(identity.issue(authority, "old", validity), authority)
    with monkeypatch.context() as patch:
        patch.setattr(module, "utc_now", lambda: NOW - datetime.timedelta(minutes=5))
        return PeerCredentials(old.path)


def test_a_client_knows_that_its_own_certificate_has_expired(sockets, expired):
    with pytest.raises(IdentityError, match=r"our own credentials in .*: the certificate ends at .*; renew it"):
        connect_tls(sockets()[0], expired, SECONDS, "")


def test_instances_of_one_cluster_go_on_when_all_their_certificates_have_expired(
    served, connect, sockets, mount, authority
):
    """The control are the tests below: whose own certificate is good refuses them."""
    ended = Validity(NOW - datetime.timedelta(hours=1), NOW - datetime.timedelta(minutes=1))
    gateway, worker, eu = (
        PeerCredentials(mount(cluster).put(identity.issue(authority, cluster, ended, part), authority).path)
        for cluster, part in (("hub", "gateway"), ("hub", "worker"), ("eu", ""))
    )
    sock, accepted = served(worker)
    client = connect(sock, gateway, "hub")
    server = accepted.result()
    assert (client.peer.cluster, server.peer.cluster) == ("hub", "hub")
    for stream, credentials in ((client, gateway), (server, worker)):
        TlsAuth(credentials).check(stream, "/v1/models")
    with pytest.raises(IdentityError, match="only cluster 'eu' takes it"):
        connect(sockets()[0], eu, "hub")
    with pytest.raises(IdentityError, match="is not of cluster 'eu', and nobody else is accepted"):
        eu.check(server.peer.certificate)


def test_a_client_whose_certificate_has_expired_is_refused_and_both_say_so(served, connect, expired, eu, monkeypatch):
    sock, accepted = served(eu)
    monkeypatch.setattr(module, "utc_now", lambda: NOW - datetime.timedelta(minutes=5))  # its clock is slow
    client_hears(connect, sock, expired, "the peer refuses our certificate: ours has expired")
    with pytest.raises(IdentityError, match="the peer's certificate has expired; renew it there"):
        accepted.result()


def test_a_server_whose_certificate_has_expired_is_refused_and_both_say_so(served, connect, expired, hub):
    sock, accepted = served(expired)
    client_hears(connect, sock, hub, "the peer's certificate has expired; renew it there")
    with pytest.raises(IdentityError, match="the peer refuses our certificate: ours has expired"):
        accepted.result()


def test_a_certificate_without_a_cluster_is_refused_though_its_authority_is_known(served, mount, authority, eu):
    key = serialization.load_pem_private_key(authority.key, None)
    signer = x509.load_pem_x509_certificate(authority.certificate)
    validity = identity.valid_for(NOW, 1)
    nameless = x509.CertificateBuilder(signer.subject, x509.Name([]), key.public_key(), 7, *validity).sign(
        key, hashes.SHA256()
    )
    folder = mount("hub").path
    (folder / "own.crt").write_bytes(nameless.public_bytes(serialization.Encoding.PEM))
    (folder / "own.key").write_bytes(authority.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / "own.crt", folder / "own.key")
    sock, accepted = served(eu)
    with (
        context.wrap_socket(sock),
        pytest.raises(IdentityError, match=r"names no cluster.* one spiffe://DOMAIN/cluster/"),
    ):
        accepted.result()


def test_recognises_a_plain_client_on_a_tls_port_which_sees_tls(served, eu):
    sock, accepted = served(eu)
    sock.sendall(b"PFX2" + bytes(100))
    with pytest.raises(ProtocolError, match=f"does not speak TLS; {MIXED}"):
        accepted.result()
    answer = sock.recv(100)
    assert is_tls(answer)
    assert not is_tls(b"PFX2")
    assert not is_tls(b"")


def test_both_sides_recognise_a_tls_client_on_a_plain_port(sockets, hub):
    client, server = sockets()
    failed: Future[TlsStream] = ThreadPoolExecutor(1).submit(connect_tls, client, hub, SECONDS, "")
    hello = bytearray(5)
    plain = DataStream(server)
    plain.receive_into(hello)
    assert is_tls(hello)
    plain.send([b"PFX2" + bytes(60)], lambda _sent: None)
    with pytest.raises(ProtocolError, match="does not speak TLS"):
        failed.result()


@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_peer_that_goes_away_in_the_handshake_is_unreachable(sockets, hub, end: str):
    client, server = sockets()
    failed = ThreadPoolExecutor(1).submit(connect_tls, client, hub, SECONDS, "")
    server.recv(10_000)
    if end == "reset":
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    server.close()
    with pytest.raises(UnreachableError, match="during the TLS handshake"):
        failed.result()


@pytest.mark.parametrize("drip", [False, True])
def test_a_silent_or_dripping_stranger_costs_one_deadline_and_no_more(served, eu, drip: bool):
    sock, accepted = served(eu, 0.3)
    stop = threading.Event()

    def send_slowly() -> None:
        hello = b"\x16\x03\x01\x02\x00" + bytes(512)  # the beginning of a long record
        for byte in hello:
            if stop.wait(0.02):
                return
            try:
                sock.send(bytes([byte]))
            except OSError:
                return

    thread = threading.Thread(target=send_slowly)
    if drip:
        thread.start()
    started = time.monotonic()
    with pytest.raises(UnreachableError, match="silent for too long during the TLS handshake"):
        accepted.result()
    assert time.monotonic() - started < 8, "all that it would drip takes 10 s"
    stop.set()
    if drip:
        thread.join()
    with suppress(ConnectionResetError):  # bytes were on their way when the server closed
        assert sock.recv(10) == b"", "the server's socket is closed"


def test_a_client_does_not_wait_for_a_silent_server(sockets, hub):
    client, _ = sockets()
    with pytest.raises(UnreachableError, match="silent for too long"):
        connect_tls(client, hub, 0.1, "")
    assert client.fileno() == -1


def test_refuses_a_kept_connection_whose_authority_was_dropped_at_its_next_request(
    served, connect, mount, authority, other
):
    eu_mount = mount("eu", trusts=(authority, other))
    eu, hub = PeerCredentials(eu_mount.path), PeerCredentials(mount("hub").path)
    sock, accepted = served(eu)
    connect(sock, hub, "eu")
    peer = accepted.result().peer
    assert eu.check(peer.certificate, peer.authorities).cluster == "hub"
    eu_mount.put(identity.issue(other, "eu", identity.valid_for(NOW, 1)), other)
    with pytest.raises(IdentityError, match="issued by CN=first, which is not trusted"):
        eu.check(peer.certificate, peer.authorities)


@pytest.mark.parametrize("renewed", ["ours", "theirs", "neither"])
def test_a_kept_connection_shows_what_we_have_now_or_is_made_anew(served, connect, mount, authority, renewed: str):
    """The peer may no longer trust the authority of our old certificate, which only the peer knows."""
    our_mount, their_mount = mount("hub"), mount("eu")
    hub, eu = PeerCredentials(our_mount.path), PeerCredentials(their_mount.path)
    sock, accepted = served(eu)
    stream = connect(sock, hub, "eu")
    accepted.result()
    for changed, cluster in ((our_mount, "hub"), (their_mount, "eu")):
        if renewed == ("ours" if cluster == "hub" else "theirs"):
            changed.put(identity.issue(authority, cluster, identity.valid_for(NOW, 1)), authority)
    assert TlsAuth(hub).is_reusable(stream) == (renewed != "ours")
