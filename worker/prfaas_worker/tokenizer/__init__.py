"""Text to token ids and back, without torch: the front's half of the model.

Three kinds: bytes (the model that ships along), Hugging Face's tokenizer.json, and tiktoken's rank files. Each turns a
token id into the bytes it adds to the text, so that streams decode the same way for all.
"""

import json
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas_worker.tokenizer.base import Tokenizer, byte_tokenizer
from prfaas_worker.tokenizer.chat_template import OWN_VARIABLES, Conversation, read_template

__all__ = ["OWN_VARIABLES", "Conversation", "Tokenizer", "load_tokenizer"]


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read a model directory's tokenizer and chat template. Raises ConfigError if a file is missing or invalid."""
    path = directory / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        template = read_template(directory, config)
        if config.get("tokenizer_class") == "byte":
            return byte_tokenizer(config, template)
        if (directory / "tokenizer.json").is_file():
            from prfaas_worker.tokenizer.huggingface import huggingface_tokenizer

            return huggingface_tokenizer(directory / "tokenizer.json", template)
        if (directory / "tiktoken.model").is_file():
            from prfaas_worker.tokenizer.tiktoken_ranks import ranks_tokenizer

            return ranks_tokenizer(directory / "tiktoken.model", config, template)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a tokenizer's configuration: {error!r}") from error
    raise ConfigError(
        f"{path}: tokenizer_class is {config.get('tokenizer_class')!r} and there is neither tokenizer.json nor "
        "tiktoken.model beside it; add one of them (a sentencepiece file is not enough)"
    )
