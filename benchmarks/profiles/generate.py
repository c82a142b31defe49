"""Write the built-in profiles: what an outside tool says of published models on today's hardware.

    python3 -m venv /tmp/tool && /tmp/tool/bin/pip install aiconfigurator-core==0.12.0 msgspec
    PYTHONPATH=core /tmp/tool/bin/python benchmarks/profiles/generate.py

For maintainers; nothing of prfaas needs the tool (NVIDIA's, Apache-2.0), so it has an environment of its own. It
answers from tables of kernels that were measured on a device under one engine, and ships the models' configurations,
from which the sizes of caches are computed here. It knows no scheduler: a prefill has the instance to itself.

Each profile that holds goes to core/prfaas/capacity/profiles/. What does not is listed with its reason in
not_covered.json beside this file: the tool has no rows, the weights do not fit, or the fitted curve misses a length
that it was not fitted to. The same tool writes the same bytes.
"""

import argparse
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from aiconfigurator_core.sdk.config_builders import build_model_config
from aiconfigurator_core.sdk.engine import EngineHandle
from aiconfigurator_core.sdk.models import get_model
from aiconfigurator_core.sdk.perf_database import resolve_query_version

from prfaas.capacity.builtin import Builtin, DecodeStep, PrefillTime
from prfaas.capacity.memory import DEVICE_BYTES, USABLE
from prfaas.capacity.models import ModelCache
from prfaas.capacity.profile import cache_bytes, prefill_seconds

ROOT: Final = Path(__file__).parents[2]
PROFILES: Final = ROOT / "core/prfaas/capacity/profiles"
NOT_COVERED: Final = Path(__file__).with_name("not_covered.json")
TOOL: Final = "aiconfigurator-core"
LENGTHS: Final = tuple(512 << doublings for doublings in range(9))
CHECKED_LENGTHS: Final = (3_072, 24_576, 98_304)
MOST_OFF: Final = 0.1
BATCHES: Final = tuple(1 << doublings for doublings in range(9))
CONTEXT_TOKENS: Final = 8_192
SYSTEMS: Final = {
    "a100": "a100_sxm",
    "l40s": "l40s",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
}
# The tool has no tables of H20. In the PrfaaS paper's case study a prefill of 128K takes 2.6 times as long as on H200.
# Decode steps read memory, at 4.0 instead of 4.8 TB/s.
H20_PREFILL: Final = 2.6
H20_DECODE: Final = 1.2


class Model(NamedTuple):
    slug: str
    repository: str
    is_moe: bool = True
    has_expert_parallelism: bool = False


class Kernels(NamedTuple):
    """Whose tables of kernels, of which version, and the precisions of products and experts (None: as shipped)."""

    engine: str
    version: str = "current"
    gemm: str | None = None
    moe: str | None = None
    title: str = ""


class Target(NamedTuple):
    model: Model
    precision: str
    device: str
    devices: int

    @property
    def name(self) -> str:
        return f"{self.model.slug}-{self.precision}-{self.devices}x{self.device}"


class NotCoveredError(Exception):
    """Why a target gets no profile."""


QWEN_397B: Final = Model("qwen3.5-397b", "Qwen/Qwen3.5-397B-A17B", has_expert_parallelism=True)
QWEN_122B: Final = Model("qwen3.5-122b", "Qwen/Qwen3.5-122B-A10B")
QWEN_35B: Final = Model("qwen3.5-35b", "Qwen/Qwen3.5-35B-A3B")
QWEN_27B: Final = Model("qwen3.5-27b", "Qwen/Qwen3.5-27B", is_moe=False)
KIMI_K3: Final = Model("kimi-k3", "moonshotai/Kimi-K3", has_expert_parallelism=True)
INSTANCES: Final[tuple[tuple[Model, str, str], ...]] = (
    (QWEN_397B, "bf16", "8xh100 8xh200 8xb200 8xb300 4xgb200 4xgb300"),
    (QWEN_397B, "fp8", "8xh100 8xh200 8xb200 8xb300 4xgb200 4xgb300"),
    (QWEN_122B, "bf16", "4xh100 4xh200 2xb200 2xb300"),
    (QWEN_122B, "fp8", "4xh100 2xh200 2xb200"),
    (QWEN_35B, "bf16", "2xa100 2xl40s 2xh100 1xh200 2xh200 1xb200 1xb300 1xgb200 1xgb300"),
    (QWEN_35B, "fp8", "2xl40s 1xh100 1xh200 1xb200"),
    (QWEN_27B, "bf16", "1xa100 2xl40s 1xh100 1xh200 1xb200 1xb300 1xgb200 1xgb300"),
    (QWEN_27B, "fp8", "1xl40s 1xh100 1xh200 1xb200"),
    (KIMI_K3, "mxfp4", "8xh200 16xh200 8xb200 8xb300 8xgb200 8xgb300"),
)


def kernels_of(target: Target) -> Kernels:
    """Choose tables whose rows can be believed.

    vLLM's are first. Its rows of block-scaled fp8 products are not used: each takes 0.1 to 0.2 ms, however small, so
    they say that a decode step of batch 1 takes 72 ms on 8xb200, and of batch 8 49. Its fp8 experts on Hopper take
    four times as long as SGLang's. SGLang's rows of attention on Blackwell are six times as slow as vLLM's.
    """
    if target.precision == "mxfp4":
        if target.device in {"b300", "gb300"}:
            # The first version with kernels of KDA on them.
            return Kernels(
                "sglang", "next", moe="w4a8_mxfp4_mxfp8", title=", experts in MXFP4 with activations in MXFP8"
            )
        return Kernels("vllm", title=", experts in MXFP4")
    if target.precision == "bf16":
        return Kernels("vllm")
    if target.model.is_moe and target.device in {"h100", "h200"}:
        return Kernels("sglang", gemm="fp8_block", moe="fp8_block", title=", products in FP8 scaled by block")
    return Kernels("vllm", gemm="fp8", moe="fp8", title=", products in FP8 scaled by tensor")


class Tool:
    """The outside tool for one target."""

    def __init__(self, target: Target, model_path: str) -> None:
        self._kernels = kernels_of(target)
        self._system = SYSTEMS[target.device]
        is_split = target.model.is_moe and not target.model.has_expert_parallelism
        moe_tp = target.devices if is_split else 1
        moe_ep = target.devices if target.model.has_expert_parallelism else 1
        self.parallelism = f"TP{target.devices} EP{moe_ep}" if moe_ep > 1 else f"TP{target.devices}"
        moe = self._kernels.moe if target.model.is_moe else None
        quant = {"gemm_quant_mode": self._kernels.gemm, "moe_quant_mode": moe}
        self.version = resolve_query_version(self._system, self._kernels.engine, self._kernels.version)
        config = build_model_config(target.devices, 1, 1, moe_tp, moe_ep, **quant)
        built = get_model(model_path, config, self._kernels.engine)
        self.weights_bytes = round(sum(op.get_weights() for op in built.context_ops) * target.devices)
        self._ask = EngineHandle.compile(
            model_path,
            self._system,
            self._kernels.engine,
            backend_version=self.version,
            tp_size=target.devices,
            moe_tp_size=moe_tp,
            moe_ep_size=moe_ep,
            **quant,
        )

    @property
    def source(self) -> str:
        engine = {"vllm": "vLLM", "sglang": "SGLang"}[self._kernels.engine]
        return f"{TOOL} {metadata.version(TOOL)}, kernels of {engine} {self.version}{self._kernels.title}"

    def prefill(self, tokens: int) -> PrefillTime:
        seconds = _answer(lambda: self._ask.predict_prefill_latency(1, tokens))
        return PrefillTime(tokens=tokens, seconds=seconds)

    def decode(self, batch: int) -> DecodeStep:
        return DecodeStep(batch=batch, seconds=_answer(lambda: self._ask.predict_decode_latency(batch, CONTEXT_TOKENS)))


def _answer(millis: Callable[[], float]) -> float:
    """Return seconds with four digits."""
    try:
        return float(f"{millis() / 1000:.4g}")
    except Exception as error:  # the tool's own errors have no common class
        raise NotCoveredError(f"the tool has no rows: {re.split(r' at /| [{]|, which', str(error))[0]}") from error


def cache_of(config: dict[str, Any]) -> ModelCache:
    """Return the sizes of a model's cache from its configuration."""
    text = config.get("text_config", config)
    layers = text["num_hidden_layers"]
    if kimi := text.get("linear_attn_config"):
        heads, width, kernel = kimi["num_heads"], kimi["head_dim"], kimi["short_conv_kernel_size"]
        return ModelCache(
            attention_layers=len(kimi["full_attn_layers"]),
            token_elements=text["kv_lora_rank"] + text["qk_rope_head_dim"],
            linear_layers=len(kimi["kda_layers"]),
            recurrent_elements=heads * width * width,
            convolution_elements=(kernel - 1) * 3 * heads * width,
            key_value_heads=1,
        )
    attention = layers // text["full_attention_interval"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    return ModelCache(
        attention_layers=attention,
        token_elements=2 * text["num_key_value_heads"] * text["head_dim"],
        linear_layers=layers - attention,
        recurrent_elements=values * text["linear_key_head_dim"],
        convolution_elements=(text["linear_conv_kernel_dim"] - 1) * (2 * keys + values),
        key_value_heads=text["num_key_value_heads"],
    )


def generate(target: Target, folder: Path) -> Builtin:
    """Return the profile of a target. Raises NotCoveredError."""
    shipped = resources.files("aiconfigurator_core") / "model_configs"
    text = (shipped / f"{target.model.repository.replace('/', '--')}_config.json").read_text()
    # By its folder the tool takes a configuration that it ships, but would fetch by the model's name.
    (folder / "config.json").write_text(text)
    cache = cache_of(json.loads(text))
    tool = Tool(target, str(folder))
    usable = USABLE * target.devices * DEVICE_BYTES[target.device]
    needed = tool.weights_bytes + cache.state_bytes + cache.token_bytes * LENGTHS[-1]
    if needed > usable:
        raise NotCoveredError(
            f"weights of {tool.weights_bytes / 1e9:.0f} GB and one cache of {LENGTHS[-1]:,} tokens do not fit: "
            f"{USABLE:.0%} of the devices' memory are {usable / 1e9:.0f} GB"
        )
    steps = tuple(tool.decode(batch) for batch in BATCHES)
    kept, note = believed(steps)
    builtin = Builtin(
        name=target.name,
        model=target.model.repository.partition("/")[2],
        precision=target.precision,
        device=target.device,
        devices=target.devices,
        parallelism=tool.parallelism,
        source=tool.source,
        basis="estimated",
        note=note,
        weights_bytes=tool.weights_bytes,
        state_bytes=cache.state_bytes,
        token_bytes=cache.token_bytes,
        points=tuple(map(tool.prefill, LENGTHS)),
        checks=tuple(map(tool.prefill, CHECKED_LENGTHS)),
        context_tokens=CONTEXT_TOKENS,
        decode_steps=kept,
    )
    check(builtin)
    return builtin


def believed(steps: tuple[DecodeStep, ...]) -> tuple[tuple[DecodeStep, ...], str]:
    """Return the steps that no larger batch beats, and a note of the rest: its kernels were disturbed as measured."""
    kept = tuple(step for i, step in enumerate(steps) if all(step.seconds <= later.seconds for later in steps[i:]))
    left_out = ", ".join(f"{one.batch} ({one.seconds * 1000:.3g} ms)" for one in steps if one not in kept)
    return kept, f"no decode step of batch {left_out}: a larger batch is quicker" if left_out else ""


def check(builtin: Builtin) -> None:
    """Refuse a profile whose curve misses what it was not fitted to."""
    profile = builtin.profile()
    off = {one.tokens: prefill_seconds(profile, one.tokens) / one.seconds - 1 for one in builtin.checks}
    worst = max(off, key=lambda tokens: abs(off[tokens]))
    if abs(off[worst]) > MOST_OFF:
        raise NotCoveredError(f"the fitted curve is off by {off[worst]:+.0%} at {worst:,} tokens")


def as_h20(h200: Builtin) -> Builtin:
    """Return what is assumed of H20 with 141 GB."""

    def slower(times: tuple[PrefillTime, ...]) -> tuple[PrefillTime, ...]:
        return tuple(PrefillTime(tokens=one.tokens, seconds=round(H20_PREFILL * one.seconds, 6)) for one in times)

    return msgspec.structs.replace(
        h200,
        name=h200.name.replace("h200", "h20-141"),
        device="h20-141",
        basis="assumed",
        source=f"assumed: prefills take {H20_PREFILL} and decode steps {H20_DECODE} times as long as in {h200.name}",
        points=slower(h200.points),
        checks=slower(h200.checks),
        decode_steps=tuple(
            DecodeStep(batch=one.batch, seconds=round(H20_DECODE * one.seconds, 6)) for one in h200.decode_steps
        ),
    )


def targets() -> Iterator[Target]:
    for model, precision, instances in INSTANCES:
        for instance in instances.split():
            devices, _, device = instance.partition("x")
            yield Target(model, precision, device, int(devices))


def written(builtin: Builtin) -> str:
    """Return a profile as JSON with a line for each field, point and step."""
    fields: list[str] = []
    for key, value in msgspec.to_builtins(builtin).items():
        text = json.dumps(value)
        if isinstance(value, list | tuple) and value:
            rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
            text = f"[\n{rows}\n  ]"
        fields.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.disable(logging.WARNING)
    covered: list[Builtin] = []
    reasons: dict[str, str] = {}
    for target in targets():
        with tempfile.TemporaryDirectory() as folder:
            try:
                covered.append(generate(target, Path(folder)))
            except NotCoveredError as error:
                reasons[target.name] = str(error)
    covered += [as_h20(one) for one in covered if one.name == "qwen3.5-397b-fp8-8xh200"]
    shutil.rmtree(PROFILES, ignore_errors=True)
    PROFILES.mkdir()
    for builtin in covered:
        (PROFILES / f"{builtin.name}.json").write_text(written(builtin))
        profile = builtin.profile()
        off = ", ".join(f"{prefill_seconds(profile, one.tokens) / one.seconds - 1:+.1%}" for one in builtin.checks)
        size = cache_bytes(profile, LENGTHS[-1]) / 1e9
        print(f"{builtin.name:34} off by {off}; weights {builtin.weights_bytes / 1e9:.0f} GB, cache {size:.1f} GB")
    NOT_COVERED.write_text(json.dumps(reasons, indent=2) + "\n")
    for name, reason in reasons.items():
        print(f"{name:34} not covered: {reason}")


if __name__ == "__main__":
    main()
