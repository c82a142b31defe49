"""Proves where every byte of the cache stands: pages and slots hold what was put into them, apart from each other."""

import pytest
import torch

from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache_spec import CacheGeometry, LayerSpec, TensorSpec

LINEAR = LayerSpec(
    state=(
        TensorSpec("conv", ("channel", "tap"), (10, 3), "bfloat16"),
        TensorSpec("recurrent", ("head", "key", "value"), (2, 4, 4), "float32"),
    )
)
ATTENTION = LayerSpec(rows=(TensorSpec("latent", ("token", "width"), (5,), "bfloat16"),))
BOTH = LayerSpec(
    rows=(
        TensorSpec("key", ("token", "head", "dim"), (2, 3), "float32"),
        TensorSpec("value", ("token", "head", "dim"), (2, 4), "float32"),
    ),
    state=(TensorSpec("recurrent", ("head", "state"), (3, 7), "float32"),),
)
LAYERS = (LINEAR, ATTENTION, BOTH)


@pytest.fixture
def memory() -> CacheMemory:
    return CacheMemory(CacheGeometry(LAYERS, 8), num_pages=12, num_slots=3, max_context=50)


def tensors_of(memory: CacheMemory) -> list[torch.Tensor]:
    """Every tensor of every page and slot."""
    views = [view for i in range(len(LAYERS)) for view in (*memory.rows(i).values(), *memory.states(i).values())]
    return [part for view in views for part in view]


def test_every_tensor_has_its_shape_and_dtype(memory):
    assert {n: (tuple(t.shape), t.dtype) for n, t in memory.rows(2).items()} == {
        "key": ((12, 8, 2, 3), torch.float32),
        "value": ((12, 8, 2, 4), torch.float32),
    }
    assert {n: (tuple(t.shape), t.dtype) for n, t in memory.states(0).items()} == {
        "conv": ((3, 10, 3), torch.bfloat16),
        "recurrent": ((3, 2, 4, 4), torch.float32),
    }
    assert memory.geometry.token_bytes == 5 * 2 + 2 * 3 * 4 + 2 * 4 * 4


def test_no_two_tensors_share_a_byte(memory):
    for number, tensor in enumerate(tensors_of(memory)):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors_of(memory)):
        assert (tensor == number).all()


def test_each_page_of_a_tensor_is_contiguous(memory):
    assert all(tensor.is_contiguous() for tensor in tensors_of(memory))


def test_a_saved_state_comes_back_whole_into_another_slot(memory):
    memory.slots.random_(0, 256)
    kept = memory.slots[1].clone()
    pages = list(range(11, 11 - memory.geometry.pages_per_state, -1))
    memory.save_state(1, pages)
    memory.clear_slot(1)
    assert not memory.slots[1].any()
    memory.load_state(pages, 0)
    assert torch.equal(memory.slots[0], kept)
    memory.copy_slot(0, 2)
    assert torch.equal(memory.slots[2], kept)


def test_a_state_that_is_written_into_pages_is_the_one_that_a_slot_loads():
    wide = LayerSpec(state=(TensorSpec("recurrent", ("head", "key", "value"), (2, 16, 16), "float32"),))
    geometry = CacheGeometry((LINEAR, ATTENTION, wide), 8)
    pages = [n * 7 % 19 for n in range(geometry.pages_per_state)]
    assert len(pages) == 18
    memory = CacheMemory(geometry, num_pages=19, num_slots=2, max_context=8)
    memory.slots[1].random_(0, 256)
    for layer, spec in enumerate(geometry.layers):
        for tensor in spec.state:
            left = memory.state_bytes(layer, tensor.name, 1)
            for piece in memory.paged_state_bytes(layer, tensor.name, pages):
                piece[:], left = left[: len(piece)], left[len(piece) :]
            assert not left
    memory.load_state(pages, 0)
    for layer in (0, 2):
        for state in memory.states(layer).values():
            assert torch.equal(state[0].view(torch.uint8), state[1].view(torch.uint8))


def test_a_page_is_copied_whole(memory):
    memory.pages.random_(0, 256)
    memory.copy_page(3, 7)
    assert torch.equal(memory.pages[3], memory.pages[7])


def test_tables_take_pages_from_a_column_on(memory):
    memory.set_pages(1, 0, [4, 9])
    memory.set_pages(1, 2, [])
    memory.set_pages(1, 2, [5])
    assert memory.table[1, :3].tolist() == [4, 9, 5]
    assert not memory.table[0].any()
    assert memory.table.shape[1] == 7  # 50 tokens in pages of 8


def test_memory_is_writable_from_threads_without_inference_mode(memory):
    with torch.inference_mode():
        inside = CacheMemory(CacheGeometry(LAYERS, 8), num_pages=1, num_slots=1, max_context=8)
    inside.rows(1)["latent"][0, 0] = 1
    assert inside.rows(1)["latent"][0, 0, 0] == 1
