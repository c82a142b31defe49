"""Proves that with keys no client comes in without one, that a changed folder counts, and that no key is logged."""

import hashlib
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas_gateway.auth import ApiClient, KeyRing

KEY, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"
DIGEST = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 2.0  # every look-up is later than the last look at the folder
        return self.seconds


def ring_of(folder: Path, **files: str) -> KeyRing:
    for name, content in files.items():
        (folder / name).write_text(content)
    return KeyRing(folder, Clock())


def named(ring: KeyRing, key: str) -> str | None:
    client = ring.client(key.encode())
    return client.name if client else None


@pytest.mark.parametrize(
    "content",
    [
        KEY,
        f"{KEY}\n",
        f"  {OTHER}\n\n{KEY}  \n",
        DIGEST,
        f"{KEY}\n{KEY}",
        f"{KEY}\n{DIGEST}",
        json.dumps({"keys": [KEY]}),
        json.dumps({"keys": [DIGEST, KEY, OTHER]}),
        json.dumps({"keys": [OTHER, DIGEST]}),
    ],
)
def test_a_key_admits_the_client_that_its_file_names(tmp_path, content):
    ring = ring_of(tmp_path, **{"team-a": content})
    assert named(ring, KEY) == "team-a"
    assert [named(ring, wrong) for wrong in (KEY[:-1], KEY + "0", KEY.upper(), "", DIGEST)] == [None] * 5


def test_limits_stand_beside_the_keys(tmp_path):
    document = {"keys": [KEY], "maxInFlight": 2, "requestsPerMinute": 60, "tokensPerMinute": 1000}
    client = ring_of(tmp_path, a=json.dumps(document)).client(KEY.encode())
    assert client == ApiClient("a", 2, 60, 1000, cache_secret=client.cache_secret)


BAD = {
    "short": "hunter2",
    "empty": " \n",
    "spaced": f"{KEY[:8]} {KEY[8:]}",
    "digest": "sha256:abc",
    "upper": DIGEST.upper(),
    "unset": "sha256:" + hashlib.sha256(b"").hexdigest(),
    "none": '{"keys": []}',
    "unknown": json.dumps({"keys": [KEY], "requestPerMinute": 5}),
    "zero": json.dumps({"keys": [KEY], "maxInFlight": 0}),
    "text": json.dumps({"keys": KEY}),
    "json": '{"keys": ["' + KEY,
    "large": KEY + "\n" * 70_000 + OTHER,
}


@pytest.mark.parametrize("name", BAD)
def test_an_unusable_file_admits_no_client_and_the_log_repeats_nothing_of_it(tmp_path, name, caplog):
    ring = ring_of(tmp_path, good=OTHER, **{name: BAD[name]})
    for _ in range(3):
        assert (named(ring, KEY), named(ring, OTHER), named(ring, "")) == (None, "good", None)
    assert caplog.text.count(f"'{name}'") == 1
    assert KEY not in caplog.text
    assert "hunter2" not in caplog.text


def test_a_key_of_an_earlier_entry_stays_there_and_costs_the_later_one_nothing_else(tmp_path, caplog):
    ring = ring_of(tmp_path, a=KEY, b=f"{DIGEST}\n{OTHER}")
    assert [(named(ring, KEY), named(ring, OTHER)) for _ in range(3)] == [("a", "b")] * 3
    assert caplog.text.count("the file 'b' in --keys-dir holds keys of 'a', which stay theirs") == 1
    assert OTHER not in caplog.text
    alone = tmp_path / "alone"
    alone.mkdir()
    secrets = [one.client(OTHER.encode()).cache_secret for one in (ring, ring_of(alone, b=OTHER))]
    assert secrets[0] == secrets[1], "a key of another client makes no salt"


def test_a_changed_folder_counts_at_the_next_look(tmp_path):
    ring = ring_of(tmp_path, a=KEY)
    (tmp_path / "b").write_text(OTHER)
    assert named(ring, OTHER) == "b"
    (tmp_path / "a").unlink()
    assert (named(ring, KEY), named(ring, OTHER)) == (None, "b")


def test_a_secret_is_followed_through_the_link_that_the_kubelet_swaps(tmp_path):
    for version, key in (("..1", KEY), ("..2", OTHER)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a").write_text(key)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "a").symlink_to("..data/a")
    ring = KeyRing(tmp_path, Clock())
    assert named(ring, KEY) == "a"
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert (named(ring, KEY), named(ring, OTHER)) == (None, "a")


def test_a_folder_that_disappears_changes_nothing_and_is_logged_once(tmp_path, caplog):
    folder = tmp_path / "keys"
    folder.mkdir()
    ring = ring_of(folder, a=KEY)
    folder.rename(tmp_path / "away")
    assert [named(ring, KEY) for _ in range(3)] == ["a"] * 3
    assert caplog.text.count("cannot be read") == 1


def test_a_folder_that_is_not_there_at_the_start_is_a_mistake_of_the_command_line(tmp_path):
    with pytest.raises(ConfigError, match="--keys-dir"):
        KeyRing(tmp_path / "absent")


@given(st.binary(max_size=600))
def test_no_bytes_but_the_key_admit_a_client(tmp_path_factory, key):
    ring = ring_of(tmp_path_factory.mktemp("keys"), a=KEY)
    assert (ring.client(key) is not None) is (key == KEY.encode())


# Through the gateway


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "team-a").write_text(KEY)
    return folder


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ({}, "missing_api_key"),
        ({"Authorization": KEY}, "missing_api_key"),
        ({"Authorization": f"Basic {KEY}"}, "missing_api_key"),
        (bearer(""), "missing_api_key"),
        (bearer(OTHER), "invalid_api_key"),
        (bearer("\u00e4" * 20), "invalid_api_key"),
    ],
)
async def test_a_stranger_is_refused_in_openai_form_and_reaches_no_worker(world, keys, short, sent, code):
    await world.start("d0", keys_dir=keys)
    got = await world.post(short, headers=sent)
    assert (got.status, got.json["error"]["code"], got.headers["www-authenticate"]) == (401, code, "Bearer")
    assert got.json["error"]["type"] == "invalid_request_error"
    async with world.client.get(world.url + "/v1/models", headers=sent) as listed:
        assert listed.status == 401
    assert world.workers["d0"].seen == []
    assert (await world.get("/healthz")).status == (await world.get_admin("/metrics")).status == 200


async def test_serves_a_client_with_a_key_and_does_not_forward_the_key(world, keys, short, caplog):
    caplog.set_level(logging.DEBUG)
    await world.start("d0", keys_dir=keys)
    assert (await world.post(short, headers=bearer(KEY))).status == 200
    assert (await world.post(short, headers={"Authorization": f"bearer  {KEY}"})).status == 200
    assert (await world.post(short, headers=bearer(OTHER))).status == 401
    assert all("authorization" not in seen.headers for seen in world.workers["d0"].seen)
    assert "client=team-a" in caplog.text
    assert KEY not in caplog.text
    assert OTHER not in caplog.text


async def test_a_strangers_body_is_not_read(world, keys):
    await world.start("d0", keys_dir=keys)

    async def endless():
        while True:
            yield b"x" * 65_536

    got = await world.post(endless())
    assert got.status == 401


def test_a_link_in_a_circle_stops_no_other_file_from_being_read(tmp_path, caplog):
    now = 0.0
    (tmp_path / "a").write_text("k" * 20)
    ring = KeyRing(tmp_path, lambda: now)
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "a").write_text("n" * 21)
    now = 5.0
    assert ring.client(b"k" * 20) is None, "a removed key is no longer valid"
    assert ring.client(b"n" * 21) is not None
    assert "'circle' in --keys-dir admits no client" in caplog.text
    assert KeyRing(tmp_path).client(b"n" * 21) is not None
