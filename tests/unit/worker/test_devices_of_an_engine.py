"""Which device an engine runs on when a GPU has room for a model's weights and none for its cache."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from prfaas.errors import CapacityError, ConfigError
from prfaas_worker.engine import assembly
from prfaas_worker.models import load_model
from prfaas_worker.options import Options

SOURCE = "builtin:kimi-linear-tiny"


def options(device: Any, **more: Any) -> Options:
    return Options(model_source=SOURCE, model_name="tiny", device=device, **more)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU with 20 MiB free, whose models stand on the CPU and say that they are there; the requested devices."""
    devices: list[str] = []

    def load(source: str, threads: int | None, device: str, dtype: str) -> tuple[Any, Path]:
        devices.append(device)
        model, directory = load_model(source, threads, "cpu", "float32")
        if device == "cpu":
            return model, directory
        fields = ("layers", "max_context", "fingerprint", "attention_kind", "hidden_size", "vocab_size")
        there = {name: getattr(model, name) for name in fields}
        return SimpleNamespace(**there, device=torch.device("cuda"), eos_token_ids=model.eos_token_ids), directory

    monkeypatch.setattr(assembly, "load_model", load)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 << 20, 80 << 30))
    return devices


def build(chosen: Options) -> str:
    model, *_ = assembly.load_and_assemble(chosen, cast("Any", SimpleNamespace(put=lambda _: None)))
    return model.device.type


def test_auto_takes_the_cpu_where_the_cache_does_not_fit_the_gpu(loads, caplog):
    with caplog.at_level(logging.WARNING):
        assert build(options("auto", profile_seconds=0.0)) == "cpu"
    assert loads == ["auto", "cpu"]
    (line,) = caplog.records
    assert "the model runs on the CPU, not on the GPU: the weights leave 18 MiB of the GPU's memory" in line.message
    assert "give a smaller --max-context" in line.message


def test_auto_takes_the_cpu_where_the_first_prefills_find_no_memory(loads, monkeypatch, caplog):
    real = assembly.assemble

    def assemble(model: Any, *rest: Any) -> Any:
        if model.device.type == "cuda":
            raise CapacityError("no memory left to compute this step")
        return real(model, *rest)

    monkeypatch.setattr(assembly, "assemble", assemble)
    assert build(options("auto", profile_seconds=0.0)) == "cpu"
    assert loads == ["auto", "cpu"]


def test_replaces_no_requested_gpu_and_blames_no_absent_flag(loads):
    with pytest.raises(ConfigError) as refused:
        build(options("cuda"))
    assert loads == ["cuda"]
    assert "--cache-mib" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"--cache-mib 18 is too little .* give --cache-mib 3"):
        build(options("cuda", cache_mib=18))


def test_a_wrong_option_is_refused_on_the_cpu_too(loads):
    with pytest.raises(ConfigError, match="--max-context 1000000 is more than the 131072 tokens of this model"):
        build(options("auto", max_context_tokens=1_000_000))


def test_one_line_says_on_what_the_model_computes(loads, caplog):
    with caplog.at_level(logging.INFO):
        build(options("cpu", profile_seconds=0.0))
    lines = [record.message for record in caplog.records if "computes on" in record.message]
    threads = torch.get_num_threads()
    line = f"the model computes on the CPU with {threads} threads: float32 products, delta rule by plain torch"
    assert (lines, loads) == ([line], ["cpu"])


def test_a_gpu_is_called_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert assembly._device_name(torch.device("cuda")) == "the GPU NVIDIA H100 80GB HBM3"
