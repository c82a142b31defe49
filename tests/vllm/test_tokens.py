"""The same text has the same tokens in our worker and in vLLM; test_parity.py compares their answers."""

import pytest

from .servers import StartServer, VllmServer, post
from .workers import StartWorker

TEXTS = ("", "def main(", "Gr\u00fc\u00dfe, \u65e5\u672c \U0001f600\r\n\t  end", "x" * 3000, "\u0000\u007f<|us er|>")
CHATS = (
    [{"role": "user", "content": "What does textwrap.dedent do?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "\u00dcber  was?\n"},
        {"role": "assistant", "content": "Return a list.\n"},
        {"role": "user", "content": ""},
    ],
)


@pytest.fixture(scope="module")
def worker(start_worker: StartWorker) -> str:
    return start_worker().wait_ready().url


@pytest.fixture(scope="module")
def server(start_server: StartServer, worker: str) -> VllmServer:
    return start_server().wait_ready()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_text_has_the_same_tokens(server: VllmServer, worker: str, text: str, add_special_tokens: bool):
    body = {"prompt": text, "add_special_tokens": add_special_tokens}
    theirs, ours = (post(f"{url}/tokenize", **body)["tokens"] for url in (server.url, worker))
    assert ours == theirs
    assert len(theirs) >= len(text.encode())


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}], ids=["", "open"])
def test_a_chat_has_the_same_tokens(server: VllmServer, worker: str, messages: list[dict], more: dict):
    body = {"messages": messages} | more
    theirs, ours = (post(f"{url}/tokenize", **body)["tokens"] for url in (server.url, worker))
    assert ours == theirs


def test_tokens_have_the_same_text(server: VllmServer, worker: str):
    tokens = [256, 259, *"Gr\u00fc\u00dfe".encode(), 262, 260]
    theirs, ours = (post(f"{url}/detokenize", tokens=tokens)["prompt"] for url in (server.url, worker))
    assert ours == theirs == "<|bos|><|user|>Gr\u00fc\u00dfe<|end_of_turn|><|assistant|>"


def test_both_end_a_chat_where_the_model_does(server: VllmServer, worker: str):
    """The end of a turn is one of the model's two last tokens; vLLM reads it from generation_config.json."""
    body = {"messages": CHATS[0], "max_tokens": 4, "temperature": 0, "logit_bias": {"262": 100}}
    for url in (server.url, worker):
        choice = post(f"{url}/v1/chat/completions", **body)["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"] or "") == ("stop", "")
