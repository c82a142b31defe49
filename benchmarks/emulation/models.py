"""The models of this benchmark: those that ship with prfaas, with their layers many times over.

A decode step of a model of four layers takes two milliseconds, of which a timer's error and the loops of engine and
client are several per cent. More layers make steps longer, and wider ones would make prompts slower above all. Weights
are copied, so that what layers compute stays in a trained model's range.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file, save_file

from prfaas_worker.assets import model_directory, read_object

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
LAYER = re.compile(r"model\.layers\.(\d+)\.")


def deepened(name: str, times: int, folder: Path) -> Path:
    """Write the built-in model `name` with `times` as many layers into `folder`; return its directory."""
    source, target = model_directory(f"builtin:{name}"), folder / f"{name}-{times}"
    shutil.copytree(source, target)
    config = read_object(source / CONFIG)
    layers = config["num_hidden_layers"]
    (target / CONFIG).write_bytes(msgspec.json.encode(deepened_config(config, times)))
    weights = load_file(source / WEIGHTS)
    made = {one: tensor for one, tensor in weights.items() if not LAYER.match(one)}
    for layer in range(layers * times):
        copied = f"model.layers.{source_layer(layer, layers)}."
        for one, tensor in weights.items():
            if one.startswith(copied):
                made[f"model.layers.{layer}.{one.removeprefix(copied)}"] = tensor.clone()
    save_file(made, target / WEIGHTS, {"format": "pt"})
    return target


def source_layer(layer: int, layers: int) -> int:
    """Return which of a model's `layers` a layer of the deep one copies. The first is a model's own: it may be dense
    where all that follow have experts. The second has the same kind of attention."""
    return layer if layer < layers else layer % layers or 1


def deepened_config(config: dict[str, Any], times: int) -> dict[str, Any]:
    """Return a configuration with as many layers. One that lists its layers by kind counts them from 1."""
    layers = config["num_hidden_layers"]
    made = config | {"num_hidden_layers": layers * times}
    if linear := config.get("linear_attn_config"):
        lists = {
            name: [layer + layers * time for time in range(times) for layer in linear[name]]
            for name in ("full_attn_layers", "kda_layers")
        }
        made["linear_attn_config"] = linear | lists
    return made
