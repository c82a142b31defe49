"""Trains the byte-level Kimi Linear that ships with prfaas: about 1.2 M parameters, minutes on two processor threads.

The text is the source of Python's own standard library, which every installation has. A part of it is turned into
questions and answers ("What does textwrap.dedent do?" and its docstring) with the special tokens of the chat template,
so that a chat request gets an answer of the right form. The layers are those that serve: gradients flow through the
worker's own blocks and its chunked KDA kernel, so what is trained is what runs.

Matrices learn by Muon (momentum made orthogonal by Newton-Schulz), everything else by Adam; the experts' correction
biases follow their load, as in the published recipe. Seeds are fixed; a budget in steps gives the same run again on one
machine, a budget in seconds depends on its load.
"""

import argparse
import ast
import json
import math
import os
import sysconfig
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.models.kimi_linear.checkpoint import expected_shapes
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig, parse_config
from prfaas_worker.models.kimi_linear.layers import MixtureOfExperts
from prfaas_worker.models.kimi_linear.model import KimiLinear

BOS, EOS, PAD, USER, ASSISTANT, SYSTEM, END_OF_TURN = range(256, 263)
OUTPUT = Path(__file__).parents[2] / "worker/prfaas_worker/assets/kimi-linear-tiny"

CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "float32",
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 320,
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "model_max_length": 131072,
    "bos_token_id": BOS,
    "eos_token_id": [EOS, END_OF_TURN],
    "pad_token_id": PAD,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 56,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "linear_attn_config": {
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
    },
}

# Never trained on, so that anyone can measure the model on new text: modules that every Python from 3.11 has.
HELD_OUT = (
    "argparse",
    "bisect",
    "calendar",
    "colorsys",
    "fnmatch",
    "heapq",
    "sched",
    "shlex",
    "statistics",
    "textwrap",
)
# Tables, tests, and packages that distributions leave out.
SKIPPED_DIRECTORIES = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "ensurepip",
}

SEQUENCE = 512
BATCH = 8
CHAT_FRACTION = 0.15
MUON_RATE, ADAM_RATE = 0.02, 0.004
WARMUP, COOLDOWN = 0.02, 0.5
BIAS_RATE = 0.001


def library_files() -> list[Path]:
    """Source files of the standard library, sorted, held-out modules left out."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        path
        for path in root.rglob("*.py")
        if not SKIPPED_DIRECTORIES & set(path.relative_to(root).parts) and path.stem not in HELD_OUT
    )


def as_tokens(text: str) -> list[int]:
    """Bytes are their own ids."""
    return list(text.encode())


def chat(question: str, answer: str) -> list[int]:
    """One exchange as the chat template writes it."""
    return [BOS, USER, *as_tokens(question), END_OF_TURN, ASSISTANT, *as_tokens(answer), END_OF_TURN]


def exchanges(path: Path, source: str) -> Iterator[list[int]]:
    """A question and its docstring for each documented function and class of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) > 30:
                yield chat(f"What does {path.stem}.{node.name} do?", docstring.split("\n\n")[0])


def read_corpus(files: list[Path]) -> tuple[Tensor, Tensor]:
    """All files as one sequence of tokens, and all exchanges as another, int64."""
    text: list[int] = []
    talk: list[int] = []
    for path in files:
        source = path.read_text(encoding="utf-8", errors="replace")
        text += [BOS, *as_tokens(source), EOS]
        for exchange in exchanges(path, source):
            talk += exchange
    return torch.tensor(text), torch.tensor(talk)


def initial_tensors(config: KimiLinearConfig) -> dict[str, Tensor]:
    """Fresh parameters by public name."""
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("A_log"):
            tensor = torch.empty(shape).uniform_(1, 16).log()
        elif name.endswith("dt_bias"):
            step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            tensor = step + torch.log(-torch.expm1(-step))  # the inverse of softplus
        elif "norm" in name:
            tensor = torch.ones(shape)
        elif "correction_bias" in name:
            tensor = torch.zeros(shape)
        elif "embed_tokens" in name:
            tensor = torch.randn(shape)
        else:
            tensor = torch.randn(shape) * shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight", "lm_head.weight")):
            tensor *= 0.2
        tensors[name] = tensor.requires_grad_("correction_bias" not in name)
    return tensors


def forward(config: KimiLinearConfig, tensors: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, T, vocab] of sequences [B, T] that start from nothing, and how often each layer picks each expert."""
    model = KimiLinear(config, tensors, fingerprint="in training")
    x = F.embedding(tokens, model.embedding)
    loads = []
    for block in model.blocks:
        x = x + block.attention.prefill(block.normed(x))
        normed = block.normed(x)
        if isinstance(block.feed_forward, MixtureOfExperts):
            picked, _ = block.feed_forward.route(normed.detach().flatten(0, 1))
            loads.append(picked.flatten().bincount(minlength=config.num_experts).float())
        x = x + block.feed_forward(normed)
    return model.logits(model.final_norm(x)), loads


def balance(tensors: dict[str, Tensor], loads: list[Tensor]) -> None:
    """Move correction biases against the load: an expert picked less often than others gets easier to pick."""
    biases = [tensor for name, tensor in tensors.items() if "correction_bias" in name]
    for bias, load in zip(biases, loads, strict=True):
        bias.add_((load.mean() - load).sign(), alpha=BIAS_RATE)


class Optimiser:
    """Muon for matrices, grouped by shape so that each group is one batched product; Adam for the rest."""

    def __init__(self, tensors: dict[str, Tensor]):
        trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        self._groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for name, tensor in trained.items():
            if tensor.ndim == 2 and not name.startswith(("model.embed_tokens", "lm_head")):
                self._groups[tuple(tensor.shape)].append(tensor)
        self._momentum = {shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()}
        matrices = {id(tensor) for group in self._groups.values() for tensor in group}
        rest = [tensor for tensor in trained.values() if id(tensor) not in matrices]
        self._adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Take one step at `scale` times the full rates and forget the gradients."""
        for group in self._adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        self._adam.step()
        self._adam.zero_grad()
        for shape, group in self._groups.items():
            gradient = torch.stack([torch.zeros_like(t) if t.grad is None else t.grad for t in group])
            momentum = self._momentum[shape].lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95)) * max(1.0, shape[0] / shape[1]) ** 0.5
            for tensor, change in zip(group, update, strict=True):
                tensor.mul_(1 - 0.05 * MUON_RATE * scale).sub_(change, alpha=MUON_RATE * scale)
                tensor.grad = None


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearest orthogonal matrices of a batch [N, R, C], roughly: five Newton-Schulz steps with Muon's coefficients."""
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.mT


def rate_scale(done: float) -> float:
    """Share of the full learning rate after the fraction `done` of the run: up, level, down to a tenth."""
    return min(1.0, done / WARMUP, 0.1 + 0.9 * (1 - done) / COOLDOWN)


def windows(tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` random stretches of SEQUENCE + 1 tokens."""
    starts = torch.randint(tokens.numel() - SEQUENCE, (count, 1), generator=generator)
    return tokens[starts + torch.arange(SEQUENCE + 1)]


def bits_per_byte(config: KimiLinearConfig, tensors: dict[str, Tensor]) -> float:
    """Mean over the held-out modules' first 8,192 bytes each, from a fresh state."""
    root = Path(sysconfig.get_path("stdlib"))
    nats, count = 0.0, 0
    for module in HELD_OUT:
        tokens = torch.tensor([BOS, *(root / f"{module}.py").read_bytes()[:8192]]).unsqueeze(0)
        with torch.no_grad():
            logits, _ = forward(config, tensors, tokens[:, :-1])
        nats += F.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").item()
        count += tokens.shape[1] - 1
    return nats / count / math.log(2)


def write_checkpoint(tensors: dict[str, Tensor], output: Path) -> None:
    """config.json and model.safetensors in the public layout."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    weights = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    (output / "model.safetensors").write_bytes(weights)


def train(seconds: float, steps: int, output: Path) -> None:
    """Train until either budget is spent, report held-out bits per byte, write the checkpoint."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    config = parse_config(CONFIG)
    text, talk = read_corpus(library_files())
    tensors = initial_tensors(config)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"{parameters:,} parameters, {text.numel():,} tokens of source, {talk.numel():,} of exchanges", flush=True)
    optimiser = Optimiser(tensors)
    chats = max(1, round(BATCH * CHAT_FRACTION))
    start, done, step = time.monotonic(), 0.0, 0
    losses: deque[float] = deque(maxlen=50)
    while done < 1.0:
        batch = torch.cat([windows(text, BATCH - chats, generator), windows(talk, chats, generator)])
        logits, loads = forward(config, tensors, batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        step += 1
        elapsed = time.monotonic() - start
        done = max(elapsed / seconds, step / steps)
        optimiser.step(rate_scale(done))
        balance(tensors, loads)
        losses.append(loss.item())
        if step % 50 == 0 or done >= 1.0:
            bits = sum(losses) / len(losses) / math.log(2)
            print(f"step {step:5d}  {elapsed:6.0f} s  {min(done, 1):4.0%}  training {bits:.3f} bits/byte", flush=True)
    write_checkpoint(tensors, output)
    print(f"held-out {bits_per_byte(config, tensors):.3f} bits/byte; wrote {output}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: OMP_NUM_THREADS=2 python train.py --seconds 540",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=600, help="wall-clock budget (default 600)")
    parser.add_argument(
        "--steps", type=int, default=100_000, help="step budget; the first of both to be spent ends the run"
    )
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, help="directory of the checkpoint (default: the package's)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    train(arguments.seconds, arguments.steps, arguments.output)


if __name__ == "__main__":
    main()
