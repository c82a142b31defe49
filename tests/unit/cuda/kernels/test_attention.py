"""Proves that both forms of MLA are plain causal attention over a sequence's rows: one token over pages, for lengths
that end anywhere in a page and any number of splits, and a chunk behind rows that came before it. Rows beyond a
sequence's end hold NaN throughout, so that a kernel which looks at them shows it."""

import pytest
import torch

from prfaas_worker.models.base import Decodes
from prfaas_worker.models.kimi_linear.cuda import causal
from prfaas_worker.models.kimi_linear.cuda.causal import EarlierRows, Expansion, attend_chunk
from prfaas_worker.models.kimi_linear.cuda.paged import Queries, Split, attend_pages, split_for
from prfaas_worker.models.kimi_linear.cuda.rows import write_rows
from prfaas_worker.models.kimi_linear.cuda.step import PADDING, decode_step

from .reference import attention, relative, rms_norm

HEADS, LATENT, SHARED, PAGE = 3, 32, 16, 64
WIDTH = LATENT + SHARED
SCALE = 0.2


class Sequences:
    """Rows of several sequences, spread over pages; slot i holds sequence i."""

    def __init__(self, lengths, normal, dtype=torch.float32):
        self.rows = [normal(length, WIDTH).to(dtype) for length in lengths]
        columns = max(-(-length // PAGE) for length in lengths) + 1
        count = columns * len(lengths)
        device = self.rows[0].device
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(device)
        self.table = order.view(len(lengths), columns)
        # Pages stand apart, as they hold other layers too.
        self.pages = torch.full((count, 2, PAGE, WIDTH), torch.nan, dtype=dtype, device=device)[:, 1]
        for slot, rows in enumerate(self.rows):
            at = torch.arange(len(rows), device=device)
            self.pages[self.table[slot, at // PAGE], at % PAGE] = rows

    def decodes(self, slots, device):
        """The last row of each sequence is that of the token which attends."""
        lengths = [0 if slot == PADDING else len(self.rows[slot]) - 1 for slot in slots]
        return Decodes(torch.tensor(slots, device=device), torch.tensor(lengths, device=device), max(lengths))


def queries_of(normal, count, dtype=torch.float32):
    shared = normal(count, HEADS, SHARED + 8)[..., 8:].to(dtype)
    return Queries(normal(HEADS, count, LATENT).to(dtype), shared, SCALE)


def wanted(queries, row, rows):
    q = torch.cat([queries.latent[:, row], queries.shared[row]], dim=-1)
    k = rows.unsqueeze(1).expand(-1, HEADS, -1)
    return attention(q.unsqueeze(0), k, k[..., :LATENT], SCALE)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("split", [Split(1, 32), Split(3, 64), Split(8, 32)])
def test_a_token_attends_to_its_sequences_rows_whatever_their_number(split, dtype, normal, device):
    lengths = [1, 2, 31, 64, 65, 150, 300]
    sequences, slots = Sequences(lengths, normal, dtype), [5, 0, 2, 1, 6, 3, 4]
    queries = queries_of(normal, len(slots), dtype)
    found = attend_pages(queries, sequences.pages, sequences.table, sequences.decodes(slots, device), split)
    for row, slot in enumerate(slots):
        assert relative(found[:, row], wanted(queries, row, sequences.rows[slot])) < (
            1e-5 if dtype == torch.float32 else 8e-3
        )


def test_rows_of_no_sequence_give_nothing(normal, device):
    sequences, queries = Sequences([70, 20], normal), queries_of(normal, 3)
    found = attend_pages(
        queries, sequences.pages, sequences.table, sequences.decodes([PADDING, 1, PADDING], device), Split(2, 32)
    )
    assert torch.equal(found[:, [0, 2]], torch.zeros_like(found[:, [0, 2]]))
    assert relative(found[:, 1], wanted(queries, 1, sequences.rows[1])) < 1e-5


def test_swapped_pages_are_seen_only_where_their_rows_differ_in_order(normal, device):
    """The check itself. Attention without positions is blind to the order of full pages; a swap with a page of another
    sequence, or with one that is partly filled, is not."""
    sequences, queries = Sequences([128, 128], normal), queries_of(normal, 1)
    decodes, right = sequences.decodes([0], device), wanted(queries, 0, sequences.rows[0])
    swapped = sequences.table.clone()
    swapped[0, [0, 1]] = sequences.table[0, [1, 0]]
    assert relative(attend_pages(queries, sequences.pages, swapped, decodes, Split(2, 32))[:, 0], right) < 1e-5
    swapped[0, 0], swapped[1, 0] = sequences.table[1, 0], sequences.table[0, 0]
    assert relative(attend_pages(queries, sequences.pages, swapped, decodes, Split(2, 32))[:, 0], right) > 0.1


def test_sequences_are_cut_finely_where_they_are_few_and_coarsely_where_they_are_many():
    assert [split_for(rows, 132) for rows in (1, 16, 64, 256)] == [(128, 128), (66, 128), (16, 512), (8, 512)]


def test_new_rows_are_normed_and_land_in_their_pages_alone(normal, device):
    sequences, x, norm = Sequences([64, 130], normal), normal(3, WIDTH + 8)[:, :WIDTH], normal(LATENT)
    before = sequences.pages.clone()
    decodes = Decodes(torch.tensor([1, PADDING, 0], device=device), torch.tensor([130, 5, 64], device=device), 130)
    found = write_rows(x, norm, sequences.pages, sequences.table, decode_step(decodes))
    right = torch.cat([rms_norm(x[:, :LATENT], norm, 1e-6), x[:, LATENT:].double()], dim=-1)
    assert relative(found, right) < 1e-5
    for row, (slot, position) in {0: (1, 130), 2: (0, 64)}.items():
        page = sequences.table[slot, position // PAGE]
        assert torch.equal(sequences.pages[page, position % PAGE], found[row])
        before[page, position % PAGE] = found[row]
    assert torch.equal(sequences.pages.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("start", [0, 1, 64, 100, 300])
def test_a_chunk_attends_to_what_stands_before_it_and_to_itself(start, normal, monkeypatch):
    monkeypatch.setattr(causal, "_BLOCK_ROWS", 128)
    tokens, value, nope = 33, 24, 16
    sequences = Sequences([start + tokens], normal)
    expand = Expansion(normal(HEADS, value + nope, LATENT), value, nope + SHARED)
    rows, q = sequences.rows[0], normal(tokens, HEADS, nope + SHARED)
    earlier = EarlierRows(sequences.pages, sequences.table[0], start)
    found = attend_chunk(q, rows[start:], earlier, expand)
    expanded = torch.einsum("nl,hwl->nhw", rows[:, :LATENT].double(), expand.weight.double())
    k = torch.cat([expanded[..., value:], rows[:, None, LATENT:].double().expand(-1, HEADS, -1)], dim=-1)
    assert relative(found, attention(q, k, expanded[..., :value], expand.key**-0.5)) < 1e-5
