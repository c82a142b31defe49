"""Runs in vLLM's own environment: makes tiny models of kinds that the built-in one is not, with random weights.

vLLM's own dummy weights are of no use here: they make each layer's part so small that bfloat16 loses it. Prints the
models' names in JSON.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, LlamaConfig, PretrainedConfig

COMMON = {
    "vocab_size": 264,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "dense": LlamaConfig(**COMMON, num_hidden_layers=3, intermediate_size=256, head_dim=32),
    "mamba2": GraniteMoeHybridConfig(
        **COMMON,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        intermediate_size=128,
        shared_intermediate_size=256,
        attention_multiplier=0.2,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_chunk_size=64,
    ),
}


def main() -> None:
    folder, tokenizer = Path(os.environ["MADE_FOLDER"]), Path(os.environ["MODEL_FOLDER"])
    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / name)
        for file in tokenizer.glob("tokenizer*"):
            shutil.copy(file, folder / name)
    print(json.dumps(list(CONFIGS)))


if __name__ == "__main__":
    main()
