"""Proves that a kind which an API server does not serve is never taken for objects that do not exist."""

from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from tests.unit.operator_.conftest import reached

from prfaas_operator.clusters.kinds import DECODE_POOL
from prfaas_operator.errors import ForbiddenError, KindNotServedError

COLLECTION = DECODE_POOL.path("ns")
DISCOVERY = f"/apis/{DECODE_POOL.api_version}"
ABSENT = {"kind": "Status", "status": "Failure", "reason": "NotFound", "message": "not found", "code": 404}


def answering(answers: dict[str, object]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A server that gives these answers by path; what is not among them it does not serve."""

    async def handle(request: web.Request) -> web.Response:
        if request.path not in answers:
            return web.Response(status=404, text="404 page not found\n")
        answer = answers[request.path]
        code = answer.get("code", 200) if isinstance(answer, dict) else 200
        return web.json_response(answer, status=code)

    return handle


async def test_an_object_that_is_absent_is_none():
    async with reached(answering({f"{COLLECTION}/home": ABSENT})) as cluster:
        assert await cluster.get(DECODE_POOL, "home") is None


async def test_a_kind_that_is_not_served_says_nothing_of_its_objects():
    async with reached(answering({})) as cluster:
        with pytest.raises(KindNotServedError, match=r"cluster eu does not serve this kind \(DecodePool home\)"):
            await cluster.get(DECODE_POOL, "home")
        with pytest.raises(KindNotServedError):
            await cluster.list_all(DECODE_POOL)


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({COLLECTION: {"items": []}, DISCOVERY: {"resources": [{"name": "decodepools"}]}}, None),
        ({COLLECTION: {"items": []}, DISCOVERY: {"resources": [{"name": "prefillpools"}]}}, KindNotServedError),
        ({COLLECTION: {"items": []}}, KindNotServedError),
        ({DISCOVERY: {"resources": [{"name": "decodepools"}]}}, KindNotServedError),
        ({COLLECTION: {"kind": "Status", "code": 403, "message": "no"}}, ForbiddenError),
    ],
)
async def test_follows_a_kind_once_it_is_served(answers: dict[str, object], error: type | None):
    async with reached(answering(answers)) as cluster:
        if error is None:
            await cluster.check_served([DECODE_POOL])
            return
        with pytest.raises(error):
            await cluster.check_served([DECODE_POOL])
