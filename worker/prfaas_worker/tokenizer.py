"""Text to token ids and back, without torch: the front's half of the model.

A byte tokenizer: ids 0..255 are bytes, the ids above are special tokens named in tokenizer_config.json. Special tokens
come from the chat template alone: the same letters in a user's text stay letters.
"""

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prfaas.errors import ConfigError, RequestError

BYTE_TOKENS = 256
# Stands in for the "<" of a special token's letters while a template renders a user's text; refused in the text itself.
_GUARD = "\ufdd0"


class ByteTokenizer:
    """The tokenizer of one model directory."""

    def __init__(self, specials: Mapping[str, int], bos_id: int | None, template: jinja2.Template | None):
        self._specials = dict(specials)
        # Longest first: a special token may begin with another one's letters.
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "(?!)")
        self._bos_id = bos_id
        self._template = template

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, beginning of sequence first.

        Raises:
            RequestError: the text has half of a surrogate pair.

        """
        return ([] if self._bos_id is None else [self._bos_id]) + list(_utf8(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            RequestError: the template refuses the messages, or the model has none.

        """
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        guarded = [{key: self._guard(value) for key, value in message.items()} for message in messages]
        try:
            rendered = self._template.render(messages=guarded, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses the messages: {error}", param="messages") from error
        return self._tokens(rendered)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: a special token adds nothing."""
        return bytes([token_id]) if token_id < BYTE_TOKENS else b""

    def _guard(self, text: str) -> str:
        if _GUARD in text:
            raise RequestError("messages contain U+FDD0, which is no character; remove it", param="messages")
        for special in self._specials:
            text = text.replace(special, _GUARD + special[1:])
        return text

    def _tokens(self, rendered: str) -> list[int]:
        """Encode rendered text, special tokens as their ids, and guarded letters as the letters they stand for."""
        token_ids: list[int] = []
        for piece in self._pattern.split(rendered):
            special = self._specials.get(piece)
            token_ids += _utf8(piece.replace(_GUARD, "<")) if special is None else [special]
        return token_ids


class Utf8Stream:
    """Bytes to text, piece by piece: a character comes out when its last byte came in, damaged ones as U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes, *, final: bool = False) -> str:
        """Return the characters that are complete now; with `final`, what is left too."""
        return self._decoder.decode(data, final)


def load_tokenizer(directory: Path) -> ByteTokenizer:
    """Read tokenizer_config.json and chat_template.jinja of a model directory.

    Raises:
        ConfigError: a file is missing or is not that of a byte tokenizer.

    """
    path = directory / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["tokenizer_class"] != "byte":
            raise ConfigError(f"{path}: tokenizer_class is {config['tokenizer_class']!r}; this worker knows 'byte'")
        specials = {entry["content"]: int(number) for number, entry in config["added_tokens_decoder"].items()}
        bos_id = specials[config["bos_token"]] if config.get("bos_token") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a byte tokenizer's configuration: {error!r}") from error
    return ByteTokenizer(specials, bos_id, _template(directory / "chat_template.jinja"))


def _template(path: Path) -> jinja2.Template | None:
    if not path.is_file():
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except jinja2.TemplateError as error:
        raise ConfigError(f"{path}: not a template: {error}") from error


def _raise(message: str) -> None:
    """Give templates the `raise_exception` that those of the public model hubs call."""
    raise jinja2.TemplateError(message)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text has half of a surrogate pair at character {error.start}; send UTF-8") from error
