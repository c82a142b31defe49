"""A member gives a cache that it could have forged: it serves the request that it was made for, and then only requests
that allow that member. One that says nothing, as from a gateway that knows no such rule, allows none.

The control is a request that allows the member: the bytes serve it.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prfaas.names import WORKER_DATA_PORT
from prfaas.wire import headers
from prfaas.wire.prefill import new_transfer
from prfaas_transfer.credentials import PeerCredentials

from .conftest import CALLERS, STEER, Answer, Installation, Targets, call

pytestmark = pytest.mark.system

GATEWAY = CALLERS["a gateway of the hub"]


def prompt_about(what: str) -> dict[str, Any]:
    """Return a prompt of 512 tokens behind the first, so that the state that crosses is at a block's end."""
    return {"model": "tiny", "prompt": (f"{what}: you name your sources. " * 99)[:512], "max_tokens": 1}


def hand_off(targets: Targets, shown: PeerCredentials | None, prompt: dict[str, Any]) -> Answer:
    """Have the member prefill the prompt for the hub."""
    transfer = new_transfer()
    place = {"host": targets.eu.worker.host, "port": WORKER_DATA_PORT, "cluster": "eu"}
    source = {STEER: {"prfaas": {"role": "source", **transfer}}}
    destination = {STEER: {"prfaas": {"role": "destination", **transfer, **place}}}
    with ThreadPoolExecutor(1) as pool:
        giving = pool.submit(call, targets.eu, shown, "POST", "/v1/completions", prompt | source)
        answer = call(targets.hub, shown, "POST", "/v1/completions", prompt | destination)
        assert giving.result().status == 200
    return answer


@pytest.mark.parametrize(("places", "served"), [("us eu", 512), ("us", 0), ("", 0), ("* us", 0), (None, 0)])
def test_a_members_bytes_serve_only_requests_that_allow_it(
    targets: Targets, installation: Installation, places: str | None, served: int
):
    shown, prompt = installation.credentials(GATEWAY), prompt_about(str(places))
    assert int(hand_off(targets, shown, prompt).headers[headers.KV_BYTES]) > 0

    def cached(places: str | None) -> int:
        sent = {} if places is None else {headers.PLACES: places}
        found = call(targets.hub, shown, "POST", "/v1/completions", prompt, headers=sent)
        return int(found.headers[headers.CACHED_TOKENS])

    assert cached(places) == served
    assert served or cached("") == 512, "the request before computed it here, which serves all"
