"""Inputs that may crash what reads them: chat templates, texts, JSON bodies, heads, event streams, each in a request.

Good ones are changed in a few places: pieces are cut out, doubled, moved, repeated many times, or replaced by what
parsers stumble over. The same seed gives the same inputs. Templates get no loops that count by themselves: a
checkpoint's template is a program of whoever serves it, and may take as long as it likes.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from prfaas.wire import headers
from prfaas_gateway.api import API_ROUTES
from prfaas_worker.assets import model_directory
from prfaas_worker.front.openai_bodies import ChatBody, CompletionBody

Kind = Literal["template", "text", "body", "head", "stream"]
Target = Literal["gateway", "drawn", "resumed", "bytes", "bpe", "emulated", "templates"]
"""Who gets it; see `target`."""
WEIGHTS: Final[dict[Kind, int]] = {"template": 1, "text": 5, "body": 7, "head": 3, "stream": 4}
MOST_EDITS: Final = 6
LONGEST_BYTES: Final = 200_000
LONGEST_TEMPLATE_BYTES: Final = 8_000
"""As checkpoints have them: one is compiled before its worker serves, in one go of the interpreter."""
REQUEST_ID: Final = "fuzz-"
JSON: Final = "Content-Type: application/json"


class Input(NamedTuple):
    """One request, to whom it goes, and for a stream what the engine behind the gateway says."""

    number: int
    kind: Kind
    target: Target
    raw: bytes
    said: bytes = b""


def inputs(count: int, seed: int = 1) -> Iterator[Input]:
    """Yield so many inputs."""
    for number in range(count):
        rng = random.Random(seed << 32 | number)
        (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        yield MAKERS[kind](number, rng)


Edit = Callable[[random.Random, bytes, bytes, bytes], bytes]
EDITS: Final[tuple[Edit, ...]] = (
    lambda _rng, _piece, _odd, _text: b"",
    lambda _rng, _piece, odd, _text: odd,
    lambda _rng, piece, odd, _text: piece + odd,
    lambda rng, piece, _odd, _text: piece * rng.choice((2, 3, 50, 3000)),
    lambda rng, _piece, odd, _text: odd * rng.choice((2, 30, 2000)),
    lambda rng, _piece, _odd, _text: rng.randbytes(rng.randint(1, 8)),
    lambda rng, piece, _odd, text: piece + text[(at := rng.randint(0, len(text))) : at + 40],
)
"""What a piece of a text becomes, by something odd and the whole text."""


def changed(rng: random.Random, good: Sequence[bytes], odd: Sequence[bytes]) -> bytes:
    """Return one of the good texts after some edits."""
    text = rng.choice(good)
    for _ in range(rng.randint(0, MOST_EDITS)):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.choice((0, 1, 4, 30)))
        piece = rng.choice(EDITS)(rng, text[start:end], rng.choice(odd), text)
        text = (text[:start] + piece + text[end:])[:LONGEST_BYTES]
    return text


def request(path: str, body: bytes, *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: g", "Connection: close", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


SHIPPED: Final = [model_directory(f"builtin:{name}-tiny") for name in ("kimi-linear", "qwen3-next")]
TEMPLATES: Final = (
    *((directory / "chat_template.jinja").read_bytes() for directory in SHIPPED),
    b"{% for m in messages %}{{ m['role'] ~ ': ' ~ m.content | trim }}{% endfor %}"
    b"{% if add_generation_prompt %}A:{% endif %}",
    b"{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% generation %}{{ m.content }}"
    b"{% endgeneration %}{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ ns.n }}",
    b"{% macro turn(m) %}<s>{{ m | tojson(indent=2) }}{% endmacro %}"
    b"{% for m in messages[::-1] %}{{ turn(m) }}{% endfor %}",
)
ODD_TEMPLATE: Final = rb"""{{  }}  {%  %}  {#  #}  {%- if   {% endif %}  {% for x in messages %}  {% endfor %}
  {% set x =  messages  message.content  (  )  [  ]  {  '  "  not   is defined  is string   in   loop.index  loop
  self  namespace()  caller()  super()  raise_exception('no')  strftime_now('%Y')  {% block b %}  {% endblock %}
  {% macro m() %}  {% endmacro %}  {{ m() }}  {% include 'x' %}  {% import 'x' as y %}  {% extends 'x' %}  {% raw %}
  {% generation %}  {% continue %}  .__class__  ['__init__']  .items()  .format(1)  % 1  ~  -  1//0  1e999  \ud800  |
  | tojson  | length  | join  | default('')  | map('upper') | list  | safe  | sort""".split(b"  ")
MESSAGES: Final = [
    {"role": "system", "content": "be <|user|> brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi \ud83d\ude00"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "7", "tool_call_id": "a"},
]


def template(number: int, rng: random.Random) -> Input:
    source = changed(rng, TEMPLATES, ODD_TEMPLATE)[:LONGEST_TEMPLATE_BYTES].decode("utf-8", "replace")
    asked = {"source": source, "messages": rng.sample(MESSAGES, rng.randint(1, len(MESSAGES)))}
    return Input(number, "template", "templates", request("/", json.dumps(asked).encode()))


TEXTS: Final = [
    json.dumps(text, ensure_ascii=False).encode()[1:-1]
    for text in (
        "The quick brown fox jumps over the lazy dog. " * 20,
        "\u654f\u6377\u7684\u68d5\u8272\u72d0\u72f8\u8df3\u8fc7\u4e86\u61d2\u72d7\u3002" * 20,
        "def main():\n\treturn {'a': [1, 2, 3]}  # ok\r\n" * 10,
        "\U0001f469\u200d\U0001f467 e\u0301\u0331\u0337 \u202e\ufeff\u2028",
        "<|bos|><|user|>x<|end_of_turn|><|assistant|><|im_start|>",
        "",
    )
]
ODD_TEXT: Final = [
    *rb"""a 0 \n \\ \u0000 \ud800 \udc00\ud800 \ufdd0 \ufdd1 <| |> <|user|> <|end_of_turn|> " 's""".split(),
    *(b" ", b"\xff", b"\xed\xa0\x80", "\u0301".encode(), "\u3000".encode(), "\U0001f600".encode()),
]


def text(number: int, rng: random.Random) -> Input:
    written = b'"%b"' % changed(rng, TEXTS, ODD_TEXT)
    token_ids = json.dumps([rng.randrange(-1, 300) for _ in range(rng.randrange(200))]).encode()
    path, body = rng.choice(
        (
            ("/tokenize", b'{"prompt":%b,"return_token_strs":true}' % written),
            ("/tokenize", b'{"messages":[{"role":"user","content":%b}]}' % written),
            ("/v1/completions", b'{"model":"m","prompt":%b,"echo":true,"stream":true}' % written),
            ("/v1/completions", b'{"model":"m","prompt":[%b,"x"],"n":2,"logprobs":2}' % written),
            ("/v1/completions", b'{"model":"m","prompt":"x","stop":[%b]}' % written),
            ("/detokenize", b'{"tokens":%b}' % token_ids),
        )
    )
    return Input(number, "text", rng.choice(("bytes", "bpe")), request(path, body, JSON))


SCHEMA: Final = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "string"}}}
GUIDES: Final[dict[str, Any]] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "guided_regex": "(a|b){1,9}",
    "guided_grammar": 'start: "x" a\na: "y"~2',
    "stop": ["\n\n"],
    "logit_bias": {"7": 1.5},
}
SAMPLED: Final[dict[str, Any]] = {"temperature": 0.5, "seed": 7, "n": 2, "max_tokens": 9}
STREAMED: Final[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
EVERY_FIELD: Final = dict.fromkeys({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__})
ASKED: Final = ({"prompt": "hello"}, {"prompt": [1, 2, 3]}, {"messages": MESSAGES}, {"input": "hello"})
BODIES: Final = [
    json.dumps({**more, **asked, "model": "m"}, sort_keys=True).encode()
    for asked in ASKED
    for more in ({}, GUIDES, SAMPLED, SAMPLED | STREAMED, EVERY_FIELD)
]
ODD_JSON: Final = [
    *rb"""[ ] { } " : , null true -0 1e999 1e-999 NaN - \\ \ud800 "model":"n", "prompt": "messages":[ "$ref":"#"
    "cache_salt":"x", "stream":true, "n":0, "logprobs":21, "prfaas_stream":{"seed":1}, {1,2} (x{9}) [[], {"":
    "kv_transfer_params":{"prfaas":{}},""".split(),
    *(b" ", b"\0", b"\xff", b"\xef\xbb\xbf", b"9" * 5000),
]


def body(number: int, rng: random.Random) -> Input:
    target: Target = rng.choice(("gateway", "gateway", "bytes", "bpe", "emulated"))
    path = rng.choice(list(API_ROUTES) if target == "gateway" else ["/v1/completions", "/v1/chat/completions"])
    return Input(number, "body", target, request(path, changed(rng, BODIES, ODD_JSON), JSON))


PROMPT: Final = b'{"model":"m","prompt":"x"}'
HEADS: Final = [
    b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nConnection: close\r\n" + lines + b"\r\n\r\n" + sent
    for lines, sent in (
        (b"Content-Length: 26", PROMPT),
        (b"Transfer-Encoding: chunked", b"1a\r\n" + PROMPT + b"\r\n0\r\n\r\n"),
        (f"{headers.DATACENTERS}: forbid a; prefer b\r\nContent-Length: 26".encode(), PROMPT),
        (f"{headers.DEADLINE_SECONDS}: 60\r\n{headers.OFFLOAD}: never\r\nContent-Length: 26".encode(), PROMPT),
        (b"Authorization: Bearer k\r\ntraceparent: 00-%b-%b-01" % (b"a" * 32, b"b" * 16), b""),
    )
]
ODD_HEAD: Final = [
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b"\0", b"\xff", b"x" * 40_000, b"0\r\n\r\n", b"Expect: 100-continue\r\n"),
    *(b"%b\r\n" % line for line in rb"Content-Length:5 Content-Length:-1 Transfer-Encoding:chunked X-a:b".split()),
    *(b"%b\r\n" % line for line in rb"Content-Encoding:gzip Content-Encoding:br Upgrade:h2c ffffffffffffffff".split()),
    *rb": GET CONNECT OPTIONS * HTTP/0.9 HTTP/2.0 http://[::1 /..%2f%00 forbid ,, nan -1 60".split(),
]


def head(number: int, rng: random.Random) -> Input:
    return Input(number, "head", rng.choice(("gateway", "bytes")), changed(rng, HEADS, ODD_HEAD))


DONE: Final = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + msgspec.json.encode({"id": "c", "created": 1, "model": "m", **fields}) + b"\n\n"


def chunk(index: int, content: str, token_ids: list[int] | None, ended: str | None = None) -> bytes:
    choice = {"index": index, "delta": {"content": content}, "token_ids": token_ids, "finish_reason": ended}
    return event(object="chat.completion.chunk", system_fingerprint="f", choices=[choice])


STREAMS: Final = (
    chunk(0, "a", [97]) + chunk(0, "b", [98]) + chunk(0, "", [], "stop") + DONE,
    event(prompt_token_ids=[1, 2], choices=[]) + chunk(0, "a", [97]) + chunk(0, "b", [98]),
    chunk(0, "a", [97, 98]) + event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2}) + DONE,
    chunk(0, "a", [1]) + event(error={"message": "no", "code": 500}) + DONE,
    chunk(0, "a", None) + b": comment\n\nevent: x\r\ndata: {}\r\n\r\n" + chunk(1, "b", [2], "length"),
    DONE,
)
ODD_EVENT: Final = [
    *rb"""data: data:[DONE] "token_ids":[ "token_ids":null "choices":[{"index": "prompt_token_ids":[1,2], "error":{ ] }
    "usage":{"prompt_tokens":-1} -1 \ud800 "finish_reason":" , null""".split(),
    *(b"\n", b"\n\n", b"\r\n\r\n", b"event: error\n", DONE, b"\xff", b"\0", b"9" * 400, b'"content":"' + b"x" * 5000),
]


def stream(number: int, rng: random.Random) -> Input:
    messages, choices, shows_ids = [{"role": "user", "content": "x"}], rng.choice((1, 1, 2)), rng.random() < 0.3
    asked = {"messages": messages, "n": choices, "stream": True, "max_tokens": 99, "return_token_ids": shows_ids}
    # Each is another request: one whose stream broke twice is refused for a minute.
    sent = json.dumps({"model": "m", "user": str(number), **asked}).encode()
    raw = request("/v1/chat/completions", sent, JSON, f"{headers.REQUEST_ID}: {REQUEST_ID}{number}")
    return Input(number, "stream", rng.choice(("drawn", "resumed")), raw, changed(rng, STREAMS, ODD_EVENT))


Maker = Callable[[int, random.Random], Input]
MAKERS: Final[dict[Kind, Maker]] = {"template": template, "text": text, "body": body, "head": head, "stream": stream}
