"""What an evaluation runs on, small and known: a gateway, a Prometheus, and two clusters that only note commands."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from tests.serving import serving

from prfaas.errors import PeerError
from prfaas.wire import headers

ROOT = Path(__file__).parents[3]
LATE = "prfaas_emulation_late_ratio"
BEGINS_A_TEXT = 1


Counters = dict[tuple[str, ...], float]
"""By the labels __name__, pod, step and le."""


def lateness(pod: str, kind: str, steps: float, late: float, in_time: float | None = None) -> Counters:
    """The counters of one instance's steps of a kind; `in_time` ended late by at most 5 %, by default all."""
    counted = steps if in_time is None else in_time
    return {
        (f"{LATE}_sum", pod, kind, ""): late,
        (f"{LATE}_count", pod, kind, ""): steps,
        (f"{LATE}_bucket", pod, kind, "0.05"): counted,
        (f"{LATE}_bucket", pod, kind, "+Inf"): steps,
    }


class World:
    """Gateway and Prometheus behind one address."""

    def __init__(self) -> None:
        self.url = ""
        self.counters: Counters = {}
        self.restarts = 0
        self.clock_ahead_seconds = 0.0
        """Prometheus' clock, of this one."""
        self.ranges: list[dict[str, str]] = []
        self.prompts: list[dict[str, Any]] = []
        self.refuses = ""
        """Prompts are answered with this error, if there is one."""
        self.refuses_with = 503
        self.parts = "prefill=4.000000"

    @classmethod
    @asynccontextmanager
    async def serving(cls) -> AsyncIterator[Self]:
        world = cls()
        async with serving(world.answer) as world.url:
            yield world

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/v1/completions":
            return self._complete(json.loads(await request.read()))
        if request.path == "/api/v1/query" and request.query["query"] == "time()":
            now = time.time() + self.clock_ahead_seconds
            return _result([now, repr(now)])
        if request.path == "/api/v1/query" and "resets(" in request.query["query"]:
            return _result([{"metric": {}, "value": [0.0, str(self.restarts)]}])
        if request.path == "/api/v1/query":
            return _result([self._counter(*labels, value=value) for labels, value in self.counters.items()])
        self.ranges.append(dict(request.query))
        begin = float(request.query["start"])
        return _result([{"metric": {}, "values": [[begin + second, "10"] for second in (0, 8, 16)]}])

    def _complete(self, body: dict[str, Any]) -> web.Response:
        self.prompts.append(body)
        if self.refuses:
            return web.Response(status=self.refuses_with, text=self.refuses)
        tokens = {"prompt_tokens": len(body["prompt"]) + BEGINS_A_TEXT, "completion_tokens": body["max_tokens"]}
        events = [json.dumps({"choices": [{"text": "A"}], "usage": tokens}), "[DONE]"]
        known = {headers.PREFILL_CLUSTER: "eu", headers.TTFT_SECONDS: self.parts}
        text = "".join(f"data: {event}\n\n" for event in events)
        return web.Response(text=text, headers=known, content_type="text/event-stream")

    def _counter(self, name: str, pod: str, step: str, le: str, *, value: float) -> dict[str, Any]:
        labels = {"__name__": name, "pod": pod, "step": step, "le": le}
        return {"metric": {key: text for key, text in labels.items() if text}, "value": [0.0, repr(value)]}


def _result(found: list[Any]) -> web.Response:
    return web.json_response({"status": "success", "data": {"result": found}})


class NotedClusters:
    """An installation and its environment: both note what they are asked for. `fails` names a command that fails."""

    def __init__(self, world: World):
        self.environment = self
        self.hub, self.member, self.images = "hub", "member", None
        self.prometheus_url = self._gateway_url = world.url
        self.noted: list[str] = []
        self.fails: list[str] = []

    async def kubectl(self, cluster: str, *arguments: str, **_: object) -> str:
        self._note(" ".join([cluster, *(word for word in arguments if not word.startswith("-"))]))
        return ""

    async def forward(self, *_: object) -> str:
        return self._gateway_url

    async def shape_link(self, mbps: float) -> None:
        self._note(f"shape {mbps:g}")

    async def cut_link(self) -> None:
        self._note("cut")

    async def restore_link(self) -> None:
        self._note("restore")

    async def wait_ready(self, kind: str, *_: object, **__: object) -> None:
        self._note(f"ready {kind}")

    async def wait_for(self, condition: str, *_: object, **__: object) -> None:
        self._note(condition)

    def _note(self, what: str) -> None:
        self.noted.append(what)
        if self.fails and what.startswith(self.fails[0]):
            self.fails.pop(0)
            raise PeerError(f"{what} failed")
