"""Block hashes name whole prefixes of one model and one tenant; a growing chain names them as a finished one does."""

import hashlib
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvindex.blocks import BlockChain, chain_root

ids = st.integers(0, 2**32 - 1)


def block_hashes(fingerprint: str, salt: str, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    chain = BlockChain(chain_root(fingerprint, salt), block_tokens)
    chain.extend(token_ids)
    return chain.hashes


def test_a_hash_is_sha256_over_the_parent_and_little_endian_token_ids():
    root = hashlib.sha256(struct.pack("<I", 2) + b"fp" + struct.pack("<I", 4) + b"salt").digest()
    first = hashlib.sha256(root + struct.pack("<4I", 1, 2, 3, 2**32 - 1)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()
    assert block_hashes("fp", "salt", [1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9], 4) == [first, second]


@given(st.lists(st.lists(ids, max_size=9), max_size=9))
def test_a_chain_that_grows_in_any_steps_equals_that_of_the_whole(steps: list[list[int]]):
    chain = BlockChain(chain_root("fp", ""), 4)
    for step in steps:
        chain.extend(step)
    whole = [token for step in steps for token in step]
    assert chain.hashes == block_hashes("fp", "", whole, 4)
    assert chain.tokens == len(whole)


def test_each_token_is_hashed_once(monkeypatch: pytest.MonkeyPatch):
    hashed: list[int] = []
    real = hashlib.sha256
    chain = BlockChain(chain_root("fp", ""), 4)
    monkeypatch.setattr(hashlib, "sha256", lambda data: hashed.append(len(data)) or real(data))
    for token in range(400):
        chain.extend([token])
    assert hashed == [32 + 4 * 4] * 100


@given(st.lists(ids, min_size=4, max_size=20), st.integers(0, 19))
def test_a_changed_token_changes_only_its_block_and_those_after_it(tokens: list[int], at: int):
    at %= len(tokens)
    changed = [*tokens]
    changed[at] ^= 1
    before, after = block_hashes("fp", "", tokens, 4), block_hashes("fp", "", changed, 4)
    for block, (one, other) in enumerate(zip(before, after, strict=True)):
        assert (one == other) == (block < at // 4)


def test_models_and_tenants_share_no_name():
    names = {block_hashes(model, salt, range(4), 4)[0] for model in ("a", "ab") for salt in ("", "b", "bc", "c")}
    assert len(names) == 8
    assert chain_root("ab", "c") != chain_root("a", "bc")  # lengths count, not only the joined text


def test_copies_grow_apart():
    chain = BlockChain(chain_root("fp", ""), 2)
    chain.extend([1, 2, 3])
    copy = chain.copy()
    chain.extend([4])
    copy.extend([5])
    assert chain.hashes == block_hashes("fp", "", [1, 2, 3, 4], 2)
    assert copy.hashes == block_hashes("fp", "", [1, 2, 3, 5], 2)
    assert (chain.parent(0), chain.parent(1)) == (None, chain.hashes[0])


def test_an_id_beyond_32_bits_is_refused():
    with pytest.raises(OverflowError):
        BlockChain(chain_root("fp", "")).extend([2**32])
