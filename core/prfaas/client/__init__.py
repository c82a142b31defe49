"""The Python SDK: typed requests to a prfaas gateway, with a say in where prompts are prefilled.

    from prfaas.client import Client, Prefer

    client = Client("http://gateway:8080", datacenters=Prefer("eu-west").forbid("us"), deadline=30)
    answer = client.chat("kimi", [{"role": "user", "content": "Hello"}])
    print(answer.text, answer.decision.prefill_cluster)

Needs the extra `client`. Errors are of the tree in prfaas.errors.
"""

from prfaas.client.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Decision,
    Message,
    Usage,
)
from prfaas.client.asynchronous import AsyncClient, AsyncStream
from prfaas.client.errors import BrokenStreamError, BusyError, DeadlinePassedError
from prfaas.client.places import Forbid, Places, Prefer
from prfaas.client.requests import Parameters
from prfaas.client.synchronous import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BrokenStreamError",
    "BusyError",
    "ChatCompletion",
    "ChatCompletionChunk",
    "Client",
    "Completion",
    "CompletionChunk",
    "DeadlinePassedError",
    "Decision",
    "Forbid",
    "Message",
    "Parameters",
    "Places",
    "Prefer",
    "Stream",
    "Usage",
]
