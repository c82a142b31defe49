"""How an answer is drawn and where it ends: the fields that both endpoints share, checked and in the engine's words."""

import re
import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

from prfaas.errors import RequestError
from prfaas.wire.engine import Grammar, Sampling
from prfaas_worker.front.bodies import Common
from prfaas_worker.front.checks import Served, require, require_tokens, unsupported
from prfaas_worker.grammars import check_grammar

MAX_STOPS: Final = 16
MAX_STOP_TOKENS: Final = 128
MAX_BIASES: Final = 1024
MAX_SALT: Final = 256
_REGEX_SIGNS: Final = re.compile(r"[\\.+*?()|\[\]{}^$/#&~-]")

# What an unserved field may say: what happens anyway. Absent here: nothing at all.
_NEUTRAL: Final[Mapping[str, object]] = {
    "bad_words": [],
    "functions": [],
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "logits_processors": [],
    "modalities": ["text"],
    "skip_special_tokens": True,
    "suffix": "",
    "use_beam_search": False,
}
_ADAPTERS: Final = frozenset({"adapter", "adapters", "lora", "lora_path", "lora_request"})
_UNSERVED: Final = (
    *_ADAPTERS,
    *("allowed_token_ids", "audio", "bad_words", "function_call", "functions", "include_stop_str_in_output"),
    *("length_penalty", "logits_processors", "modalities", "prompt_embeds", "prompt_logprobs", "skip_special_tokens"),
    *("suffix", "truncate_prompt_tokens", "use_beam_search", "web_search_options"),
)


def refuse_unserved(asked: Common) -> None:
    """Raise RequestError if a field asks for something that would be ignored."""
    for param in _UNSERVED:
        given = getattr(asked, param)
        if given is None or given == _NEUTRAL.get(param):
            continue
        if param in _ADAPTERS:
            raise unsupported(param, f"{param} names a LoRA adapter, and adapters are not served here; leave it out")
        raise unsupported(param, f"{param} is not served here; leave it out")
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise unsupported("best_of", "best_of is served where it equals n: all that is generated is returned")


def sampling(asked: Common, served: Served) -> Sampling:
    """Return how tokens are drawn; without a seed every call draws its own."""
    drawn = Sampling(
        temperature=_given(asked.temperature, 1.0),
        top_p=_given(asked.top_p, 1.0),
        top_k=max(asked.top_k or 0, 0),
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        min_p=_given(asked.min_p, 0.0),
        presence_penalty=_given(asked.presence_penalty, 0.0),
        frequency_penalty=_given(asked.frequency_penalty, 0.0),
        repetition_penalty=_given(asked.repetition_penalty, 1.0),
        logit_bias=_biases(asked.logit_bias or {}, served),
    )
    require(0 <= drawn.temperature <= 2, "temperature", "must be 0 to 2")
    require(0 < drawn.top_p <= 1, "top_p", "must be above 0 and at most 1")
    require(-1 <= (asked.top_k or 0) < 1 << 31, "top_k", "must be at least 1, or 0 or -1 for no limit")
    require(-(1 << 63) <= drawn.seed < 1 << 63, "seed", "must be a 64-bit integer")
    require(0 <= drawn.min_p <= 1, "min_p", "must be 0 to 1")
    require(-2 <= drawn.presence_penalty <= 2, "presence_penalty", "must be -2 to 2")
    require(-2 <= drawn.frequency_penalty <= 2, "frequency_penalty", "must be -2 to 2")
    require(0 < drawn.repetition_penalty <= 10, "repetition_penalty", "must be above 0 and at most 10")
    return drawn


def stops(asked: Common) -> list[str]:
    """Return the strings that end an answer."""
    found = [] if asked.stop is None else [asked.stop] if isinstance(asked.stop, str) else asked.stop
    require(len(found) <= MAX_STOPS, "stop", f"may hold at most {MAX_STOPS} strings")
    require(all(found), "stop", "may not hold an empty string")
    return found


def stop_tokens(asked: Common, served: Served) -> tuple[int, ...]:
    """Return the tokens that end an answer."""
    found = require_tokens(asked.stop_token_ids or [], served, "stop_token_ids")
    require(len(found) <= MAX_STOP_TOKENS, "stop_token_ids", f"may hold at most {MAX_STOP_TOKENS} tokens")
    return tuple(found)


def cache_salt(asked: Common) -> str:
    """Return what sets this caller's cached prefixes apart."""
    salt = asked.cache_salt
    require(salt is None or 0 < len(salt) <= MAX_SALT, "cache_salt", f"must have 1 to {MAX_SALT} characters")
    return salt or ""


def grammar(asked: Common) -> Grammar | None:
    """Return what the answer must be, None for any text. The grammar is checked: call it in a thread.

    Raises:
        RequestError: it is no grammar, or several fields give one.

    """
    found = _grammars(asked)
    if len(found) > 1:
        first, second, *_ = found
        raise RequestError(f"{first} and {second} both say what the answer must be; give one", param=second)
    for param, wanted in found.items():
        checked(wanted, param)
        return wanted
    return None


def checked(wanted: Grammar, param: str) -> Grammar:
    """Return a grammar that is sound.

    Raises:
        RequestError: it is not; names the field it came in.

    """
    try:
        check_grammar(wanted)
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param) from error
    return wanted


def _grammars(asked: Common) -> dict[str, Grammar]:
    """Return every field that gives a grammar."""
    found: dict[str, Grammar] = {}
    form, vllm = asked.response_format, asked.structured_outputs
    if form is not None and form.type == "json_object":
        found["response_format"] = _json_object()
    if form is not None and form.type == "json_schema":
        require(form.json_schema is not None, "response_format", "of type json_schema needs a json_schema")
        schema = form.json_schema.schema if form.json_schema else msgspec.Raw()
        found["response_format"] = Grammar("json_schema", _text(schema))
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(asked, f"guided_{name}")
        if _is_given(value):
            found[f"guided_{name}"] = _vllm_grammar(f"guided_{name}", name, value)
    if vllm is not None:
        if vllm.structural_tag is not None:
            raise unsupported("structured_outputs", "structured_outputs.structural_tag is not served here")
        if vllm.json_object:
            found["structured_outputs.json_object"] = _json_object()
        for name in ("json", "regex", "choice", "grammar"):
            value = getattr(vllm, name)
            if _is_given(value):
                found[f"structured_outputs.{name}"] = _vllm_grammar("structured_outputs", name, value)
    return found


def _vllm_grammar(param: str, name: str, value: msgspec.Raw | str | list[str]) -> Grammar:
    if isinstance(value, msgspec.Raw):
        text = _text(value)
        return Grammar("json_schema", msgspec.json.decode(text, type=str) if text[:1] == '"' else text)
    if isinstance(value, list):
        require(bool(value), param, "must offer at least one choice")
        return Grammar("regex", "|".join(_REGEX_SIGNS.sub(r"\\\g<0>", choice) for choice in value))
    return Grammar("regex" if name == "regex" else "lark", value)


def _is_given(value: msgspec.Raw | str | list[str] | None) -> bool:
    # JSON as text: absent is empty, and null is text like any other.
    return value is not None and not (isinstance(value, msgspec.Raw) and bytes(value) in (b"", b"null"))


def _json_object() -> Grammar:
    return Grammar("json_schema", '{"type":"object"}')


def _text(schema: msgspec.Raw) -> str:
    return bytes(schema).decode(errors="replace")


def _biases(given: Mapping[str, float], served: Served) -> tuple[tuple[int, float], ...]:
    require(len(given) <= MAX_BIASES, "logit_bias", f"may hold at most {MAX_BIASES} tokens")
    for token, bias in given.items():
        known = token.isdecimal() and token.isascii() and int(token) < served.vocab_size
        require(known, "logit_bias", f"holds {token!r}: want token ids of 0 to {served.vocab_size - 1}")
        require(-100 <= bias <= 100, "logit_bias", f"of token {token} must be -100 to 100")
    return tuple((int(token), bias) for token, bias in given.items())


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
