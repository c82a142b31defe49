"""Proves that one model serves every device: on a pretended one it gives the CPU's logits and cache; and that `auto`
never fails, but takes the CPU and says why, where `cuda` is refused in a sentence.

No test here has a GPU. What is fla's is a stand-in with fla 0.6.0's signatures.
"""

import json
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from prfaas.errors import ConfigError
from prfaas_worker.assets import model_directory
from prfaas_worker.models import gpu, load_model
from prfaas_worker.models.base import Batch, Chunk, Decodes
from prfaas_worker.models.kimi_linear import mla
from prfaas_worker.models.kimi_linear import model as model_module
from prfaas_worker.models.kimi_linear.checkpoint import weight_bytes
from prfaas_worker.models.kimi_linear.delta_rule import TORCH_RULE, DeltaRule, choose_rule, fla_rule
from prfaas_worker.models.kimi_linear.mla import attend, attend_plainly
from prfaas_worker.models.kimi_linear.model import KimiLinear
from prfaas_worker.models.solo import Solo

from .elsewhere import DEVICE, device_elsewhere
from .test_delta_rule import inputs, recurrence

SOURCE = "builtin:kimi-linear-tiny"
TINY = model_directory(SOURCE)
TOKENS = torch.randint(256, (200,), generator=torch.Generator().manual_seed(1))
BOUND = 1e-4


def every_kind_of_step(model: KimiLinear) -> tuple[torch.Tensor, Solo]:
    """Logits of prompts in one chunk and two, of decodes, and of a step of both; and the memory behind them."""
    solo = Solo(model, slots=4, tokens=256)
    a, b, c = solo.new(), solo.new(), solo.new()
    hidden = [solo.prefill(TOKENS[:150], a), solo.prefill(TOKENS[:40], b), solo.prefill(TOKENS[:33], a)]
    logits = [model.logits(torch.stack(hidden)), solo.decode(TOKENS[:2], [a, b])]
    slots, lengths = (torch.tensor([number], device=model.device) for number in (b.slot, b.length))
    chunks = (Chunk(c.slot, 0, 5), Chunk(a.slot, a.length, 3))
    batch = Batch(TOKENS[:9], chunks, Decodes(slots, lengths, b.length))
    return torch.cat([*logits, model.logits(model.forward(batch))]), solo


def test_on_another_device_it_is_the_model_of_the_cpu():
    expected, plain = every_kind_of_step(KimiLinear.load(TINY))
    with device_elsewhere() as device:
        model = KimiLinear.load(TINY, "float32", device.type)
        logits, solo = every_kind_of_step(model)
        assert logits.device == model.device == solo.memory.device == DEVICE
        logits, slots = logits.cpu(), solo.memory.slots.cpu()
    assert expected.std() > 1
    assert (logits - expected).abs().max() < BOUND
    recurrent = [memory.view(torch.float32) for memory in (slots, plain.memory.slots)]
    assert (recurrent[0] - recurrent[1]).abs().max() < BOUND
    assert model.fingerprint == plain.model.fingerprint
    assert model.layers == plain.model.layers


def test_the_pretended_device_refuses_what_a_gpu_would():
    """Negative control: one tensor of the model left on the CPU."""
    with device_elsewhere() as device:
        model = KimiLinear.load(TINY, "float32", device.type)
        model.blocks[0].attention._conv = model.blocks[0].attention._conv.cpu()
        with pytest.raises(RuntimeError, match=r"tensors on meta and on the CPU"):
            every_kind_of_step(model)


def test_a_gpu_multiplies_in_bf16_by_default():
    with device_elsewhere() as device:
        model = KimiLinear.load(TINY, "auto", device.type)
        assert model.blocks[0].attention._qkv.dtype == torch.bfloat16
        logits, _ = every_kind_of_step(model)
        rounded = logits.cpu()
    expected, _ = every_kind_of_step(KimiLinear.load(TINY, "bfloat16"))
    assert (rounded.softmax(-1) - expected.softmax(-1)).abs().sum(-1).max() < 0.05


@pytest.mark.parametrize("causal", [True, False])
def test_plain_attention_is_that_of_the_cpu(causal, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    rows = 70 if causal else 130
    q, k, v = (torch.randn(1, 3, n, 24, generator=generator) for n in (70, rows, rows))
    expected = attend(q, k, v, 0.3, causal=causal)
    for at_once in (1 << 30, 16 * 3 * rows * 4):  # all queries, and 16 of them
        monkeypatch.setattr(mla, "_SCORE_BYTES", at_once)
        found = attend_plainly(q, k, v, 0.3, causal=causal)
        assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) < 1e-5


# fla


def _run_fla(q, k, v, g, beta, scale, initial_state):  # noqa: PLR0917
    """The rule in fla's layout, [B, T, H, K], in fp64."""
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert initial_state.dtype == torch.float32
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, initial_state))
    assert g.shape == q.shape
    assert beta.shape == q.shape[:3]
    by_head = [x[0].transpose(0, 1) for x in (q * scale, k, v, g, beta)]
    o, state = recurrence(*by_head, initial_state[0])
    return o.transpose(0, 1).unsqueeze(0).to(v.dtype), state.unsqueeze(0).float()


def chunk_kda(  # noqa: PLR0917, fla's own order of arguments
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
):
    assert output_final_state
    assert use_qk_l2norm_in_kernel is use_gate_in_kernel is use_beta_sigmoid_in_kernel is False
    return _run_fla(q, k, v, g, beta, scale, initial_state)


def fused_recurrent_kda(  # noqa: PLR0917, fla's own order of arguments
    q,
    k,
    v,
    g,
    beta,
    A_log=None,  # noqa: N803
    dt_bias=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
):
    assert A_log is dt_bias is None
    assert output_final_state
    assert q.shape[1] == 1
    return _run_fla(q, k, v, g, beta, scale, initial_state)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in where fla would be imported from."""
    ops = ModuleType("fla.ops.kda")
    ops.chunk_kda, ops.fused_recurrent_kda = chunk_kda, fused_recurrent_kda
    for name, module in {"fla": ModuleType("fla"), "fla.ops": ModuleType("fla.ops"), "fla.ops.kda": ops}.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_fla_behind_our_arguments_is_the_rule_but_for_rounding():
    rule = fla_rule(chunk_kda, fused_recurrent_kda)
    *tokens, state = inputs(50, 1.0)
    before = state.clone()
    expected, expected_state = TORCH_RULE.chunked(*tokens, state)
    o, after = rule.chunked(*tokens, state)
    assert o.dtype == after.dtype == torch.float32
    assert torch.equal(state, before)
    assert 0 < (o - expected).abs().max() < 0.02
    assert (after - expected_state).abs().max() < 0.05
    ours, theirs = state.clone(), state.clone()
    for t in range(5):
        one = [x[:, t] for x in tokens]
        assert (rule.step(*one, theirs) - TORCH_RULE.step(*one, ours)).abs().max() < 0.02
    assert (ours - theirs).abs().max() < 0.05
    assert (theirs - before).abs().max() > 0.1


@pytest.mark.usefixtures("fla")
def test_fla_is_used_only_on_a_gpu_and_for_bf16():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_rule(cuda, torch.bfloat16) is not TORCH_RULE
    assert choose_rule(cuda, torch.float32) is TORCH_RULE
    assert choose_rule(cpu, torch.bfloat16) is TORCH_RULE


class Broken(ModuleType):
    """As triton where it finds no driver."""

    def __getattr__(self, name: str) -> None:
        raise RuntimeError("0 active drivers ([]). There should only be one.")


@pytest.mark.parametrize(("module", "message"), [(lambda _: None, ".[cuda]"), (Broken, "0 active drivers")])
def test_where_fla_cannot_be_imported_a_gpu_runs_plain_torch_and_the_log_says_why(monkeypatch, caplog, module, message):
    for name in ("fla", "fla.ops", "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, name, module(name))
    with caplog.at_level(logging.INFO):
        assert choose_rule(torch.device("cuda"), torch.bfloat16) is TORCH_RULE
    assert message in caplog.text


# --device


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch says that there is a GPU with 80 GB free; models that are sent there stand on the CPU."""
    calls = SimpleNamespace(loads=[])
    load = KimiLinear.load

    def loaded(directory, dtype="float32", device="cpu"):
        calls.loads.append((dtype, device))
        return load(directory, dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 << 30, 80 << 30))
    monkeypatch.setattr(KimiLinear, "load", loaded)
    return calls


def test_auto_takes_a_gpu_that_runs_the_checkpoint(pretended_gpu, caplog):
    load_model(SOURCE, None, "auto", "auto")
    assert pretended_gpu.loads == [("auto", "cuda")]
    assert "CPU" not in caplog.text


def test_auto_takes_the_cpu_where_there_is_no_gpu(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, _ = load_model(SOURCE, None, "auto", "float32")
    assert model.device.type == "cpu"
    assert not caplog.records


def test_auto_takes_the_cpu_where_the_gpu_is_too_small(pretended_gpu, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1_000_000, 80 << 30))
    model, _ = load_model(SOURCE, None, "auto", "auto")
    assert model.device.type == "cpu"
    assert pretended_gpu.loads == [("auto", "cpu")]
    assert "the GPU has 0.0 GB free" in caplog.text
    with pytest.raises(ConfigError, match=r"the weights take .* GB"):
        load_model(SOURCE, None, "cuda", "auto")


@pytest.mark.parametrize("trouble", ["raises", "no numbers"])
def test_auto_takes_the_cpu_where_a_trial_step_fails(pretended_gpu, monkeypatch, caplog, trouble):
    def decode(*_):
        if trouble == "raises":
            raise RuntimeError("Failed to find C compiler")
        return torch.full((2, 264), torch.nan)

    monkeypatch.setattr(gpu.Solo, "decode", decode)
    model, _ = load_model(SOURCE, None, "auto", "auto")
    assert pretended_gpu.loads == [("auto", "cuda"), ("auto", "cpu")]
    reason = "Failed to find C compiler" if trouble == "raises" else "logits that are no numbers"
    assert [reason in record.message for record in caplog.records] == [True]
    with pytest.raises(ConfigError, match=reason):
        load_model(SOURCE, None, "cuda", "auto")
    assert model.fingerprint


def _no_compiler(*_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def test_a_gpu_on_which_flas_kernels_cannot_be_built_runs_plain_torch(pretended_gpu, monkeypatch, caplog):
    monkeypatch.setattr(model_module, "choose_rule", lambda *_: DeltaRule(_no_compiler, _no_compiler))
    for device in ("auto", "cuda"):
        pretended_gpu.loads.clear()
        caplog.clear()
        model, _ = load_model(SOURCE, None, device, "auto")
        assert pretended_gpu.loads == [("auto", "cuda")]
        (line,) = caplog.records
        assert line.message.startswith("the delta rule runs in plain torch, not by fla's kernels: RuntimeError: Failed")
        assert model.arithmetic == "float32 products, delta rule by plain torch"
        every_kind_of_step(model)


def test_a_gpu_that_fails_in_plain_torch_too_is_not_used(pretended_gpu, monkeypatch, caplog):
    monkeypatch.setattr(model_module, "choose_rule", lambda *_: DeltaRule(_no_compiler, _no_compiler))
    monkeypatch.setattr(gpu.Solo, "decode", lambda *_: torch.full((2, 264), torch.nan))
    load_model(SOURCE, None, "auto", "auto")
    assert pretended_gpu.loads == [("auto", "cuda"), ("auto", "cpu")]
    assert "the model runs on the CPU, not on the GPU" in caplog.text


def test_a_gpu_that_is_not_there_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no GPU: give --device cpu"):
        load_model(SOURCE, None, "cuda", "auto")


def test_a_wrong_checkpoint_is_refused_whatever_the_device(pretended_gpu, tmp_path):
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    for device in ("auto", "cuda", "cpu"):
        with pytest.raises(ConfigError, match="hidden_act is 'gelu'"):
            load_model(str(tmp_path), None, device, "auto")


def test_the_bytes_requested_from_a_gpu_are_those_of_the_weights():
    config = KimiLinear.load(TINY).config
    numbers = sum(tensor.numel() for tensor in load_file(TINY / "model.safetensors").values())
    assert weight_bytes(config, torch.float32) == 4 * numbers
    assert 2 * numbers < weight_bytes(config, torch.bfloat16) < 3 * numbers
