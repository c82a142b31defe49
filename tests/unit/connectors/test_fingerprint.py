"""The fingerprint of vLLM's connector: one model is one, wherever it lies; a fine-tuning of it is another."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prfaas_vllm.fingerprint import fingerprint_of, weights_digest

SHARD_BYTES = 3 << 20


class Config:
    def __init__(self, **fields: Any):
        self._fields = {"hidden_size": 64, "_name_or_path": "/models/a", "transformers_version": "5"} | fields

    def to_dict(self) -> dict[str, Any]:
        return self._fields


@dataclass
class Served:
    model: str
    revision: str | None = None
    dtype: str = "torch.bfloat16"
    quantization: str | None = None
    hf_config: Config = field(default_factory=Config)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for number in range(2):
        data = bytes(range(256)) * (SHARD_BYTES // 256)
        (directory / f"model-{number}.safetensors").write_bytes(bytes([number]) + data)
    return directory


def test_a_model_is_the_same_in_another_place_and_under_other_names(checkpoint: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for number in range(2):
        shutil.copy(checkpoint / f"model-{number}.safetensors", elsewhere / f"part{number}.safetensors")
    there = Served(str(elsewhere), hf_config=Config(_name_or_path="/models/b", transformers_version="4"))
    assert fingerprint_of(there, "auto") == fingerprint_of(Served(str(checkpoint)), "auto")


def test_other_weights_of_the_same_shapes_are_another_model(checkpoint: Path):
    before = fingerprint_of(Served(str(checkpoint)), "auto")
    path = checkpoint / "model-1.safetensors"
    # Training changes all numbers a little.
    path.write_bytes(bytes((value + 1) % 256 for value in path.read_bytes()))
    assert fingerprint_of(Served(str(checkpoint)), "auto") != before


@pytest.mark.parametrize(
    "change", [{"dtype": "torch.float16"}, {"quantization": "fp8"}, {"hf_config": Config(rope_theta=1e6)}]
)
def test_another_configuration_is_another_model(checkpoint: Path, change: dict[str, Any]):
    assert fingerprint_of(Served(str(checkpoint), **change), "auto") != fingerprint_of(Served(str(checkpoint)), "auto")
    assert fingerprint_of(Served(str(checkpoint)), "fp8") != fingerprint_of(Served(str(checkpoint)), "auto")


def test_without_files_only_the_configuration_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert weights_digest(tmp_path) == weights_digest(None) == ""
    found = [fingerprint_of(Served(name), "auto", str(tmp_path)) for name in ("org/model", "s3://bucket/model")]
    assert found[0] == found[1]
    assert "its weights are not compared" in caplog.text


def test_small_files_are_read_whole(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    found = set()
    for content in (b"", b"a", b"b", b"ab"):
        path.write_bytes(content)
        found.add(weights_digest(tmp_path))
    assert len(found) == 4
