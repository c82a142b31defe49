"""Trains the byte-level Qwen3-Next that ships with prfaas: about 1.2 M parameters, minutes on two processor threads.

It is the hybrid that our worker and vLLM both read, so that they can be held to each other. Gradients flow through
transformers' own layers, which our worker serves it with. Experts share the work by the loss term of the published
recipe. Weights are trained in fp32 and written in bf16, the one type in which vLLM runs such models. Text, tokens and
optimiser are those of all models that ship: `models/training.py`.

Sizes are chosen for tests: heads divide by two ranks, and vLLM's pages, as large as a layer's state, stay small.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import ASSETS, BOS, END_OF_TURN, EOS, PAD, Pass, Trainee, main

CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 320,
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "bos_token_id": BOS,
    "eos_token_id": [EOS, END_OF_TURN],
    "pad_token_id": PAD,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
# In the order of their ids, which follow the bytes'.
SPECIALS = ("bos", "eos", "pad", "user", "assistant", "system", "end_of_turn", "tool")
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": CONFIG["max_position_embeddings"],
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "pad_token": "<|pad|>",
}
GENERATION_CONFIG = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
BALANCE = 0.01


def initial_model() -> Qwen3NextForCausalLM:
    """Fresh parameters: matrices by their width, those that write to the residual stream smaller."""
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**CONFIG))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "embed_tokens" in name:
                tensor.normal_()
            elif tensor.ndim > 1:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj", "lm_head.weight")):
                tensor.mul_(0.2)
    return model


def trained_model(directory: Path) -> Qwen3NextForCausalLM:
    """A checkpoint of this script's, in fp32."""
    return Qwen3NextForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)


def forward(model: Qwen3NextForCausalLM, tokens: Tensor) -> Pass:
    """Run sequences [B, T] that start from nothing."""
    config = model.config
    made = model(tokens, use_cache=False, output_router_logits=True)
    picked = [layer.topk(config.num_experts_per_tok, dim=-1).indices for layer in made.router_logits]
    loads = [layer.flatten().bincount(minlength=config.num_experts).float() for layer in picked]
    balance = load_balancing_loss_func(made.router_logits, config.num_experts, config.num_experts_per_tok)
    return Pass(made.logits, loads, BALANCE * balance)


def unstacked(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The public names of a parameter: transformers keeps a layer's experts in one tensor, checkpoints do not."""
    layer, found, kind = name.rpartition(".experts.")
    if not found:
        return {name: tensor}
    if kind == "down_proj":
        return {f"{layer}.experts.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
    halves = {"gate_proj": tensor.chunk(2, dim=1)[0], "up_proj": tensor.chunk(2, dim=1)[1]}
    return {f"{layer}.experts.{i}.{half}.weight": one for half, part in halves.items() for i, one in enumerate(part)}


def byte_tokenizer() -> Tokenizer:
    """Bytes are their own ids; a plain prompt begins with BOS."""
    letters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return tokenizer


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_texts(output: Path) -> None:
    """Write all files but the weights."""
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "config.json", CONFIG)
    write_json(output / "generation_config.json", GENERATION_CONFIG)
    write_json(output / "tokenizer_config.json", TOKENIZER_CONFIG)
    byte_tokenizer().save(str(output / "tokenizer.json"), pretty=False)
    shutil.copyfile(ASSETS / "kimi-linear-tiny/chat_template.jinja", output / "chat_template.jinja")


class Trained(Trainee):
    """Qwen3-Next through transformers' own layers."""

    def __init__(self):
        self._model = initial_model()
        self.tensors = dict(self._model.named_parameters())

    def forward(self, tokens: Tensor) -> Pass:
        return forward(self._model, tokens)

    def write(self, output: Path) -> None:
        write_texts(output)
        self._model.bfloat16().float()
        public = {}
        for name, tensor in self._model.named_parameters():
            public |= unstacked(name, tensor.detach().bfloat16())
        weights = save({name: public[name].contiguous() for name in sorted(public)}, {"format": "pt"})
        (output / "model.safetensors").write_bytes(weights)


if __name__ == "__main__":
    main(__doc__, "qwen3-next-tiny", Trained)
