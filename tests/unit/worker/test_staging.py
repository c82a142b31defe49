"""Proves that rows and states reach host memory, and come back to another sequence's pages, byte by byte, for spans
that begin and end anywhere; and that what lands touches nothing else. Runs over a GPU's memory where there is one."""

import pytest
import torch

from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.staging import Staging
from prfaas_worker.cache.transfer_frames import TokenSpan
from prfaas_worker.cache_spec import CacheGeometry, LayerSpec, TensorSpec

LAYERS = (
    LayerSpec(
        state=(
            TensorSpec("conv", ("channel", "tap"), (9, 3), "bfloat16"),
            TensorSpec("recurrent", ("head", "key", "value"), (2, 16, 16), "float32"),
        )
    ),
    LayerSpec(rows=(TensorSpec("latent", ("token", "latent"), (6,), "bfloat16"),)),
    LayerSpec(
        rows=(TensorSpec("latent", ("token", "latent"), (6,), "bfloat16"),),
        state=(TensorSpec("recurrent", ("head", "key", "value"), (2, 16, 16), "float32"),),
    ),
)
PAGES = [7, 2, 9]


@pytest.fixture
def memory():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = CacheMemory(CacheGeometry(LAYERS), num_pages=24, num_slots=3, max_context=192, device=device)
    memory.pages.copy_(torch.randint(256, memory.pages.shape, dtype=torch.uint8, generator=torch.manual_seed(0)))
    memory.slots.copy_(torch.randint(256, memory.slots.shape, dtype=torch.uint8, generator=torch.manual_seed(1)))
    return memory


@pytest.fixture
def staging(memory):
    return Staging(memory)


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def received(staging, sent):
    """The same bytes in memory that a socket could have filled."""
    rooms = {}
    for name, data in sent.items():
        rooms[name] = staging.room(len(data))
        rooms[name][:] = data
    return rooms


@pytest.mark.parametrize("span", [TokenSpan(0, 1), TokenSpan(63, 65), TokenSpan(64, 128), TokenSpan(5, 150)])
def test_rows_go_out_and_land_elsewhere_byte_by_byte(span, memory, staging):
    rows = memory.rows(2)["latent"][PAGES].flatten(0, 1)
    sent = staging.read_rows(2, PAGES, span, staging.mark())
    assert bytes(sent["latent"]) == bytes_of(rows[span.start : span.end])
    before, target = memory.pages.clone(), [20, 21, 22]
    staging.land_rows(2, target, span, received(staging, sent))
    landed = memory.rows(2)["latent"][target].flatten(0, 1)
    assert bytes_of(landed[span.start : span.end]) == bytes(sent["latent"])
    # Put what stood there back, and nothing else has changed.
    kept = CacheMemory(memory.geometry, num_pages=24, num_slots=1, max_context=64, device=memory.device)
    kept.pages.copy_(before)
    old = {"latent": Staging(kept).read_rows(2, target, span, Staging(kept).mark())["latent"]}
    staging.land_rows(2, target, span, received(staging, old))
    assert torch.equal(memory.pages, before)


def test_a_state_goes_out_and_lands_layer_by_layer(memory, staging):
    others, pages = memory.slots[0].clone(), memory.pages.clone()
    for layer in (2, 0):
        sent = staging.read_state(layer, 1, staging.mark())
        for name, state in memory.states(layer).items():
            assert bytes(sent[name]) == bytes_of(state[1])
            assert bytes(sent[name]) != bytes_of(state[2])
        staging.land_state(layer, 2, received(staging, sent))
    for layer in (0, 2):
        for state in memory.states(layer).values():
            assert bytes_of(state[2]) == bytes_of(state[1])
    assert torch.equal(memory.slots[0], others)
    assert torch.equal(memory.pages, pages)


def test_a_state_lands_in_pages_and_a_slot_loads_it(memory, staging):
    pages = [5, 0, 11, 3, 8, 21, 14, 17][: memory.geometry.pages_per_state]
    assert len(pages) == memory.geometry.pages_per_state > 1
    others = [page for page in range(memory.num_pages) if page not in pages]
    before = memory.pages[others].clone()
    for layer in (2, 0):
        staging.land_paged_state(layer, pages, received(staging, staging.read_state(layer, 1, staging.mark())))
    memory.load_state(pages, 2)
    for layer in (0, 2):
        for state in memory.states(layer).values():
            assert bytes_of(state[2]) == bytes_of(state[1])
    assert torch.equal(memory.pages[others], before)
