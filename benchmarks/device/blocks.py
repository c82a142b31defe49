"""Whether the connector reads and writes the right bytes of a device's caches, in each form that vLLM gives them.

What is right comes from the raw memory: of each form it is told by hand where a block's bytes lie, and which are a
rank's. All else of the memory has to stay as it was.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from benchmarks.device.cases import Case
from benchmarks.device.memory import shared_memory, synchronize
from benchmarks.report import Figure

from prfaas.errors import InternalError
from prfaas.wire.transfer import LayerGroup, TensorLayout
from prfaas_vllm.blocks import VllmGroup, rank_cache, read_blocks, read_slice, write_blocks, write_slice
from prfaas_vllm.device import AfterKernels, CopyStream
from prfaas_vllm.ranks import HeadMap, HeadRows, HeadSection, RankOf
from prfaas_vllm.slices import slices_of
from prfaas_vllm.views import by_block

BLOCKS = {"cpu": 24, "cuda": 512}
HEADS, ROWS, COLUMNS, LATENT = 8, 16, 64, 576
PAGE_BYTES = HEADS * ROWS * COLUMNS * 2
TAPS, KEY_BYTES, STATE_PAGE = 3, 16, 65536  # a convolution's inputs and a state, in a page with room behind them
CONV_BYTES, STATE_BYTES = TAPS * 3 * HEADS * KEY_BYTES, HEADS * 8 * 8 * 4
RANKS = (2, 4)
PRODUCTS, SIDE = 40, {"cpu": 64, "cuda": 4096}

Shares = Callable[[torch.Tensor, RankOf], list[torch.Tensor]]


class Form(NamedTuple):
    """How a layer lies in raw memory: what vLLM gives of it, and the first and the end of each part of a block. `share`
    gives the bytes [blocks, bytes] of a rank's heads."""

    name: str
    block_bytes: int
    view: Callable[[torch.Tensor], Any]
    places: Callable[[int, int], list[tuple[int, int]]]  # of a block, of so many
    heads: tuple[HeadMap, ...] = ()
    share: Shares | None = None


def _whole(block: int, _blocks: int) -> list[tuple[int, int]]:
    return [(block * PAGE_BYTES, (block + 1) * PAGE_BYTES)]


def _keys_then_values(block: int, blocks: int) -> list[tuple[int, int]]:
    half = PAGE_BYTES // 2
    return [(at * half, (at + 1) * half) for at in (block, blocks + block)]


def _latents(block: int, _blocks: int) -> list[tuple[int, int]]:
    size = ROWS * LATENT * 2
    return [(block * size, (block + 1) * size)]


def _states(block: int, _blocks: int) -> list[tuple[int, int]]:
    first = block * STATE_PAGE
    return [(first, first + CONV_BYTES), (first + CONV_BYTES, first + CONV_BYTES + STATE_BYTES)]


def _view_states(raw: torch.Tensor) -> list[torch.Tensor]:
    pages = raw.view(-1, STATE_PAGE)
    conv, state = pages[:, :CONV_BYTES], pages[:, CONV_BYTES : CONV_BYTES + STATE_BYTES]
    return [conv.view(torch.bfloat16).unflatten(1, (TAPS, -1)), state.view(torch.float32).unflatten(1, (HEADS, 8, 8))]


def _share(heads: torch.Tensor, axis: int, part: RankOf) -> torch.Tensor:
    """Return a rank's heads along an axis, as bytes [blocks, bytes]."""
    first, count = part.heads(HEADS)
    return heads.narrow(axis, first, count).flatten(1)


def _share_states(raw: torch.Tensor, part: RankOf) -> list[torch.Tensor]:
    pages = raw.view(-1, STATE_PAGE)
    conv = pages[:, :CONV_BYTES].unflatten(1, (TAPS, 3, HEADS, KEY_BYTES))
    state = pages[:, CONV_BYTES : CONV_BYTES + STATE_BYTES].unflatten(1, (HEADS, -1))
    return [_share(conv, 3, part), _share(state, 1, part)]


_CONV_HEADS = HeadRows(TAPS, (HeadSection(HEADS, KEY_BYTES),) * 3)
_STATE_HEADS = HeadRows(1, (HeadSection(HEADS, STATE_BYTES // HEADS),))
FORMS = (
    Form(
        "heads before rows",
        PAGE_BYTES,
        lambda raw: raw.view(torch.bfloat16).view(-1, HEADS, ROWS, COLUMNS),
        _whole,
        ((HeadRows(1, (HeadSection(HEADS, ROWS * COLUMNS * 2),)),),),
        lambda raw, part: [_share(raw.view(-1, HEADS, ROWS * COLUMNS * 2), 1, part)],
    ),
    Form(
        "rows before heads",
        PAGE_BYTES,
        lambda raw: raw.view(torch.bfloat16).view(-1, ROWS, HEADS, COLUMNS).transpose(1, 2),
        _whole,
        ((HeadRows(ROWS, (HeadSection(HEADS, COLUMNS * 2),)),),),
        lambda raw, part: [_share(raw.view(-1, ROWS, HEADS, COLUMNS * 2), 2, part)],
    ),
    Form(
        "keys before values",
        PAGE_BYTES,
        lambda raw: raw.view(torch.bfloat16).view(2, -1, ROWS, HEADS, COLUMNS // 2),
        _keys_then_values,
    ),
    Form(
        "a kernel's blocks of a quarter",
        PAGE_BYTES,
        lambda raw: raw.view(torch.bfloat16).view(-1, HEADS, ROWS // 4, COLUMNS),
        _whole,
    ),
    Form("latents", ROWS * LATENT * 2, lambda raw: raw.view(torch.bfloat16).view(-1, ROWS, LATENT), _latents),
    Form("states", STATE_PAGE, _view_states, _states, ((_CONV_HEADS,), (_STATE_HEADS,)), _share_states),
)


class Cache:
    """Random memory of a form on a device, what has to be in it, and host memory to copy from and to."""

    def __init__(self, form: Form, device: str):
        self.form, self.device, self.count = form, torch.device(device), BLOCKS[device]
        self.expected = random_bytes(self.count * form.block_bytes)
        self.memory = self.expected.clone().to(self.device)
        self.tensors = [part.view(torch.uint8) for part in by_block(form.name, form.view(self.memory), self.count)]
        self.room = memoryview(shared_memory(len(self.expected), self.device))
        self.copies = CopyStream(self.device)
        synchronize(self.device)

    def places(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Return the bytes of blocks, as they travel: part after part."""
        by_part = zip(*(self.form.places(block, self.count) for block in blocks), strict=True)
        return [place for part in by_part for place in part]

    def wrong_memory(self) -> int:
        return int((self.memory.cpu() != self.expected).sum())

    def host(self, count_bytes: int) -> torch.Tensor:
        return torch.frombuffer(self.room[:count_bytes], dtype=torch.uint8)


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def wrong_in_blocks(form: Form, device: str) -> int:
    """Count wrong bytes of reading one block, some in disorder, and half of all, and of writing others there."""
    cache, wrong = Cache(form, device), 0
    for blocks in ([5], [17, 3, 9], list(range(1, cache.count, 2))[::-1]):
        places = cache.places(blocks)
        count_bytes = sum(end - first for first, end in places)
        with cache.copies.used():
            read_blocks(cache.tensors, blocks, cache.room[:count_bytes])
        held = torch.cat([cache.expected[first:end] for first, end in places])
        wrong += int((cache.host(count_bytes) != held).sum())
        new = random_bytes(count_bytes)
        cache.host(count_bytes).copy_(new)
        with cache.copies.used():
            write_blocks(cache.tensors, blocks, cache.room[:count_bytes])
        for (first, end), part in zip(places, new.split([end - first for first, end in places]), strict=True):
            cache.expected[first:end] = part
        wrong += cache.wrong_memory()
    return wrong


def wrong_in_slices(form: Form, device: str) -> int:
    """Count wrong bytes of cutting each rank's heads out of some blocks, and of landing them in others."""
    cache, wrong = Cache(form, device), 0
    layouts = tuple(
        TensorLayout(f"part{at}", ("element",), (one.shape[1],), "uint8") for at, one in enumerate(cache.tensors)
    )
    layout = LayerGroup("attention", (0,), layouts, ROWS, "bench")
    group = VllmGroup(0, ROWS, layout, {0: cache.tensors}, form.heads, str)
    rank = rank_cache([group], RankOf())
    source, target = [17, 3, 9], [4, 20, 11]
    for ranks in RANKS:
        for number, part in enumerate(slices_of(rank.groups, rank.own, ranks, is_source=True)):
            cuts = part.cuts[0]
            room = cache.room[: len(source) * sum(cut.cut_bytes for cut in cuts)]
            with rank.copies.used():
                read_slice(cache.tensors, source, room, cuts)
            assert form.share is not None
            shares = form.share(cache.expected, RankOf(number, ranks))
            held = torch.cat([share[source].flatten() for share in shares])
            wrong += int((cache.host(len(room)) != held).sum())
            with rank.copies.used():
                write_slice(cache.tensors, target, room, cuts)
        for (first, end), (new, new_end) in zip(cache.places(target), cache.places(source), strict=True):
            cache.expected[first:end] = cache.expected[new:new_end]
        wrong += cache.wrong_memory()
    return wrong


def stale_bytes(device: str, *, waits: bool) -> int:
    """Count bytes that were copied before the kernels had written them, of a block that a step writes at its end."""
    where, stale = torch.device(device), 0
    block = torch.zeros((2, PAGE_BYTES), dtype=torch.uint8, device=where)
    side = torch.randn(SIDE[device], SIDE[device], device=where)
    room = memoryview(shared_memory(PAGE_BYTES, where))
    copies, after = CopyStream(where), AfterKernels(where)

    def read() -> None:
        with copies.used():
            read_blocks([block], [1], room)
        done.release()

    done, failures = threading.Semaphore(0), list[str]()
    for value in range(1, 6):
        for _ in range(PRODUCTS):
            torch.mm(side, side)
        block.fill_(value)
        if waits:
            after.call(read, failures.append)
        else:
            read()
        if not done.acquire(timeout=10):
            raise InternalError(f"the copy was not made: {failures}")
        stale += int((torch.frombuffer(room, dtype=torch.uint8) != value).sum())
        synchronize(where)
    return stale


def _wrong(name: str, value: int) -> Iterator[Figure]:
    yield Figure(name=name, value=value, unit="bytes", reach=0)


def _kernels(device: str) -> Iterator[Figure]:
    yield Figure(
        name="blocks copied before the kernels that write them",
        value=stale_bytes(device, waits=True),
        unit="bytes",
        reach=0,
        rival="without waiting for them",
        rival_value=stale_bytes(device, waits=False),
    )


def cases(device: str) -> list[Case]:
    """Return a case for each form, for ranks' shares of those whose heads are known, and for kernels that run on."""
    found = [
        (f"wrong bytes in {what}, {form.name}", partial(count, form, device))
        for what, count in (("blocks", wrong_in_blocks), ("slices", wrong_in_slices))
        for form in FORMS
        if form.share or count is wrong_in_blocks
    ]
    checks = [Case(name, lambda n=name, c=count: _wrong(n, c()), is_check=True) for name, count in found]
    return [*checks, Case("copies after kernels", lambda: _kernels(device), is_check=True)]
