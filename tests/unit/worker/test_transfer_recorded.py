"""What is on the wire is what docs/extend/protocol.md says: a reader written only from it gets every bit of a recorded
transfer and of a fresh one, through every codec, and what is sent today is, byte for byte, what was sent when this
version was recorded; but what zstd makes of a plane is its own.

After a change of the format, of its version and of the document: `python -m tests.unit.worker.test_transfer_recorded`.
"""

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch

from prfaas.wire.frames import DATA_KINDS, HEADER_BYTES, Codec, Kind, parse_header, seal
from prfaas.wire.receive_ledger import ReceiveLedger
from prfaas.wire.transfer import VERSION, Done, Welcome
from prfaas_transfer.compression import Packer, decode
from prfaas_worker.cache.memory import bytes_of
from prfaas_worker.cache.transfer_frames import CachePlace, block_frames, state_frames
from prfaas_worker.cache_spec import LayerSpec, TensorSpec

from ..wire import second_reader
from ..wire.second_reader import Cache, RefusedError
from .transfer_bench import LARGE, TRAFFIC, Model, Port, compute, connect, frames, hello

pytestmark = pytest.mark.system

RECORDED = Path(__file__).parents[1] / "wire" / f"recorded_v{VERSION}.bin"
CODECS: dict[str, Codec] = {"lossless": Codec.LOSSLESS, "int8": Codec.INT8}
LINEAR = LayerSpec(
    state=(
        TensorSpec("recurrent", ("head", "key", "value"), (2, 3, 5), "float32"),
        TensorSpec("conv", ("channel", "tap"), (4, 3), "bfloat16"),
    )
)
ATTENTION = LayerSpec(
    rows=(
        TensorSpec("key", ("token", "head", "channel"), (2, 4), "bfloat16"),
        TensorSpec("value", ("token", "head", "channel"), (2, 3), "float32"),
    )
)
MODEL = Model((LINEAR, ATTENTION, LINEAR, ATTENTION), 150)
KINDS = ("bfloat16", "float16", "float32")
CODED = Model(
    (
        LayerSpec(state=tuple(TensorSpec(f"of {kind}", ("head", "key"), (4, 50), kind) for kind in KINDS)),
        LayerSpec(rows=tuple(TensorSpec(f"of {kind}", ("token", "channel"), (8,), kind) for kind in KINDS)),
    ),
    150,
)
"""Every type, in frames that are worth a codec."""
START = 70
STEP = 40


def cache() -> CachePlace:
    """Content that needs no generator: the same everywhere and for ever."""
    place = MODEL.reserved(2, 0, 4)
    for tensor in (place.memory.pages, place.memory.slots):
        tensor.view(-1).copy_((torch.arange(tensor.numel()) * 37 + 11) % 251)
    return place


def numbers() -> CachePlace:
    """Numbers that every type holds exactly and codecs make smaller; the same everywhere and for ever."""
    place = CODED.reserved(2, 0, 4)
    for layer, spec in enumerate(CODED.layers):
        for tensor in (place.memory.rows(layer) if spec.rows else place.memory.states(layer)).values():
            tensor.copy_((((torch.arange(tensor.numel()) * 37 + 11) % 251 - 125) / 64).view(tensor.shape))
    return place


def spoken(port: Port, model: Model, place: CachePlace, start_token: int, codecs: tuple[int, ...] = (0,)) -> bytes:
    """What a source says on a transfer's only connection, from WELCOME to DONE, KEEP_ALIVEs left out."""
    offer, leg = port.announce()
    compute(model, offer, place, step=STEP)
    stream = b""
    with closing(connect(port, hello(leg, codecs=codecs, start_token=start_token))) as sock:
        for header, payload in frames(sock):
            if header.kind != Kind.KEEP_ALIVE:
                stream += seal(header, [payload]).header + payload
            if header.kind == Kind.DONE:
                break
    port.cancel(offer)
    return stream


def coded(name: str) -> bytes:
    """What a source says that uses a codec wherever it can."""
    traffic = TRAFFIC._replace(packer=Packer(name, TRAFFIC.monitor))  # type: ignore[arg-type]
    return spoken(Port(CODED, traffic=traffic), CODED, numbers(), START, codecs=(0, 1, 2))


def recorded(name: str) -> Path:
    return RECORDED.with_stem(f"{RECORDED.stem}_{name}")


def assert_cache(found: Cache, model: Model, place: CachePlace, start_token: int) -> None:
    """Every bit is where it belongs, and nothing else is there."""
    rows, states = {}, {}
    for layer, spec in enumerate(model.layers):
        for tensor in spec.rows:
            held = place.memory.rows(layer)[tensor.name][list(place.pages)].flatten(0, 1)[start_token : model.tokens]
            rows[layer, tensor.name] = bytes(bytes_of(held.contiguous()))
        for tensor in spec.state:
            held = place.memory.states(layer)[tensor.name][place.slot]
            states[layer, tensor.name] = bytes(bytes_of(held.contiguous()))
    assert found.rows == rows
    assert found.states == states


def test_the_second_reader_gets_every_bit_of_the_recorded_transfer():
    assert_cache(second_reader.read(RECORDED.read_bytes()), MODEL, cache(), START)


def test_the_second_reader_does_not_care_which_connection_brought_what():
    place = LARGE.filled()
    stream = spoken(Port(LARGE), LARGE, place, 0)
    welcome, *others = split(stream)
    streams = [welcome + b"".join(others[at::3]) for at in range(3)]
    assert_cache(second_reader.read(*streams), LARGE, place, 0)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", CODECS)
def test_the_second_reader_gets_of_every_codec_what_the_product_gets(name: str, fresh: bool):
    stream, place = coded(name) if fresh else recorded(name).read_bytes(), numbers()
    used = {parse_header(frame[:HEADER_BYTES]).codec for frame in split(stream) if frame[4] in DATA_KINDS}
    assert int(CODECS[name]) in used
    found = second_reader.read(stream)
    ours = read_by_the_product(stream)
    assert (found.rows, found.states) == ours
    if name == "lossless":
        assert_cache(found, CODED, place, START)
        return
    for kind in KINDS:
        rows = torch.frombuffer(bytearray(found.rows[1, f"of {kind}"]), dtype=getattr(torch, kind)).float()
        wanted = place.memory.rows(1)[f"of {kind}"][list(place.pages)].flatten(0, 1)[START : CODED.tokens].float()
        largest = wanted.abs().max().item()
        assert 0 < (rows.view_as(wanted) - wanted).abs().max().item() <= largest * (1 / 254 + 2**-22 + 2**-8)


def read_by_the_product(stream: bytes) -> tuple[dict[tuple[int, str], bytes], dict[tuple[int, str], bytes]]:
    """Rows and states of a stream, as a destination's memory holds them."""
    welcome, *others = split(stream)
    manifest = msgspec.json.decode(welcome[HEADER_BYTES:], type=Welcome).manifest
    rows: dict[tuple[int, str], bytes] = {}
    states: dict[tuple[int, str], bytes] = {}
    blocks: dict[int, list[tuple[int, list[memoryview]]]] = {}
    for frame in others:
        header, payload = parse_header(frame[:HEADER_BYTES]), frame[HEADER_BYTES:]
        if header.kind in (Kind.BLOCK, Kind.STATE):
            tensors = manifest.groups[header.group].tensors
            parts = decode(Codec(header.codec), tensors, header.tokens or 1, payload)
            if header.kind == Kind.STATE:
                states |= {(header.layer, one.name): bytes(part) for one, part in zip(tensors, parts, strict=True)}
            else:
                blocks.setdefault(header.layer, []).append((header.start_token, parts))
    for layer, found in blocks.items():
        for at, kind in enumerate(KINDS):
            rows[layer, f"of {kind}"] = b"".join(bytes(parts[at]) for _, parts in sorted(found, key=lambda one: one[0]))
    return rows, states


def split(stream: bytes) -> list[bytes]:
    found = []
    while stream:
        size = HEADER_BYTES + parse_header(stream[:HEADER_BYTES]).payload_bytes
        found.append(stream[:size])
        stream = stream[size:]
    return found


def test_what_was_recorded_is_what_is_sent_today_unless_the_version_changed():
    recorded = split(RECORDED.read_bytes())
    manifest = msgspec.json.decode(recorded[0][HEADER_BYTES:], type=Welcome).manifest
    place = cache()
    spans = [(start, min(start + STEP, MODEL.tokens)) for start in range(0, MODEL.tokens, STEP)]
    to_send = []
    for span in spans:
        for layer in range(len(MODEL.layers)):
            to_send += block_frames(manifest, place, layer, span)
            if span[1] == MODEL.tokens:
                to_send += state_frames(manifest, place, layer)
    today = []
    for sequence, frame in enumerate(to_send):
        with frame.load(frame.header) as loaded:
            payload = loaded
        today.append(seal(frame.header._replace(sequence=sequence), payload).header + b"".join(payload))
    assert today == [frame for frame in recorded if frame[4] in DATA_KINDS], "the format changed: so must its version"


def test_the_product_reads_what_was_recorded():
    welcome, *others = split(RECORDED.read_bytes())
    ledger = ReceiveLedger(msgspec.json.decode(welcome[HEADER_BYTES:], type=Welcome).manifest)
    for frame in others:
        header, payload = parse_header(frame[:HEADER_BYTES]), frame[HEADER_BYTES:]
        if header.kind in DATA_KINDS:
            ledger.claim(0, header)
            ledger.accept(header, [payload])
        else:
            ledger.note(header, payload)
    done = ledger.require_whole()
    assert done == msgspec.json.decode(others[-1][HEADER_BYTES:], type=Done)


@pytest.mark.parametrize("at", [4, 9, 40, 52, 60, 64, 300, 1500, 4000, -1])
def test_the_second_reader_refuses_a_changed_byte(at: int):
    stream = bytearray(RECORDED.read_bytes())
    stream[at] ^= 4
    with pytest.raises(RefusedError):
        second_reader.read(bytes(stream))


if __name__ == "__main__":
    RECORDED.write_bytes(spoken(Port(MODEL), MODEL, cache(), START))
    for codec in CODECS:
        recorded(codec).write_bytes(coded(codec))
