"""A tiny Qwen3-Next with a layer that drafts (MTP), made of the one that comes with us."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LAYER = "model.layers.3."


def with_draft_layer(model: Path, folder: Path) -> Path:
    """Return a copy of a checkpoint whose draft layer is the model's last one, behind a mean of what it takes in."""
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = load_file(model / "model.safetensors")
    tensors |= {name.replace(LAYER, "mtp.layers.0."): one.clone() for name, one in tensors.items() if LAYER in name}
    size = config["hidden_size"]
    half = torch.eye(size, dtype=torch.bfloat16) / 2
    tensors["mtp.fc.weight"] = torch.cat([half, half], dim=1)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(size, dtype=torch.bfloat16)  # vLLM adds one
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
