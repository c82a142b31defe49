"""A checkpoint's safetensors files, mapped: its tensors are read one at a time into place, and their pages given back.

All that can be wrong is found from the headers first: files that an index names and that are not there, damaged or cut
ones, tensors that do not fit the config. While tensors are read they are hashed, so that the fingerprint costs no
second reading of what may be hundreds of gigabytes: SHA-256 over config.json and, for each tensor by public name, its
type, shape and the XXH3-128 of its bytes. It covers every byte, whatever files they are spread over: equal fingerprints
mean equal weights but for an accident of 2^-64 at worst. It does not withstand somebody who makes two checkpoints that
differ and have one fingerprint, which XXH3 does not promise to.
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from prfaas.errors import ConfigError, InternalError
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig
from prfaas_worker.models.kimi_linear.shapes import Shape, describe_differences, expected_shapes, public_name

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What is read, hashed and given back at once.
_PIECE_BYTES = 2 << 20
# The kernel may map so much, a large folio, around a page that is touched: given back too, or it would stay.
_MAPPED_AROUND = 2 << 20
_HEADER_LENGTH = struct.Struct("<Q")


class _Stored(NamedTuple):
    """Where a tensor's bytes are."""

    file: Path
    dtype: str
    shape: Shape
    start: int
    end: int


class Checkpoint:
    """The tensors of one directory, by public name; complete and of the right shapes."""

    def __init__(self, directory: Path, config: KimiLinearConfig):
        """Read the headers.

        Raises:
            ConfigError: a file is missing, damaged or cut, or names, shapes and types are not exactly those of the
                config; the message lists all differences.

        """
        self._directory = directory
        stored = [one for file in _files(directory) for one in _header(file)]
        self._stored = {public_name(name, config): where for name, where in stored}
        found = {name: (where.dtype, where.shape) for name, where in self._stored.items()}
        differences = describe_differences(expected_shapes(config), found)
        differences += [f"{name}: in more than one file" for name in _repeated([name for name, _ in stored])]
        if differences:
            raise ConfigError(f"{directory}: the weights do not fit config.json:\n  " + "\n  ".join(differences))
        self._maps: dict[Path, mmap.mmap] = {}
        self._hashes: dict[str, str] = {}

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""
        return self._stored[name].shape

    def read(self, name: str, target: Tensor) -> None:
        """Copy a tensor into `target`, which has as many numbers: of the same shape, or any contiguous one."""
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
        digest = hashlib.sha256(json.dumps(_document(self._directory / "config.json"), sort_keys=True).encode())
        for name in sorted(self._stored):
            where = self._stored[name]
            digest.update(f"\n{name} {where.dtype} {list(where.shape)} {self._hashes[name]}".encode())
        return digest.hexdigest()

    def _pieces(self, where: _Stored, size_bytes: int) -> Iterator[Tensor]:
        """The numbers of a tensor in pieces [n] that view the mapped file; what was taken is given back."""
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


def _files(directory: Path) -> list[Path]:
    """The weights' files: those that the index names, or every model*.safetensors."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            files = sorted({directory / name for name in _document(index)["weight_map"].values()})
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
    """Name and place of each tensor of a file, of which only the header is read."""
    try:
        with file.open("rb") as opened:
            (length,) = _HEADER_LENGTH.unpack(opened.read(_HEADER_LENGTH.size))
            size = file.stat().st_size
            header = json.loads(opened.read(min(length, size)))
        begin = _HEADER_LENGTH.size + length
        return [(name, _stored(file, entry, begin, size)) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{file}: the weights cannot be read, fetch them again: {error}") from error


def _stored(file: Path, entry: dict[str, Any], begin: int, size: int) -> _Stored:
    start, end = (begin + offset for offset in entry["data_offsets"])
    shape = tuple(entry["shape"])
    if not begin <= start <= end <= size:
        raise ValueError(f"a tensor would end at byte {end}, the file has {size}")
    if (dtype := _DTYPES.get(entry["dtype"])) and end - start != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for a tensor of shape {list(shape)} and type {entry['dtype']}")
    return _Stored(file, entry["dtype"], shape, start, end)


def _document(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _repeated(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
