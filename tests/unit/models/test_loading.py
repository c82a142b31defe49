"""Proves that a checkpoint in shards is loaded within a tenth more memory than its weights take, whatever its type, and
that everything wrong with its files is reported before a weight is read.

Memory is what the kernel says of a fresh process, less what the libraries take.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prfaas.errors import ConfigError
from prfaas_worker.models.kimi_linear.checkpoint import SafetensorsCheckpoint, expected_shapes
from prfaas_worker.models.kimi_linear.config import parse_config, read_config
from prfaas_worker.models.kimi_linear.model import KimiLinear

from .conftest import ORACLE_CONFIG

pytestmark = pytest.mark.system

# About 250 MB in fp32, spread over layers and experts as a large checkpoint's weights are.
CONFIG = ORACLE_CONFIG | {
    "model_type": "kimi_linear",
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "moe_renormalize": True,
    "hidden_size": 512,
    "vocab_size": 8192,
    "moe_intermediate_size": 512,
}
SHARDS = 5

MEASURE = """
import re, sys
from pathlib import Path
import torch
from prfaas_worker.models.kimi_linear.model import KimiLinear

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024

torch.randn(64, 64) @ torch.randn(64, 64)
before = peak()
model = KimiLinear.load(Path(sys.argv[1]))
print(peak() - before)
"""


def write_shards(directory: Path, dtype: torch.dtype) -> int:
    """Write a random checkpoint with an index; returns the bytes of its weights in fp32."""
    torch.manual_seed(0)
    tensors = {n: torch.randn(s).to(dtype) for n, s in expected_shapes(parse_config(CONFIG)).items()}
    names = sorted(tensors)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    files = {f"model-{i + 1:05}-of-{SHARDS:05}.safetensors": names[i::SHARDS] for i in range(SHARDS)}
    for file, chosen in files.items():
        save_file({name: tensors[name] for name in chosen}, directory / file)
    index = {"weight_map": {name: file for file, chosen in files.items() for name in chosen}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(4 * tensor.numel() for tensor in tensors.values())


def peak_bytes(directory: Path) -> int:
    command = [sys.executable, "-c", MEASURE, str(directory)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def shards(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A checkpoint in shards of either type, and the bytes of its weights in fp32."""
    directory = tmp_path_factory.mktemp("shards")
    yield directory, write_shards(directory, request.param)
    shutil.rmtree(directory)


def test_loading_takes_a_tenth_more_than_the_weights_at_most(shards):
    directory, weights_bytes = shards
    assert weights_bytes > 200 << 20
    assert peak_bytes(directory) <= 1.1 * weights_bytes


@pytest.fixture
def sharded(checkpoint: Path, tmp_path: Path) -> Callable[[dict[str, torch.Tensor]], Path]:
    """Writes weights as two files with an index, beside the oracle's configuration."""

    def write(weights: dict[str, torch.Tensor]) -> Path:
        (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
        names = sorted(weights)
        files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, chosen in files.items():
            save_file({name: weights[name] for name in chosen}, tmp_path / file)
        index = {"weight_map": {name: file for file, chosen in files.items() for name in chosen}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return tmp_path

    return write


def test_the_same_weights_in_other_files_are_the_same_model(sharded, weights, model):
    assert KimiLinear.load(sharded(weights)).fingerprint == model.fingerprint


def test_one_other_number_anywhere_is_another_model(sharded, weights, model):
    for name in ("model.embed_tokens.weight", "model.layers.5.block_sparse_moe.experts.3.w2.weight"):
        changed = weights | {name: weights[name].clone()}
        changed[name].view(-1)[-1] += 1e-3
        assert KimiLinear.load(sharded(changed)).fingerprint != model.fingerprint


def test_files_that_the_index_does_not_name_are_not_read(sharded, weights, model):
    directory = sharded(weights)
    save_file({"model.stray": torch.ones(3)}, directory / "model-old.safetensors")
    assert KimiLinear.load(directory).fingerprint == model.fingerprint


def test_an_index_that_names_absent_files_is_refused_with_their_names(sharded, weights):
    directory = sharded(weights)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names files that are not there: model-00002-of-00002\.safetensors"):
        KimiLinear.load(directory)
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weight_map"):
        KimiLinear.load(directory)


def test_reports_all_differences_and_reads_no_weight(sharded, weights, monkeypatch):
    for layer in range(8):
        for part in ("input", "post_attention"):
            del weights[f"model.layers.{layer}.{part}_layernorm.weight"]
    weights |= {f"model.more.{i}": torch.ones(2) for i in range(60)}
    weights["model.norm.weight"] = torch.ones(256, dtype=torch.int64)
    weights["lm_head.weight"] = torch.ones(320, 255)
    monkeypatch.setattr(SafetensorsCheckpoint, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ConfigError) as refused:
        KimiLinear.load(sharded(weights))
    lines = str(refused.value).splitlines()
    assert len(lines) == 1 + 16 + 60 + 2
    assert "  model.layers.1.input_layernorm.weight: missing, shape [256]" in lines
    assert "  model.more.7: not in this architecture, shape [2]" in lines
    assert "  model.norm.weight: type I64, weights may be F32, BF16, F16" in lines
    assert "  lm_head.weight: shape [320, 255], the config asks for [320, 256]" in lines


def test_a_tensor_in_two_files_is_refused(sharded, weights):
    directory = sharded(weights)
    (directory / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": weights["model.norm.weight"]}, directory / "model-more.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight: in more than one file"):
        KimiLinear.load(directory)


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:5], lambda b: b[:5000], lambda b: b[:-1], lambda b: b"\xff" * 8 + b[8:], lambda b: b[:8] + b"["],
    ids=["no header", "cut header", "last byte missing", "endless header", "no JSON"],
)
def test_a_damaged_file_is_refused_by_its_name(sharded, weights, damage):
    directory = sharded(weights)
    path = directory / "model-00002-of-00002.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"00002-of-00002\.safetensors: the weights cannot be read, fetch them again"):
        SafetensorsCheckpoint(directory, read_config(directory))
