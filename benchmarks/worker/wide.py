"""A checkpoint whose cache is large beside its work, as a real model's is: random weights, wide latents, large states.

The model that ships along has 256 bytes a token: at 1 Gbit/s its caches stand for half a million prompt tokens a
second, and what a worker does for each token would drown what it does for each byte.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from prfaas_worker.assets import model_directory
from prfaas_worker.models.kimi_linear.checkpoint import expected_shapes
from prfaas_worker.models.kimi_linear.config import read_config

BUILTIN = "builtin:kimi-linear-tiny"


def write(directory: Path) -> Path:
    """Write it: 2.3 KB a token and 1.7 MB of state."""
    builtin = model_directory(BUILTIN)
    config = json.loads((builtin / "config.json").read_text())
    config |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    config["linear_attn_config"] |= {"head_dim": 128, "num_heads": 8}
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(builtin / "tokenizer_config.json", directory)
    torch.manual_seed(0)
    shapes = expected_shapes(read_config(directory))
    tensors = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory
