"""Trains the byte-level models that ship with prfaas: text, tokens, optimiser and loop, whatever the architecture.

The text is the source of Python's own standard library, which every installation has. A part of it is turned into
questions and answers ("What does textwrap.dedent do?" and its docstring) with the special tokens of the chat template,
so that a chat request gets an answer of the right form.

Matrices learn by Muon (momentum made orthogonal by Newton-Schulz), everything else by Adam. Seeds are fixed; a budget
in steps gives the same run again on one machine, a budget in seconds depends on its load.
"""

import argparse
import ast
import math
import os
import sysconfig
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

BOS, EOS, PAD, USER, ASSISTANT, SYSTEM, END_OF_TURN = range(256, 263)
ASSETS = Path(__file__).parents[1] / "worker/prfaas_worker/assets"

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


class Pass(NamedTuple):
    """One pass over sequences [B, T]: logits [B, T, vocab], how often each layer of experts picked each of them, and
    what the loss gets besides."""

    logits: Tensor
    loads: list[Tensor]
    penalty: Tensor | float = 0.0


class Trainee(ABC):
    """An architecture in training: its parameters by name, and what it makes of tokens."""

    tensors: dict[str, Tensor]

    @abstractmethod
    def forward(self, tokens: Tensor) -> Pass:
        """Run sequences that start from nothing, with gradients."""

    def after_step(self, loads: list[Tensor]) -> None:  # noqa: B027, most have nothing to do
        """Change what learns by no gradient."""

    @abstractmethod
    def write(self, output: Path) -> None:
        """Write a checkpoint in the public layout; what remains in memory is what was written."""


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


class Optimiser:
    """Muon for matrices, grouped by shape so that each group is one batched product; Adam for the rest. A tensor
    [N, R, C] is N matrices, but for a convolution's [N, 1, taps]."""

    def __init__(self, tensors: dict[str, Tensor]):
        trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        self._groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for name, tensor in trained.items():
            is_matrix = tensor.ndim == 2 or (tensor.ndim == 3 and tensor.shape[1] > 1)
            if is_matrix and not name.startswith(("model.embed_tokens", "lm_head")):
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
            direction = gradient.lerp(momentum, 0.95).flatten(0, -3)
            update = orthogonal(direction).view_as(momentum) * max(1.0, shape[-2] / shape[-1]) ** 0.5
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


def bits_per_byte(trainee: Trainee) -> float:
    """Mean over the held-out modules' first 8,192 bytes each, from a fresh state."""
    root = Path(sysconfig.get_path("stdlib"))
    nats, count = 0.0, 0
    for module in HELD_OUT:
        tokens = torch.tensor([BOS, *(root / f"{module}.py").read_bytes()[:8192]]).unsqueeze(0)
        with torch.no_grad():
            logits = trainee.forward(tokens[:, :-1]).logits
        nats += F.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").item()
        count += tokens.shape[1] - 1
    return nats / count / math.log(2)


def train(trainee: Trainee, seconds: float, steps: int) -> None:
    """Train until either budget is spent."""
    generator = torch.Generator().manual_seed(1)
    text, talk = read_corpus(library_files())
    parameters = sum(tensor.numel() for tensor in trainee.tensors.values())
    print(f"{parameters:,} parameters, {text.numel():,} tokens of source, {talk.numel():,} of exchanges", flush=True)
    optimiser = Optimiser(trainee.tensors)
    chats = max(1, round(BATCH * CHAT_FRACTION))
    start, done, step = time.monotonic(), 0.0, 0
    losses: deque[float] = deque(maxlen=50)
    while done < 1.0:
        batch = torch.cat([windows(text, BATCH - chats, generator), windows(talk, chats, generator)])
        made = trainee.forward(batch[:, :-1])
        loss = F.cross_entropy(made.logits.flatten(0, 1), batch[:, 1:].flatten())
        (loss + made.penalty).backward()
        step += 1
        elapsed = time.monotonic() - start
        done = max(elapsed / seconds, step / steps)
        optimiser.step(rate_scale(done))
        trainee.after_step(made.loads)
        losses.append(loss.item())
        if step % 50 == 0 or done >= 1.0:
            bits = sum(losses) / len(losses) / math.log(2)
            print(f"step {step:5d}  {elapsed:6.0f} s  {min(done, 1):4.0%}  training {bits:.3f} bits/byte", flush=True)


def main(description: str | None, name: str, make: Callable[[], Trainee]) -> None:
    """Parse a script's command line, train what `make` gives, write it and measure it."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog="example: OMP_NUM_THREADS=2 python train.py --seconds 540",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=600, help="wall-clock budget (default 600)")
    parser.add_argument(
        "--steps", type=int, default=100_000, help="step budget; the first of both to be spent ends the run"
    )
    parser.add_argument(
        "--output", type=Path, default=ASSETS / name, help="directory of the checkpoint (default: the package's)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    torch.manual_seed(0)
    trainee = make()
    train(trainee, arguments.seconds, arguments.steps)
    trainee.write(arguments.output)
    print(f"held-out {bits_per_byte(trainee):.3f} bits/byte; wrote {arguments.output}")
