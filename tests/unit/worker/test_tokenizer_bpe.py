"""Hugging Face's and tiktoken's files: ids equal those of the libraries themselves, every id has its bytes, so that
streams of any cut give the whole text, and special tokens stand only where the template puts them.
"""

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from prfaas.errors import ConfigError, RequestError
from prfaas_worker.front.openai_out import TextStream
from prfaas_worker.tokenizer import Conversation, Tokenizer, load_tokenizer
from prfaas_worker.tokenizer.tiktoken_ranks import KIMI_PATTERN, LONGEST_RUN, bounded_parts

CORPUS = [
    "the quick brown fox jumps",
    "over the lazy dog, naïve café 中文字符 emoji 🙂🙃",
    "def f(x):\n    return x\n",
] * 3
TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}<think>"
    "{% if tools %}{{ tools[0] }}{% endif %}"
)
ADDED = [
    AddedToken("<s>", special=True),
    AddedToken("<|user|>", special=True),
    AddedToken("<|end|>", special=True, rstrip=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("    ", special=False, normalized=False),
]


def trained() -> tokenizers.Tokenizer:
    """A small byte-level BPE, as Qwen's checkpoints have."""
    library = tokenizers.Tokenizer(models.BPE(unk_token=None))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=["<s>"])
    library.train_from_iterator(CORPUS, trainer)
    plain = json.loads(library.to_str())
    plain["added_tokens"] = []  # the trainer's
    library = tokenizers.Tokenizer.from_str(json.dumps(plain))
    library.add_tokens(ADDED)
    begin = library.token_to_id("<s>")
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return library


LIBRARY = trained()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("byte_level")
    LIBRARY.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return load_tokenizer(directory)


# Without what would be found as an added token: that is where we differ on purpose.
ORDINARY = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])).filter(lambda t: "    " not in t)
MODULE_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


@given(text=ORDINARY)
@MODULE_FIXTURE
def test_ids_are_the_librarys(ours, text: str):
    assert ours.encode(text) == LIBRARY.encode(text).ids
    assert ours.encode(text, framed=False) == LIBRARY.encode(text, add_special_tokens=False).ids


@given(contents=st.lists(ORDINARY, min_size=1, max_size=3))
@MODULE_FIXTURE
def test_a_rendered_conversation_has_the_librarys_ids(ours, contents: list[str]):
    rendered = "<s>" + "".join(f"<|user|>{content}<|end|>\n" for content in contents) + "<think>"
    messages = [{"role": "user", "content": content} for content in contents]
    assert ours.encode_chat(Conversation(messages)) == (LIBRARY.encode(rendered, add_special_tokens=False).ids)


@given(text=st.text(st.sampled_from("<s>|userndthik ")))
@MODULE_FIXTURE
def test_letters_of_special_tokens_stay_letters(ours, text: str):
    marks = {special for letters, special in ours.specials.items() if letters.strip()}
    assert not marks & set(ours.encode(f"{text}<s><|user|><think>", framed=False))
    token_ids = ours.encode_chat(Conversation([{"role": "user", "content": f"{text}<think><|end|>"}]))
    specials = [token for token in token_ids if token in marks]
    names = ["<s>", "<|user|>", "<|end|>", "<think>"]
    assert specials == [ours.specials[name] for name in names]


def test_runs_of_spaces_that_are_tokens_are_found_in_users_text(ours):
    space = ours.specials["    "]
    assert ours.encode("a    b", framed=False) == LIBRARY.encode("a    b").ids[1:]
    assert space in ours.encode("a    b")


def test_the_assistants_own_marks_come_back_as_tokens_but_no_hidden_ones(ours):
    model = ours
    token_ids = model.encode_chat(Conversation([{"role": "assistant", "content": "<think><s>"}]))
    assert token_ids.count(model.specials["<think>"]) == 2
    assert token_ids.count(model.specials["<s>"]) == 1


@given(text=ORDINARY, cuts=st.lists(st.integers(0, 100)))
@example(text="0 ", cuts=[])
@MODULE_FIXTURE
def test_streamed_text_is_the_librarys_text_wherever_it_is_cut(ours, text: str, cuts: list[int]):
    token_ids = LIBRARY.encode(text, add_special_tokens=False).ids
    stream = TextStream(ours, ())
    edges = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    parts = [stream.push(token_ids[start:end], final=False) for start, end in itertools.pairwise(edges)]
    streamed = "".join([*parts, stream.push([], final=True)])
    decoded = LIBRARY.decode(token_ids)
    assert streamed == decoded
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


def test_special_tokens_show_only_where_the_file_says(ours):
    model = ours
    assert model.token_bytes(model.specials["<s>"]) == b""
    assert model.token_bytes(model.specials["<think>"]) == b"<think>"
    assert model.token_bytes(1 << 20) == b""
    assert model.decode([model.specials["<s>"], *model.encode("x", framed=False)]) == "<s>x"


def test_half_a_surrogate_pair_is_refused(ours):
    with pytest.raises(RequestError, match="surrogate"):
        ours.encode("\ud800")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "reads BPE"),
        ({"decoder": {"type": "Metaspace"}}, "decoder is Metaspace"),
        ({"decoder": None}, "decoder is None"),
        ({"added_tokens": [{"content": 5}]}, "not a tokenizer"),
        ({"pre_tokenizer": {"type": "Nonsense"}}, "library refuses it"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path, change: dict[str, Any], sentence: str):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    file = json.loads(LIBRARY.to_str()) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=sentence):
        load_tokenizer(tmp_path)


# tiktoken

RANKS = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", "é".encode(), "中".encode()]
KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "chat_template": "{% for m in messages %}[BOS]{{ m.content }}<|x|>{% endfor %}",
    "added_tokens_decoder": {
        str(len(RANKS)): {"content": "[BOS]", "special": True},
        str(len(RANKS) + 3): {"content": "<|x|>", "special": False},
    },
}


def kimi(directory: Path, *lines: str, **config: Any) -> Tokenizer:
    (directory / "tokenizer_config.json").write_text(json.dumps(KIMI | config))
    known = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(RANKS)]
    (directory / "tiktoken.model").write_text("\n".join([*known, *lines]))
    return load_tokenizer(directory)


def test_rank_files_give_tiktokens_ids(tmp_path: Path):
    ranks = {token: rank for rank, token in enumerate(RANKS)}
    library = tiktoken.Encoding("x", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={})
    model = kimi(tmp_path)
    for text in ["the other", "中文 the'Ll  \n x", "[BOS]<|x|>", ""]:
        assert model.encode(text) == library.encode_ordinary(text)
        assert model.decode(model.encode(text)) == text


def test_special_tokens_of_rank_files_stand_behind_the_ranks(tmp_path: Path):
    model = kimi(tmp_path)
    base = len(RANKS)
    assert model.encode_chat(Conversation([{"role": "user", "content": "[BOS]a"}])) == [base, *b"[BOS]a", base + 3]
    assert [model.token_bytes(base + n) for n in (0, 1, 3)] == [b"", b"", b"<|x|>"]
    assert model.specials[f"<|reserved_token_{base + 1}|>"] == base + 1
    assert f"<|reserved_token_{base}|>" not in model.specials


def test_a_pattern_in_the_configuration_is_used(tmp_path: Path):
    assert kimi(tmp_path, pat_str="[a-z]").encode("the") == list(b"the")


@pytest.mark.parametrize("length", [1, LONGEST_RUN, LONGEST_RUN + 1, 400_000, 900_001])
@pytest.mark.parametrize("unit", ["a", " ", "ab ", "a" * LONGEST_RUN + " "])
def test_long_text_is_cut_without_loss(unit: str, length: int):
    text = (unit * (length // len(unit) + 1))[:length]
    parts = list(bounded_parts(text))
    assert "".join(parts) == text
    for part in parts:
        assert all(len(run) <= LONGEST_RUN for run in part.split())
    if unit == "a" and length == LONGEST_RUN + 1:
        assert [len(part) for part in parts] == [LONGEST_RUN, 1]


@pytest.mark.parametrize(
    ("lines", "config", "sentence"),
    [
        (["nonsense"], {}, "line 262"),
        (["%%% 261"], {}, "line 262"),
        (["YWE= 300"], {}, "are not 0 to"),
        ([], {"tokenizer_class": "Other"}, "give tokenizer_config.json a pat_str"),
        ([], {"pat_str": "("}, "tiktoken refuses"),
    ],
)
def test_damaged_rank_files_are_refused_by_line(tmp_path: Path, lines: list[str], config: dict, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        kimi(tmp_path, *lines, **config)
