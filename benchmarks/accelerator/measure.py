"""Times on the GPU, by events and as medians, on random data: zeros would hide errors and run faster."""

import statistics
import time
from collections.abc import Callable

import torch
from benchmarks.accelerator.sizes import Size

from prfaas_worker.cache.memory import CacheGeometry, CacheMemory
from prfaas_worker.models.base import Batch, Chunk, Decodes
from prfaas_worker.models.kimi_linear.cuda.grouped import grouped_linear, grouped_linear_triton
from prfaas_worker.models.kimi_linear.cuda.model import KimiLinearCuda
from prfaas_worker.models.kimi_linear.cuda.sources import RandomSource

CHUNK_TOKENS = 16384
_DEVICE = torch.device("cuda")
_MIN_RUNS, _MAX_RUNS, _RUN_SECONDS = 3, 50, 5.0


def median_seconds(work: Callable[[], object]) -> float:
    """Warm up once, then run for some seconds."""
    work()
    torch.cuda.synchronize()
    found: list[float] = []
    while len(found) < _MIN_RUNS or (len(found) < _MAX_RUNS and sum(found) < _RUN_SECONDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def product_rate() -> float:
    """Operations a second of a large bf16 product."""
    a, b = (torch.randn(8192, 8192, device=_DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_seconds(lambda: a @ b)


def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.randint(256, (4 << 30,), device=_DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source))


class Bench:
    """A model of one size with random weights, and memory for what is measured."""

    def __init__(self, size: Size):
        self.size = size
        begin = time.perf_counter()
        self.model = KimiLinearCuda.build(size.config, RandomSource(_DEVICE), _DEVICE, torch.bfloat16, "random")
        torch.cuda.synchronize()
        self.load_seconds = time.perf_counter() - begin
        self.weight_bytes = torch.cuda.memory_allocated()
        geometry = CacheGeometry(self.model.layers)
        slots, longest = max(size.batches), 1024 * max(*size.prefill_lengths, *size.decode_lengths)
        # A page more for each sequence than it is measured at: the decoded token's own.
        each = geometry.pages_for(1024 * max(size.decode_lengths)) + 1
        pages = max(slots * each, geometry.pages_for(longest))
        self._pages_each = each
        self.memory = CacheMemory(
            geometry, num_pages=pages, num_slots=slots, max_context=longest + geometry.page_tokens, device=_DEVICE
        )
        begin = time.perf_counter()
        self.model.bind(self.memory)
        torch.cuda.synchronize()
        self.bind_seconds = time.perf_counter() - begin

    def cache_bytes(self, tokens: int) -> int:
        """S_kv: the bytes that a sequence's cache has after so many tokens."""
        geometry = self.memory.geometry
        states = sum(tensor.nbytes for layer in self.model.layers for tensor in layer.state)
        return states + geometry.token_bytes * tokens

    def prefill_seconds(self, tokens: int) -> float:
        """A prompt from an empty cache to its last hidden state."""
        self.memory.set_pages(0, 0, range(self.memory.geometry.pages_for(tokens)))
        prompt = torch.randint(self.model.vocab_size, (tokens,), device=_DEVICE)

        def work() -> None:
            self.memory.clear_slot(0)
            for start in range(0, tokens, CHUNK_TOKENS):
                part = prompt[start : start + CHUNK_TOKENS]
                self.model.forward(Batch(part, (Chunk(0, start, len(part)),)))

        return median_seconds(work)

    def decode_seconds(self, batch: int, tokens: int) -> float:
        """A step of so many sequences of so many tokens, logits included."""
        for slot in range(batch):
            # Spread, as after long use.
            self.memory.set_pages(slot, 0, range(slot, batch * self._pages_each, batch))
        for layer in range(len(self.model.layers)):
            for rows in self.memory.rows(layer).values():
                rows.normal_()
            for state in self.memory.states(layer).values():
                state.normal_(0, 0.1)
        slots = torch.arange(batch, device=_DEVICE)
        decodes = Decodes(slots, torch.full_like(slots, tokens), tokens)
        chosen = torch.randint(self.model.vocab_size, (batch,), device=_DEVICE)
        return median_seconds(lambda: self.model.logits(self.model.forward(Batch(chosen, (), decodes))))

    def expert_seconds(self, tokens: int) -> tuple[float, float]:
        """Both products of one layer's experts: as the model runs them, and by our grouped kernel."""
        config = self.size.config
        experts, top = config.num_experts, config.experts_per_token
        picked = torch.rand(tokens, experts, device=_DEVICE).topk(top).indices
        ends = picked.flatten().bincount(minlength=experts).cumsum(0, dtype=torch.int32)
        x = torch.randn(tokens * top, config.hidden_size, device=_DEVICE, dtype=torch.bfloat16)
        hidden = torch.randn(tokens * top, config.expert_size, device=_DEVICE, dtype=torch.bfloat16)
        up = torch.randn(experts, 2 * config.expert_size, config.hidden_size, device=_DEVICE, dtype=torch.bfloat16)
        down = torch.randn(experts, config.hidden_size, config.expert_size, device=_DEVICE, dtype=torch.bfloat16)
        ours, rival = (
            median_seconds(lambda product=product: (product(x, up, ends), product(hidden, down, ends)))
            for product in (grouped_linear, grouped_linear_triton)
        )
        return ours, rival
