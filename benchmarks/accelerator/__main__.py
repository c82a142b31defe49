"""What Kimi Linear reaches on one GPU: prefill time, KV throughput and matrix rate by length, a decoding step by batch.

    prfaas bench accelerator                                the whole 48B model with random weights: 110 GB, one H200
    python -m benchmarks.accelerator --size small           the same measurements on a model of 1.5 GB

On a bare machine with a GPU, from a checkout (fla-core brings the chunk kernels, torch's CUDA build brings Triton):

    python3 -m pip install torch fla-core einops safetensors msgspec pydantic pyyaml typer rich xxhash
    PYTHONPATH=.:core:worker python3 -m benchmarks.accelerator -o json >accelerator.json

Before anything is timed a small model is compared with the CPU's implementation, by logits, with a damaged cache as
negative control; where that fails nothing is measured. Prefill runs in chunks of 16K tokens, as an engine would, from
an empty cache to the last layer; a time is the median of several runs. S_kv is counted (state + rows), Phi_kv = S_kv /
T_prefill. Beside it stands the published figure of eight H200 (arXiv:2604.15039, table 3). Operations are counted as
benchmarks/accelerator/work.py says; the rate's rival is a large bf16 product measured in the same run, a decoding
step's the time of its own memory traffic at the rate of a large copy measured in the same run. Without CUDA it says so
and exits with 2.
"""

import argparse
import sys
from collections.abc import Iterator

import torch
from benchmarks.accelerator.check import check_against_cpu
from benchmarks.accelerator.measure import Bench, copy_rate, product_rate
from benchmarks.accelerator.sizes import SIZES, Size
from benchmarks.accelerator.work import decode_bytes, prefill_operations
from benchmarks.report import Figure, run

PUBLISHED_GBIT = {1: 1.19, 8: 2.29, 32: 3.87, 128: 4.88}
PUBLISHED = "published, 8 x H200"


def figures(size: Size) -> Iterator[Figure]:
    """Check, then measure everything for one size of model."""
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {size.name}")
    say(check_against_cpu())
    product, copy = product_rate(), copy_rate()
    torch.cuda.empty_cache()
    yield Figure(name="bf16 product of 8192 squared", value=product / 1e12, unit="TFLOP/s", better="higher")
    yield Figure(name="copy, read and written", value=copy / 1e12, unit="TB/s", better="higher")
    bench = Bench(size)
    say(f"weights {bench.weight_bytes / 1e9:.1f} GB in {bench.load_seconds:.1f} s, graphs {bench.bind_seconds:.1f} s")
    for thousand in size.prefill_lengths:
        yield from prefill_figures(bench, thousand, product)
    for batch in size.batches:
        for thousand in size.decode_lengths:
            seconds = bench.decode_seconds(batch, thousand * 1024)
            floor = decode_bytes(size.config, batch, thousand * 1024) / copy
            yield Figure(
                name=f"decoding step, {batch} x {thousand}K",
                value=seconds * 1e3,
                unit="ms",
                rival="its memory traffic at the rate of the copy",
                rival_value=floor * 1e3,
            )
    for rows in (1, 64, 4096):
        ours, rival = bench.expert_seconds(rows)
        name = f"one layer's experts, {rows} tokens"
        yield Figure(name=name, value=ours * 1e6, unit="us", rival="our grouped kernel", rival_value=rival * 1e6)


def prefill_figures(bench: Bench, thousand: int, product: float) -> Iterator[Figure]:
    """T_prefill, S_kv, Phi_kv and the rate of operations at one length."""
    tokens = thousand * 1024
    seconds = bench.prefill_seconds(tokens)
    cache = bench.cache_bytes(tokens)
    yield Figure(name=f"T_prefill {thousand}K", value=seconds, unit="s")
    yield Figure(name=f"S_kv {thousand}K", value=cache / 1e6, unit="MB")
    published = PUBLISHED_GBIT.get(thousand) if bench.size.is_published else None
    yield Figure(
        name=f"Phi_kv {thousand}K",
        value=8 * cache / seconds / 1e9,
        unit="Gbit/s",
        better="higher",
        rival=None if published is None else PUBLISHED,
        rival_value=published,
    )
    yield Figure(
        name=f"operations of prefill {thousand}K",
        value=prefill_operations(bench.size.config, tokens) / seconds / 1e12,
        unit="TFLOP/s",
        better="higher",
        rival="the product above",
        rival_value=product / 1e12,
    )


def say(line: str) -> None:
    """Say what a figure depends on beside the report, which may be JSON."""
    sys.stderr.write(line + "\n")


def main() -> None:
    """Take our own flag off the command line; the report's stay."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--size", choices=sorted(SIZES), default="48b")
    own, sys.argv[1:] = parser.parse_known_args()
    if not torch.cuda.is_available():
        say("prfaas bench accelerator measures a GPU, and torch finds none on this machine: nothing was measured")
        sys.exit(2)
    run("accelerator", __doc__ or "", lambda: figures(SIZES[own.size]))


if __name__ == "__main__":
    main()
