"""Canonical bytes: equal requests have equal ones, different kinds never do, and no prefix claims a token it lacks."""

import json
from itertools import takewhile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.kvindex.canonical import (
    MAX_ITEMS,
    Canonical,
    canonical_chat,
    canonical_completion,
    canonical_messages,
    canonical_response,
    tokens_before,
)


def chat(messages: list, **fields) -> Canonical:
    found = canonical_chat({"model": "m", "messages": messages} | fields)
    assert found is not None
    return found


def completion(prompt, **fields) -> Canonical:
    found = canonical_completion({"model": "m", "prompt": prompt} | fields)
    assert found is not None
    return found


def user(content) -> dict:
    return {"role": "user", "content": content}


def test_a_completion_is_its_text_and_a_batch_of_one_is_the_same():
    assert completion("héllo").data == "héllo".encode()
    assert completion(["héllo"]) == completion("héllo")
    assert completion([[1, 70_000]]).data == b"\x01\0\0\0\x70\x11\x01\0"


def test_sampling_does_not_matter_but_kind_model_and_salt_do():
    first = completion("abc", temperature=0, seed=1, user="x")
    assert first == completion("abc", max_tokens=9, stream=True)
    roots = {
        first.root,
        completion([97, 98, 99]).root,
        chat([user("abc")]).root,
        completion("abc", cache_salt="s").root,
        completion("abc", model="other").root,
    }
    assert len(roots) == 5
    assert completion("abc", cache_salt="").root == completion("abc", cache_salt=None).root == first.root


def test_a_chat_is_the_same_in_any_order_of_its_json():
    one = b'{"model":"m","messages":[{"role":"user","name":"n","content":"a\\u00e9"}],"tools":[{"b":1,"a":2}]}'
    two = '{"tools":[{"a":2,"b":1}],"messages":[{"content":"aé", "name":"n", "role":"user"}],"model":"m","n":2}'
    assert canonical_chat(json.loads(one)) == canonical_chat(json.loads(two)) is not None


def test_a_longer_conversation_begins_with_the_shorter_one():
    turns = [{"role": "system", "content": "s"}, user("q"), {"role": "assistant", "content": "a"}, user("more")]
    assert chat(turns).data.startswith(chat(turns[:3]).data)


def test_what_templates_put_first_comes_first():
    with_tools = chat([user("q")], tools=[{"type": "function"}]).data
    assert with_tools.index(b"function") < with_tools.index(b"user") < with_tools.index(b'"q"')


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"model": "m"},
        {"model": "m", "prompt": 7, "messages": {}},
        {"model": "m", "prompt": ["a", "b"]},
        {"model": "m", "prompt": [1 << 32], "messages": [7]},
        {"model": "m", "prompt": [-1], "messages": [], "tools": {}},
        {"model": 7, "prompt": "a", "messages": []},
    ],
)
def test_a_body_that_is_no_request_has_none(body):
    assert canonical_completion(body) is None
    assert canonical_chat(body) is None


def test_token_ids_map_exactly():
    canonical = completion(list(range(1000, 1200)))
    assert tokens_before(canonical, [256, 512, 768, 1024], range(1000, 1200), lambda _: b"?") == [64, 128, 192, 200]


SPECIAL = 256


def byte_prompt(rendered: list) -> list[int]:
    """A byte tokenizer's ids of a rendered template, in which None stands for a special token."""
    return [token for part in rendered for token in ([SPECIAL] if part is None else part.encode())]


def byte_tokens(token: int) -> bytes:
    return bytes([token]) if token < SPECIAL else b""


def render(messages: list[dict], *, strip: bool = False) -> list:
    parts: list = [None]
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        parts += [None, message["role"] + "\n", text.strip() if strip else text, None, "\n"]
    return [*parts, None, "assistant\n"]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
contents = texts | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3)
conversations = st.lists(
    st.builds(lambda r, c: {"role": r, "content": c}, st.sampled_from(["system", "user"]), contents), max_size=4
)


# White space to a template, and none to ASCII: what is left of it is nothing, not a text to look for.
@example([{"role": "system", "content": "\x1d"}], "", ("", "\x80\x1d0"), ([], []), True)
@given(conversations, texts, st.tuples(texts, texts), st.tuples(conversations, conversations), st.booleans())
def test_what_is_claimed_for_shared_bytes_is_shared_by_the_prompts(prefix, stem, ends, rests, strip):
    """The claim itself: where two requests have equal canonical prefixes, the tokens claimed there are equal."""
    both = [[*prefix, user(stem + end), *rest] for end, rest in zip(ends, rests, strict=True)]
    canonical = [chat(messages) for messages in both]
    prompts = [byte_prompt(render(messages, strip=strip)) for messages in both]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*(found.data for found in canonical), strict=False))
    cuts = range(len(list(same)) + 1)
    for found, mine, other in zip(canonical, prompts, prompts[::-1], strict=True):
        claimed = tokens_before(found, cuts, mine, byte_tokens)
        assert claimed == sorted(claimed)
        assert mine[: claimed[-1]] == other[: claimed[-1]]


@pytest.mark.parametrize("text", ["plain text " * 30, 'quotes " and\nlines\n\x00' * 20, "umlauts äöü€😀 " * 20])
def test_hardly_anything_is_lost_inside_a_text(text):
    messages = [{"role": "system", "content": "Be brief."}, user(text)]
    canonical, prompt = chat(messages), byte_prompt(render(messages))
    ends = [len(canonical.data) - 3 - back for back in (0, 50)]  # behind the text are a quote, a bracket, a line's end
    whole, cut = tokens_before(canonical, sorted(ends), prompt, byte_tokens)[::-1]
    behind = len(byte_prompt([None, "\n", None, "assistant\n"]))
    assert whole >= len(prompt) - behind - 3
    assert whole - cut <= 52


def test_a_template_that_rewrites_a_text_stops_the_map_there():
    messages = [user("first " * 20), user("REWRITTEN " * 20), user("third " * 20)]
    canonical = chat(messages)
    rendered = render([messages[0], user("other words"), messages[2]])
    (claimed,) = tokens_before(canonical, [len(canonical.data)], byte_prompt(rendered), byte_tokens)
    assert 100 < claimed <= len(byte_prompt(render(messages[:1])[:4]))


def test_tokens_next_to_the_cut_are_left_out():
    canonical = completion("abcdef")
    pieces = {0: b"", 1: b"abc", 2: b"de", 3: b"f"}
    claimed = tokens_before(canonical, [0, 3, 4, 5, 6], [0, 1, 2, 3], pieces.__getitem__)
    assert claimed == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("canonical_of", "field"),
    [(canonical_chat, "messages"), (canonical_messages, "messages"), (canonical_response, "input")],
)
def test_a_prompt_of_more_items_than_contexts_hold_matches_nothing(canonical_of, field):
    """Each costs microseconds, and a client may send a million of them in one body."""
    assert canonical_of({"model": "m", field: [{}] * MAX_ITEMS}) is not None
    assert canonical_of({"model": "m", field: [{}] * (MAX_ITEMS + 1)}) is None


@pytest.mark.parametrize("messages", [1, 3])
def test_of_more_parts_than_contexts_hold_the_tokens_are_not_known(messages):
    parts = [{"type": "text", "text": "x"}] * (MAX_ITEMS + 1)
    found = canonical_chat({"model": "m", "messages": [{"role": "user", "content": parts}] * messages})
    assert found is not None
    assert found.data.count(b'"text":"x"') == messages * (MAX_ITEMS + 1), "its bytes still count"
    assert found.texts is not None
    assert len(found.texts) == MAX_ITEMS


def test_requests_of_other_apis_extend_their_earlier_turns():
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    for canonical_of, field in ((canonical_messages, "messages"), (canonical_response, "input")):
        body = {"model": "m", field: turns[:1], "tools": [{"name": "f"}]}
        one, two = canonical_of(body), canonical_of(body | {field: turns})
        assert two.root == one.root
        assert two.data.startswith(one.data)
        assert canonical_of(body | {"tools": []}).data != one.data
        assert canonical_of(body | {"cache_salt": "s"}).root != one.root
        assert canonical_of({"model": "m", field: 7}) is None
    assert (
        canonical_response({"model": "m", "input": "one"}).root
        != canonical_messages({"model": "m", "messages": ["one"]}).root
    )
