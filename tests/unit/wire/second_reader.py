"""A reader of the transfer protocol, written only from docs/extend/protocol.md and docs/understand/compression.md,
without a line of the product.

It reads what a source sent on the connections of one transfer, in any order, with any codec; returns the tensors.
"""

import json
import struct
from typing import Any, NamedTuple

import xxhash
import zstandard

HELLO, WELCOME, BLOCK, STATE, _, DONE, KEEP_ALIVE, ABORT, ACK, FREED = range(1, 11)
KIB, MIB = 1 << 10, 1 << 20
LIMITS = {
    HELLO: 64 * KIB, WELCOME: MIB, BLOCK: 64 * MIB, STATE: 64 * MIB, DONE: 64 * KIB,
    KEEP_ALIVE: 0, ABORT: 64 * KIB, ACK: 0, FREED: 0,
}  # fmt: skip
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
PLANES = {"float32": (2, 1, 1), "float16": (1, 1), "bfloat16": (1, 1)}
"""Bytes of an element in each plane."""
LARGEST = {"float32": (2 - 2**-23) * 2.0**127, "float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127}


class RefusedError(Exception):
    """Not what the document says."""


class Frame(NamedTuple):
    kind: int
    codec: int
    group: int
    layer: int
    sequence: int
    transfer_id: str
    epoch: int
    first_token: int
    tokens: int
    digest: int
    payload: bytes


class Cache(NamedTuple):
    """Tensors by layer and name: rows of tokens from `start_token` on, and states."""

    manifest: dict[str, Any]
    rows: dict[tuple[int, str], bytes]
    states: dict[tuple[int, str], bytes]


def frames_of(stream: bytes) -> list[Frame]:
    """Take a stream apart, and check every frame by itself."""
    found, at = [], 0
    while at < len(stream):
        head = stream[at : at + 64]
        refuse(len(head) == 64, "half a header")
        (check,) = struct.unpack(">I", head[52:56])
        refuse(check == xxhash.xxh3_64_intdigest(head[:52]) % 2**32, "check")
        refuse(head[0:4] == b"PFX2", "magic")
        kind, codec = head[4], head[5]
        refuse(kind in LIMITS, "kind")
        group, layer, flags = struct.unpack(">HHH", head[6:12])
        (sequence,) = struct.unpack(">I", head[12:16])
        (epoch,) = struct.unpack(">Q", head[32:40])
        first_token, tokens, size = struct.unpack(">III", head[40:52])
        refuse(size <= LIMITS[kind], "limit")
        refuse(flags == 0, "flags")
        payload = stream[at + 64 : at + 64 + size]
        refuse(len(payload) == size, "half a payload")
        (digest,) = struct.unpack(">Q", head[56:64])
        refuse(digest == xxhash.xxh3_64_intdigest(head[:52] + payload), "digest")
        whose = head[16:32].hex(), epoch
        found.append(Frame(kind, codec, group, layer, sequence, *whose, first_token, tokens, digest, payload))
        at += 64 + size
    return found


def read(*streams: bytes) -> Cache:
    """Return what a whole transfer brought over these connections."""
    frames = [frame for stream in streams for frame in frames_of(stream)]
    manifest = the_same([json.loads(frame.payload)["manifest"] for frame in frames if frame.kind == WELCOME])
    refuse(all(json.loads(frame.payload)["version"] == 3 for frame in frames if frame.kind == WELCOME), "version")
    refuse(manifest["format"] == 3, "format")
    for frame in frames:
        refuse((frame.transfer_id, frame.epoch) == (manifest["transfer_id"], manifest["epoch"]), "another transfer")
        refuse(frame.kind in (WELCOME, BLOCK, STATE, DONE, KEEP_ALIVE, FREED), "not from a source")
    data = sorted((frame for frame in frames if frame.kind in (BLOCK, STATE)), key=lambda frame: frame.sequence)
    done = the_same([json.loads(frame.payload) for frame in frames if frame.kind == DONE])
    refuse([frame.sequence for frame in data] == list(range(done["frames"])), "sequence")
    refuse(sum(len(frame.payload) for frame in data) == done["payload_bytes"], "bytes")
    account = b"".join(struct.pack(">Q", frame.digest) for frame in data)
    refuse(xxhash.xxh3_128_hexdigest(account) == done["digest"], "digest over all")
    return placed(manifest, data)


def placed(manifest: dict[str, Any], data: list[Frame]) -> Cache:
    """Put payloads where they belong, each place once."""
    rows: dict[tuple[int, str], bytearray] = {}
    covered: dict[int, set[int]] = {}
    states: dict[tuple[int, str], bytes] = {}
    start, end = manifest["start_token"], manifest["end_token"]
    for frame in data:
        group = manifest["groups"][frame.group]
        refuse(frame.layer in group["layers"], "layer")
        refuse(group["kind"] == ("attention" if frame.kind == BLOCK else "linear"), "kind of group")
        payload, at = decoded(frame, group["tensors"]), 0
        for tensor in group["tensors"]:
            place, size = (frame.layer, tensor["name"]), nbytes(tensor)
            if frame.kind == STATE:
                refuse(place not in states, "twice")
                states[place] = payload[at : at + size]
                at += size
                continue
            part = payload[at : at + size * frame.tokens]
            offset = (frame.first_token - start) * size
            rows.setdefault(place, bytearray((end - start) * size))[offset : offset + len(part)] = part
            at += len(part)
        refuse(at == len(payload), "size")
        if frame.kind == BLOCK:
            span = set(range(frame.first_token, frame.first_token + frame.tokens))
            refuse(bool(span) and span <= set(range(start, end)), "range")
            refuse(not span & covered.setdefault(frame.layer, set()), "overlap")
            covered[frame.layer] |= span
    for group in manifest["groups"]:
        for layer in group["layers"]:
            if group["kind"] == "attention":
                refuse(len(covered.get(layer, ())) == end - start, "rows are missing")
            else:
                refuse(all((layer, tensor["name"]) in states for tensor in group["tensors"]), "a state is missing")
    return Cache(manifest, {place: bytes(found) for place, found in rows.items()}, states)


def decoded(frame: Frame, tensors: list[dict[str, Any]]) -> bytes:
    """Return the tensors' bytes that a BLOCK or STATE stands for."""
    items = frame.tokens if frame.kind == BLOCK else 1
    size = items * sum(nbytes(tensor) for tensor in tensors)
    refuse(size <= 64 * MIB, "stands for too much")
    if frame.codec == 0:
        return frame.payload
    refuse(frame.codec in (1, 2), "codec")
    refuse(len(frame.payload) < size, "not smaller")
    return (lossless if frame.codec == 1 else int8)(frame.payload, tensors, items)


def lossless(payload: bytes, tensors: list[dict[str, Any]], items: int) -> bytes:
    """Put planes of significance together again."""
    widths = [(tensor, width) for tensor in tensors for width in PLANES[tensor["dtype"]]]
    at = 4 * len(widths)
    refuse(len(payload) >= at, "half a table")
    lengths = struct.unpack(f">{len(widths)}I", payload[:at])
    refuse(at + sum(lengths) == len(payload), "lengths")
    planes = []
    for (tensor, width), length in zip(widths, lengths, strict=True):
        planes.append(plane(payload[at : at + length], items * nbytes(tensor) // ITEM_BYTES[tensor["dtype"]] * width))
        at += length
    found = b""
    for tensor in tensors:
        size, low = ITEM_BYTES[tensor["dtype"]], 0
        whole = bytearray(items * nbytes(tensor))
        for width in PLANES[tensor["dtype"]]:
            part = planes.pop(0)
            for byte in range(width):
                whole[low + byte :: size] = part[byte::width]
            low += width
        found += whole
    return found


def plane(wire: bytes, size: int) -> bytes:
    """Return a plane of so many bytes."""
    if len(wire) == size:
        return wire
    try:
        refuse(len(wire) < size and zstandard.frame_content_size(wire) == size, "content size")
        return zstandard.ZstdDecompressor().decompress(wire, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RefusedError("zstd") from error


def int8(payload: bytes, tensors: list[dict[str, Any]], items: int) -> bytes:
    """Multiply integers with the scales of their channels."""
    found, at = b"", 0
    for tensor in tensors:
        kind = tensor["dtype"]
        channels = nbytes(tensor) // ITEM_BYTES[kind]
        refuse(len(payload) >= at + (4 + items) * channels, "half a tensor")
        scales = struct.unpack_from(f"<{channels}f", payload, at)
        refuse(all(2.0**-126 <= scale <= LARGEST[kind] / 128 for scale in scales), "scale")
        at += 4 * channels
        integers = struct.unpack_from(f"<{items * channels}b", payload, at)
        at += items * channels
        found += b"".join(rounded(number * scales[n % channels], kind) for n, number in enumerate(integers))
    refuse(at == len(payload), "size")
    return found


def rounded(value: float, kind: str) -> bytes:
    """Return a value in a type, little endian."""
    single = struct.pack("<f", value)
    if kind == "float32":
        return single
    if kind == "float16":
        return struct.pack("<e", *struct.unpack("<f", single))
    (bits,) = struct.unpack("<I", single)
    return struct.pack("<I", bits + 0x8000)[2:]


def nbytes(tensor: dict[str, Any]) -> int:
    """Bytes of a tensor, or of a token's row."""
    size = ITEM_BYTES[tensor["dtype"]]
    for length in tensor["shape"]:
        size *= length
    return size


def the_same(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all of them say."""
    refuse(bool(messages) and all(message == messages[0] for message in messages), "nothing, or contradictions")
    return messages[0]


def refuse(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RefusedError(otherwise)
