"""Finds a model's files: a directory of the user's, or one that ships with the package. Needs no torch."""

import json
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError

_BUILTIN_PREFIX = "builtin:"


def model_directory(source: str) -> Path:
    """Turn `--model-source`, a directory or `builtin:NAME`, into the directory of the model's files. Raises ConfigError
    if there is no such directory or built-in model, or it holds no config.json."""
    if source.startswith(_BUILTIN_PREFIX):
        directory = Path(__file__).parent / source.removeprefix(_BUILTIN_PREFIX)
        hint = f"built-in models are: {', '.join(builtin_models())}"
    else:
        directory = Path(source)
        hint = "give a directory in the public checkpoint layout, or builtin:NAME"
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model source {source!r}: no config.json in {directory}; {hint}")
    return directory


def read_object(path: Path) -> dict[str, Any]:
    """Read one of the JSON files. Raises ConfigError if it cannot be read, or holds no object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds a {type(raw).__name__}, not an object with a checkpoint's fields")
    return raw


def builtin_models() -> list[str]:
    """Names that `builtin:NAME` accepts, sorted."""
    return sorted(config.parent.name for config in Path(__file__).parent.glob("*/config.json"))
