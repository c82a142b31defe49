"""One block or checkpoint outside the device: its name, its bytes, and its file format.

A file is a header and a payload. The header has the model's fingerprint, the entry's name, its parent, its tokens, the
payload's length, and a digest of each half. So a damaged or truncated file, or one of another model or entry, is
recognised before a byte of it is used:

    magic, version, kind, fingerprint, key, parent or zeros, tokens, payload bytes, payload digest | token ids | digest

All integers are little-endian. Both digests are xxh3_64, which finds accidents, not attacks: only the worker may be
able to write the directory.
"""

import struct
from array import array
from typing import Final, NamedTuple

import xxhash

from prfaas.errors import ProtocolError
from prfaas.kvindex.blocks import BlockHash
from prfaas.wire.frames import Buffer

_MAGIC: Final = b"PFXCACHE"
_VERSION: Final = 1
_FIXED: Final = struct.Struct("<8sHBx32s32s32sIQQ")
_DIGEST: Final = struct.Struct("<Q")
_NO_PARENT: Final = bytes(32)
_MAX_TOKENS: Final = 4096
MAX_HEADER_BYTES: Final = _FIXED.size + 4 * _MAX_TOKENS + _DIGEST.size


class EntryName(NamedTuple):
    key: BlockHash
    is_state: bool = False


class BlockContent(NamedTuple):
    """An entry's block: its parent block, None for the first, and its token ids."""

    parent: BlockHash | None
    token_ids: "array[int]"


class CacheEntry(NamedTuple):
    name: EntryName
    content: BlockContent
    payload: Buffer


class EntryHeader(NamedTuple):
    name: EntryName
    content: BlockContent
    header_bytes: int
    payload_bytes: int
    payload_digest: int


def header_bytes(content: BlockContent) -> int:
    return _FIXED.size + 4 * len(content.token_ids) + _DIGEST.size


def encode_header(fingerprint: bytes, entry: CacheEntry) -> bytes:
    name, content, payload = entry
    fixed = _FIXED.pack(
        _MAGIC,
        _VERSION,
        name.is_state,
        fingerprint,
        name.key,
        content.parent or _NO_PARENT,
        len(content.token_ids),
        len(payload),
        xxhash.xxh3_64_intdigest(payload),
    )
    head = fixed + struct.pack(f"<{len(content.token_ids)}I", *content.token_ids)
    return head + _DIGEST.pack(xxhash.xxh3_64_intdigest(head))


def decode_header(data: bytes, fingerprint: bytes, file_bytes: int) -> EntryHeader:
    """Read the header in `data`, a file's first MAX_HEADER_BYTES or all of it. Raises ProtocolError if it is damaged,
    of another kind or model, or its length does not fit."""
    if len(data) < _FIXED.size:
        raise ProtocolError(f"{file_bytes} bytes are too few for a header")
    magic, version, is_state, model, key, parent, tokens, payload_bytes, digest = _FIXED.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION):
        raise ProtocolError(f"it starts with {magic!r}, version {version}: no cache entry of this release")
    end = _FIXED.size + 4 * tokens
    if tokens > _MAX_TOKENS or len(data) < end + _DIGEST.size:
        raise ProtocolError(f"its header of {tokens} tokens is cut short")
    if _DIGEST.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end]):
        raise ProtocolError("its header is damaged")
    if model != fingerprint:
        raise ProtocolError("it belongs to another model")
    header_bytes = end + _DIGEST.size
    if file_bytes != header_bytes + payload_bytes:
        raise ProtocolError(f"it has {file_bytes} bytes, its header requires {header_bytes + payload_bytes}")
    token_ids = array("I", struct.unpack_from(f"<{tokens}I", data, _FIXED.size))
    content = BlockContent(None if parent == _NO_PARENT else parent, token_ids)
    return EntryHeader(EntryName(key, bool(is_state)), content, header_bytes, payload_bytes, digest)


def check_payload(header: EntryHeader, payload: Buffer) -> None:
    """Raise ProtocolError unless the payload matches the header's digest."""
    if len(payload) != header.payload_bytes or xxhash.xxh3_64_intdigest(payload) != header.payload_digest:
        raise ProtocolError("its payload is damaged")
