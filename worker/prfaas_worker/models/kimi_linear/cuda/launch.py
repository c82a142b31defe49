"""Starts a kernel. Triton's own types know neither grids nor launch options, so its kernels are untyped here."""

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel at each place of `grid`; `constants` are its compile-time arguments, `num_warps` and the like."""
    # Products are fused with sums whatever the default of the Triton that is installed.
    kernel[grid](*arguments, enable_fp_fusion=True, **constants)
