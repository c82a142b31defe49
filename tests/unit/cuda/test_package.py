"""Proves that asking for a GPU where there is none, or for kernels that are not installed, is answered with what to
do."""

import sys

import pytest
import torch

from prfaas.errors import ConfigError
from prfaas_worker.models.kimi_linear import cuda


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_named_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match="torch finds no GPU: run with the device 'cpu'"):
        cuda.load(tmp_path)


def test_missing_kernels_are_named_with_the_extra_that_brings_them(monkeypatch):
    pytest.importorskip("triton")
    from prfaas_worker.models.kimi_linear.cuda.chunked import chunk_rule

    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
    with pytest.raises(ConfigError, match=r"fla-core.*prfaas\[worker,cuda\]"):
        chunk_rule(torch.device("cuda"))
    assert callable(chunk_rule(torch.device("cpu")))
