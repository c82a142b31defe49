"""Where these tests run: on a GPU where there is one, else in Triton's interpreter, in the process that
tests/unit/cuda/test_interpreted.py starts for them. In any other process they are not collected: the interpreter is
chosen once, before Triton is first imported."""

import functools
import inspect
import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

collect_ignore_glob = [] if INTERPRETED or DEVICE == "cuda" else ["test_*.py"]

if INTERPRETED:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
        """The interpreter keeps bf16 as its bits and would multiply those as integers."""
        left, right = (
            (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data
            for x in (a, b)
        )
        return interpreter.TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = _dot

    @functools.cache
    def _builtins(pkg):
        return [name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]

    def _patch_builtin(pkg, builder, scope):
        """The interpreter looks all of the language through before each kernel, which takes longer than the kernel."""
        for name in _builtins(pkg):
            if tl.core.is_builtin(member := getattr(pkg, name)):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    interpreter._patch_builtin = _patch_builtin


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small matrices gain nothing from more threads, and tests run beside each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


@pytest.fixture
def normal(device: torch.device, generator: torch.Generator):
    """Draws fp32 tensors of a shape."""
    return lambda *shape: torch.randn(*shape, generator=generator, device=device)
