"""Proves, without a GPU, that a whole model of the 48B checkpoint's sizes runs through a step in shape, and that every
kernel which it starts on the way compiles for Hopper at those sizes without spilling registers to memory. What the
kernels compute is shown elsewhere; the interpreter that shows it checks no types and knows no registers."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.accelerator.sizes import KIMI_LINEAR_48B

from prfaas_worker.cache.memory import CacheGeometry, CacheMemory
from prfaas_worker.models.base import Batch, Chunk, Decodes

triton = pytest.importorskip("triton")

META = torch.device("meta")
# Two layers have every kernel: KDA before a dense MLP, MLA before experts.
CONFIG = replace(KIMI_LINEAR_48B, layer_kinds=("linear", "attention"), dense_layers=(True, False))
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
OF_THE_START = ("grid", "warmup")


class Nothing:
    """Weights that are never filled."""

    def read(self, name, target):
        pass


class Compiled:
    """Takes the place of a kernel's start: compiles it as its arguments ask, once for each kind of arguments."""

    def __init__(self):
        self.kernels = {}

    def in_place_of_run(self):
        """A method for kernels."""
        return lambda kernel, *arguments, **given: self._compile(kernel, arguments, given)

    def _compile(self, kernel, arguments, constants):
        options = {name: constants.pop(name) for name in OPTIONS if name in constants}
        for name in OF_THE_START:
            constants.pop(name)
        given = dict(zip([one.name for one in kernel.params], arguments, strict=False)) | constants
        signature, fixed, known = {}, {}, {}
        for place, one in enumerate(kernel.params):
            value = given[one.name]
            if one.is_constexpr or (isinstance(value, int) and value == 1):
                signature[one.name], fixed[place,] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[one.name], known[place,] = TYPES[value.dtype], [["tt.divisibility", 16]]
            else:
                signature[one.name] = "fp32" if isinstance(value, float) else "i32"
        key = (kernel.fn.__name__, str(signature), str(fixed), str(options))
        if key not in self.kernels:
            source = triton.compiler.ASTSource(kernel, signature, fixed, known)
            target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
            self.kernels[key] = triton.compile(source, target=target, options=options)


def spilled_bytes(kernel, path):
    """Bytes of local memory and stack that a thread uses, from the machine code's own table."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path.write_bytes(kernel.asm["cubin"])
    listed = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", listed))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's GPU compiles and runs them")
def test_every_kernel_of_a_step_compiles_for_hopper_without_spills(monkeypatch, tmp_path):
    from triton.runtime.jit import JITFunction

    from prfaas_worker.models.kimi_linear.cuda import chunked
    from prfaas_worker.models.kimi_linear.cuda.model import KimiLinearCuda

    compiled = Compiled()
    monkeypatch.setattr(JITFunction, "run", compiled.in_place_of_run())
    # A GPU runs fla's rule in this place, which is not installed where there is none; the plain one looks at numbers.
    monkeypatch.setattr(chunked, "kda_chunked", lambda *given: (torch.empty_like(given[2]), given[-1]))
    model = KimiLinearCuda.build(CONFIG, Nothing(), META, torch.bfloat16, "none")
    geometry = CacheGeometry(model.layers)
    model.bind(CacheMemory(geometry, num_pages=64, num_slots=8, max_context=1 << 17, device=META))

    whole = torch.zeros(3, dtype=torch.int64, device=META)
    decodes = Decodes(whole, whole, 5000)
    chunks = (Chunk(0, 20_000, 300), Chunk(1, 0, 17))
    hidden = model.forward(Batch(torch.zeros(320, dtype=torch.int64, device=META), chunks, decodes))
    assert hidden.shape == (5, 2304)
    assert hidden.dtype == torch.float32
    assert model.logits(hidden).shape == (5, 163840)

    names = {key[0] for key in compiled.kernels}
    assert names == {
        "_add_norm_kernel", "_gated_norm_kernel", "_silu_mul_kernel", "_conv_kernel", "_state_kernel",
        "_delta_step_kernel", "_rows_kernel", "_attend_kernel", "_join_kernel", "_pick_kernel", "_send_kernel",
        "_combine_kernel", "_grouped_kernel",
    }  # fmt: skip
    spills = {key[0]: spilled_bytes(kernel, tmp_path / "kernel") for key, kernel in compiled.kernels.items()}
    assert not any(spills.values()), spills
