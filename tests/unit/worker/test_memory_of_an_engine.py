"""Memory is added up before it is taken: --cache-mib is all of the cache, and a refusal names only set flags."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file

from prfaas.errors import CapacityError, ConfigError
from prfaas.util import MIB
from prfaas_worker import memory as host_memory
from prfaas_worker.assets import model_directory
from prfaas_worker.engine import __main__ as process
from prfaas_worker.engine import assembly, wiring
from prfaas_worker.models.base import Model
from prfaas_worker.models.kimi_linear.checkpoint import SafetensorsCheckpoint
from prfaas_worker.models.kimi_linear.model import KimiLinear
from prfaas_worker.models.qwen3_next.model import load_causal_model
from prfaas_worker.options import Options

TINY = "builtin:kimi-linear-tiny"


def options(**more: Any) -> Options:
    return Options(model_source=TINY, model_name="tiny", profile_seconds=0.0, **more)


def reserved(model: Model, chosen: Options) -> Any:
    """The memory of an engine that is made with these options."""
    outbox: Any = SimpleNamespace(put=lambda _: None)
    engine, _ = assembly.assemble(model, chosen, outbox)
    return engine.runner.memory


@pytest.mark.parametrize(("cache_mib", "max_running"), [(64, 1), (64, 32), (96, 300), (40, 8)])
def test_the_states_of_running_sequences_are_in_the_caches_memory(model: Model, cache_mib: int, max_running: int):
    memory = reserved(model, options(cache_mib=cache_mib, max_running=max_running))
    nbytes = memory.pages.nbytes + memory.slots.nbytes
    assert cache_mib * MIB - memory.geometry.page_bytes < nbytes <= cache_mib * MIB
    assert memory.num_slots == 2 * max_running, "caches that leave have some, too"


def test_the_log_says_what_the_cache_takes(model: Model, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        reserved(model, options(cache_mib=64, max_running=16))
    line = "the cache has 64 MiB: 3968 pages of 64 tokens, and 2 MiB for the states of 32 sequences"
    assert line in caplog.messages


def test_too_many_states_are_refused_with_the_name_of_their_flag(model: Model):
    with pytest.raises(ConfigError) as refused:
        reserved(model, options(cache_mib=64, max_running=600))
    assert str(refused.value) == (
        "--cache-mib 64 is too little for the states of 1200 sequences (75 MiB, --max-running) and one sequence of "
        "131072 tokens that comes from another instance (33 MiB, --max-context): give --cache-mib 108 or more, or a "
        "smaller --max-context or --max-running"
    )


def test_calls_no_default_that_is_too_little_a_flag(model: Model):
    with pytest.raises(ConfigError) as refused:
        reserved(model, options(max_running=20_000))
    assert str(refused.value).startswith("the cache's 1024 MiB are too little for the states of 40000 sequences")
    assert "give --cache-mib" in str(refused.value)


def test_a_cache_beyond_the_machines_memory_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wiring, "available_bytes", lambda: 100 * MIB)
    reserved(model, options(cache_mib=90))
    reserved(model, options())  # the default: what is not used costs nothing
    with pytest.raises(ConfigError, match="--cache-mib 101 is more than the 100 MiB of memory that are available"):
        reserved(model, options(cache_mib=101))


def test_weights_beyond_the_machines_memory_are_refused_before_one_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 4_000_000)
    monkeypatch.setattr(SafetensorsCheckpoint, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ConfigError, match=r"the weights take 0\.0047 GB, and 0\.004 GB of memory are available"):
        KimiLinear.load(model_directory(TINY), "float32")


def test_weights_of_qwen3_next_are_added_up_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import torch

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_experts": 2, "vocab_size": 1000}
    config = {"model_type": "qwen3_next"} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {"model.embed_tokens.weight": torch.zeros(1000, 64, dtype=torch.bfloat16)}, tmp_path / "model.safetensors"
    )
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 255_999)
    with pytest.raises(ConfigError, match=r"the weights take 0\.00026 GB, and 0\.00026 GB of memory are available"):
        load_causal_model(tmp_path)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 256_000)
    with pytest.raises(ConfigError, match=r"do not fit config|cannot load"):
        load_causal_model(tmp_path)


def test_no_memory_for_a_first_step_is_a_sentence_for_the_front_and_no_traceback(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise CapacityError("no memory left to compute this step: 3 GiB asked for")

    monkeypatch.setattr(assembly, "load_and_assemble", fail)
    sent: list[bytes] = []
    front: Any = SimpleNamespace(sendall=sent.append)
    with pytest.raises(SystemExit):
        process._run(options(), front)
    assert b"no memory left to compute this step: 3 GiB asked for" in b"".join(sent)
