"""The Python SDK: typed requests to a prfaas gateway, with preferences for where prompts are prefilled.

    from prfaas.client import Client, Prefer

    client = Client("http://gateway:8080", datacenters=Prefer("eu-west").forbid("us"), deadline=30)
    answer = client.chat("kimi", [{"role": "user", "content": "Hello"}])
    print(answer.text, answer.decision.prefill_cluster)

Needs the extra `client`. Its errors are subclasses of those in prfaas.errors.
"""

from prfaas.client.answers import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, Message, Usage
from prfaas.client.answers import ReportedDecision as Decision
from prfaas.client.client import AsyncClient, AsyncStream, Client, Stream
from prfaas.client.errors import BrokenStreamError, BusyError, DeadlinePassedError
from prfaas.client.requests import Forbid, Parameters, Places, Prefer

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
