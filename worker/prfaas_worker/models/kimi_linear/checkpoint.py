"""Reads a checkpoint's safetensors files: mapped, one tensor at a time, straight to where a layer wants it.

The headers of the files show all that can be wrong, before any weight is read. The headers show missing files that an
index names, damaged or cut files, and every tensor that does not fit the config. The config by itself gives the name
and the shape of each tensor in the public layout.

Tensors are hashed while they are read, so that the fingerprint costs no second reading of what may be hundreds of
gigabytes. The fingerprint is SHA-256 over config.json and, for each tensor by public name, its type, shape and the
XXH3-128 of its bytes. It covers every byte, whatever files they are spread over. Equal fingerprints mean equal weights
but for an accident of 2^-64 at worst. It does not withstand deliberate collisions, which XXH3 does not prevent.
"""

import hashlib
import itertools
import json
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from prfaas.errors import ConfigError, InternalError
from prfaas_worker.assets import read_object
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig

Shape = tuple[int, ...]

# By safetensors' names: the types that weights may have. Each becomes fp32 without loss.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# The matrices that make up the work.
_PRODUCTS = re.compile(r"\b([qkvo]_proj|kv_a_proj_with_mqa|(gate|up|down)_proj|w[123])\.weight$")
# Read, hashed and released at once.
_PIECE_BYTES = 2 << 20
# The kernel may map so much, a large folio, around a page that is touched: given back too, or it would stay.
_MAPPED_AROUND = 2 << 20
_HEADER_LENGTH = struct.Struct("<Q")


def expected_shapes(config: KimiLinearConfig) -> dict[str, Shape]:
    """Public name -> shape of every tensor of a checkpoint with this config."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer, (kind, dense) in enumerate(zip(config.layer_kinds, config.dense_layers, strict=True)):
        prefix = f"model.layers.{layer}."
        attention = _kda_shapes(config) if kind == "linear" else _mla_shapes(config)
        feed_forward = _mlp_shapes("mlp.", hidden, config.intermediate_size) if dense else _moe_shapes(config)
        norms = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        shapes |= {prefix + name: shape for name, shape in {**norms, **attention, **feed_forward}.items()}
    return shapes


def _kda_shapes(config: KimiLinearConfig) -> dict[str, Shape]:
    size, head, hidden = config.kda_size, config.kda_head_size, config.hidden_size
    shapes: dict[str, Shape] = {
        "A_log": (1, 1, config.kda_heads, 1),
        "dt_bias": (size,),
        "f_a_proj.weight": (head, hidden),
        "f_b_proj.weight": (size, head),
        "b_proj.weight": (config.kda_heads, hidden),
        "g_a_proj.weight": (head, hidden),
        "g_b_proj.weight": (size, head),
        "o_norm.weight": (head,),
        "o_proj.weight": (hidden, size),
    }
    for name in ("q", "k", "v"):
        shapes[f"{name}_proj.weight"] = (size, hidden)
        shapes[f"{name}_conv1d.weight"] = (size, 1, config.conv_kernel)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _mla_shapes(config: KimiLinearConfig) -> dict[str, Shape]:
    heads, hidden = config.num_heads, config.hidden_size
    return {
        "self_attn.q_proj.weight": (heads * config.key_size, hidden),
        "self_attn.kv_a_proj_with_mqa.weight": (config.latent_size + config.shared_key_size, hidden),
        "self_attn.kv_a_layernorm.weight": (config.latent_size,),
        "self_attn.kv_b_proj.weight": (heads * (config.nope_size + config.value_size), config.latent_size),
        "self_attn.o_proj.weight": (hidden, heads * config.value_size),
    }


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }


def _moe_shapes(config: KimiLinearConfig) -> dict[str, Shape]:
    hidden, size = config.hidden_size, config.expert_size
    shapes: dict[str, Shape] = {
        "block_sparse_moe.gate.weight": (config.num_experts, hidden),
        "block_sparse_moe.gate.e_score_correction_bias": (config.num_experts,),
        **_mlp_shapes("block_sparse_moe.shared_experts.", hidden, config.shared_experts * size),
    }
    for expert in range(config.num_experts):
        prefix = f"block_sparse_moe.experts.{expert}."
        shapes |= {f"{prefix}w1.weight": (size, hidden), f"{prefix}w3.weight": (size, hidden)}
        shapes[f"{prefix}w2.weight"] = (hidden, size)
    return shapes


def weight_bytes(config: KimiLinearConfig, products: torch.dtype) -> int:
    """Bytes of the weights with products of this type and all else in fp32."""
    return sum(
        math.prod(shape) * (products if _PRODUCTS.search(name) else torch.float32).itemsize
        for name, shape in expected_shapes(config).items()
    )


def describe_differences(expected: Mapping[str, Shape], found: Mapping[str, tuple[str, Shape]]) -> list[str]:
    """One line per tensor that is missing, unknown, of another shape or not a float, sorted by name. `found` maps names
    to safetensors' dtype name and shape."""
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            lines.append(f"{name}: missing, shape {list(expected[name])}")
            continue
        dtype, shape = found[name]
        if name not in expected:
            lines.append(f"{name}: not in this architecture, shape {list(shape)}")
        elif shape != expected[name]:
            lines.append(f"{name}: shape {list(shape)}, the config asks for {list(expected[name])}")
        elif dtype not in _DTYPES:
            lines.append(f"{name}: type {dtype}, weights may be {', '.join(_DTYPES)}")
    return lines


def public_name(name: str, config: KimiLinearConfig) -> str:
    """Map transformers' name of a dense MLP (block_sparse_moe.gate_proj) to the public one (mlp.gate_proj)."""
    prefix, found, rest = name.partition("block_sparse_moe.")
    dense = {f"model.layers.{layer}." for layer, dense in enumerate(config.dense_layers) if dense}
    return f"{prefix}mlp.{rest}" if found and prefix in dense else name


class _Stored(NamedTuple):
    file: Path
    dtype: str
    shape: Shape
    start: int
    end: int


class SafetensorsCheckpoint:
    """The tensors of one directory, by public name; complete and of the right shapes."""

    def __init__(self, directory: Path, config: KimiLinearConfig):
        """Read the headers. Raises ConfigError with a list of all differences from the config."""
        self._directory = directory
        stored = [one for file in weight_files(directory) for one in _header(file)]
        expected = expected_shapes(config)
        self._stored = {public_name(name, config): where for name, where in stored}
        for name, where in self._stored.items():
            # Newer tools write A_log flat. It is the same tensor, and has the same fingerprint.
            if name.endswith(".A_log") and where.shape == (config.kda_heads,) and name in expected:
                self._stored[name] = where._replace(shape=expected[name])
        found = {name: (where.dtype, where.shape) for name, where in self._stored.items()}
        differences = describe_differences(expected, found)
        counts = Counter(name for name, _ in stored)
        differences += [f"{name}: in more than one file" for name in sorted(counts) if counts[name] > 1]
        if differences:
            raise ConfigError(f"{directory}: the weights do not fit config.json:\n  " + "\n  ".join(differences))
        self._maps: dict[Path, mmap.mmap] = {}
        self._hashes: dict[str, str] = {}

    def shape(self, name: str) -> Shape:
        return self._stored[name].shape

    def read(self, name: str, target: Tensor) -> None:
        """Copy a tensor into `target`, of the same shape or contiguous with as many numbers."""
        where = self._stored[name]
        digest = xxhash.xxh3_128()
        # A target that is not contiguous is filled at once: a few megabytes, which the caller sees to.
        whole = not target.is_contiguous() and target.shape == where.shape
        flat = target if whole else target.view(-1)
        at = 0
        for piece in self._pieces(where, where.end - where.start if whole else _PIECE_BYTES):
            digest.update(piece.view(torch.uint8).numpy().data)
            if whole:
                flat.copy_(piece.view(where.shape))
            else:
                flat[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
        self._hashes[name] = digest.hexdigest()

    def fingerprint(self) -> str:
        """SHA-256, hex, of configuration and weights; every tensor must have been read."""
        if unread := self._stored.keys() - self._hashes.keys():
            raise InternalError(f"fingerprint of {self._directory} asked before {sorted(unread)[0]} was read")
        digest = hashlib.sha256(json.dumps(read_object(self._directory / "config.json"), sort_keys=True).encode())
        for name in sorted(self._stored):
            where = self._stored[name]
            digest.update(f"\n{name} {where.dtype} {list(where.shape)} {self._hashes[name]}".encode())
        return digest.hexdigest()

    def _pieces(self, where: _Stored, size_bytes: int) -> Iterator[Tensor]:
        """Yield a tensor's numbers in pieces [n] that view the mapped file; release each after use."""
        mapped = self._mapped(where.file)
        for start in range(where.start, where.end, size_bytes):
            count = min(size_bytes, where.end - start)
            yield torch.frombuffer(memoryview(mapped)[start : start + count], dtype=_DTYPES[where.dtype])
            first = max(0, start - start % mmap.PAGESIZE - _MAPPED_AROUND)
            last = min(len(mapped), start + count + _MAPPED_AROUND)
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _mapped(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as opened:
                # Copy on write, though nothing is written: torch warns of memory that it could not write to.
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def weight_files(directory: Path) -> list[Path]:
    """Return the files that an index names, else model*.safetensors. Raises ConfigError if one is not there."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            files = sorted({directory / name for name in read_object(index)["weight_map"].values()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}: has no weight_map from tensors to files") from error
        if missing := [file.name for file in files if not file.is_file()]:
            raise ConfigError(f"{directory}: the index names files that are not there: {', '.join(missing)}")
    else:
        files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise ConfigError(f"{directory}: no model*.safetensors; put the checkpoint's weights there")
    return files


def _header(file: Path) -> list[tuple[str, _Stored]]:
    try:
        with file.open("rb") as opened:
            (length,) = _HEADER_LENGTH.unpack(opened.read(_HEADER_LENGTH.size))
            size = file.stat().st_size
            header = json.loads(opened.read(min(length, size)))
        begin = _HEADER_LENGTH.size + length
        return [(name, _stored(file, entry, begin, size)) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{file}: the weights cannot be read, fetch them again: {error}") from error


def _stored(file: Path, entry: dict[str, Any], begin: int, size: int) -> _Stored:
    start, end = (begin + offset for offset in entry["data_offsets"])
    shape = tuple(entry["shape"])
    if not begin <= start <= end <= size:
        raise ValueError(f"a tensor would end at byte {end}, the file has {size}")
    if (dtype := _DTYPES.get(entry["dtype"])) and end - start != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for a tensor of shape {list(shape)} and type {entry['dtype']}")
    return _Stored(file, entry["dtype"], shape, start, end)


class Weights:
    """Tensors by public name, seen from one prefix: `weights["q_proj"]` is <prefix>q_proj.weight, fp32 on `device`.

    The matrices that make up the work, *products*, may be bf16, summed in fp32: projections, MLPs and experts. All
    others are fp32: norms, gates, decays, the router, attention, the head. Whatever is joined is made in place on the
    device, one tensor of the checkpoint at a time: no more than a piece of a file is in memory beside the weights. The
    tensors may also be parameters in training: gradients flow to them. So parts are slices: autograd lets nobody write
    into what `split` or a loop over a tensor gives.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | SafetensorsCheckpoint,
        products: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefix: str = "",
    ):
        self._tensors, self._products, self._prefix = tensors, products, prefix
        self.device = torch.device(device)

    def under(self, name: str) -> "Weights":
        return Weights(self._tensors, self._products, self.device, f"{self._prefix}{name}.")

    def raw(self, name: str) -> Tensor:
        full = self._prefix + name
        if not isinstance(self._tensors, SafetensorsCheckpoint):
            return self._tensors[full].to(self.device)
        tensor = torch.empty(self._tensors.shape(full), device=self.device)
        self._tensors.read(full, tensor)
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.raw(f"{name}.weight")

    def product(self, names: Sequence[str], *, columns: Tensor | None = None) -> Tensor:
        """`joined` in the type of products."""
        return self.joined(names, columns=columns, dtype=self._products)

    def joined(
        self, names: Sequence[str], *, columns: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Concatenate tensors along their first axis, with columns multiplied by `columns`."""
        shapes = [self._shape(name) for name in names]
        joined = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype, device=self.device)
        ends = list(itertools.accumulate(shape[0] for shape in shapes))
        for name, start, end in zip(names, [0, *ends], ends, strict=False):
            self._copy(name, joined[start:end])
        return joined if columns is None else joined.mul_(columns)

    def experts(self, pairs: Sequence[tuple[str, str]], shared: tuple[str, str], columns: Tensor) -> Tensor:
        """Stack each expert's two matrices [size, D]: products [experts, 2 size, D], times `columns`. The two `shared`
        matrices [n size, D] become n more experts at the end."""
        size, width = self._shape(pairs[0][0])
        count = len(pairs) + self._shape(shared[0])[0] // size
        stacked = torch.empty(count, 2, size, width, dtype=self._products, device=self.device)
        for expert, pair in enumerate(pairs):
            for half, name in enumerate(pair):
                self._copy(name, stacked[expert, half])
        for half, name in enumerate(shared):
            self._copy(name, stacked[len(pairs) :, half])
        for expert in range(count):
            stacked[expert].mul_(columns)  # one by one, since bf16 is multiplied in an fp32 copy
        return stacked.flatten(1, 2)

    def experts_transposed(self, names: Sequence[str], shared: str, size: int) -> Tensor:
        """Each expert's matrix [D, size], then `shared` [D, n size] as n more: products [experts, size, D]."""
        width, shared_size = self._shape(shared)
        stacked = torch.empty(len(names) * size + shared_size, width, dtype=self._products, device=self.device)
        for expert, name in enumerate(names):
            self._copy(name, stacked[expert * size : (expert + 1) * size].T)
        self._copy(shared, stacked[len(names) * size :].T)
        return stacked.view(-1, size, width)

    def _shape(self, name: str) -> tuple[int, ...]:
        full = f"{self._prefix}{name}.weight"
        if isinstance(self._tensors, SafetensorsCheckpoint):
            return self._tensors.shape(full)
        return tuple(self._tensors[full].shape)

    def _copy(self, name: str, target: Tensor) -> None:
        full = f"{self._prefix}{name}.weight"
        if isinstance(self._tensors, SafetensorsCheckpoint):
            self._tensors.read(full, target)
        else:
            target.copy_(self._tensors[full].view(target.shape))
