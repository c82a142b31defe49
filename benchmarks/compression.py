"""What wire compression saves and costs, and what INT8 does to a model's answers.

    prfaas bench compression

Ratio and speed: frames as a link carries them, of the 48B model's shapes with normal numbers in channels of different
sizes, and of the shipped model's own cache. Speeds are tensor bytes over CPU time of one thread. The rival is zstd at
level 1 on the same bytes as they are.

Loss: the shipped model reads the start of some of this repository's files, its cache goes through a codec frame by
frame, as over a link, and the model goes on reading from what came out. Logits and perplexity are compared with those
from the untouched cache; the rival is a cache whose rows were rounded to bfloat16, which is what a GPU would hold.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import zstandard
from benchmarks.report import Figure, run
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from prfaas.wire.frames import Codec
from prfaas.wire.transfer import Buffer, TensorLayout
from prfaas_transfer.compression import decode_into, encode
from prfaas_worker.cache_spec import TensorSpec
from prfaas_worker.models import load_model
from prfaas_worker.models.solo import Solo, SoloSequence

ROUNDS = 9
GIB = 1 << 30
# Of the 48B model: a frame of 4 MiB of rows in pages of 64 tokens, and one layer's state.
BLOCK_TOKENS, PAGE_TOKENS, CHANNELS = 3584, 64, 576
STATE_SHAPES = (("recurrent", (32, 128, 128), "float32"), ("conv", (3, 12288), "bfloat16"))

FILES = [
    "core/prfaas/errors.py",
    "core/prfaas/routing/controller.py",
    "core/prfaas/routing/decide.py",
    "core/prfaas/kvindex/blocks.py",
    "core/prfaas/kube/lease.py",
    "worker/prfaas_worker/models/base.py",
    "worker/prfaas_worker/models/solo.py",
    "gateway/prfaas_gateway/server.py",
]
BOS = 256
READ_TOKENS, SCORED_TOKENS = 1024, 256
LARGEST, MEAN = "logits, largest difference", "logits, mean difference"
REACHES = {LARGEST: 1000.0, MEAN: 5.0}  # thousandths
PERPLEXITY_REACH_PERCENT = 0.1

Through = Callable[[Sequence[TensorLayout], int, Sequence[memoryview]], None]
"""Changes the memory of one frame, in place, to what a destination would have."""


class Sample(NamedTuple):
    """A frame to measure with."""

    name: str
    layouts: Sequence[TensorLayout]
    items: int
    parts: Sequence[Buffer]

    @property
    def nbytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.parts)


def samples_48b() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(CHANNELS, generator=generator).mul(0.5).exp()
    rows = (torch.randn(BLOCK_TOKENS, CHANNELS, generator=generator) * sizes).bfloat16()
    block = TensorLayout("latent", ("token", "channel"), (CHANNELS,), "bfloat16")
    states = [TensorLayout(name, ("",) * len(shape), shape, dtype) for name, shape, dtype in STATE_SHAPES]
    values = [torch.randn(one.shape, generator=generator).to(getattr(torch, one.dtype)) for one in states]
    return [
        Sample("48B rows, bf16", [block], BLOCK_TOKENS, [_bytes(page) for page in rows.split(PAGE_TOKENS)]),
        Sample("48B state", states, 1, [_bytes(value) for value in values]),
    ]


def samples_shipped(solo: Solo, sequence: SoloSequence) -> list[Sample]:
    """The last layer's rows and the first one's state, as they are and as bfloat16."""
    last = len(solo.model.layers) - 1
    found = []
    for layer, specs, items in (
        (last, solo.model.layers[last].rows, sequence.length),
        (0, solo.model.layers[0].state, 1),
    ):
        kind = "rows" if items > 1 else "state"
        parts = frame_memory(solo, sequence, layer, specs)
        found.append(Sample(f"shipped model's {kind}, fp32", _layouts(specs), items, parts))
        halves = [spec._replace(dtype="bfloat16") for spec in specs]
        rounded = [_bytes(torch.frombuffer(part, dtype=torch.float32).bfloat16()) for part in parts]
        found.append(Sample(f"shipped model's {kind}, bf16", _layouts(halves), items, rounded))
    return found


def frame_memory(solo: Solo, sequence: SoloSequence, layer: int, specs: Sequence[TensorSpec]) -> list[memoryview]:
    """Memory of a layer's rows or state, in pieces."""
    if specs[0].axes[0] != "token":
        return [solo.memory.state_bytes(layer, spec.name, sequence.slot) for spec in specs]
    pages, span = solo.pages(sequence).tolist(), (0, sequence.length)
    return [piece for spec in specs for piece in solo.memory.row_bytes(layer, spec.name, pages, span)]


def ratio_figures(sample: Sample) -> Iterator[Figure]:
    plain = b"".join(sample.parts)
    rival = {"rival": "zstd level 1", "rival_value": len(plain) / len(zstandard.ZstdCompressor(1).compress(plain))}
    for codec in _codecs_of(sample):
        ratio = sample.nbytes / encode(codec, sample.layouts, sample.items, sample.parts).nbytes
        name = f"{codec.name.lower()}, {sample.name}: ratio"
        yield Figure(name=name, value=ratio, unit="times", better="higher", **rival)


def speed_figures(sample: Sample) -> Iterator[Figure]:
    plain, level_1 = b"".join(sample.parts), zstandard.ZstdCompressor(1)
    packed = level_1.compress(plain)
    for codec in _codecs_of(sample):
        layouts, items = sample.layouts, sample.items
        encoded = encode(codec, layouts, items, sample.parts)
        payload = b"".join(encoded.buffers)
        room = [memoryview(bytearray(memoryview(part).nbytes)) for part in sample.parts]
        seconds = in_turns(
            {
                "encode": partial(encode, codec, layouts, items, sample.parts),
                "decode": partial(decode_into, encoded.codec, layouts, items, payload, room),
                "zstd encode": lambda: level_1.compress(plain),
                "zstd decode": lambda: zstandard.ZstdDecompressor().decompress(packed),
            }
        )
        name = f"{codec.name.lower()}, {sample.name}"
        for way in ("encode", "decode"):
            yield Figure(
                name=f"{name}: {way}",
                value=sample.nbytes / seconds[way] / 1e6,
                unit="MB/s",
                better="higher",
                rival="zstd level 1",
                rival_value=sample.nbytes / seconds[f"zstd {way}"] / 1e6,
            )
        both = (seconds["encode"] + seconds["decode"]) / sample.nbytes * GIB
        rival_both = (seconds["zstd encode"] + seconds["zstd decode"]) / sample.nbytes * GIB
        yield Figure(
            name=f"{name}: both ends", value=both, unit="CPU s/GiB", rival="zstd level 1", rival_value=rival_both
        )


def in_turns(contenders: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Each contender's median CPU seconds over rounds in which all run once, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(ROUNDS + 1):
        for name, work in contenders.items():
            started = time.thread_time()
            work()
            if number:
                seconds[name].append(time.thread_time() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


class Reader:
    """Reads the texts with the shipped model: `READ_TOKENS`, then a codec, then `SCORED_TOKENS`."""

    def __init__(self) -> None:
        root, length = Path(__file__).resolve().parents[1], READ_TOKENS + SCORED_TOKENS
        texts = [[BOS, *(root / name).read_bytes()[:length]] for name in FILES]
        self.texts = torch.tensor(texts)
        self.solo = Solo(load_model("builtin:kimi-linear-tiny", 1)[0], slots=len(FILES), tokens=length + 1)

    def read(self) -> list[SoloSequence]:
        sequences = [self.solo.new() for _ in self.texts]
        for text, sequence in zip(self.texts, sequences, strict=True):
            self.solo.prefill(text[:READ_TOKENS], sequence)
        return sequences

    def logits(self, through: Through) -> torch.Tensor:
        """Logits after each scored token but the last, fp32 [texts, SCORED_TOKENS, vocab_size]."""
        sequences = self.read()
        for sequence in sequences:
            for layer, spec in enumerate(self.solo.model.layers):
                for specs, items in ((spec.rows, sequence.length), (spec.state, 1)):
                    if specs:
                        through(_layouts(specs), items, frame_memory(self.solo, sequence, layer, specs))
        columns = self.texts[:, READ_TOKENS : READ_TOKENS + SCORED_TOKENS].T
        found = torch.stack([self.solo.decode(column, sequences) for column in columns], dim=1)
        for sequence in sequences:
            self.solo.drop(sequence)
        return found

    def perplexity(self, logits: torch.Tensor) -> float:
        """A byte's perplexity under these logits."""
        following = self.texts[:, READ_TOKENS + 1 : READ_TOKENS + 1 + SCORED_TOKENS]
        return math.exp(cross_entropy(logits.flatten(0, 1), following.flatten()).item())


def through_codec(codec: Codec, layouts: Sequence[TensorLayout], items: int, memory: Sequence[memoryview]) -> None:
    encoded = encode(codec, layouts, items, memory)
    payload = b"".join(encoded.buffers)
    for piece in memory:
        piece[:] = bytes(piece.nbytes)
    decode_into(encoded.codec, layouts, items, payload, memory)


def through_bfloat16(layouts: Sequence[TensorLayout], items: int, memory: Sequence[memoryview]) -> None:
    """Round rows, and leave a state as it is."""
    if layouts[0].axes[0] == "token" and items:
        for piece in memory:
            values = torch.frombuffer(piece, dtype=torch.float32)
            values.copy_(values.bfloat16())


def loss_figures(reader: Reader) -> Iterator[Figure]:
    exact = reader.logits(lambda *_: None)
    rounded = differences(exact, reader.logits(through_bfloat16))
    plain = reader.perplexity(exact)
    yield Figure(name="logits, standard deviation", value=exact.std().item(), unit="")
    for codec in (Codec.LOSSLESS, Codec.INT8):
        logits = reader.logits(partial(through_codec, codec))
        name = codec.name.lower()
        for what, value in differences(exact, logits).items():
            yield Figure(
                name=f"{name}: {what}",
                value=value * 1000,
                unit="thousandths",
                reach=0.0 if codec.is_exact else REACHES.get(what),
                rival="rows rounded to bf16",
                rival_value=rounded[what] * 1000,
            )
        perplexity = reader.perplexity(logits)
        yield Figure(name=f"{name}: perplexity", value=perplexity, unit="a byte", rival="exact", rival_value=plain)
        change = 100 * (perplexity / plain - 1)
        yield Figure(name=f"{name}: perplexity, change", value=change, unit="%", reach=PERPLEXITY_REACH_PERCENT)


def differences(exact: torch.Tensor, logits: torch.Tensor) -> dict[str, float]:
    off = (logits - exact).abs()
    divergence = kl_div(log_softmax(logits, -1), log_softmax(exact, -1), reduction="none", log_target=True).sum(-1)
    return {
        LARGEST: off.max().item(),
        "logits, 99.9% differ by less": off.flatten().quantile(0.999).item(),
        MEAN: off.mean().item(),
        "KL divergence, mean": divergence.mean().item(),
        "KL divergence, largest": divergence.max().item(),
    }


def figures() -> Iterator[Figure]:
    reader = Reader()
    sequences = reader.read()
    large, small = samples_48b(), samples_shipped(reader.solo, sequences[0])
    for sample in (*large, *small):
        yield from ratio_figures(sample)
    for sample in large:
        yield from speed_figures(sample)
    for sequence in sequences:
        reader.solo.drop(sequence)
    yield from loss_figures(reader)


def _codecs_of(sample: Sample) -> Sequence[Codec]:
    return (Codec.LOSSLESS, Codec.INT8) if sample.layouts[0].axes[0] == "token" else (Codec.LOSSLESS,)


def _layouts(specs: Sequence[TensorSpec]) -> list[TensorLayout]:
    return [TensorLayout(*spec) for spec in specs]


def _bytes(values: torch.Tensor) -> memoryview:
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


if __name__ == "__main__":
    run("compression", __doc__, figures)
