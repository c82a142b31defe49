"""A random Kimi Linear in transformers (the oracle) and the same weights, saved by it, behind our loader."""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prfaas_worker.models.base import Model
from prfaas_worker.models.kimi_linear.model import KimiLinear

# Standard deviation of the logits at which parity is asserted; random weights alone give a far smaller one, where any
# error would look small.
LOGIT_SCALE = 5.0

ORACLE_CONFIG = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 96,
    "routed_scaling_factor": 2.446,
    "model_max_length": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "linear_attn_config": {
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
    },
}


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Small matrices gain nothing from more threads, and tests run beside each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def oracle() -> torch.nn.Module:
    """transformers' own model in fp32, with logits of standard deviation LOGIT_SCALE."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # With these packages installed, transformers takes their GPU kernels even where there is no GPU.
        for package in ("fla", "causal_conv1d"):
            patch.setitem(sys.modules, package, None)
        # Deprecations inside third-party imports say nothing about us.
        warnings.simplefilter("ignore")
        from transformers import KimiLinearConfig, KimiLinearForCausalLM

        torch.manual_seed(0)
        model = KimiLinearForCausalLM(KimiLinearConfig(**ORACLE_CONFIG)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "A_log" not in name:
                # Wide enough that every layer matters, and embeddings so wide that the network does not amplify
                # rounding: with narrow ones, fp32 alone moves the logits after 1,500 tokens by 1e-4.
                parameter.normal_(0, 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.uniform_(-0.1, 0.1)
        logits = model(torch.randint(320, (1, 200))).logits
        model.lm_head.weight *= LOGIT_SCALE / logits.std()
    return model


@pytest.fixture(scope="package")
def checkpoint(oracle: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The oracle as its save_pretrained writes it, with the public configuration beside it."""
    directory = tmp_path_factory.mktemp("kimi-linear-random")
    oracle.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    public = {"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "moe_renormalize": True, "mla_use_nope": True}
    (directory / "config.json").write_text(json.dumps(config | ORACLE_CONFIG | public))
    return directory


@pytest.fixture
def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture(scope="package")
def model(checkpoint: Path) -> Model:
    """The same weights behind our loader."""
    return KimiLinear.load(checkpoint)
