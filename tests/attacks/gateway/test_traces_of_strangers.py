"""Who tries keys wants to leave no trace, and who has one wants it without its limits."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Final

import pytest
from tests.unit.gateway.conftest import World

from prfaas.errors import ConfigError
from prfaas_gateway import auth, dispatch
from prfaas_gateway.auth import ApiClient, KeyRing

KEY, OTHER, TRIED = "sk-0123456789abcdef", "sk-fedcba9876543210", "sk-guess-0123456789abcdef"
DIGEST: Final = hashlib.sha256(TRIED.encode()).hexdigest()
HELLO: Final = {"model": "m", "prompt": "hello"}


@pytest.fixture
async def asked(world: World, tmp_path: Path, caplog) -> World:
    caplog.set_level(logging.INFO)
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "team-a").write_text(KEY)
    await world.start("d0", keys_dir=keys)
    return world


def lines(caplog, words: str) -> list[str]:
    return [one.message for one in caplog.records if one.message.startswith(words + " ")]


@pytest.mark.parametrize("sent", [{"Authorization": f"Bearer {TRIED}"}, {"x-api-key": TRIED}])
async def test_a_key_that_is_tried_leaves_its_address_and_a_digest(asked, caplog, sent):
    assert (await asked.post(HELLO, "/v1/completions", headers=sent)).status == 401
    (found,) = lines(caplog, "request")
    assert " peer=127.0.0.1 " in found
    assert f" key_digest={DIGEST[:8]} " in found
    assert " status=401 " in found
    assert not any(secret in caplog.text for secret in (TRIED, DIGEST, DIGEST[:9]))


async def test_control_where_a_refusal_does_not_know_the_key_no_digest_is_left(asked, caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "UnknownKeyError", ConfigError)
    assert (await asked.post(HELLO, "/v1/completions", headers={"x-api-key": TRIED})).status == 401
    (found,) = lines(caplog, "request")
    assert "key_digest" not in found


async def test_control_with_all_its_digits_the_log_has_the_whole_digest(asked, caplog, monkeypatch):
    monkeypatch.setattr(auth, "KEY_DIGEST_DIGITS", 64)
    assert (await asked.post(HELLO, "/v1/completions", headers={"x-api-key": TRIED})).status == 401
    assert DIGEST in caplog.text


async def test_without_a_key_the_address_is_left(asked, caplog):
    assert (await asked.post(HELLO, "/v1/completions")).status == 401
    (found,) = lines(caplog, "request")
    assert " peer=127.0.0.1 " in found
    assert "key_digest" not in found


async def test_a_look_at_the_models_leaves_them_too(asked, caplog):
    for path in ("/v1/models", "/v1/models/m"):
        async with asked.client.get(asked.url + path, headers={"Authorization": f"Bearer {TRIED}"}) as got:
            assert got.status == 401
    expected = f"a look at the models is refused peer=127.0.0.1 key_digest={DIGEST[:8]}"
    assert lines(caplog, "a look at the models is refused") == [expected] * 2


async def test_a_client_leaves_its_name_and_address(asked, caplog):
    sent = {"Authorization": f"Bearer {KEY}"}
    assert (await asked.post(HELLO, "/v1/completions", headers=sent)).status == 200
    (found,) = lines(caplog, "request")
    assert " peer=127.0.0.1 client=team-a " in found
    assert KEY not in caplog.text


# Keys with two owners

LIMITED: Final = {"keys": [KEY], "maxInFlight": 1}


def ring_of(folder: Path, **files: str) -> KeyRing:
    for name, content in files.items():
        (folder / name).write_text(content)
    return KeyRing(folder)


def test_a_key_in_two_entries_keeps_the_limits_of_the_first(tmp_path, caplog):
    ring = ring_of(tmp_path, alice=json.dumps(LIMITED), zed=f"{OTHER}\n{KEY}")
    client = ring.client(KEY.encode())
    assert (client.name, client.max_in_flight) == ("alice", 1)
    assert ring.client(OTHER.encode()).name == "zed", "its own key stays good"
    assert "the file 'zed' in --keys-dir holds keys of 'alice', which stay theirs" in caplog.text
    assert KEY not in caplog.text


def test_control_without_an_owner_the_last_entry_would_take_the_limits_away(tmp_path, monkeypatch):
    read = KeyRing._read_client
    monkeypatch.setattr(KeyRing, "_read_client", lambda self, name, first, _others: read(self, name, first, {}))
    ring = ring_of(tmp_path, alice=json.dumps(LIMITED), zed=f"{OTHER}\n{KEY}")
    client = ring.client(KEY.encode())
    assert isinstance(client, ApiClient)
    assert (client.name, client.max_in_flight) == ("zed", None)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("b", f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}", "all its keys are of 'Alice'"),
        ("alice", OTHER, "'Alice' is a client of the same name"),
        ("b", "", "it holds no key"),
        ("b", '{"keys": [""]}', "a key must have 16 to 512 characters"),
        ("b", f"sha256:{hashlib.sha256(b'').hexdigest()}", "the digest of an empty key"),
    ],
)
def test_an_entry_that_is_no_client_of_its_own_is_refused_with_a_sentence(tmp_path, caplog, name, content, sentence):
    ring = ring_of(tmp_path, Alice=KEY, **{name: content})
    assert ring.client(KEY.encode()).name == "Alice"
    assert ring.client(OTHER.encode()) is None
    assert ring.client(b"") is None
    assert f"the file {name!r} in --keys-dir admits no client: " in caplog.text
    assert sentence in caplog.text
    assert OTHER not in caplog.text
