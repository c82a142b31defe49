"""The fingerprint of vLLM's connector: one model is one, wherever it lies; a fine-tuning of it is another."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prfaas_vllm.fingerprint import DraftLayers, fingerprint_of, weights_digest

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
    max_model_len: int = 4096
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


def test_what_changes_no_byte_of_a_cache_changes_no_fingerprint(checkpoint: Path):
    base = fingerprint_of(Served(str(checkpoint)), "auto")
    nested = Config(text_config={"layers": [1, 2]})
    assert fingerprint_of(Served(str(checkpoint), max_model_len=8192), "auto") == base
    assert fingerprint_of(Served(str(checkpoint)), "bfloat16") == base, "auto is the model's type"
    assert fingerprint_of(Served(str(checkpoint), hf_config=Config(max_model_len=8192)), "auto") == base
    own = Config(text_config={"layers": (1, 2), "_name_or_path": "/b", "max_model_len": 1, "transformers_version": "6"})
    assert fingerprint_of(Served("m", hf_config=own), "auto") == fingerprint_of(Served("m", hf_config=nested), "auto")
    assert fingerprint_of(Served("m"), "fp8") == fingerprint_of(Served("m"), "fp8_e4m3")


@pytest.mark.parametrize(
    ("change", "ours", "theirs"),
    [
        ({"dtype": "torch.float16"}, "dtype bfloat16,", "dtype float16,"),
        ({"quantization": "fp8"}, "quantization None,", "quantization fp8,"),
        ({"hf_config": Config(rope_theta=1e6)}, "configuration ", "configuration "),
        ({"hf_config": Config(text_config={"layers": [2, 1]})}, "configuration ", "configuration "),
    ],
)
def test_another_configuration_is_another_model_and_both_values_are_told(
    checkpoint: Path, change: dict[str, Any], ours: str, theirs: str
):
    here = fingerprint_of(Served(str(checkpoint)), "auto")
    there = fingerprint_of(Served(str(checkpoint), **change), "auto")
    assert here != there
    assert ours in here
    assert theirs in there
    assert len(here) < 200, "a longer one would be cut where both are shown"


def test_draft_layers_count_with_their_weights_and_are_told_by_their_method(checkpoint: Path, tmp_path: Path):
    """Their caches cross, too: what one draft's layers have computed is of no use to another's."""
    other, deeper = tmp_path / "draft", tmp_path / "deeper"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"other weights")
    shutil.copytree(checkpoint, deeper)
    (deeper / "config.json").write_text('{"num_hidden_layers": 2}')

    def of(method: str, draft: Served) -> str:
        return fingerprint_of(Served(str(checkpoint)), "auto", None, DraftLayers(method, draft))

    without, here = fingerprint_of(Served(str(checkpoint)), "auto"), of("mtp", Served(str(checkpoint)))
    assert without.endswith(", draft layers none")
    assert ", draft layers mtp " in here
    longer = Served(str(checkpoint), hf_config=Config(max_position_embeddings=8192))
    assert here == of("mtp", longer), "vLLM writes its own longest prompt there"
    changed = (Served(str(other)), Served(str(deeper)), Served(str(checkpoint), quantization="fp8"))
    found = {without, here, of("eagle3", Served(str(checkpoint))), *(of("mtp", draft) for draft in changed)}
    assert len(found) == 6
    assert max(map(len, found)) < 200, "a longer one would be cut where both are shown"


def test_another_type_of_caches_is_told():
    assert "cache fp8_e4m3," in fingerprint_of(Served("m"), "fp8")
    assert fingerprint_of(Served("m"), "fp8_e5m2") != fingerprint_of(Served("m"), "fp8")
    assert "dtype float16, cache float16," in fingerprint_of(Served("m", dtype="torch.float16"), "auto")


def test_a_longer_context_counts_where_vllm_computes_other_keys_for_it():
    """LongRoPE's factors for long contexts hold for every prompt of such an instance."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    for config in (Config(rope_parameters=rope), Config(text_config={"rope_parameters": {"full_attention": rope}})):
        short, edge, long = (
            fingerprint_of(Served("m", max_model_len=length, hf_config=config), "auto") for length in (2048, 4096, 4097)
        )
        assert short == edge
        assert "positions plain," in short
        assert "positions of long contexts," in long
    other = Config(rope_parameters=rope | {"rope_type": "yarn"})
    assert "positions plain," in fingerprint_of(Served("m", max_model_len=8192, hf_config=other), "auto")


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
